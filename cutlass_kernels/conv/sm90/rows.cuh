// Convolution on Hopper for stride-1 RxS filters on small images: a tile is whole rows of one image, and the blocks of
// a cluster divide its reduction. The rows lie one after the other with their halo, so that an operand of any width is
// one run of pixels, read from another start for every tap; the columns between two rows are computed and dropped.
// Unlike im2col it loads each pixel once, not R*S times; unlike patches of 8 pixels a side it wastes nothing on images
// whose sides are no multiple of 8.
#pragma once

#include "conv/sm90/halo.cuh"
#include "conv/sm90/im2col.cuh"

namespace cutefuse::conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <class Element_, int kPixels_>
struct Sm90Rows {
  using Element = Element_;
  // Each warpgroup multiplies all pixels with half of the channels, since a wgmma narrower than 120 takes as long as
  // one of 120, and finishes half of the pixels.
  static constexpr int kFilters = 64, kPixels = kPixels_, kN = kPixels / kConsumers;
  static constexpr int kPairs =
      kN / 16;  // pairs of 8-pixel groups, the unit that one block of a cluster finishes at a time
  static constexpr int kPixelBytes = kChannelBlock * int(sizeof(Element)), kFilterBytes = kFilters * kPixelBytes;
  static constexpr int kPartBytes = 2 * kConsumers * 128 * int(sizeof(float4));
  static_assert(kN % 16 == 0 && kPairs <= kRowsParts && kPartBytes == kRowsPartBytes);

  struct SharedStorage {
    alignas(1024) unsigned char stages[kRowsRegionBytes];         // the plan's halo stages, then its filter stages
    float4 parts[kRowsParts * kPartBytes / int(sizeof(float4))];  // (thread,group,other block,pair)
    Element y[kConsumers][2][16 * kStoreColumns];
    alignas(8) uint64_t halo_full[kHaloMaxStages], halo_empty[kHaloMaxStages];
    uint64_t filter_full[kFilterMaxStages], filter_empty[kFilterMaxStages];
    uint64_t parts_full, shortcut_full;
  };
  static_assert(sizeof(SharedStorage) <= kSharedBytes && kRowsRegionBytes % 1024 == 0);
  static_assert(kFilters * kPixels * int(sizeof(float)) <= kRowsRegionBytes);  // halves exchanged where the ring was
};

// ---- reduction ------------------------------------------------------------------------------------------------------

// Sends the sums of every 16 pixels of this warpgroup to the block that finishes them, if that is another block. The
// loop starts at this block's rank, so that the blocks do not all write to the same one at once.
template <class Traits>
CUTE_DEVICE void send_parts(float (&acc)[Traits::kN / 2], Sm90Params const &params,
                            typename Traits::SharedStorage &shared) {
  int const rank = int(block_rank_in_cluster()), splits = params.splits;
  uint32_t const mine = cast_smem_ptr_to_uint(&shared.parts[threadIdx.x]);
  uint32_t const full = cast_smem_ptr_to_uint(&shared.parts_full);
  CUTE_NO_UNROLL
  for (int i = 0; i < Traits::kPairs; ++i) {
    int const chosen = (i + rank) % Traits::kPairs, owner = chosen % splits;
    if (owner == rank) continue;
    uint32_t const to = mine + (chosen / splits * (splits - 1) + rank - (rank > owner)) * Traits::kPartBytes;
    uint32_t const there = set_block_rank(to, owner), barrier = set_block_rank(full, owner);
    CUTE_UNROLL
    for (int pair = 0; pair < Traits::kPairs; ++pair) {
      if (pair != chosen) continue;
      CUTE_UNROLL
      for (int group = 0; group < 2; ++group) {
        float const *const v = acc + 8 * pair + 4 * group;
        constexpr int kGroupBytes = Traits::kPartBytes / 2;
        asm volatile(  // CuTe stores single words
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                there + group * kGroupBytes),
            "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
            : "memory");
      }
    }
  }
}

