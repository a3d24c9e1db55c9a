// Host side of the small Hopper tiles: into how many parts a reduction is divided, and how long a problem takes.
#include <algorithm>

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// Fitted on an H200 to the latency and single_source shapes, every small tile and division, warm.
double small_us(Sm90Tile const &tile, Problem const &p, int splits, int sm_count, int const (&room)[kMaxSplits + 1]) {
  constexpr double kStart = 0.41;        // barriers, the first loads' latency, the last store
  constexpr double kWave = 0.73;         // the same for blocks that start when others have ended
  constexpr double kLatency = 0.95;      // of a stage: to be loaded, multiplied and free again
  constexpr double kChain = 0.14;        // of a k-tile: until one thread has issued its loads, or it is multiplied
  constexpr double kRow = 0.00103;       // a multiprocessor takes this long for 128 bytes
  constexpr double kShared = 0.0000123;  // and all of them together, out of L2
  constexpr double kRewrite = 0.0037;    // 64 channels of a pre-activated pixel, by one warpgroup
  constexpr double kFinish = 0.51;       // 64 x 64 outputs
  constexpr double kMeet = 0.53;         // the blocks of a cluster wait for each other
  constexpr double kSend = 0.79;         // 64 x 64 sums to other blocks
  double const area = tile.filters * tile.pixels() / 4096.0;
  int const k_tiles = ceil_div(conv::k_tiles<kChannelBlock>(p), splits);
  double const rewrite = p.pre_activated ? kRewrite * tile.pixels() : 0;
  int const tiles = ceil_div(p.K, tile.filters) * ceil_div(p.N * p.P * p.Q, tile.pixels());
  double us = 0;
  for (int left = tiles; left > 0; left -= std::max(1, room[splits])) {
    int const blocks = std::min(left, std::max(1, room[splits])) * splits, resident = ceil_div(blocks, sm_count);
    double const load = (tile.filters + tile.pixels()) * std::max(kRow * resident, kShared * blocks);
    us += (left == tiles ? kStart : kWave) +
          k_tiles * (std::max({kLatency / small_room(tile).stages, kChain, load}) + rewrite) +
          area * resident * kFinish / splits;
    if (splits > 1) us += kMeet + area * resident * kSend * (splits - 1) / splits;
  }
  return us;
}

int small_splits(Sm90Tile const &tile, Problem const &p, int sm_count, int const (&room)[kMaxSplits + 1]) {
  int const units = tile.pixels() / 8, length = k_tiles<kChannelBlock>(p);
  int best = 1;
  double fastest = small_us(tile, p, best, sm_count, room);
  for (int splits = 2; splits <= kMaxSplits && length >= 2 * splits; ++splits) {
    // A block has room for the units that it finishes, and a second wave costs more than a division gains.
    bool const fits = ceil_div(units, splits) * splits <= small_parts(tile.pixels()) && room[splits] > 0;
    double const us = fits ? small_us(tile, p, splits, sm_count, room) : fastest;
    if (us < fastest) best = splits, fastest = us;
  }
  return best;
}

}  // namespace cutefuse::conv
