// Convolution on Hopper, general path: TMA brings every k-tile of pixels as an im2col (or plain) box of its source, for
// any stride, dilation and padding that such a box can express. Warp-specialised and persistent: one warp loads, two
// or four warpgroups multiply.
#pragma once

#include "conv/sm90/joined.cuh"
#include "conv/sm90/pixel_rows.cuh"
#include "conv/sm90/pre_activation.cuh"
#include "conv/sm90/scales.cuh"
#include "conv/sm90/shortcut.cuh"

namespace cutefuse::conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <class Element_, int kFilters_, int kPixels_, Sm90Schedule kSchedule = Sm90Schedule::kCooperative,
          bool kPre = false, bool kPairs_ = false, bool kPixelRows_ = false>
struct Sm90Im2col : Sm90Numbers<Element_> {
  using Element = Element_;
  using Output = typename Sm90Numbers<Element>::Output;
  static constexpr bool kSharesPixels = true, kSmall = false, kJoins = false;
  static constexpr bool kPairs = kPairs_;          // a k-tile is two blocks of channels
  static constexpr bool kPixelRows = kPixelRows_;  // pixels are wgmma's rows: pixel_rows.cuh
  static constexpr int kFilters = kFilters_, kPixels = kPixels_, kChannels = kChannelBlock * (kPairs ? 2 : 1);
  static constexpr bool kFour = kSchedule == Sm90Schedule::kFour, kPreActivated = kPre;
  static constexpr bool kPingPong = kFour || kSchedule == Sm90Schedule::kPingPong;  // warpgroups take turns
  // Warpgroups that multiply. Four need no more registers than each thread is launched with.
  static constexpr int kWarpgroups = kFour ? 4 : kConsumers, kThreads = kFour ? 4 * 128 + 32 : kSm90Threads;
  // Two divide the registers, of which every thread is launched with 168, anew. Up to 192 of a consumer's hold sums
  // where consumers take turns. Where the producer's other warps rewrite pixels they need more registers, and up to 160
  // of a consumer's hold sums.
  static constexpr bool kManyRegisters = kPingPong || Sm90Numbers<Element>::kScaled;
  static constexpr int kProducerRegisters = kPre ? 72 : kManyRegisters ? 40 : 56;
  static constexpr int kConsumerRegisters = kPre ? 216 : kManyRegisters ? 232 : 224;
  static constexpr int kReaders = kFour ? kFilters / 64 : kPingPong ? 1 : kConsumers;  // warpgroups of one tile
  static constexpr int kRows = kPixelRows ? kPixels : kFilters;
  static constexpr int kRowTiles = kRows / 64 / kReaders;     // 64 rows each, of one warpgroup
  static constexpr int kN = kPixelRows ? kFilters : kPixels;  // wgmma's width
  static_assert(kRows == 64 || kRows == 128);
  static_assert(!kPixelRows || (kPingPong && sizeof(Output) == 2 && !kPre && !kPairs));
  static constexpr int kStoreRows = kPixelRows ? kN : sm90_store_rows(kN);  // pixels of one TMA store
  static_assert(kN % kStoreRows == 0 && kN <= 256);

  static constexpr int kPixelBytes = kChannels * int(sizeof(Element)), kSteps = kPixelBytes / kStepBytes;
  static constexpr auto kSwizzle = kPixelBytes == 128 ? SM90::GMMA::LayoutType::B128 : SM90::GMMA::LayoutType::B64;
  static_assert(kPixelBytes == 128 || kPixelBytes == 64);
  static constexpr int kStageBytes = (kFilters + kPixels) * kPixelBytes;
  static constexpr int kVectors = kPreActivated ? 2 * kChannels : 0;  // elements of a stage's scale and shift
  static constexpr int kRewriters = 3;                                // the other warps of the producer
  // A tile's shortcut takes the pixels' part of one more stage for every 64 filters.
  static constexpr bool kShortcut = !kPreActivated && !Sm90Numbers<Element>::kScaled && !kPingPong;
  static constexpr int kShortcutSlots = kShortcut ? kFilters / 64 : 0;
  // All outputs of 64 filters, staged for the stores, or half of them where all would cost the fourth stage.
  static constexpr int kStagings = kN / kStoreRows / (kN == 256 ? 2 : 1);
  static constexpr int kStagingElements = kPixelRows ? 0 : kStagings * kStoreRows * kStoreColumns;
  static constexpr int kStages =
      cute::min(1024 / kPixelBytes, (kSharedBytes - 1024 - kWarpgroups * kStagingElements * int(sizeof(Output))) /
                                        (kStageBytes + kVectors * int(sizeof(Element))));

