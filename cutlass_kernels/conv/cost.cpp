#include "conv/cost.h"

#include <algorithm>

#include "architecture.h"
#include "conv/checks.h"
#include "conv/cuts.h"
#include "device.h"

namespace cutefuse::conv {
namespace {

constexpr int kMostMultiprocessors = 1024;  // of any GPU: more blocks are never cut

// Whether every source's channels are whole 16-byte vectors.
bool whole_vectors(Problem const &p) {
  return std::all_of(p.C, p.C + p.sources, [&](int channels) { return channels * size_of(p.type) % 16 == 0; });
}

// The largest copy of at most 16 bytes that divides every source's pixels, first channel and channels; 16 where ranges
// are whole vectors apart, since a tail of channels is then masked.
int copy_bytes(Problem const &p) {
  std::int64_t strides = 16, sizes = 16;
  for (int i = 0; i < p.sources; ++i) {
    std::int64_t const stride = (p.ldx[i] | p.start[i]) * size_of(p.type);
    strides |= stride, sizes |= stride | p.C[i] * size_of(p.type);
  }
  return strides % 16 == 0 ? 16 : int(sizes & -sizes);
}

// One source, every pixel of which is at most one vector, under several taps.
bool has_few_channels(Problem const &p) {
  return p.sources == 1 && p.C[0] * size_of(p.type) <= 16 && p.R * p.S > 1 && p.layout == Layout::kChannelsLast;
}

// The taps of a filter row can share their pixels where these are adjacent, and where one stage holds all of them that
// a tile reads.
char const *obstacle_to_taps(Tile const &tile, Problem const &p) {
  bool const adjacent = p.stride_w == 1 && (p.dilation_w == 1 || tile.type_bytes > 1);
  if (p.S != kRowTaps || !adjacent) return "this filter, stride or dilation";
  int const image_rows = p.Q > 0 ? (tile.m + p.Q - 2) / p.Q + 1 : 1;
  return image_rows * halo_of(p) <= tile.halo_rows ? nullptr : "images this narrow";
}

// Int8 sources need one scale and sums that cannot overflow, or a tile that drains the sums of each source.
char const *obstacle_to_sums(Tile const &tile, Problem const &p) {
  if (tile.drains() || drains_once(p)) return nullptr;
  bool const one_scale = std::all_of(p.scale, p.scale + p.sources, [&](float scale) { return scale == p.scale[0]; });
  return one_scale ? "sums beyond 32 bits" : "sources of other scales";
}

// What a depthwise block copies at a time: 16 bytes, which lie in one source.
char const *obstacle_to_vectors(Problem const &p) {
  bool const whole = std::all_of(p.C, p.C + p.sources - 1, [&](int c) { return c * size_of(p.type) % 16 == 0; });
  return whole && copy_bytes(p) == 16 ? nullptr : "pixels of this stride";
}

// Image tiles read images of networks and other sources of few channels, depthwise tiles each filter's own channel, and
// no other tile reads either.
char const *obstacle_to_reading(Tile const &tile, Problem const &p) {
  bool const single = p.reads == Reads::kOwnChannel;
  if (tile.image && !single) return obstacle_to_image(tile, p);
  if (tile.depthwise && single) {
    char const *const why = obstacle_to_vectors(p);
    return why == nullptr ? obstacle_to_depthwise(p) : why;
  }
  if (tile.depthwise) return "filters that read all channels";
  return p.reads == Reads::kSources ? nullptr : "the image of a network, or single channels";
}

// Slots for the blocks of a split launch. The 8-bit kernels are as fast with one block on a multiprocessor as with two.
std::int64_t slots(Tile const &tile, Target const &target) {
  return std::int64_t(target.sm_count) * (tile.type_bytes == 1 ? 1 : resident_blocks(tile, target.sm));
}

// A single block uses a multiprocessor nearly as well as two do, so that more tiles than half of the multiprocessors
// gain nothing from a second launch.
std::int64_t wanted_splits(Tile const &tile, Problem const &p, Target const &target) {
  std::int64_t const tiles = std::max<std::int64_t>(1, output_tiles(tile, p));
  if (tile.has_cut() || 2 * tiles > target.sm_count) return 1;
  std::int64_t blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += ceil_div(p.C[i], tile.k);
  std::int64_t const longest = std::min(blocks, std::max<std::int64_t>(1, blocks * p.R * p.S / 4));
  return std::max<std::int64_t>(1, std::min({slots(tile, target) / tiles, longest, std::int64_t(kMostSplits)}));
}

}  // namespace

Target::Target(Call const &call)
    : sm(call.sm), sm_count(multiprocessors(call.sm_count, call.sm)), workspace_bytes(call.workspace_promise) {}

char const *obstacle_of(Tile const &tile, Problem const &p, std::int32_t sm) {
  if (tile.shared_bytes() > shared_limit(sm)) return "stages larger than the shared memory";
  if (char const *const why = obstacle_to_reading(tile, p)) return why;
  bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
  if (sized && output_tiles(tile, p) > kMostBlocks) return "images of more than 2^31 blocks";
  if (tile.upsamples != is_upsampled(p)) return tile.upsamples ? "sources of full size" : "enlarged sources";
  if (p.pre_activated && !tile.pre_activates) return "a pre-activation";
  if (tile.has_cut()) return nullptr;
  if (tile.few_channels && !has_few_channels(p)) return "more than a vector of channels, or one tap";
  char const *const taps = tile.halo_rows > 0 ? obstacle_to_taps(tile, p) : nullptr;
  if (taps != nullptr) return taps;
  // Lanes behind a source's int8 channels are multiplied by zeros of the packed filter.
  bool const masks = tile.any_channels || p.type == Type::kInt8;
  if (!masks && !whole_vectors(p)) return "channels that are no multiples of a vector";
  bool const fits = tile.copy_bytes <= copy_bytes(p) && (tile.copy_bytes == 16) == (copy_bytes(p) == 16);
  if (!fits) return "pixels of this stride";
  return p.type == Type::kInt8 ? obstacle_to_sums(tile, p) : nullptr;
}

bool runs(Tile const &tile, Problem const &p, std::int32_t sm) {
  return offers(sm, tile.needs()) && tile.takes(p.type) && obstacle_of(tile, p, sm) == nullptr;
}

BlockCut cut_of(Tile const &tile, Problem const &p, int sm_count) {
  return tile.image ? image_cut(tile, p) : depthwise_cut(p, sm_count);
}

std::int64_t output_tiles(Tile const &tile, Problem const &p) {
  if (tile.has_cut()) return cut_of(tile, p, kMostMultiprocessors).blocks(p.N);
  return (std::int64_t(p.N) * p.P * p.Q + tile.m - 1) / tile.m * ceil_div(p.K, tile.n);
}

int resident_blocks(Tile const &tile, std::int32_t sm) {
  // A multiprocessor has 1 KiB more than one block may ask for, and takes 1 KiB for every block.
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

bool can_start_early(std::int32_t sm) { return offers(sm, kClusters); }

bool starts_early(Tile const &tile, Problem const &p, Target const &target) {
  constexpr int kSeveral = 4;
  std::int64_t const blocks = output_tiles(tile, p) * splits_of(tile, p, target);
  std::int64_t const evenly = (blocks + target.sm_count - 1) / target.sm_count;
  bool const spreads =
      tile.depthwise || kSeveral * blocks <= target.sm_count || evenly >= resident_blocks(tile, target.sm);
  return can_start_early(target.sm) && spreads;
}

// Blocks go to the multiprocessors in turn. n blocks on one multiprocessor hide each other's latencies, so that
// together they take less than n times as long as one: together[n] times.
double sm80_us(Tile const &tile, Problem const &p, Target const &target) {
  constexpr double kTail = 0.4;      // what a channel that the last k-tile lacks takes of the time of another
  constexpr double kSource = 0.035;  // how much longer a sum takes for every source but the first
  // From the end of the kernel before it to the end of its last stores, apart from its tiles. An early start was timed
  // to save 0.8 to 1.3 us.
  double const late_us = starts_early(tile, p, target) ? 0 : 1.1, start_us = 1.2 + late_us;
  if (tile.image) return start_us + image_us(tile, p, target.sm_count);
  if (tile.depthwise) return late_us + depthwise_us(p, target.sm_count);
  double const together[] = {0.0, 1.0, 1.45, tile.takes(Type::kInt8) ? 1.8 : 2.2, 2.2};
  int const splits = splits_of(tile, p, target), resident = resident_blocks(tile, target.sm);
  std::int64_t const blocks = output_tiles(tile, p) * splits;
  std::int64_t const per_sm = (blocks + target.sm_count - 1) / target.sm_count;
  // Where tails are masked, and in the 8-bit kernels, one takes about as long as a whole k-tile.
  int const step = tile.type_bytes > 1 && whole_vectors(p) ? 16 : tile.k;
  double reduction = 0;  // channels times taps
  for (int i = 0; i < p.sources; ++i) {
    int const multiplied = ceil_div(p.C[i], step) * step, whole = ceil_div(p.C[i], tile.k) * tile.k;  // channels
    reduction += (multiplied + kTail * (whole - multiplied)) * p.R * p.S / splits;
  }
  reduction *= 1 + kSource * (p.sources - 1);
  if (tile.few_channels) reduction = ceil_div(p.R * p.S * 16 / size_of(p.type), tile.k) * tile.k;
  double const rounds = double(per_sm / resident) * together[resident] + together[per_sm % resident];
  // Where blocks follow each other, the teams of one meet at its start and end while no other block fills the gap.
  std::int64_t const waves = (per_sm + resident - 1) / resident;
  double const gaps_us = tile.teams > 1 ? 1.75 * double(waves - 1) : 0.0;
  double const sum_us = splits > 1 ? 3.0 + 0.1 * splits : 0.0;  // of the second launch, which reads the parts
  return start_us + rounds * (reduction * tile.channel_ns * 1e-3 + tile.block_us) + gaps_us + sum_us;
}

}  // namespace cutefuse::conv
