// The sums of a tile on the Ampere path: where they start, and how they leave, for the outputs or for the workspace.
#pragma once

#include "conv/epilogue.cuh"
#include "conv/sm80/split.cuh"
#include "conv/sm80/store.cuh"

namespace cutefuse::conv {

// The sums start at the bias, whose loads hide behind those of the first tiles; of several splits, the first has it.
template <class Traits, class ThreadMma, class Sums>
__device__ __forceinline__ void start_at_bias(Params const &params, int split, int n0, ThreadMma const &thread_mma,
                                              Sums &acc) {
  Problem const &p = params.problem;
  Tensor tYcY = thread_mma.partition_C(make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kN>>{}));  // -> (m,n)
  CUTE_UNROLL
  for (int j = 0; j < size<2>(acc); ++j) {
    int const k = n0 + get<1>(tYcY(0, 0, j));  // this thread holds channels k and k + 1
    float const bias[2] = {split == 0 && k < p.K ? __ldg(params.b + k) : 0.f,
                           split == 0 && k + 1 < p.K ? __ldg(params.b + k + 1) : 0.f};
    CUTE_UNROLL
    for (int i = 0; i < size(acc(_, _, 0)); ++i) acc(_, _, j)(i) = bias[i % 2];
  }
}

// Residual and activation in registers, r2s into the shared memory that the main loop has left, then 16-byte s2g.
template <class Traits, class Mma, class Sums>
__device__ __forceinline__ void store_tile(Params const &params, Mma const &mma, Sums &acc, unsigned char *shared) {
  using Output = typename Traits::Output;
  constexpr int kVector = Traits::kVector;
  Problem const &p = params.problem;
  Place const place = Place::of<Traits>(params);
  auto const out_mma = mma.get_slice(place.thread);
  int const pixels = p.N * p.P * p.Q;
  if (params.splits > 1) {  // leave the sums to concat_conv_sm80_finish: [split][pixel][channel]
    Tensor tYcY = out_mma.partition_C(make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kN>>{}));  // (m,n)
    float *const part = params.partials + int64_t(place.split) * pixels * split_ld(p);
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) {
      int const m = place.m0 + get<0>(tYcY(i)), k = place.n0 + get<1>(tYcY(i));
      if (m < pixels && k < split_ld(p)) {
        __stcg(reinterpret_cast<float2 *>(part + int64_t(m) * split_ld(p) + k), make_float2(acc(i), acc(i + 1)));
      }
    }
    return;
  }

  Tensor sY = make_tensor(make_smem_ptr(reinterpret_cast<Output *>(shared)), typename Traits::SmemY{});  // (M,N)
  Tensor tYsY = out_mma.partition_C(sY);  // (MMA,MMA_M,MMA_N)
  auto const add_residual = [&] {         // each thread reads just the elements that it will overwrite
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) {
      Pair<Output> const z = pair_at(&tYsY(i));
      acc(i) += float(z.v[0]), acc(i + 1) += float(z.v[1]);
    }
  };
  if (p.residual != Residual::kNone) load_residual<Traits>(params, sY, place.m0, place.n0);
  if (p.residual == Residual::kBefore) add_residual();
  Clamp<Output> const clamp(p);
  if (!clamp.is_all) {
    CUTE_UNROLL
    for (int j = 0; j < size<2>(acc); ++j) activate(acc(_, _, j), p);  // all at once would need registers beside them
  }
  if (p.residual == Residual::kAfter) add_residual();
  CUTE_UNROLL
  for (int i = 0; i < size(acc); i += 2) pair_at(&tYsY(i)) = clamp(acc(i), acc(i + 1));
  __syncthreads();

  int const n = place.thread % Traits::kChunksY * kVector, k = place.n0 + n;
  int const first_row = place.thread / Traits::kChunksY, first_m = place.m0 + first_row, rows_left = pixels - first_m;
  if (k >= p.K) return;
  Target<Output> const target(params, k);
  if (target.whole && !target.padded) {
    Output *to = target.y + int64_t(first_m) * target.ld;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kM; i += Traits::kRowsY, to += Traits::kRowsY * target.ld) {
      if (i < rows_left) *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<uint4 *>(&sY(i + first_row, n));
    }
    return;
  }
  CUTE_NO_UNROLL
  for (int i = 0; i < Traits::kM && i < rows_left; i += Traits::kRowsY) {
    Output *const from = &sY(i + first_row, n);
    for (int v = target.channels; v < kVector; ++v) from[v] = Output(0);
    target.store(first_m + i, from);
  }
}

}  // namespace cutefuse::conv
