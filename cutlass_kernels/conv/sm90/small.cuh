// Convolution on Hopper for small maps: a block has one narrow tile, and a cluster divides the reduction. There is no
// tile scheduler, no barrier before a block's first load and none after its last sum, because a few microseconds of
// work cannot hide them. The host says how many stages the ring has: all that fit, or fewer where blocks share a
// multiprocessor. Filters and pixels are loaded as in im2col.cuh, or pixels as patches (small_patch.cuh).
#pragma once

#include "conv/sm90/activated_rows.cuh"
#include "conv/sm90/phases.cuh"
#include "conv/sm90/small_patch.cuh"

namespace cutefuse::conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <class Element_, int kFilters_, int kPixels_, bool kPre = false, bool kEnlarged_ = false,
          bool kPixelRows_ = kPre, bool kPatch_ = false>
struct Sm90Small : Sm90Numbers<Element_> {
  using Element = Element_;
  using Output = typename Sm90Numbers<Element>::Output;
  static constexpr bool kSmall = true, kPairs = sizeof(Element) == 1;  // a k-tile is two blocks of channels
  static constexpr bool kJoins = kPairs;                               // or two sources, or two taps (JoinPlan)
  static constexpr bool kEnlarged = kEnlarged_;    // some sources are enlarged by two: see phases.cuh
  static constexpr bool kPixelRows = kPixelRows_;  // pixels are wgmma's rows, filters its columns
  static constexpr bool kPatch = kPatch_;          // pixels are a patch of an image: see small_patch.cuh
  static constexpr bool kDrains = Sm90Numbers<Element>::kScaled;
  static constexpr int kFilters = kFilters_, kPixels = kPixels_, kChannels = kSmallRowBytes / int(sizeof(Element));
  // wgmma's rows, 64 of each warpgroup, and its columns.
  static constexpr int kRows = kPixelRows ? kPixels : kFilters, kN = kPixelRows ? kFilters : kPixels, kRowTiles = 1;
  static constexpr bool kShortcut = !kPre && !kDrains && !kEnlarged && !(kPixelRows && kN > kWidestWithShortcut);
  static constexpr bool kPingPong = false, kSharesPixels = false, kPreActivated = kPre;
  static constexpr int kShortcutSlots = 0, kPhasePixels = kPixels / 4;
  static constexpr int kRunPixels = kEnlarged ? kPhasePixels : kPixels;  // of the run that is a tile
  static constexpr bool kInOrder = loads_in_order(true, kPixels);
  // At most: blocks on a multiprocessor, and stages of each.
  static constexpr int kBlocks = small_blocks(kRows, kN, int(sizeof(Element))), kStages = kSmallStages;
  static constexpr int kReaders = kRows / 64, kSumThreads = 128 * kReaders, kThreads = kSumThreads + 32;
  static_assert(!kPre || kReaders == 1);
  static constexpr int kUnits = kN / 8;  // a unit: 8 columns, finished by one block
  // Of a wide tile so many are finished by the same code, in turns; pre-activated ones have straight code.
  static constexpr int kUnitsInTurn = kPre || kUnits <= 8 ? kUnits
                                      : kPixelRows        ? (kUnits % 4 == 0 ? kUnits / 2 : 6)
                                      : kUnits % 5 == 0   ? 5
                                      : kUnits % 4 == 0   ? 4
                                                          : 5;
  static constexpr int kPartBytes = kSumThreads * int(sizeof(float4));

  static constexpr int kPixelBytes = kChannels * int(sizeof(Element)), kSteps = kPixelBytes / kStepBytes;
  static constexpr auto kSwizzle = SM90::GMMA::LayoutType::B128;
  static constexpr int kTaps = kPatch ? kSmallPatchTaps : 1;  // of a stage
  static constexpr int kStageBytes = (kPatch ? kTaps * kFilters : kFilters + kPixels) * kPixelBytes;