// Adds up this block's share of the sums in the order of the blocks, so that results never depend on timing.
template <class Traits>
CUTE_DEVICE void add_and_store(float const (&acc)[Traits::kN / 2], FilterPair const &pair, Sm90Params const &params,
                               typename Traits::SharedStorage &shared, Patch const &tile, TileFilters const &filters,
                               int consumer) {
  if (has_shortcut(params.problem)) TransactionBarrier::wait(&shared.shortcut_full, 0);
  using Element = typename Traits::Element;
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  Sm90Output const &output = params.outputs[filters.output];
  constexpr int kGroupSize = kConsumers * 128;
  int const splits = params.splits, rank = int(block_rank_in_cluster());
  int const thread = threadIdx.x % 128, pixel = thread / 8, chunk = thread % 8;
  float4 const *parts = &shared.parts[threadIdx.x];
  CUTE_NO_UNROLL
  for (int part = rank, turn = 0; part < Traits::kPairs; part += splits, turn ^= 1) {
    Element *const staging = shared.y[consumer][turn];
    float own[8] = {}, values[8] = {};
    CUTE_UNROLL
    for (int i = 0; i < Traits::kN / 2; ++i) own[i % 8] = i / 8 == part ? acc[i] : own[i % 8];
    CUTE_UNROLL
    for (int block = 0; block < kMaxSplits; ++block) {
      if (block >= splits) continue;
      CUTE_UNROLL
      for (int group = 0; group < 2; ++group) {
        float4 v = make_float4(own[4 * group], own[4 * group + 1], own[4 * group + 2], own[4 * group + 3]);
        if (block != rank) v = parts[((block - (block > rank)) * 2 + group) * kGroupSize];
        values[4 * group] += v.x, values[4 * group + 1] += v.y;
        values[4 * group + 2] += v.z, values[4 * group + 3] += v.w;
      }
    }
    parts += (splits - 1) * 2 * kGroupSize;
    int const first = consumer * Traits::kN + part * 16, position = first + pixel, k = filters.in_output + chunk * 8;
    auto const *const shortcut = reinterpret_cast<Element const *>(shared.stages + plan.shortcut_at);
    stage_with_shortcut<Element, 2>(values, pair, p, shortcut + first * kStoreColumns, staging);
    cutlass::arch::NamedBarrier::sync(128, 1 + consumer);
    int const row = position / plan.pitch, column = position - row * plan.pitch;
    int const h = tile.b + row, w = tile.a + column;
    if (row < plan.tile_b && column < plan.tile_a && h < p.P && w < p.Q && output.first + k < output.last) {
      auto const *const from =
          reinterpret_cast<uint4 const *>(staging + pixel * kStoreColumns + (chunk ^ pixel % 8) * 8);
      int const m = (tile.n * p.P + h) * p.Q + w;
      *reinterpret_cast<uint4 *>(static_cast<Element *>(output.y) + m * output.ld + k) = *from;
    }
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Loads the shortcut of the tile, whose first pixel and filter are given, and keeps the halo stages full with the
// channel blocks of the k-tiles [k_begin, k_end); one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_patches(typename Traits::SharedStorage &shared, Sm90Params const &params, Patch const &tile,
                              int filter, int k_begin, int k_end) {
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const taps = params.by_taps.divisor, bytes = plan.pitch * plan.rows * Traits::kPixelBytes;
  if (has_shortcut(p)) {  // of the whole tile, with the pixels between its rows
    wait_for_previous_kernel();
    TransactionBarrier::arrive_and_expect_tx(&shared.shortcut_full, plan.pitch * plan.tile_b * 128);
    SM90_TMA_LOAD_4D::copy(&params.z, &shared.shortcut_full, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                           shared.stages + plan.shortcut_at, filter, tile.a, tile.b, tile.n);
  }
  Ring ring(plan.halo_stages);
  auto cursor = cursor_at(params, k_begin);
  for (int k = k_begin - cursor.r * p.S - cursor.s; k < k_end; k += taps) {
    uint64_t *const full = &shared.halo_full[ring.stage];
    Barrier::wait(&shared.halo_empty[ring.stage], ring.phase ^ 1);
    TransactionBarrier::arrive_and_expect_tx(full, bytes);
    if (ring.stage == 0) wait_for_previous_kernel();  // before the first load; later calls return at once
    load_patch<Traits::kPixelBytes>(params, cursor.source, cursor.channel(), tile.a - p.pad_left, tile.b - p.pad_top,
                                    tile.n, full, shared.stages + ring.stage * plan.stage_bytes);
    ring.advance();
    cursor.advance_block(p);
  }
}

// Keeps the filter stages full with the k-tiles [k_begin, k_end); one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_filters(typename Traits::SharedStorage &shared, Sm90Params const &params, FilterBox const &box,
                              int filter, unsigned char *filter_stages, int k_begin, int k_end) {
  Ring ring(params.halo.filter_stages);
  for (int k = k_begin; k < k_end; ++k) {
    uint64_t *const full = &shared.filter_full[ring.stage];
    Barrier::wait(&shared.filter_empty[ring.stage], ring.phase ^ 1);
    TransactionBarrier::arrive_and_expect_tx(full, Traits::kFilterBytes - box.missing * Traits::kPixelBytes);
    if (ring.stage == 0) wait_for_previous_kernel();
    load_filters(params, box.map, k * kChannelBlock, filter, full, filter_stages + ring.stage * Traits::kFilterBytes);
    ring.advance();
  }
}

