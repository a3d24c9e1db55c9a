// The int8 ConcatConv for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync on int8 -> shared -> global.
// M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles of 64 bytes.
#pragma once

#include "quant_concat_conv/sm80_loop.cuh"

namespace cutefuse::quant_concat_conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <int kTileId>
struct Sm80 {
  static constexpr quant_concat_conv::Tile kTile = *find_tile(kTileId);
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kChannelBlock, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads(), kMmaK = 32;

  // 16 columns a warp, two mma wide: one ldmatrix.x4 then fills the filter fragments of both.
  using Mma = TiledMMA<MMA_Atom<SM80_16x8x32_S32S8S8S32_TN>, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, _1>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  static_assert(size(Mma{}) == kThreads && kM % (kTile.warps_m * 16) == 0 && kN % (kTile.warps_n * 16) == 0);

  // The four 16-byte chunks of a row are XORed with bits 1 and 2 of the row: ldmatrix then touches every bank once.
  using Atom = decltype(composition(Swizzle<2, 4, 3>{}, Layout<Shape<_8, Int<kK>>, Stride<Int<kK>, _1>>{}));
  using SmemX = decltype(tile_to_shape(Atom{}, Shape<Int<kM>, Int<kK>, Int<kStages>>{}));  // (M,K,stage)
  using SmemW = decltype(tile_to_shape(Atom{}, Shape<Int<kN>, Int<kK>, Int<kStages>>{}));  // (N,K,stage)
  static_assert(kTile.shared_bytes() >= int(cosize_v<SmemX> + cosize_v<SmemW>) + 8 * kN);

  static constexpr int kChunks = kK / kVector;             // 16-byte chunks in a row of a k-tile
  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  static constexpr int kRowsX = kM / kRowsPerPass, kRowsW = kN / kRowsPerPass;
  static_assert(kM % kRowsPerPass == 0 && kN % kRowsPerPass == 0);
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, int8_t>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, int8_t>;
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    quant_concat_conv_sm80(Params const __grid_constant__ params) {
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  Place const place = Place::of<Traits>(params);
  int const thread = place.thread;

  int8_t *const shared_x = reinterpret_cast<int8_t *>(shared), *const shared_w =
                                                                   shared_x + cosize_v<typename Traits::SmemX>;
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});  // (M,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});  // (N,K,stage)
  load_scales_and_biases<Traits>(params, place, shared);

  auto const g2s = typename Traits::G2S{}.get_slice(thread);
  Tensor tXsX = g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = g2s.partition_D(sW);  // (vector,kRowsW,1,stage)
  int const first_block = params.k_blocks * place.split / params.splits;
  int const k_blocks = params.k_blocks * (place.split + 1) / params.splits - first_block;
  KBlock<kK> read(p);
  CUTE_NO_UNROLL
  for (int i = 0; i < first_block; ++i) read.advance(p);
  Loader<Traits> loader(params, place, read, first_block, k_blocks);

  constexpr int kSteps = kK / Traits::kMmaK;
  // Part `part` of a k-tile's copies, one for each mma step; `issued` of the step's `all` mma rows are behind it.
  auto const copy_part = [&](int part, int stage, int issued, int all) {
    constexpr int kCopies = Loader<Traits>::kCopies;
    int const begin = part * kCopies / kSteps, count = (part + 1) * kCopies / kSteps - begin;
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      if (i < begin + (issued - 1) * count / all || i >= begin + issued * count / all) continue;
      loader.copy(i, tXsX(_, _, _, stage), tWsW(_, _, _, stage));
    }
  };
  // As in the float kernel: kStages k-tiles are in flight, and the stage that all warps have read is filled again at
  // once, part 0 of the copies right behind the barrier, the others between the mma of the next k-tile's steps.
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
  Tensor tSsX = s2r_x.get_slice(thread).partition_S(sX);  // (copy,M,k_step,stage)
  Tensor tSsW = s2r_w.get_slice(thread).partition_S(sW);  // (copy,N,k_step,stage)
  Tensor tSrX = s2r_x.get_slice(thread).retile_D(rX);     // (copy,M,k_step)
  Tensor tSrW = s2r_w.get_slice(thread).retile_D(rW);     // (copy,N,k_step)
  auto const fetch = [&](int step, int stage) {
    copy(s2r_x, tSsX(_, _, step, stage), tSrX(_, _, step));
    copy(s2r_w, tSsW(_, _, step, stage), tSrW(_, _, step));
  };

  auto const multiply = [&](int step, int part, int stage) {
    multiply_step(mma, rX, rW, acc, step, [&](int issued, int all) { copy_part(part, stage, issued, all); });
  };

  // ---- drain: at a source's end its integers, times its scale, join the float32 sums ----
  auto sum = make_tensor<float>(shape(acc));  // as acc; beside it in the main loop only where Sums::kRegisters says so
  clear(acc);
  if constexpr (Traits::kTile.sums == Sums::kRegisters) clear(sum);

  // ---- main loop ----
  auto const enter_next_stage = [&] {
    cp_async_fence();
    loader.advance();
    cp_async_wait<kStages - 2>();
    __syncthreads();
    write_stage = read_stage;
    read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
  };
  cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0, 0);
  auto const whole_blocks = [&](int blocks) {
    CUTE_NO_UNROLL
    for (int tiles = blocks * params.taps; tiles > 0; --tiles) {
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) enter_next_stage();
        fetch((step + 1) % kSteps, read_stage);
        multiply(step, (step + 1) % kSteps, write_stage);
      }
    }
  };
  auto const last_channels = [&] {  // no step is spent on those that do not exist
    CUTE_NO_UNROLL
    for (int tiles = params.taps; tiles > 0; --tiles) {
      multiply(0, 1, write_stage);
      enter_next_stage();
      copy_part(0, write_stage, 1, 1);
      fetch(0, read_stage);
    }
  };
  walk_sources<Traits>(params, shared, read, k_blocks, acc, sum, whole_blocks, last_channels);
}

}  // namespace cutefuse::quant_concat_conv
