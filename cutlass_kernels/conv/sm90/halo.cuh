// Convolution on Hopper, halo path for RxS filters: a patch of pixels is loaded into shared memory once per channel
// chunk, with its halo, and every tap is multiplied from there. The pixel operand of a tap is the same tile read from
// another row: a K-major swizzled operand may start at any row (8 pixels are a core matrix, the next 8 lie one row of
// the patch further). im2col would fetch each pixel R*S times from L2.
//
// Under a stride of 2 a tap reads every other pixel. Those of one parity along each axis are an image of their own,
// over which the taps that read them have stride 1: such a chunk has a patch for each parity, up to four.
#pragma once

#include "conv/sm90/beside.cuh"
#include "conv/sm90/direct_store.cuh"
#include "conv/sm90/enlarge.cuh"
#include "conv/sm90/patch.cuh"
#include "conv/sm90/scales.cuh"
#include "conv/sm90/shortcut.cuh"

namespace cutefuse::conv {

// ---- types ----------------------------------------------------------------------------------------------------------

// The patch is kPixelsA x kPixelsB pixels along `a` and `b`; see HaloPlan. Of 128 filters each warpgroup has 64, over a
// patch 8 pixels wide. Of 64 filters each has half of a patch 16 pixels wide. Where that would leave most
// multiprocessors without a patch, it is 8 pixels wide, and each warpgroup multiplies all of it with half of the
// channels: a wgmma of half the pixels would take as long. Where kBeside is 2, they are 32 filters of two pixels, and a
// pixel of the patch is such a pair.
template <class Element_, int kFilters_, int kPixelsA_, int kPixelsB_, bool kPairs_ = false, int kBeside_ = 1>
struct Sm90Halo : Sm90Numbers<Element_> {
  using Element = Element_;
  using Output = typename Sm90Numbers<Element>::Output;
  static constexpr bool kDirect = Sm90Numbers<Element>::kDirect;
  static constexpr int kFilters = kFilters_, kPixelsA = kPixelsA_, kPixelsB = kPixelsB_;
  static constexpr int kBeside = kBeside_, kTileFilters = kFilters / kBeside, kTileA = kPixelsA * kBeside;
  static constexpr int kPixels = kPixelsA * kPixelsB, kPixelGroups = kPixelsA / 8, kWidth = 8 * kPixelsB;  // of a wgmma
  static constexpr bool kHalves = halves_channels(kFilters, kPixelsA);
  static constexpr int kN = kHalves ? kWidth / kConsumers : kWidth;  // pixels that a warpgroup finishes
  static constexpr int kStoreRows = sm90_store_rows(kN);             // pixels of one TMA store, 8 of them along `a`
  static constexpr int kStagings = kN / kStoreRows;
  static constexpr int kChannels = halo_channels(kFilters, kPixels, int(sizeof(Element)), kPairs_);  // of one stage
  static constexpr int kPixelBytes = kChannels * int(sizeof(Element)), kFilterBytes = kFilters * kPixelBytes;
  static constexpr auto kSwizzle = kPixelBytes == 128 ? SM90::GMMA::LayoutType::B128 : SM90::GMMA::LayoutType::B64;
  static_assert(kPixelBytes == 128 || kPixelBytes == 64);
  // Of two blocks of channels all filters' first ones come before all second ones.
  static constexpr bool kPairs = kPairs_;
  static constexpr int kFilterRowBytes = kPixelBytes / (kPairs ? 2 : 1);
  static constexpr auto kFilterSwizzle = kPairs ? SM90::GMMA::LayoutType::B64 : kSwizzle;
  static_assert(!kPairs || kPixelBytes == 128);
  static_assert(kN % kStoreRows == 0 && kWidth <= 256);
  static_assert(kHalves ? !Sm90Numbers<Element>::kScaled && !kDirect : kFilters * kPixelGroups == 64 * kConsumers);

  static constexpr int kThreads = kSm90Threads;
  static constexpr int kRegionBytes = halo_region_bytes(kFilters, kPixelsA, kPixelsB, int(sizeof(Element)));