// Multiplies the k-tiles [k_begin, k_end) of the patch from pixel `a` on as they arrive. As in main_loop, the next
// k-tile is prepared while two are running.
template <class Traits>
CUTE_DEVICE void multiply_rows(float (&acc)[1][Traits::kPixels / 2], Sm90Params const &params,
                               typename Traits::SharedStorage &shared, unsigned char const *filter_stages, int consumer,
                               int a, int k_begin, int k_end) {
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const taps = params.by_taps.divisor;
  bool const signals = threadIdx.x % 128 == 0;
  constexpr auto kSwizzle = SM90::GMMA::LayoutType::B128;
  auto scale = SM90::GMMA::ScaleOut::Zero;  // the first step overwrites acc
  Ring halo(plan.halo_stages), filters(plan.filter_stages);
  bool arrived = false;
  auto cursor = cursor_at(params, k_begin);
  int tap = cursor.r * p.S + cursor.s, row_of_tap = cursor.r * plan.step_r + cursor.s * plan.step_s;
  for (int k = k_begin; k < k_end; tap = 0, row_of_tap = 0) {  // channel blocks
    int const first = k, last = cute::min(k_end, k + taps - tap), left = p.C[cursor.source] - cursor.channel();
    // This warpgroup takes the first two or the last two of the block's four k-steps; channels that do not exist are
    // zeros.
    int const steps = cute::max(1, cute::min(2, ceil_div(left, 16) - 2 * consumer));
    TransactionBarrier::wait(&shared.halo_full[halo.stage], halo.phase);
    int const at =
        pixels_before(params, cursor.source, a) * Traits::kPixelBytes + consumer * Traits::kPixelBytes / kConsumers;
    uint64_t const pixels = operand(shared.stages + halo.stage * plan.stage_bytes + at, 1024, kSwizzle);
    CUTE_NO_UNROLL
    for (; k < last; ++k) {
      if (!arrived) TransactionBarrier::wait(&shared.filter_full[filters.stage], filters.phase);
      uint64_t const weights =
          operand(filter_stages + filters.stage * Traits::kFilterBytes + consumer * Traits::kPixelBytes / kConsumers,
                  1024, kSwizzle);
      multiply<typename Traits::Element, Traits::kPixels, 2>(
          acc, weights, pixels + row_of_tap * Traits::kPixelBytes / 16, steps, scale);
      int const previous = filters.previous();
      filters.advance();
      bool const next_row = ++cursor.s == p.S;
      row_of_tap += next_row ? plan.step_r - (p.S - 1) * plan.step_s : plan.step_s;
      cursor.s = next_row ? 0 : cursor.s;
      arrived = TransactionBarrier::test_wait(&shared.filter_full[filters.stage], filters.phase, 1);
      warpgroup_wait<1>();
      if (k > k_begin && signals) {
        Barrier::arrive(&shared.filter_empty[previous]);
        if (k == first) Barrier::arrive(&shared.halo_empty[halo.previous()]);
      }
    }
    halo.advance();
    cursor.s = 0;
    cursor.advance_block(p);
  }
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (int i = 0; i < Traits::kPixels / 2; ++i) warpgroup_fence_operand(acc[0][i]);
}