  struct PlainStage {
    Element x[kPixels * kChannels];   // (pixel,channel), 128-byte rows, SWIZZLE_128B
    Element w[kFilters * kChannels];  // (filter,channel), likewise
  };
  struct PatchStage {
    Element w[kTaps * kFilters * kChannels];  // (tap,filter,channel)
  };
  using Stage = cute::conditional_t<kPatch, PatchStage, PlainStage>;
  // A launch has as many stages as the host chose, each with its operands side by side. Behind them lie patches, where
  // it divides the reduction the parts and, where it activates the sources, the scales and shifts.
  struct SharedStorage {
    alignas(8) uint64_t full[kStages], empty[kStages], parts_full;
    uint64_t patch_full[kSmallPatches], patch_empty[kSmallPatches];
    alignas(16) float bias[kPreActivated ? kFilters : 1];
    alignas(1024) Stage stages[kStages];
    CUTE_DEVICE Element *x_of(int stage) { return stages[stage].x; }
    CUTE_DEVICE Element *w_of(int stage) { return stages[stage].w; }
    // (pixel,channel), rows as in a stage
    CUTE_DEVICE unsigned char *patch(Sm90Params const &params, int i) {
      return reinterpret_cast<unsigned char *>(stages + params.stages) + i * params.halo.stage_bytes;
    }
    // (thread,(block of the cluster,unit))
    CUTE_DEVICE auto parts(Sm90Params const &params) {
      return reinterpret_cast<float4(*)[kSumThreads]>(patch(params, kPatch ? params.halo.halo_stages : 0));
    }
    // (channel,scale and shift)
    CUTE_DEVICE Element *vectors(Sm90Params const &params) {
      return reinterpret_cast<Element *>(parts(params) + (params.splits > 1 ? small_parts(kN) : 0));
    }
  };
  static_assert(sizeof(Stage) == kStageBytes && sizeof(Stage) % 1024 == 0);
  static_assert(offsetof(SharedStorage, stages) == kSmallHeadBytes);
};

// ---- reduction ------------------------------------------------------------------------------------------------------

// Gives every unit of sums to the block that finishes it; this block's own stay here.
template <class Traits>
CUTE_DEVICE void send_units(float const (&acc)[Traits::kN / 2], Sm90Params const &params, int rank,
                            typename Traits::SharedStorage &shared) {
  float4 *to = &shared.parts(params)[rank][threadIdx.x];
  uint32_t const full = cast_smem_ptr_to_uint(&shared.parts_full);
  int owner = 0;
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnits; ++unit) {
    float const *const v = acc + 4 * unit;
    if (owner == rank) {
      *to = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      asm volatile(  // CuTe stores single words
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
              set_block_rank(cast_smem_ptr_to_uint(to), owner)),
          "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(set_block_rank(full, owner))
          : "memory");
    }
    if (++owner == params.splits) owner = 0, to += params.splits * Traits::kSumThreads;
  }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

// Units that a block of a cluster finishes at most.
template <class Traits>
constexpr int kUnitsOfPart = (Traits::kUnits + 1) / 2;

// Adds up this block's units, once they have come, in the order of the blocks: results never depend on timing.
template <class Traits, Finish kFinish, bool kShortcut, class Pair, class Place>
CUTE_DEVICE void add_units(uint32_t (&shortcut)[Traits::kUnits][2], Pair const &pair, bool pads,
                           Sm90Params const &params, int rank, typename Traits::SharedStorage &shared,
                           Place const &place) {
  float4 const *part = &shared.parts(params)[0][threadIdx.x];
  TransactionBarrier::wait(&shared.parts_full, 0);
  CUTE_NO_UNROLL
  for (int unit = rank; unit < Traits::kUnits; unit += params.splits) {
    // The first two parts, which always exist, come together. To read all eight at once is more code, and no faster.
    float4 const first = part[0], second = part[Traits::kSumThreads];
    float values[4] = {first.x + second.x, first.y + second.y, first.z + second.z, first.w + second.w};
    CUTE_NO_UNROLL
    for (int block = 2; block < params.splits; ++block) {
      float4 const more = part[block * Traits::kSumThreads];
      values[0] += more.x, values[1] += more.y, values[2] += more.z, values[3] += more.w;
    }
    part += params.splits * Traits::kSumThreads;
    store_unit<Traits, kFinish, kShortcut>(values, shortcut[0], pair_of_unit(pair, unit), pads, params, place, unit);
    CUTE_UNROLL
    for (int i = 0; i + 1 < kUnitsOfPart<Traits> && kShortcut; ++i) {
      shortcut[i][0] = shortcut[i + 1][0], shortcut[i][1] = shortcut[i + 1][1];
    }
  }
}

// The shortcut's elements of all units that this block finishes.
template <class Traits, class Place>
CUTE_DEVICE void load_units(uint32_t (&shortcut)[Traits::kUnits][2], Sm90Params const &params, int rank,
                            Place const &place) {
  if (params.splits > 1) {
    CUTE_UNROLL
    for (int i = 0; i < kUnitsOfPart<Traits>; ++i) place.load(shortcut[i], rank + i * params.splits);
    return;
  }
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnits; ++unit) {
    if constexpr (!Traits::kPixelRows) {
      place.load(shortcut[unit], unit);
    } else if (unit % 2 == 0) {
      place.load_two(shortcut[unit], shortcut[unit + 1], unit);
    }
  }
}