  struct SharedStorage {
    alignas(1024) Element x[kStages][kPixels * kChannels];   // (pixel,channel), rows of 128 or 64 bytes, so swizzled
    alignas(1024) Element w[kStages][kFilters * kChannels];  // (filter,channel), likewise; see StageRows
    alignas(1024) Output y[kWarpgroups][kPixelRows ? 1 : kStagingElements];
    alignas(16) Element vectors[kPreActivated ? kStages : 1][kPreActivated ? kVectors : 16];
    alignas(8) uint64_t full[kStages], empty[kStages];
    uint64_t ready[kPreActivated ? kStages : 1];
    CUTE_DEVICE Element *x_of(int stage) { return x[stage]; }
    CUTE_DEVICE Element *w_of(int stage) { return w[stage]; }
    // The barriers, one for each stage, for which a consumer waits before it multiplies.
    CUTE_DEVICE uint64_t *multipliable() { return kPreActivated ? ready : full; }
  };
  static_assert(sizeof(SharedStorage) <= kSharedBytes && kStages >= 4);
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Initialises the ring's barriers; one thread calls it.
template <class Traits>
CUTE_DEVICE void init_ring(typename Traits::SharedStorage &shared, ClusterPlace const &place) {
  for (int i = 0; i < Traits::kStages; ++i) {
    TransactionBarrier::init(&shared.full[i], 1);
    Barrier::init(&shared.empty[i], Traits::kReaders * place.cluster_f);
    if constexpr (Traits::kPreActivated) Barrier::init(&shared.ready[i], Traits::kRewriters);
  }
  cutlass::arch::fence_barrier_init();
}

// Keeps the ring full with the k-tiles [k_begin, k_end) of each of this block's tiles; one thread calls it. (A small
// tile's block has one tile. Without the loop over tiles the compiler would not keep its operands in uniform
// registers.)
template <class Traits>
CUTE_DEVICE void fill_ring(typename Traits::SharedStorage &shared, Sm90Params const &params, ClusterPlace const &place,
                           int k_begin, int k_end) {
  constexpr int kFilters = Traits::kFilters, kPixels = Traits::kPixels;
  Problem const &p = params.problem;
  int const share_x = place.cluster_f > 1 ? kPixels / 2 : kPixels;  // rows of pixels loaded here; it is 1 or 2
  Ring ring(Traits::kSmall ? params.stages : Traits::kStages);
  for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
    int const tile_f = place.tile_f(tile), filter = TileFilters(params, tile_f, kFilters, 0).first;
    FilterBox const box(params, tile_f);
    int const stage_bytes = Traits::kStageBytes - box.missing * Traits::kPixelBytes;
    int const tile_first = place.first_pixel<kPixels>(tile, params), first = tile_first + place.rank_f * share_x;
    Pixel const pixel = pixel_of(p, params.by_image, params.by_row, first);
    auto cursor = part_cursor<Traits>(params, place.part, k_begin);
    auto const load = [&](bool waits) {
      uint64_t *const full = &shared.full[ring.stage];
      Barrier::wait(&shared.empty[ring.stage], ring.phase ^ 1);
      TransactionBarrier::arrive_and_expect_tx(full, stage_bytes + vector_bytes<Traits>(p, cursor));
      if (waits) wait_for_previous_kernel();  // before the first load; later calls return at once
      load_pixels<Traits>(params, cursor, first, pixel, full,
                          shared.x_of(ring.stage) + place.rank_f * share_x * Traits::kChannels, place);
      void *const w = shared.w_of(ring.stage);
      if constexpr (Traits::kPairs) {
        load_filter_pair<loads_in_order(Traits::kSmall, kPixels), !Traits::kSmall>(params, box.map, cursor, filter,
                                                                                   full, w);
      } else {
        load_filters<Traits::kScaled>(params, box.map, int(cursor.column), filter, full, w);
      }
      if constexpr (Traits::kPreActivated && !Traits::kSmall) {
        load_vectors<Traits>(params, cursor, full, shared.vectors[ring.stage]);
      }
      ring.advance();
      cursor.advance(p);
    };
    if constexpr (Traits::kSmall) {
      int const joined = Traits::kJoins ? cute::min(k_end, params.joined.begin) : k_end;
      int k = k_begin;
      // Short sums wait for this code.
      CUTE_NO_UNROLL
      for (; k < joined; ++k) load(ring.stage == 0);
      if constexpr (Traits::kJoins) {
        auto const load_rest = [&](auto sources) {
          CUTE_NO_UNROLL
          for (; k < k_end; ++k) {
            load_joined<Traits, decltype(sources)::value>(shared, params, cursor, ring, filter, first, pixel, place);
          }
        };
        if (params.by_taps.divisor == 1) {
          load_rest(std::true_type{});
        } else {
          load_rest(std::false_type{});
        }
      }
    } else {
      for (int k = k_begin; k < k_end; ++k) load(tile == place.first_tile && k == k_begin);
    }
    if (!has_shortcut(p)) continue;
    for (int i = 0; i < Traits::kShortcutSlots; ++i) {
      uint64_t *const full =
          open_stage(shared.full, shared.empty, ring, kPixels * kStoreColumns * int(sizeof(typename Traits::Element)));
      SM90_TMA_LOAD_2D::copy(&params.z, full, kEvictNormal, shared.x_of(ring.stage), filter + i * 64, tile_first);
      ring.advance();
    }
  }
}

