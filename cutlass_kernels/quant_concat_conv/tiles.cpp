// Which tiles can run a problem, in how many parts, and how long they take. No CUDA header.
#include "quant_concat_conv/tiles.h"

#include <algorithm>

namespace cutefuse::quant_concat_conv {
namespace {

// Shared memory of a multiprocessor that blocks may use, by compute capability.
int shared_limit(int sm) {
  return sm == 86 || sm == 89 || sm >= 120 ? 99 << 10 : sm >= 90 || sm == 0 ? 227 << 10 : 163 << 10;
}

int resident_blocks(Tile const &tile, int sm) {
  // A block may have 1 KiB less than the multiprocessor, which takes 1 KiB for every block.
  return std::max(1, std::min(tile.blocks_per_sm, (shared_limit(sm) + 1024) / (tile.shared_bytes() + 1024)));
}

std::int64_t output_tiles(Tile const &tile, Problem const &p) {
  return (std::int64_t(p.N) * p.P * p.Q + tile.m - 1) / tile.m * ceil_div(p.K, tile.n);
}

}  // namespace

int all_blocks(Problem const &p) {
  int blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += conv::blocks_of(p.C[i]);
  return blocks;
}

int splits_of(Tile const &tile, Problem const &p, int sm_count) {
  std::int64_t const tiles = std::max<std::int64_t>(1, output_tiles(tile, p)), blocks = all_blocks(p);
  std::int64_t const parts =
      std::min(sm_count / tiles, std::min(blocks, std::max<std::int64_t>(1, blocks * p.R * p.S / 4)));
  return static_cast<int>(std::clamp<std::int64_t>(parts, 1, 16));
}

bool runs(Tile const &tile, Problem const &p, int sm) {
  std::int64_t sum = 0;
  bool equal = true;
  for (int i = 0; i < p.sources; ++i) sum += largest_sum(p, i), equal = equal && p.scale[i] == p.scale[0];
  bool const right_filter = tile.halo_rows == 0 || (p.S == kRowTaps && p.stride_w == 1 && p.dilation_w == 1);
  return right_filter && (sm == 0 || sm >= 80) && tile.shared_bytes() <= shared_limit(sm) &&
         (tile.drains() || (equal && sum <= 0x7fffffff));
}

bool fits(Tile const &tile, Problem const &p) {
  return tile.halo_rows == 0 || p.Q < 1 || (tile.m - 2) / p.Q + 2 <= kHaloRows / (kRowTaps - 1);
}

double cost(Tile const &tile, Problem const &p, int sm, int sm_count) {
  constexpr double kTogether[] = {0.0, 1.0, 1.45, 1.8, 2.2};
  int const splits = splits_of(tile, p, sm_count), resident = resident_blocks(tile, sm);
  std::int64_t const per_sm = (output_tiles(tile, p) * splits + sm_count - 1) / sm_count;
  double const rounds = double(per_sm / resident) * kTogether[resident] + kTogether[per_sm % resident];
  double const block_us =
      double(all_blocks(p)) * p.R * p.S / splits * kChannelBlock * tile.channel_ns * 1e-3 + tile.block_us;
  return rounds * block_us + (splits > 1 ? 3.0 + 0.1 * splits : 0.0);
}

}  // namespace cutefuse::quant_concat_conv
