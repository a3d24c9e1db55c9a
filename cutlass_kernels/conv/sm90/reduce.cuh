// How the blocks of a cluster that divide a reduction among them add up their parts and store the outputs.
#pragma once

#include "conv/sm90/scaled_store.cuh"
#include "conv/sm90/shortcut.cuh"

namespace cutefuse::conv {

// Brings the shortcut of the pixels that this block finishes to where their outputs are staged.
template <class Traits>
CUTE_DEVICE void load_split_shortcut(typename Traits::SharedStorage &shared, Sm90Params const &params, int filter,
                                     int first, int consumer) {
  if (threadIdx.x % 128 != 0 || !has_shortcut(params.problem)) return;
  constexpr int kParts = Traits::kN / 16, kElements = 16 * kStoreColumns;
  int const rank = int(block_rank_in_cluster()), mine = rank < kParts ? ceil_div(kParts - rank, params.splits) : 0;
  uint64_t *const full = &shared.shortcut_full[consumer];
  TransactionBarrier::arrive_and_expect_tx(full, mine * kElements * int(sizeof(typename Traits::Element)));
  for (int part = rank; part < kParts; part += params.splits) {
    SM90_TMA_LOAD_2D::copy(&params.z, full, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                           shared.y[consumer] + part * kElements, filter, first + part * 16);
  }
}

// Adds up the accumulators of a cluster's blocks in the order of the blocks, so that results never depend on timing.
// Each block finishes every splits-th group of 16 pixels, whose parts it reads from the others' shared memory. A block
// has one tile here, so that all threads of a cluster pass cluster_sync as often.
template <class Traits>
CUTE_DEVICE void reduce_and_store(float (&acc)[Traits::kN / 2], SplitPair<Traits> const &pair, Sm90Params const &params,
                                  typename Traits::SharedStorage &shared, TileFilters const &filters, int first,
                                  int consumer) {
  using Output = typename Traits::Output;
  constexpr int kGroups = Traits::kN / 8, kThreads = kConsumers * 128;
  static_assert(kGroups * kThreads * sizeof(float4) <= sizeof(shared.x) + sizeof(shared.w));
  static_assert(offsetof(typename Traits::SharedStorage, w) == sizeof(shared.x));
  Problem const &p = params.problem;
  int const thread = threadIdx.x % 128;
  auto *const parts = reinterpret_cast<float4 *>(&shared);  // (thread,group), where the ring was
  int const slot = consumer * 128 + thread;
  cutlass::arch::NamedBarrier::sync(kThreads, 0);  // the ring is no longer read
  CUTE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    parts[g * kThreads + slot] = make_float4(acc[4 * g], acc[4 * g + 1], acc[4 * g + 2], acc[4 * g + 3]);
  }
  if (params.splits > 1) {
    cluster_sync();
  } else {  // without a cluster that barrier is the block's own, and the producer never arrives
    cutlass::arch::NamedBarrier::sync(kThreads, 0);
  }

  static_assert(Traits::kStagingElements == Traits::kN * kStoreColumns);
  if (has_shortcut(p)) TransactionBarrier::wait(&shared.shortcut_full[consumer], 0);
  Sm90Output const &output = params.outputs[filters.output];
  int const pixels = p.N * p.P * p.Q, row = thread / 8, chunk = thread % 8;
  for (int part = int(block_rank_in_cluster()); part < kGroups / 2; part += params.splits) {
    Output *const staging = shared.y[consumer] + part * 16 * kStoreColumns;
    float values[8] = {};
    CUTE_UNROLL
    for (int g = 0; g < 2; ++g) {
      uint32_t const from = cast_smem_ptr_to_uint(&parts[(2 * part + g) * kThreads + slot]);
      float4 v[kMaxSplits];  // all loads are issued before the first is added
      CUTE_UNROLL
      for (int block = 0; block < kMaxSplits; ++block) {
        if (block >= params.splits) continue;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[block].x), "=f"(v[block].y), "=f"(v[block].z), "=f"(v[block].w)
                     : "r"(set_block_rank(from, block)));
      }
      CUTE_UNROLL
      for (int block = 0; block < kMaxSplits; ++block) {
        if (block >= params.splits) continue;
        values[4 * g] += v[block].x, values[4 * g + 1] += v[block].y;
        values[4 * g + 2] += v[block].z, values[4 * g + 3] += v[block].w;
      }
    }
    if constexpr (Traits::kScaled) {
      stage_outputs<Output, 2>(values, pair, p, staging);
    } else {
      stage_with_shortcut<Output, 2>(values, pair, p, staging, staging);
    }
    cutlass::arch::NamedBarrier::sync(128, 1 + consumer);
    int const m = first + part * 16 + row, k = filters.in_output + chunk * 8;
    if (m < pixels && output.first + k < output.last) {
      auto const *const from = reinterpret_cast<uint4 const *>(staging + row * kStoreColumns + (chunk ^ row % 8) * 8);
      *reinterpret_cast<uint4 *>(static_cast<Output *>(output.y) + m * output.ld + k) = *from;
    }
  }
}

}  // namespace cutefuse::conv