// How kRows filters or pixels of a k-tile lie in a stage. Filters of two blocks under several taps, and all of a joined
// k-tile, lie in two halves of 64-byte rows, all first ones before all second ones; else each is one row.
template <class Traits, int kRows>
struct StageRows {
  bool halves;
  int row_bytes, two_steps_bytes;

  CUTE_DEVICE explicit StageRows(bool halves_)
      : halves(halves_), row_bytes(halves ? 64 : Traits::kPixelBytes), two_steps_bytes(halves ? 64 * kRows : 64) {}
  // From row `first` of the stage on.
  CUTE_DEVICE uint64_t operand_at(typename Traits::Element const *stage, int first) const {
    auto const *const from = reinterpret_cast<unsigned char const *>(stage) + first * row_bytes;
    return operand(from, 8 * row_bytes, halves ? SM90::GMMA::LayoutType::B64 : Traits::kSwizzle);
  }
  // Of step `i`.
  CUTE_DEVICE uint64_t operand_at(typename Traits::Element const *stage, int first, int i) const {
    return further(operand_at(stage, first), i % 2 * kStepBytes + i / 2 * two_steps_bytes);
  }
};

template <class Traits>
using FilterRows = StageRows<Traits, Traits::kFilters>;
template <class Traits>
CUTE_DEVICE FilterRows<Traits> filter_rows(Sm90Params const &params) {
  return FilterRows<Traits>(Traits::kPairs && params.by_taps.divisor > 1);
}

// Issues the next k-tiles of a tile up to k_end; the steps of the last one are still running when it returns. Each
// k-tile is prepared while two others are running, because the tensor cores may finish one in less time than that
// takes.
template <class Traits>
CUTE_DEVICE void issue_k_tiles(typename Traits::Sum (&acc)[Traits::kRowTiles][Traits::kN / 2], Ring &ring,
                               Steps<Traits> &position, SM90::GMMA::ScaleOut &scale,
                               typename Traits::SharedStorage &shared, Sm90Params const &params, Release const &release,
                               int first_row, int k_begin, int k_end) {
  Problem const &p = params.problem;
  uint64_t *const full = shared.multipliable();
  FilterRows<Traits> const rows = filter_rows<Traits>(params);
  bool arrived = false;  // whether the next k-tile's loads were already seen to have ended
  CUTE_NO_UNROLL
  for (int k = k_begin; k < k_end; ++k) {
    if (!arrived) TransactionBarrier::wait(&full[ring.stage], ring.phase);
    uint64_t const w = rows.operand_at(shared.w[ring.stage], first_row);
    uint64_t const x = operand(shared.x[ring.stage], 8 * Traits::kPixelBytes, Traits::kSwizzle);
    multiply<typename Traits::Element, Traits::kN, Traits::kSteps>(acc, Traits::kPixelRows ? x : w,
                                                                   Traits::kPixelRows ? w : x, position.steps(p), scale,
                                                                   64 * rows.row_bytes, rows.two_steps_bytes);
    int const previous = ring.previous();
    ring.advance();
    position.advance(p);
    if (!Traits::kPingPong) {  // with ping-pong a k-tile lasts long enough to wait for the next one then
      arrived = TransactionBarrier::test_wait(&full[ring.stage], ring.phase, 1);
    }
    warpgroup_wait<1>();
    if (k > k_begin) release(&shared.empty[previous]);
  }
}

