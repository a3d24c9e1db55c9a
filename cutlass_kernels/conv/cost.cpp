#include "conv/cost.h"

#include <algorithm>

#include "device.h"

namespace cutefuse::conv {
namespace {

// Slots for blocks of a split launch. The int8 kernels are as fast with one block on a multiprocessor as with two.
std::int64_t slots(Tile const &tile, Target const &target) {
  return std::int64_t(target.sm_count) * (tile.type_bytes == 1 ? 1 : resident_blocks(tile, target.sm));
}

// One block on a multiprocessor is nearly as fast as two, so more tiles than half of those gain nothing from a second
// launch.
std::int64_t wanted_splits(Tile const &tile, Problem const &p, Target const &target) {
  std::int64_t const tiles = std::max<std::int64_t>(1, output_tiles(tile, p));
  if (2 * tiles > target.sm_count) return 1;
  std::int64_t blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += ceil_div(p.C[i], tile.k);
  std::int64_t const longest = std::min(blocks, std::max<std::int64_t>(1, blocks * p.R * p.S / 4));
  return std::max<std::int64_t>(1, std::min({slots(tile, target) / tiles, longest, std::int64_t(kMostSplits)}));
}

}  // namespace

Target::Target(Call const &call)
    : sm(call.sm),
      sm_count(call.sm_count > 0 ? call.sm_count
               : call.sm == 90   ? 132
                                 : 108),
      workspace_bytes(call.workspace_promise) {}

std::int64_t output_tiles(Tile const &tile, Problem const &p) {
  return (std::int64_t(p.N) * p.P * p.Q + tile.m - 1) / tile.m * ceil_div(p.K, tile.n);
}

int resident_blocks(Tile const &tile, std::int32_t sm) {
  // A block may have 1 KiB less than the multiprocessor, which takes 1 KiB for every block.
  int const fit = (shared_limit(sm) + 1024) / (tile.shared_bytes() + 1024);
  return std::max(1, std::min(tile.blocks_per_sm, fit));
}

std::int64_t split_bytes(Problem const &p, int splits) {
  return splits < 2 ? 0 : std::int64_t(splits) * p.N * p.P * p.Q * split_ld(p) * std::int64_t(sizeof(float));
}

int splits_of(Tile const &tile, Problem const &p, Target const &target) {
  std::int64_t splits = wanted_splits(tile, p, target);
  std::int64_t const part = split_bytes(p, 2) / 2;
  if (target.workspace_bytes >= 0 && part > 0) splits = std::min(splits, target.workspace_bytes / part);
  return static_cast<int>(std::max<std::int64_t>(1, splits));
}

std::int64_t workspace_bound(Tile const &tile, Problem const &p, Target const &target) {
  bool const sized = p.N >= 0 && p.P >= 0 && p.Q >= 0;
  if (sized && wanted_splits(tile, p, target) == 1) return 0;
  return slots(tile, target) * tile.m * tile.n * std::int64_t(sizeof(float));
}

bool whole_vectors(Problem const &p) {
  return std::all_of(p.C, p.C + p.sources, [&](int channels) { return channels * size_of(p.type) % 16 == 0; });
}

// Blocks go to the multiprocessors in turn; those that share one hide each other's latencies and take less than as many
// times as long as one alone.
double cost_us(Tile const &tile, Problem const &p, Target const &target) {
  bool const int8 = tile.type_bytes == 1;
  double const together[] = {0.0, 1.0, 1.45, int8 ? 1.8 : 2.2, 2.2};
  int const splits = splits_of(tile, p, target), resident = resident_blocks(tile, target.sm);
  std::int64_t const blocks = output_tiles(tile, p) * splits;
  std::int64_t const per_sm = (blocks + target.sm_count - 1) / target.sm_count;
  // Where tails are masked, and in the int8 kernels, one takes about as long as a whole k-tile.
  int const step = !int8 && whole_vectors(p) ? 16 : tile.k;
  double reduction = 0;  // channels times taps
  for (int i = 0; i < p.sources; ++i) reduction += double(ceil_div(p.C[i], step)) * step * p.R * p.S / splits;
  double const rounds = double(per_sm / resident) * together[resident] + together[per_sm % resident];
  double const sum_us = splits > 1 ? 3.0 + 0.1 * splits : 0.0;  // a second launch, and its reads
  return rounds * (reduction * tile.channel_ns * 1e-3 + tile.block_us) + sum_us;
}

std::int32_t ranked(Candidate *candidates, int count, std::int32_t *ids, std::int32_t capacity) {
  std::stable_sort(candidates, candidates + count, [](Candidate const &a, Candidate const &b) {
    return a.later != b.later ? b.later : a.cost < b.cost;
  });
  count = std::min(count, int(capacity));
  for (int i = 0; i < count; ++i) ids[i] = candidates[i].id;
  return count;
}

}  // namespace cutefuse::conv