// Finishes and stores this block's units, all of the tile. The first ones of a wide tile are finished, and the others
// move to their registers: straight code for all would be long, and a launch behind another kernel waits for its code.
template <class Traits, Finish kFinish, bool kShortcut, class Pair, class Place>
CUTE_DEVICE void store_units(float (&acc)[Traits::kN / 2], uint32_t (&shortcut)[Traits::kUnits][2], Pair const &pair,
                             bool pads, Sm90Params const &params, Place const &place) {
  constexpr int kUnits = Traits::kUnits, kTurn = Traits::kUnitsInTurn;
  auto const values_of = [&](int unit) -> auto & { return reinterpret_cast<float (&)[4]>(acc[4 * unit]); };
  CUTE_NO_UNROLL
  for (int done = 0; done < kUnits; done += kTurn) {
    CUTE_UNROLL
    for (int i = 0; i < kTurn && i < kUnits; ++i) {
      int const unit = done + i;
      if (kUnits % kTurn != 0 && unit >= kUnits) break;
      if constexpr (!Traits::kPixelRows) {
        store_unit<Traits, kFinish, kShortcut>(values_of(i), shortcut[i], pair_of_unit(pair, unit), pads, params, place,
                                               unit);
      } else if (i % 2 == 1) {
        store_two_units<kFinish, kShortcut>(values_of(i - 1), values_of(i), shortcut[i - 1], shortcut[i], pair, params,
                                            place, unit - 1);
      } else if (i + 1 == kUnits) {
        store_unit<Traits, kFinish, kShortcut>(values_of(i), shortcut[i], pair_of_unit(pair, unit), pads, params, place,
                                               unit);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i + kTurn < kUnits; ++i) {
      CUTE_UNROLL
      for (int v = 0; v < 4; ++v) values_of(i)[v] = values_of(i + kTurn)[v];
      if constexpr (kShortcut) shortcut[i][0] = shortcut[i + kTurn][0], shortcut[i][1] = shortcut[i + kTurn][1];
    }
  }
}

// What is added to a unit's sums.
template <class Traits>
using UnitPair = cute::conditional_t<
    Traits::kPreActivated, BegunWithBias,
    cute::conditional_t<Traits::kPixelRows, RowBiases,
                        cute::conditional_t<Traits::kDrains, ScaledPair<float, true, Traits::kInOrder>, FilterPair>>>;
template <class Traits>
using PlainPlace = cute::conditional_t<Traits::kEnlarged, PhasePlace<typename Traits::Output, Traits::kUnits / 4>,
                                       UnitPlace<typename Traits::Output>>;
template <class Traits>
using Place = cute::conditional_t<Traits::kPixelRows, RowPlace<typename Traits::Output>, PlainPlace<Traits>>;

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Makes the barriers of a block, those of absent stages too: one thread calls it. (A lane for each stage would take
// longer, since the instruction takes one address of a warp at a time.)
template <class Traits>
CUTE_DEVICE void init_barriers(typename Traits::SharedStorage &shared, Sm90Params const &params, int part) {
  init_stages(shared.full, shared.empty, Traits::kReaders);
  if constexpr (Traits::kPatch) init_stages(shared.patch_full, shared.patch_empty, Traits::kReaders);
  TransactionBarrier::init(&shared.parts_full, 1);
  cutlass::arch::fence_barrier_init();
  if (params.splits == 1) return;
  int const units = part < Traits::kUnits ? ceil_div(Traits::kUnits - part, params.splits) : 0;
  TransactionBarrier::arrive_and_expect_tx(&shared.parts_full, units * (params.splits - 1) * Traits::kPartBytes);
}

// The first pixel of a warpgroup, the tile's row_x-th, in the order of all pixels; of a patch, where it begins.
template <class Traits>
CUTE_DEVICE auto first_of(ClusterPlace const &place, Sm90Params const &params, int row_x) {
  if constexpr (Traits::kPatch) {
    return patch_of<Traits>(place, params);
  } else {
    return place.first_pixel<Traits::kRunPixels>(place.first_tile, params) + row_x;
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    conv_sm90_small(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  if (!params.holds_next) let_next_kernel_start();
  ClusterPlace const place(params);
  int const k_begin = params.k_begin[place.part], k_end = params.k_begin[place.part + 1];
  bool const divided = params.splits > 1;

  // A jump to code that is not near costs 0.2 us where the code has to be fetched. Of a comparison by size the compiler
  // puts the `else` in front: here the producer, below the epilogues without a shortcut.
  if (threadIdx.x < Traits::kSumThreads) {
    // ---- consumers ----
    prefetch_maps(params);
    if (divided) cluster_arrive();
    // This warpgroup's first row of the tile, which is a filter or a pixel. The compiler has to know that it is the
    // same in all threads, or an operand's address moves to uniform registers for every wgmma, which waits for it.
    int const row = Traits::kReaders == 1 ? 0 : cutlass::canonical_warp_group_idx() * 64;
    int const row_f = Traits::kPixelRows ? 0 : row, row_x = Traits::kPixelRows ? row : 0;
    auto const first = first_of<Traits>(place, params, row_x);
    Release const release(place);
    Ring ring(params.stages);
    if constexpr (!Traits::kPreActivated) wait_and_let_next_start();  // those do later, in activated_loop
    int const tile_f = place.tile_f(place.first_tile);
    UnitPair<Traits> const pair(params, TileFilters(params, tile_f, Traits::kFilters, row_f));
    if constexpr (Traits::kPixelRows && !Traits::kPreActivated) {
      fetch_biases<Traits::kFilters>(params, TileFilters(params, tile_f, Traits::kFilters, 0));
    }
    float acc[1][Traits::kN / 2];
    // Loaded ahead of the loop, behind which the latency would be seen.
    uint32_t shortcut[Traits::kUnits][2];
    if constexpr (Traits::kShortcut) {
      if (has_shortcut(params.problem)) {
        load_units<Traits>(shortcut, params, place.part,
                           Place<Traits>(params, TileFilters(params, tile_f, Traits::kFilters, row_f), pair, first));
      }
    }
    auto const meet = [] { cutlass::arch::NamedBarrier::sync(Traits::kThreads, 0); };
    if constexpr (Traits::kPreActivated) {
      Constants<Traits> const constants(shared, params, tile_f * Traits::kFilters, place.part);
      if (params.pointwise) {
        activated_loop<Traits, false>(acc[0], ring, shared, params, release, constants, first, place.part);
      } else {
        activated_loop<Traits, true>(acc[0], ring, shared, params, release, constants, first, place.part);
      }
    } else if constexpr (Traits::kPatch) {
      meet();
      loop_over_patches<Traits>(acc, ring, shared, params, release, row, FilterBox(params, tile_f).missing, place.part);
    } else if constexpr (Traits::kDrains) {
      meet();
      narrow_loop_and_drain<Traits>(acc[0], ring, shared, params, release, row, k_begin, k_end);
    } else {
      meet();
      PlainRows<Traits> rows(params, row);
      if constexpr (Traits::kEnlarged) {
        loop_in_phases<Traits>(acc[0], ring, shared, params, release, rows, place.part);
      } else {
        narrow_loop<Traits>(acc[0], ring, shared, release, rows, k_begin, k_end);
      }
    }
    TileFilters const filters(params, tile_f, Traits::kFilters, opaque(row_f));  // not kept through the main loop
    Place<Traits> const outputs(params, filters, pair, first);
    if constexpr (!Traits::kDrains) finish_loop<Traits>(acc, ring, shared, release);
    bool const pads = holds_pad_lanes(pair);
    auto const store = [&](auto finish, auto with_shortcut, auto const &outputs) {
      constexpr Finish kFinish = decltype(finish)::value;
      constexpr bool kShortcut = decltype(with_shortcut)::value;
      if (divided) {
        add_units<Traits, kFinish, kShortcut>(shortcut, pair, pads, params, place.part, shared, outputs);
      } else {
        store_units<Traits, kFinish, kShortcut>(acc[0], shortcut, pair, pads, params, outputs);
      }
    };

    if (divided) {
      cluster_wait();  // every block has made its barriers
      send_units<Traits>(acc[0], params, place.part, shared);
    }
    auto const store_all = [&](auto with_shortcut, auto const &to) {
      with_finish(params.problem.activation, [&](auto finish) { store(finish, with_shortcut, to); });
    };
    if constexpr (Traits::kDrains) {
      BytePlace<typename Traits::Element, Traits::kInOrder> const bytes(params, filters, pair, first);
      if (size_of(params.problem.output_type) == 1) return store_all(cute::false_type{}, bytes);
    }
    if (Traits::kShortcut && int(params.problem.residual) > 0) {  // not != kNone, which would put this in front
      store_all(cute::bool_constant<Traits::kShortcut>{}, outputs);
    } else {
      store_all(cute::false_type{}, outputs);
    }
  } else {
    // ---- producer ----
    bool const loads = is_elected();
    if (loads) init_barriers<Traits>(shared, params, place.part);
    __syncwarp();
    cutlass::arch::NamedBarrier::arrive(Traits::kThreads, 0);
    if (divided) cluster_arrive();
    if constexpr (Traits::kPatch) {
      if (loads) fill_ring_and_patches<Traits>(shared, params, place);
    } else if constexpr (Traits::kEnlarged) {
      if (loads) fill_ring_in_phases<Traits>(shared, params, place);
    } else {
      if (loads) fill_ring<Traits>(shared, params, place, k_begin, k_end);
    }
    __syncwarp();
    if (divided) cluster_wait();
  }
#endif
}

}  // namespace cutefuse::conv
