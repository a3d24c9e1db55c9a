// Few filters on the patches of halo.cuh. Pixels are wgmma's rows and filters its columns, as in pixel_rows.cuh, so
// that 16 or 32 filters leave no row empty, and no thread activates outputs that do not exist. A tap's filters are too
// little to load for every tile: a block loads all of them once and keeps them. A tile is so little work that waiting
// takes longer: several small blocks share a multiprocessor.
#pragma once

#include "conv/sm90/halo.cuh"
#include "conv/sm90/pixel_rows.cuh"

namespace cutefuse::conv {

// One warpgroup multiplies a patch 8 pixels wide, in squares of 8 x 8 pixels: the 64 rows of a wgmma.
template <class Element_, int kFilters_, int kPixelsB_, int kChannels_>
struct Sm90PatchRows : Sm90Numbers<Element_> {
  using Element = Element_;
  using Output = typename Sm90Numbers<Element>::Output;
  static constexpr int kFilters = kFilters_, kTileA = 8, kPixelsB = kPixelsB_, kBeside = 1;
  static constexpr int kSquares = kPixelsB / 8, kThreads = 128 + 32;
  static constexpr int kChannels = kChannels_, kPixelBytes = kChannels * int(sizeof(Element));
  static constexpr int kFilterBytes = kFilters * kPixelBytes;  // of a tap and a chunk of channels
  static constexpr auto kSwizzle = kPixelBytes == 128 ? SM90::GMMA::LayoutType::B128 : SM90::GMMA::LayoutType::B64;
  static_assert(kFilters % 16 == 0 && kFilterBytes % 1024 == 0 && kChannels == 32 && sizeof(Element) == 2);

  struct SharedStorage {
    uint64_t halo_full[kHaloMaxStages], halo_empty[kHaloMaxStages];
    uint64_t filters_full;
    alignas(1024) unsigned char stages[1];  // as many as the plan says, then all filters
  };
  static_assert(offsetof(SharedStorage, stages) == kRowsHeadBytes);
};

// Loads the filters of all taps of all patches, in the order in which they are multiplied; one thread calls it.
template <class Traits>
CUTE_DEVICE void load_all_filters(typename Traits::SharedStorage &shared, Sm90Params const &params, unsigned char *to) {
  Problem const &p = params.problem;
  FilterBox const box(params, 0);
  int const bytes = Traits::kFilterBytes - box.missing * Traits::kPixelBytes;
  TransactionBarrier::arrive_and_expect_tx(&shared.filters_full, params.halo.filter_stages * bytes);
  wait_for_previous_kernel();
  for_each_patch<Traits::kChannels>(p, [&](int, int, int column, PatchTaps const &taps) {
    for (int r = 0; r < taps.rows; ++r) {
      for (int s = 0; s < taps.columns; ++s, to += Traits::kFilterBytes) {
        int const tap = (taps.r + r * p.stride_h) * p.S + taps.s + s * p.stride_w;
        load_filters(params, box.map, column + tap * kChannelBlock, params.outputs[0].first, &shared.filters_full, to);
      }
    }
  });
}

// acc(kSquares, 64 pixels, kN) += pixels x filters of a tap, over kSteps k-steps. square_bytes: from one square of
// the patch to the next.
template <class Element, int kN, int kSteps, int kSquares>
CUTE_DEVICE void multiply_squares(float (&acc)[kSquares][kN / 2], uint64_t pixels, uint64_t filters, int square_bytes) {
  warpgroup_arrive();
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    CUTE_UNROLL
    for (int m = 0; m < kSquares; ++m) {
      wgmma<Element>(acc[m], SM90::GMMA::ScaleOut::One, further(pixels, m * square_bytes + i * kStepBytes),
                     further(filters, i * kStepBytes));
    }
  }
  warpgroup_commit_batch();
}

// The biases of a thread's filters, which it keeps.
template <int kUnits>
struct KeptBiases {
  UnitBiases units[kUnits];
  CUTE_DEVICE explicit KeptBiases(Sm90Params const &params) {
    RowBiases const all(params, TileFilters(params, 0, 0, 0));
    CUTE_UNROLL
    for (int i = 0; i < kUnits; ++i) units[i] = UnitBiases(all, i);
  }
};
template <int kUnits>
CUTE_DEVICE UnitBiases const &pair_of_unit(KeptBiases<kUnits> const &biases, int unit) {
  return biases.units[unit];
}