  struct SharedStorage {
    alignas(1024) unsigned char stages[kRegionBytes];  // the plan's halo stages, then its filter stages
    alignas(1024) Output y[kConsumers][kDirect ? 1 : kN * kStoreColumns];  // all outputs of a tile, for the stores
    alignas(16) float4 halves[kHalves ? kConsumers * 128 * kN / 8 : 1];    // (group,thread)
    alignas(8) uint64_t halo_full[kHaloMaxStages], halo_empty[kHaloMaxStages];
    uint64_t filter_full[kFilterMaxStages], filter_empty[kFilterMaxStages];
    uint64_t shortcut_full[kConsumers];
  };
  static_assert(sizeof(SharedStorage) <= kSharedBytes);
};

// The taps that read the pixels of one patch: rows x columns of them from (r,s) on, a stride apart.
struct PatchTaps {
  int r = 0, s = 0, rows, columns;

  CUTE_DEVICE explicit PatchTaps(Problem const &p) { count(p); }
  CUTE_DEVICE bool exists(Problem const &p) const { return r < cute::min(p.stride_h, p.R); }
  CUTE_DEVICE void advance(Problem const &p) {
    if (++s == cute::min(p.stride_w, p.S)) s = 0, ++r;
    count(p);
  }

 private:
  CUTE_DEVICE void count(Problem const &p) {  // strides are 1 or 2
    rows = (p.R - r + p.stride_h - 1) >> (p.stride_h - 1);
    columns = (p.S - s + p.stride_w - 1) >> (p.stride_w - 1);
  }
};

// Calls f(source, channel, column of tap 0, taps) for every patch of the reduction: for every channel chunk, and of
// strided filters for every parity.
template <int kChannels, class F>
CUTE_DEVICE void for_each_patch(Problem const &p, F const &f) {
  int const taps = p.R * p.S;
  int block_column = 0;
  for (int source = 0; source < p.sources; ++source) {
    for (int channel = 0; channel < p.C[source]; channel += kChannels) {
      int const column = block_column + channel / kChannelBlock * taps * kChannelBlock + channel % kChannelBlock;
      for (PatchTaps of_patch(p); of_patch.exists(p); of_patch.advance(p)) f(source, channel, column, of_patch);
    }
    block_column += blocks_of(p.C[source]) * taps * kChannelBlock;
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Keeps the halo stages full with the patches of each of this block's tiles; one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_patches(typename Traits::SharedStorage &shared, Sm90Params const &params,
                              ClusterPlace const &place) {
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const pad_a = plan.swapped ? p.pad_top : p.pad_left, pad_b = plan.swapped ? p.pad_left : p.pad_top;
  int const stride_a = plan.swapped ? p.stride_h : p.stride_w, stride_b = plan.swapped ? p.stride_w : p.stride_h;
  int const bytes = plan.pitch * plan.rows * Traits::kPixelBytes;
  Ring ring(plan.halo_stages);
  for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
    Patch const patch(params, place.tile_x(tile), Traits::kTileA, Traits::kPixelsB);
    for_each_patch<Traits::kChannels>(p, [&](int source, int channel, int, PatchTaps const &taps) {
      uint64_t *const full = &shared.halo_full[ring.stage];
      unsigned char *const to = shared.stages + ring.stage * plan.stage_bytes;
      int const a = patch.a * stride_a - pad_a + (plan.swapped ? taps.r : taps.s);
      int const b = patch.b * stride_b - pad_b + (plan.swapped ? taps.s : taps.r);
      Barrier::wait(&shared.halo_empty[ring.stage], ring.phase ^ 1);
      if (ring.stage == 0) wait_for_previous_kernel();  // before the first load; later calls return at once
      if constexpr (Traits::kBeside > 1) {
        load_patch_in_parts<Traits>(params, source, channel, a, b, patch.n, full, to);
      } else {
        TransactionBarrier::arrive_and_expect_tx(full, bytes);
        load_patch<Traits::kPixelBytes>(params, source, channel, a, b, patch.n, full, to);
      }
      ring.advance();
    });
  }
}

// Keeps the filter stages full with every tap of each of this block's tiles; one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_filters(typename Traits::SharedStorage &shared, Sm90Params const &params,
                              ClusterPlace const &place, unsigned char *filter_stages) {
  Problem const &p = params.problem;
  int const taps = p.R * p.S;
  Ring ring(params.halo.filter_stages);
  for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
    int const tile_f = place.tile_f(tile), filter = TileFilters(params, tile_f, Traits::kTileFilters, 0).first;
    FilterBox const box(params, tile_f);
    int const bytes = Traits::kFilterBytes - box.missing * Traits::kPixelBytes;
    for_each_patch<Traits::kChannels>(p, [&](int, int, int column, PatchTaps const &of_patch) {
      int const block = params.by_taps.divide(column / kChannelBlock);
      int const columns = of_patch.columns + Traits::kBeside - 1, count = of_patch.rows * columns;
      int tap = of_patch.r * p.S + of_patch.s;  // of all taps
      for (int i = 0, s = 0; i < count; ++i) {
        uint64_t *const full = open_stage(shared.filter_full, shared.filter_empty, ring, bytes);
        if (ring.stage == 0) wait_for_previous_kernel();
        unsigned char *const to = filter_stages + ring.stage * Traits::kFilterBytes;
        if constexpr (Traits::kBeside > 1) {
          load_filters_beside<Traits>(params, column, s, filter, full, to);
          if (++s == columns) s = 0, column += p.S * kChannelBlock;
        } else if constexpr (Traits::kPairs) {
          bool const alone = block == params.lone_block;
          load_filter_pair<false>(params, alone ? &params.w_second : box.map, alone ? 0 : tap * kChannelBlock,
                                  alone ? block * taps + tap : block, filter, full, to);
        } else {
          load_filters<Traits::kScaled>(params, box.map, column + tap * kChannelBlock, filter, full, to);
        }
        if constexpr (Traits::kBeside == 1) {
          tap += p.stride_w;
          if (++s == columns) s = 0, tap += p.stride_h * p.S - columns * p.stride_w;
        }
        ring.advance();
      }
    });
  }
}