// Issues the k-tiles of one tile.
template <class Traits>
CUTE_DEVICE void main_loop(typename Traits::Sum (&acc)[Traits::kRowTiles][Traits::kN / 2], Ring &ring,
                           typename Traits::SharedStorage &shared, Sm90Params const &params, Release const &release,
                           int first_row) {
  auto scale = begin_sums(acc, params);
  Steps<Traits> position(params.problem);
  issue_by_scale<Traits>(acc, ring, shared, params, release, [&](int begin, int end) {
    issue_k_tiles<Traits>(acc, ring, position, scale, shared, params, release, first_row, begin, end);
  });
}

// Stores 64 filters of staged pixels, from pixel `first` on, by TMA; one thread calls it. The maps of spread outputs
// are im2col's.
template <class Element>
CUTE_DEVICE void store_pixels(Sm90Params const &params, TileFilters const &filters, Element const *from, int first) {
  CUtensorMap const *const map = &params.out[filters.output];
  if (params.problem.spread == 1) {
    SM90_TMA_STORE_2D::copy(map, from, filters.in_output, first);
    return;
  }
  int const n = params.by_image.divide(first), in_image = first - n * params.by_image.divisor;
  int const row = params.by_row.divide(in_image);
  SM90_TMA_STORE_IM2COL_4D::copy(map, from, filters.in_output, in_image - row * params.by_row.divisor, row, n);
}

// Takes the next slot of the ring, 64 filters of a tile's shortcut, which follow its k-tiles; adds it to acc(kN) if
// this warpgroup has these filters.
template <class Traits>
CUTE_DEVICE void take_shortcut(float (&acc)[Traits::kN / 2], bool adds, Ring &ring,
                               typename Traits::SharedStorage &shared, Release const &release, int consumer) {
  TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
  if (adds) {
    add_shortcut<typename Traits::Element, Traits::kN / 8>(acc, shared.x[ring.stage]);
  }
  cutlass::arch::fence_view_async_shared();  // what was read here is next written by TMA
  cutlass::arch::NamedBarrier::sync(128, consumer);
  release(&shared.empty[ring.stage]);
  ring.advance();
}

// Tile after tile by both warpgroups together: each has 64 filters x kN pixels of it.
template <class Traits>
CUTE_DEVICE void share_tiles(typename Traits::SharedStorage &shared, Sm90Params const &params,
                             ClusterPlace const &place, int consumer) {
  int const first_row = consumer * 64;
  Release const release(place);
  Ring ring(Traits::kStages);
  for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
    TileFilters const filters(params, place.tile_f(tile), Traits::kFilters, first_row);
    int const first = place.first_pixel<Traits::kPixels>(tile, params);
    Pair<Traits> pair(params, filters);
    auto const store = [&](int i, auto const *from) {
      store_pixels(params, filters, from, first + i * Traits::kStoreRows);
    };
    auto activation = params.problem.activation;
    typename Traits::Sum acc[1][Traits::kN / 2];
    main_loop<Traits>(acc, ring, shared, params, release, first_row);
    finish_loop<Traits>(acc, ring, shared, release);
    lower_sums(acc, params);
    if constexpr (Traits::kShortcut) {
      if (has_shortcut(params.problem)) {
        activation = finish_before_shortcut(acc[0], pair, params.problem);
        for (int i = 0; i < Traits::kShortcutSlots; ++i) {
          take_shortcut<Traits>(acc[0], i == consumer, ring, shared, release, consumer);
        }
      }
    }
    store_tile<Traits>(acc[0], pair, activation, params, shared.y[consumer], consumer, store);
  }
}

