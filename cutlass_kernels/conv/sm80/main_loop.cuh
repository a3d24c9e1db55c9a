// ConcatConv as implicit GEMM for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync -> shared -> global.
// M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles.
#pragma once

#include "conv/sm80/copy.cuh"
#include "conv/sm80/epilogue.cuh"
#include "conv/sm80/traits.cuh"

namespace cutefuse::conv {

// float32 bits -> float32 bits that the tensor core truncates to the nearest tf32, ties away from zero; without it the
// error doubles. Half of tf32's last place is the value's own power of two times 2^-11, and NaN and infinity stay what
// they are. cvt.rna.tf32 does the same by a comparison and an add under a predicate, of which there are too few.
template <class Engine, class Shape>
__device__ __forceinline__ void round_to_tf32(Tensor<Engine, Shape> &&fragment) {
  auto r = recast<uint32_t>(fragment);
  CUTE_UNROLL
  for (int i = 0; i < size(r); ++i) {
    float const power = __uint_as_float(r(i) & 0xff800000u);
    r(i) = __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(r(i))));
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    concat_conv_sm80(Params const __grid_constant__ params) {
  using Element = typename Traits::Element;
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  auto const [thread, split, m0, n0] = Place::of<Traits>(params);

  Element *const shared_x = reinterpret_cast<Element *>(shared);
  Element *const shared_w = shared_x + cosize_v<typename Traits::SmemX>;
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});  // (M,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});  // (N,K,stage)

  // ---- g2s: each thread copies one column chunk of kRowsX pixels and kRowsW filters ----
  auto const thread_g2s = typename Traits::G2S{}.get_slice(thread);
  Tensor tXsX = thread_g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = thread_g2s.partition_D(sW);  // (vector,kRowsW,1,stage)
  int const taps = p.R * p.S;
  int const first_block = params.k_blocks * split / params.splits;
  int const k_blocks = params.k_blocks * (split + 1) / params.splits - first_block;
  KBlock<kK> read(p);
  int first_column = 0;
  CUTE_NO_UNROLL
  for (int i = 0; i < first_block; ++i) {
    first_column += taps * kChannelBlock + read.filter_step(taps);
    read.advance(p);
  }
  Loader<Traits> loader(params, thread, m0, n0, read, first_column, k_blocks);

  constexpr int kSteps = kK / Traits::kMmaK;
  // Part `part` of a k-tile's copies, one for each mma step; `issued` of the step's `all` mma rows or columns are
  // behind it.
  auto const copy_part = [&](int part, int stage, int issued, int all) {
    constexpr int kCopies = Loader<Traits>::kCopies;
    int const begin = part * kCopies / kSteps, count = (part + 1) * kCopies / kSteps - begin;
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      if (i < begin + (issued - 1) * count / all || i >= begin + issued * count / all) continue;
      loader.copy(i, tXsX(_, _, _, stage), tWsW(_, _, _, stage));
    }
  };
  // kStages k-tiles are in flight. The stage that all warps have read is filled again at once: part 0 of the copies
  // right behind the barrier, the others between the mma of the next k-tile's steps.
  CUTE_NO_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) {
    CUTE_UNROLL
    for (int part = 0; part < kSteps; ++part) copy_part(part, stage, 1, 1);
    cp_async_fence();
    loader.advance();
  }
  int read_stage = 0, write_stage = kStages - 1;
  copy_part(0, write_stage, 1, 1);

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});  // (MMA,MMA_M,MMA_N)
  Tensor rX = thread_mma.partition_fragment_A(sX(_, _, 0));           // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));           // (MMA,MMA_N,k_step)
  auto const s2r_x = make_tiled_copy_A(typename Traits::S2R{}, mma);
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  auto const thread_s2r_x = s2r_x.get_slice(thread);
  auto const thread_s2r_w = s2r_w.get_slice(thread);
  Tensor tSsX = thread_s2r_x.partition_S(sX);  // (copy,M,k_step,stage)
  Tensor tSsW = thread_s2r_w.partition_S(sW);  // (copy,N,k_step,stage)
  Tensor tSrX = thread_s2r_x.retile_D(rX);     // (copy,M,k_step)
  Tensor tSrW = thread_s2r_w.retile_D(rW);     // (copy,N,k_step)
  auto const fetch = [&](int step, int stage) {
    copy(s2r_x, tSsX(_, _, step, stage), tSrX(_, _, step));
    copy(s2r_w, tSsW(_, _, step, stage), tSrW(_, _, step));
  };

  // The mma of one step, and between them the copies of a part.
  auto const multiply = [&](int step, int part, int stage) {
    if constexpr (Traits::kTf32) {
      round_to_tf32(rX(_, _, step));
      round_to_tf32(rW(_, _, step));
    }
    constexpr int kColumns = size<2>(acc), kRows = size<1>(acc);
    constexpr int kOuter = Traits::kRowsFirst ? kRows : kColumns, kInner = Traits::kRowsFirst ? kColumns : kRows;
    CUTE_UNROLL
    for (int outer = 0; outer < kOuter; ++outer) {
      CUTE_UNROLL
      for (int inner = 0; inner < kInner; ++inner) {
        int const back = outer % 2 ? kInner - 1 - inner : inner;  // and forth: the last fragment is still at hand
        int const i = Traits::kRowsFirst ? outer : back, j = Traits::kRowsFirst ? back : outer;
        gemm(mma, rX(_, i, step), rW(_, j, step), acc(_, i, j));
      }
      if (part >= 0) copy_part(part, stage, outer + 1, kOuter);
    }
  };

  // ---- main loop ----
  auto const enter_next_stage = [&] {
    cp_async_fence();
    loader.advance();
    cp_async_wait<kStages - 2>();
    __syncthreads();
    write_stage = read_stage;
    read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
  };
  start_at_bias<Traits>(params, split, n0, thread_mma, acc);
  cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0, 0);

  for (int to_read = k_blocks; to_read > 0;) {                             // a source at a time
    int const whole = min((read.left + Traits::kMmaK - 1) / kK, to_read);  // blocks with channels for every mma step
    CUTE_NO_UNROLL
    for (int tiles = whole * taps; tiles > 0; --tiles) {
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) enter_next_stage();
        fetch((step + 1) % kSteps, read_stage);
        multiply(step, (step + 1) % kSteps, write_stage);
      }
    }
    to_read -= whole, read.left -= whole * kK;
    if (to_read > 0 && read.left > 0) {  // the source's last channels: no step is spent on those that do not exist
      int const steps = ceil_div(read.left, Traits::kMmaK);
      CUTE_NO_UNROLL
      for (int tiles = taps; tiles > 0; --tiles) {
        CUTE_UNROLL
        for (int part = 1; part < kSteps; ++part) copy_part(part, write_stage, 1, 1);
        multiply(0, -1, 0);
        CUTE_UNROLL
        for (int step = 1; step < kSteps - 1; ++step) {
          if (step >= steps) break;
          fetch(step, read_stage);
          multiply(step, -1, 0);
        }
        enter_next_stage();
        copy_part(0, write_stage, 1, 1);
        fetch(0, read_stage);
      }
      --to_read;
    }
    if (++read.source < p.sources) read.left = p.C[read.source];
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<Traits>(params, mma, acc, shared);
}

}  // namespace cutefuse::conv