// The second of two arrays if kSecond, else the first one.
template <bool kSecond, class First, class Second>
CUTE_DEVICE auto &second_if(First &first, Second &second) {
  if constexpr (kSecond) {
    return second;
  } else {
    return first;
  }
}

// sums = this warpgroup's half of the pixels, of which each warpgroup has multiplied all with half of the channels.
// They go through `exchange`, (group,thread).
template <int kCount>
CUTE_DEVICE void add_halves(float const (&acc)[2 * kCount], float (&sums)[kCount], int consumer, float4 *exchange) {
  constexpr int kThreads = kConsumers * 128, kBarrier = 2 * kConsumers;
  int const other = int(threadIdx.x) ^ 128;
  bool const second = consumer == 1;
  cutlass::arch::NamedBarrier::sync(kThreads, kBarrier);  // what lay there is no longer read
  CUTE_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    float const *const first_half = acc + i, *const second_half = acc + kCount + i;
    float4 give;
    give.x = second ? first_half[0] : second_half[0], give.y = second ? first_half[1] : second_half[1];
    give.z = second ? first_half[2] : second_half[2], give.w = second ? first_half[3] : second_half[3];
    exchange[i / 4 * kThreads + other] = give;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) sums[i + j] = second ? second_half[j] : first_half[j];
  }
  cutlass::arch::NamedBarrier::sync(kThreads, kBarrier);
  CUTE_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    float4 const got = exchange[i / 4 * kThreads + threadIdx.x];
    sums[i] += got.x, sums[i + 1] += got.y, sums[i + 2] += got.z, sums[i + 3] += got.w;
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) conv_sm90_halo(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  using Element = typename Traits::Element;
  constexpr int kFilters = Traits::kFilters, kChannels = Traits::kChannels, kN = Traits::kN;
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const warpgroup = cutlass::canonical_warp_group_idx();
  int const pad_a = plan.swapped ? p.pad_top : p.pad_left;
  ClusterPlace const place(params);
  unsigned char *const filter_stages = shared.stages + plan.halo_stages * plan.stage_bytes;

  if (threadIdx.x == 0) {
    init_stages(shared.halo_full, shared.halo_empty, kConsumers);
    init_stages(shared.filter_full, shared.filter_empty, kConsumers);
    for (int i = 0; i < kConsumers; ++i) TransactionBarrier::init(&shared.shortcut_full[i], 1);
    cutlass::arch::fence_barrier_init();
  }
  prefetch_maps<Traits::kDirect>(params);
  __syncthreads();
  let_next_kernel_start();

  if (warpgroup < kConsumers) {  // see conv_sm90_small: the producer's code comes first
    // ---- consumers: each warpgroup has 64 filters x (8 x kPixelsB) pixels of the patch ----
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    wait_for_previous_kernel();
    constexpr bool kHalves = Traits::kHalves;
    constexpr int kWidth = Traits::kWidth, kStep = kStepBytes / int(sizeof(Element));
    constexpr int kSteps = kChannels / kStep / (kHalves ? kConsumers : 1), kStride = kHalves ? kConsumers : 1;
    int const consumer = warpgroup, first_row_w = kFilters == 64 ? 0 : consumer * 64;
    int const first_a = Traits::kPixelGroups == 2 ? consumer * 8 : 0;   // of its pixels
    int const first_b = kHalves ? consumer * Traits::kPixelsB / 2 : 0;  // of those that it finishes
    int const first_step = kHalves ? consumer * kStepBytes : 0;         // of every other one
    bool const signals = threadIdx.x % 128 == 0;

    Ring halo(plan.halo_stages), filters(plan.filter_stages);
    int before = 0;  // the stage of the tap before
    uint64_t const weights = operand(filter_stages + first_row_w * Traits::kFilterRowBytes + first_step,
                                     8 * Traits::kFilterRowBytes, Traits::kFilterSwizzle);
    uint32_t shortcut_phase = 0;
    for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
      Patch const patch(params, place.tile_x(tile), Traits::kTileA, Traits::kPixelsB);
      TileFilters const tile_filters(params, place.tile_f(tile), Traits::kTileFilters, first_row_w);
      PatchPair<Traits> pair(params, tile_filters);
      typename Traits::Sum acc[1][kWidth / 2];  // the first step overwrites it
      auto scale = SM90::GMMA::ScaleOut::Zero;
      bool running = false;  // some steps' products are still being added
      auto const finish = [&] {
        warpgroup_wait<0>();
        running = false;
        if (signals) {  // their stages are free
          Barrier::arrive(&shared.filter_empty[before]);
          Barrier::arrive(&shared.halo_empty[halo.previous()]);
        }
        fence_sums(acc);
      };
      for_each_patch<kChannels>(p, [&](int source, int channel, int, PatchTaps const &of_patch) {
        int const columns = of_patch.columns + Traits::kBeside - 1, taps = of_patch.rows * columns;
        bool const first_patch = of_patch.r + of_patch.s == 0;  // of this chunk
        int const left = p.C[source] - channel, all_steps = ceil_div(left < kChannels ? left : kChannels, kStep);
        // Half of the steps; of a single one the second warpgroup has the next, which is zeros.
        int const steps = kHalves ? cute::max(1, (all_steps + 1 - consumer) / 2) : all_steps;
        if (Traits::kScaled && channel == 0 && first_patch && params.rescale[source].factor != 1.f) {
          finish();
          rescale(acc[0], params.rescale[source]);
        }
        TransactionBarrier::wait(&shared.halo_full[halo.stage], halo.phase);
        PairColumns const beside(params, source);
        int const first = first_a + (Traits::kBeside > 1 ? 0 : pixels_before(params, source, patch.a - pad_a));
        uint64_t const pixels =
            operand(shared.stages + halo.stage * plan.stage_bytes + first * Traits::kPixelBytes + first_step,
                    plan.pitch * Traits::kPixelBytes, Traits::kSwizzle);
        // Byte of the tap's first pixel in the patch, and of what lies between two taps, in a row and from row to row.
        int of_row = 0, of_tap = Traits::kBeside > 1 ? beside.pixel(0) * Traits::kPixelBytes : 0, s = 0;
        int const step = plan.step_s * Traits::kPixelBytes, to_next_row = plan.step_r * Traits::kPixelBytes;
        constexpr bool kComes = !Traits::kScaled && !Traits::kDirect;
        bool const comes = kComes && source == 0 && channel == 0 && first_patch && has_shortcut(p);
        // A tap's products may take less time than its instructions, most of which wait for one another: so they are
        // few, an addition for each operand's place, and threads arrive without a branch.
        CUTE_NO_UNROLL
        for (int tap = 0; tap < taps; ++tap) {
          TransactionBarrier::wait(&shared.filter_full[filters.stage], filters.phase);
          multiply<Element, kWidth, kSteps, kStride>(
              acc, further(weights, filters.stage * Traits::kFilterBytes), further(pixels, of_tap), steps, scale,
              64 * Traits::kFilterRowBytes, Traits::kPairs ? 64 * kFilters : 2 * kStepBytes);
          // Loads the shortcut to where the outputs are staged. First this thread waits until the last tile's stores
          // have read them; meanwhile the tensor cores have two taps to do, or the only one.
          if constexpr (kComes) {
            if (comes && signals && tap == int(taps > 1)) {
              tma_store_wait<0>();
              uint64_t *const full = &shared.shortcut_full[consumer];
              TransactionBarrier::arrive_and_expect_tx(full, sizeof(shared.y[consumer]));
              if constexpr (Traits::kBeside > 1) {
                load_shortcut_in_parts<Traits>(params, tile_filters.first, patch.a + first_a * Traits::kBeside, patch.b,
                                               patch.n, full, shared.y[consumer]);
              } else {
                SM90_TMA_LOAD_4D::copy(&params.z, full, kEvictNormal, shared.y[consumer], tile_filters.first,
                                       patch.a + first_a, patch.b + first_b, patch.n);
              }
            }
          }
          bool const next_r = ++s == columns;
          s = next_r ? 0 : s;
          of_row += next_r ? to_next_row : 0;
          of_tap = of_row + (Traits::kBeside > 1 ? beside.pixel(s) * Traits::kPixelBytes : s * step);
          int const stage = filters.stage;
          filters.advance();
          warpgroup_wait<1>();
          arrive_if(signals && running, &shared.filter_empty[before]);
          arrive_if(signals && running && tap == 0, &shared.halo_empty[halo.previous()]);
          running = true, before = stage;
        }
        halo.advance();
      });
      finish();
      float sums[kHalves ? kN / 2 : 1];
      if constexpr (kHalves) add_halves(acc[0], sums, consumer, shared.halves);
      auto &finished = second_if<kHalves>(acc[0], sums);
      if constexpr (Traits::kBeside > 1) {
        replace_nan<Element>(finished, params, tile_filters.first, patch.a + first_a * Traits::kBeside, patch.b,
                             patch.n);
      }
      auto const store = [&](int i, auto const *from) {
        if constexpr (Traits::kBeside > 1) {
          store_in_parts<Traits>(params, from, tile_filters.in_output, patch.a + first_a * Traits::kBeside,
                                 patch.b + i * (Traits::kStoreRows / 8), patch.n);
        } else {
          SM90_TMA_STORE_4D::copy(&params.out[tile_filters.output], from, tile_filters.in_output, patch.a + first_a,
                                  patch.b + first_b + i * (Traits::kStoreRows / 8), patch.n);
        }
      };
      auto activation = p.activation;
      if constexpr (!Traits::kScaled && !Traits::kDirect) {
        if (has_shortcut(p)) {
          activation = finish_before_shortcut(finished, pair, p);
          TransactionBarrier::wait(&shared.shortcut_full[consumer], shortcut_phase);
          shortcut_phase ^= 1;
          add_shortcut<Element, kN / 8, PatchPair<Traits>::kColumns>(
              finished, shared.y[consumer]);  // each warp reads what it overwrites later
        }
      }
      if constexpr (Traits::kDirect) {
        DirectPixels const pixels(params, patch.a + first_a, patch.b, patch.n);
        store_directly<kN / 8>(finished, pair, params, tile_filters, pixels);
      } else {
        store_tile<Traits>(finished, pair, activation, params, shared.y[consumer], consumer, store);
      }
    }
    if (signals) tma_store_wait<0>();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync() - 4 * kConsumers;
    if (warp == 0) {
      if (is_elected()) fill_patches<Traits>(shared, params, place);
    } else if (warp == 1) {
      if (is_elected()) fill_filters<Traits>(shared, params, place, filter_stages);
    }
    __syncwarp();
  }
#endif
}

}  // namespace cutefuse::conv
