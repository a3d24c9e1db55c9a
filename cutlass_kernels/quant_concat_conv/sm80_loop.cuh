// What the main loops of the int8 kernels share: the mma of a step, and the walk over the sources.
#pragma once

#include "quant_concat_conv/sm80_copy.cuh"
#include "quant_concat_conv/sm80_sums.cuh"

namespace cutefuse::quant_concat_conv {

// acc += X * W for one mma step: each row's mma behind those of the one before and back again, so that the last
// filters' fragment is still at hand. `between(row, rows)` stands behind each row.
template <class Mma, class FragmentX, class FragmentW, class Acc, class Between>
__device__ __forceinline__ void multiply_step(Mma const &mma, FragmentX const &rX, FragmentW const &rW, Acc &acc,
                                              int step, Between const &between) {
  constexpr int kColumns = decltype(size<2>(acc))::value, kRows = decltype(size<1>(acc))::value;
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      int const k = i % 2 ? kColumns - 1 - j : j;
      gemm(mma, rX(_, i, step), rW(_, k, step), acc(_, i, k));
    }
    between(i + 1, kRows);
  }
}

// The reduction, a source at a time: `whole(blocks)` for the channel blocks with channels for every mma step, `last()`
// for a source's last channels, and at its end its integers join the float32 sums. Then the outputs.
template <class Traits, class Acc, class Sum, class Whole, class Last>
__device__ __forceinline__ void walk_sources(Params const &params, unsigned char *shared, KBlock<Traits::kK> &read,
                                             int k_blocks, Acc &acc, Sum &sum, Whole const &whole_blocks,
                                             Last const &last_channels) {
  Problem const &p = params.problem;
  bool first = true;
  for (int to_read = k_blocks;;) {
    int const whole = min((read.left + Traits::kMmaK - 1) / Traits::kK, to_read);
    whole_blocks(whole);
    to_read -= whole, read.left -= whole * Traits::kK;
    if (to_read > 0 && read.left > 0) {
      last_channels();
      --to_read;
    }
    if (to_read == 0) break;
    drain<Traits>(params, shared, read.source, first, acc, sum);
    first = false;
    ++read.source, read.left = p.C[read.source];
  }
  if constexpr (Traits::kTile.drains()) drain_last<Traits>(params, shared, read.source, first, acc, sum);
  cp_async_wait<0>();
  __syncthreads();
  if constexpr (Traits::kTile.drains()) {
    store<Traits>(params, shared, 1.f, sum);
  } else {
    store<Traits>(params, shared, p.scale[0], acc);
  }
}

}  // namespace cutefuse::quant_concat_conv