// For short reductions, such as 1x1 filters: each warpgroup, or pair of them, has whole tiles of its own, and they take
// turns at the tensor cores, so that some store their outputs while others multiply. One ring serves all, whose tiles
// follow each other in it.
template <class Traits>
CUTE_DEVICE void take_turns(typename Traits::SharedStorage &shared, Sm90Params const &params, ClusterPlace const &place,
                            int consumer) {
  constexpr int kN = Traits::kN, kRowTiles = Traits::kRowTiles;
  constexpr int kReaders = Traits::kReaders, kTurns = Traits::kWarpgroups / kReaders, kMeeting = 2 * kReaders * 128;
  int const turn = consumer / kReaders, row = consumer % kReaders * 64;
  int const my_turn = Traits::kWarpgroups + turn, next_turn = Traits::kWarpgroups + (turn + 1) % kTurns;
  Release const release(place);
  Ring ring(Traits::kStages);
  ring.skip(turn * params.k_tiles);
  for (int tile = place.first_tile + turn * place.clusters; tile < place.tiles; tile += kTurns * place.clusters) {
    // Wait until the turn before has waited for all k-tiles of its tile: a barrier's parity cannot tell this turn's
    // fillings of a stage from those two earlier.
    if (tile != place.first_tile) cutlass::arch::NamedBarrier::sync(kMeeting, my_turn);
    typename Traits::Sum acc[kRowTiles][kN / 2];
    main_loop<Traits>(acc, ring, shared, params, release, row);
    if (tile + place.clusters < place.tiles) cutlass::arch::NamedBarrier::arrive(kMeeting, next_turn);
    finish_loop<Traits>(acc, ring, shared, release);
    lower_sums(acc, params);

    int const same = opaque(tile);  // so that the place is computed here, not kept in registers through the main loop
    int const tile_f = place.tile_f(same), first = place.first_pixel<Traits::kPixels>(same, params);
    // Fewer instructions, more exponentials: for two warpgroups, one of which multiplies. A tile of 64 filters and 256
    // pixels would spill.
    constexpr bool kBesideLoop = kRowTiles > 1;
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      TileFilters const filters(params, tile_f, Traits::kFilters, Traits::kPixelRows ? 0 : row + 64 * m);
      if constexpr (Traits::kPixelRows) {
        store_rows<typename Traits::Output>(acc[m], params, filters, first + 64 * m);
        continue;
      }
      auto const store = [&](int i, auto const *from) {
        store_pixels(params, filters, from, first + i * Traits::kStoreRows);
      };
      store_tile<Traits, kRowTiles, kBesideLoop>(acc[m], Pair<Traits>(params, filters), params.problem.activation,
                                                 params, shared.y[consumer], consumer, store);
    }
    ring.skip((kTurns - 1) * params.k_tiles);  // those of the other turns
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) conv_sm90_im2col(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  int const warpgroup = cutlass::canonical_warp_group_idx();
  ClusterPlace const place(params);

  if (threadIdx.x == 0) init_ring<Traits>(shared, place);
  prefetch_maps(params);
  cluster_sync();
  let_next_kernel_start();

  if (warpgroup < Traits::kWarpgroups) {  // see conv_sm90_small: the producer's code comes first
    if constexpr (!Traits::kFour) cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    wait_for_previous_kernel();
    if constexpr (Traits::kPingPong) {
      take_turns<Traits>(shared, params, place, warpgroup);
    } else {
      share_tiles<Traits>(shared, params, place, warpgroup);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
  } else {
    if constexpr (!Traits::kFour) cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (cutlass::canonical_warp_idx_sync() == 4 * Traits::kWarpgroups && is_elected()) {
      fill_ring<Traits>(shared, params, place, 0, params.k_tiles);
    }
    if constexpr (Traits::kPreActivated) {
      int const rewriter = cutlass::canonical_warp_idx_sync() - 4 * kConsumers - 1;  // after the one that loads
      if (rewriter >= 0) rewrite_ring<Traits>(shared, params, place, rewriter);
    }
    __syncwarp();
  }
  cluster_sync();  // no block exits while another may still write to its shared memory
#endif
}

}  // namespace cutefuse::conv
