// The int8 ConcatConv for filters of three columns whose neighbours are neighbouring pixels: a stage holds one filter
// row of 64 channels, the pixels under it once and the filters of its three taps. That is two thirds to a half of the
// traffic that three k-tiles make, and one barrier instead of three.
#pragma once

#include "quant_concat_conv/sm80_loop.cuh"
#include "quant_concat_conv/sm80_rows_copy.cuh"

namespace cutefuse::quant_concat_conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <int kTileId>
struct Sm80Rows {
  static constexpr quant_concat_conv::Tile kTile = *find_tile(kTileId);
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kChannelBlock, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads(), kMmaK = 32;
  using Mma = TiledMMA<MMA_Atom<SM80_16x8x32_S32S8S8S32_TN>, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, _1>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  using Atom = decltype(composition(Swizzle<2, 4, 3>{}, Layout<Shape<_8, Int<kK>>, Stride<Int<kK>, _1>>{}));
  using SmemW = decltype(tile_to_shape(Atom{}, Shape<Int<kN>, Int<kK>, Int<kStages * kRowTaps>>{}));  // (N,K,tap)
  static constexpr int kPixels = kM + kHaloRows, kStageX = kPixels * kRowPitch;
  static constexpr int kChunks = kK / kVector, kRowsPerPass = kThreads / kChunks;
  static constexpr int kRowsX = (kPixels + kRowsPerPass - 1) / kRowsPerPass, kRowsW = kN / kRowsPerPass;
  static_assert(kN % kRowsPerPass == 0 && kTile.shared_bytes() >= kStages * kStageX + int(cosize_v<SmemW>) + 8 * kN);
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, int8_t>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, int8_t>;
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    quant_concat_conv_rows_sm80(Params const __grid_constant__ params) {
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  Place const place = Place::of<Traits>(params);
  int const thread = place.thread;

  Tensor sW = make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(shared)), typename Traits::SmemW{});  // (N,K,tap)
  uint32_t const shared_x = cast_smem_ptr_to_uint(shared) + cosize_v<typename Traits::SmemW>;
  load_scales_and_biases<Traits>(params, place, shared);

  Tensor tWsW = typename Traits::G2S{}.get_slice(thread).partition_D(sW);  // (vector,kRowsW,1,tap)
  uint32_t const to_x = shared_x + thread / Traits::kChunks * kRowPitch + thread % Traits::kChunks * kVector;
  int const first_block = params.k_blocks * place.split / params.splits;
  int const k_blocks = params.k_blocks * (place.split + 1) / params.splits - first_block;
  KBlock<kK> read(p);
  CUTE_NO_UNROLL
  for (int i = 0; i < first_block; ++i) read.advance(p);
  // No copy goes to the end of the last stage before the first barrier.
  int2 *const table = reinterpret_cast<int2 *>(shared + Traits::kTile.stages_bytes() - Traits::kPixels * sizeof(int2));
  RowLoader<Traits>::list_pixels(params, place, table);
  __syncthreads();
  RowLoader<Traits> loader(params, place, table, read, first_block, k_blocks);

  constexpr int kTapSteps = kK / Traits::kMmaK, kSteps = kTapSteps * kRowTaps;
  // Part `part` of a stage's copies, one for each mma step; `issued` of the step's `all` mma rows are behind it. With
  // two stages only, the first steps have them all: the barrier waits for what was copied last.
  constexpr int kParts = kStages == 2 ? kSteps - 3 : kSteps;
  auto const copy_part = [&](int part, int stage, int issued, int all) {
    constexpr int kCopies = RowLoader<Traits>::kCopies;
    if (part >= kParts) return;
    int const begin = part * kCopies / kParts, count = (part + 1) * kCopies / kParts - begin;
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      if (i < begin + (issued - 1) * count / all || i >= begin + issued * count / all) continue;
      loader.copy(i, to_x, tWsW, stage);
    }
  };
  CUTE_NO_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) {
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) copy_part(part, stage, 1, 1);
    cp_async_fence();
    loader.advance();
  }
  int read_stage = 0, write_stage = kStages - 1;
  copy_part(0, write_stage, 1, 1);

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});                   // (MMA,MMA_M,MMA_N)
  Tensor rX = make_tensor<int8_t>(partition_shape_A(mma, Shape<Int<kM>, Int<kK>>{}));  // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));                            // (MMA,MMA_N,k_step)
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  Tensor tSsW = s2r_w.get_slice(thread).partition_S(sW);  // (copy,N,k_step,tap)
  Tensor tSrW = s2r_w.get_slice(thread).retile_D(rW);     // (copy,N,k_step)
  // A tap is one pixel further, whichever row of the fragment it is: an immediate offset.
  uint32_t from_x[size<1>(acc)];
  {
    RowWalk const walk(params, place.m0);
    CUTE_UNROLL
    for (int i = 0; i < size<1>(acc); ++i) {
      int const m = (i * Traits::kTile.warps_m + thread / 32 % Traits::kTile.warps_m) * 16 + thread % 16;
      from_x[i] = shared_x + walk.of_output(params, m) * kRowPitch + thread % 32 / 16 * kVector;
    }
  }
  auto const fetch = [&](int step, int stage) {
    int const tap = step / kTapSteps, half = step % kTapSteps;
    CUTE_UNROLL
    for (int i = 0; i < size<1>(acc); ++i) {
      uint32_t const from = from_x[i] + stage * Traits::kStageX + (tap * kRowPitch + half * Traits::kMmaK);
      Tensor to = recast<uint32_t>(rX(_, i, half));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to(0)), "=r"(to(1)), "=r"(to(2)), "=r"(to(3))
                   : "r"(from));
    }
    copy(s2r_w, tSsW(_, _, half, stage * kRowTaps + tap), tSrW(_, _, half));
  };

  auto const multiply = [&](int half, int part, int stage) {
    multiply_step(mma, rX, rW, acc, half, [&](int issued, int all) {
      if (part >= 0) copy_part(part, stage, issued, all);
    });
  };

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
    for (int rows = blocks * p.R; rows > 0; --rows) {
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) enter_next_stage();
        fetch((step + 1) % kSteps, read_stage);
        multiply(step % kTapSteps, (step + 1) % kSteps, write_stage);
      }
    }
  };
  auto const last_channels = [&] {  // no step is spent on those that do not exist
    CUTE_NO_UNROLL
    for (int rows = p.R; rows > 0; --rows) {
      CUTE_UNROLL
      for (int tap = 0; tap < kRowTaps; ++tap) {
        if (tap > 0) fetch(tap * kTapSteps, read_stage);
        CUTE_UNROLL
        for (int part = 1; part < kSteps; ++part) {
          if (part * kRowTaps / kSteps == tap) copy_part(part, write_stage, 1, 1);
        }
        multiply(0, -1, 0);
      }
      enter_next_stage();
      copy_part(0, write_stage, 1, 1);
      fetch(0, read_stage);
    }
  };
  walk_sources<Traits>(params, shared, read, k_blocks, acc, sum, whole_blocks, last_channels);
}

}  // namespace cutefuse::quant_concat_conv