template <class Traits>
__global__ void __launch_bounds__(kSm90Threads, 1) conv_sm90_rows(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const warpgroup = cutlass::canonical_warp_group_idx();
  ClusterPlace const place(params);
  int const k_begin = params.k_begin[place.part], k_end = params.k_begin[place.part + 1];
  TileFilters const filters(params, place.tile_f(place.first_tile), Traits::kFilters, 0);  // of this block's only tile
  Patch const tile(params, place.tile_x(place.first_tile), plan.tile_a, plan.tile_b);
  unsigned char *const filter_stages = shared.stages + plan.halo_stages * plan.stage_bytes;

  if (threadIdx.x == 0) {
    init_halo_rings(shared);
    TransactionBarrier::init(&shared.parts_full, 1);
    TransactionBarrier::init(&shared.shortcut_full, 1);
    cutlass::arch::fence_barrier_init();
    int const rank = int(block_rank_in_cluster());
    int const pairs =
        rank < Traits::kPairs ? ceil_div(Traits::kPairs - rank, params.splits) : 0;  // which this block finishes
    TransactionBarrier::arrive_and_expect_tx(&shared.parts_full, pairs * (params.splits - 1) * Traits::kPartBytes);
  }
  prefetch_maps(params);
  __syncthreads();
  if (params.splits > 1) cluster_arrive();  // the wait comes before the sums are sent
  let_next_kernel_start();

  if (warpgroup < kConsumers) {  // see conv_sm90_small: the producer's code comes first
    // ---- consumers ----
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    wait_for_previous_kernel();
    FilterPair const pair(params, filters);
    float acc[1][Traits::kPixels / 2], sums[Traits::kN / 2];
    multiply_rows<Traits>(acc, params, shared, filter_stages, warpgroup, tile.a - p.pad_left, k_begin, k_end);
    add_halves(acc[0], sums, warpgroup, reinterpret_cast<float4 *>(shared.stages));  // where the ring was
    if (params.splits > 1) cluster_wait();  // every block has started and made its barrier
    send_parts<Traits>(sums, params, shared);
    TransactionBarrier::wait(&shared.parts_full, 0);  // no other block writes to this one any more
    add_and_store<Traits>(sums, pair, params, shared, tile, filters, warpgroup);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const warp = cutlass::canonical_warp_idx_sync() - 4 * kConsumers;
    if (warp == 0) {
      if (is_elected()) fill_patches<Traits>(shared, params, tile, filters.first, k_begin, k_end);
    } else if (warp == 1) {
      if (is_elected()) {
        FilterBox const box(params, place.tile_f(place.first_tile));
        fill_filters<Traits>(shared, params, box, filters.first, filter_stages, k_begin, k_end);
      }
    }
    __syncwarp();
    if (params.splits > 1) cluster_wait();
  }
#endif
}

}  // namespace cutefuse::conv