// Bias, activation and residual of a tile's sums, and its outputs, from pixel (a,b) of image n on.
template <class Traits>
CUTE_DEVICE void store_squares(float (&acc)[Traits::kSquares][Traits::kFilters / 2],
                               KeptBiases<Traits::kFilters / 8> const &biases, Sm90Params const &params,
                               Patch const &patch) {
  using Place = RowPlace<typename Traits::Output>;
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const thread = opaque(threadIdx.x);  // else the compiler keeps places in registers through the main loop
  int const a = patch.a + thread % 32 / 4, b = patch.b + thread / 32 * 2;
  int const step_a = plan.swapped ? p.Q : 1, step_b = plan.swapped ? 1 : p.Q;
  int const pixels = a < plan.size_a ? plan.size_b - b : 0;
  Place place(params, TileFilters(params, 0, 0, 0), patch.n * p.P * p.Q + a * step_a + b * step_b, step_b, pixels);
  auto const store = [&](auto finish, auto shortcut) {
    constexpr bool kShortcut = decltype(shortcut)::value;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSquares; ++i) {
      CUTE_UNROLL
      for (int unit = 0; unit < Traits::kFilters / 8; unit += 2) {
        uint32_t z[2][2] = {};
        if constexpr (kShortcut) place.load_two(z[0], z[1], unit);
        store_two_units<decltype(finish)::value, kShortcut>(reinterpret_cast<float (&)[4]>(acc[i][4 * unit]),
                                                            reinterpret_cast<float (&)[4]>(acc[i][4 * unit + 4]), z[0],
                                                            z[1], biases, params, place, unit);
      }
      place.y += 8 * place.step_y, place.z += 8 * place.step_z, place.pixels -= 8;
    }
  };
  with_finish(p.activation, [&](auto finish) {
    if (has_shortcut(p)) {
      store(finish, std::true_type{});
    } else {
      store(finish, std::false_type{});
    }
  });
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, most_rows_blocks(Traits::kFilters))
    conv_sm90_patch_rows(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  using Element = typename Traits::Element;
  constexpr int kN = Traits::kFilters, kChannels = Traits::kChannels, kSquares = Traits::kSquares;
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const pad_a = plan.swapped ? p.pad_top : p.pad_left;
  ClusterPlace const place(params);
  unsigned char *const filters = shared.stages + plan.halo_stages * plan.stage_bytes;

  if (threadIdx.x == 0) {
    init_stages(shared.halo_full, shared.halo_empty, 1);
    TransactionBarrier::init(&shared.filters_full, 1);
    cutlass::arch::fence_barrier_init();
  }
  prefetch_maps<true>(params);
  __syncthreads();
  let_next_kernel_start();

  if (cutlass::canonical_warp_group_idx() == 0) {  // not of threadIdx: the compiler must see that no warp diverges
    wait_for_previous_kernel();
    bool const signals = threadIdx.x == 0;
    KeptBiases<kN / 8> const biases(params);
    Ring halo(plan.halo_stages);
    uint64_t const weights = operand(filters, 8 * Traits::kPixelBytes, Traits::kSwizzle);
    int const square_bytes = 8 * plan.pitch * Traits::kPixelBytes;
    int const step_r = plan.step_r * Traits::kPixelBytes, step_s = plan.step_s * Traits::kPixelBytes;
    TransactionBarrier::wait(&shared.filters_full, 0);
    for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
      Patch const patch(params, place.tile_x(tile), Traits::kTileA, Traits::kPixelsB);
      float acc[kSquares][kN / 2] = {};
      uint64_t of_tap = weights;
      for_each_patch<kChannels>(p, [&](int source, int channel, int, PatchTaps const &taps) {
        TransactionBarrier::wait(&shared.halo_full[halo.stage], halo.phase);
        int const first = pixels_before(params, source, patch.a - pad_a);
        uint64_t const pixels = operand(shared.stages + halo.stage * plan.stage_bytes + first * Traits::kPixelBytes,
                                        plan.pitch * Traits::kPixelBytes, Traits::kSwizzle);
        auto const multiply_taps = [&](auto steps) {
          fence_sums(acc);
          CUTE_NO_UNROLL
          for (int r = 0; r < taps.rows; ++r) {
            uint64_t at = further(pixels, r * step_r);
            CUTE_NO_UNROLL
            for (int s = 0; s < taps.columns; ++s) {
              multiply_squares<Element, kN, decltype(steps)::value>(acc, at, of_tap, square_bytes);
              at = further(at, step_s), of_tap = further(of_tap, Traits::kFilterBytes);
            }
          }
        };
        if (p.C[source] - channel > 16) {
          multiply_taps(_2{});
        } else {
          multiply_taps(_1{});
        }
        warpgroup_wait<0>();
        fence_sums(acc);
        if (signals) Barrier::arrive(&shared.halo_empty[halo.stage]);
        halo.advance();
      });
      store_squares<Traits>(acc, biases, params, patch);
    }
  } else if (is_elected()) {
    load_all_filters<Traits>(shared, params, filters);
    fill_patches<Traits>(shared, params, place);
  }
#endif
}

}  // namespace cutefuse::conv
