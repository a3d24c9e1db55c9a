// Which of the Ampere path's tiles run a problem, and how a device runs them: blocks, splits of the reduction,
// workspace, predicted time. Host code for all number types.
#pragma once

#include "conv/sm80/tiles.h"

namespace cutefuse::conv {

// What a launch is made for.
struct Target {
  std::int32_t sm;  // 0: any
  std::int32_t sm_count;
  std::int64_t workspace_bytes;  // promised to it; negative: no limit

  explicit Target(Call const &call);
};

constexpr int kMostSplits = 16;

// What of a problem a tile of its type cannot run, null: nothing; where its width is not known, in images wide enough.
// sm 0: on any device.
char const *obstacle_of(Tile const &tile, Problem const &p, std::int32_t sm);
bool runs(Tile const &tile, Problem const &p, std::int32_t sm);

std::int64_t output_tiles(Tile const &tile, Problem const &p);

// Blocks of a tile that share a multiprocessor.
int resident_blocks(Tile const &tile, std::int32_t sm);

// Parts into which the reduction is cut when the tiles leave half of the multiprocessors idle; each keeps four k-tiles,
// and together they fit the workspace that was promised.
int splits_of(Tile const &tile, Problem const &p, Target const &target);

// What a launch leaves in the workspace: float32 sums, [splits][N*P*Q][split_ld].
std::int64_t split_bytes(Problem const &p, int splits);

// Bytes with which the tile divides the reduction freely, whatever is promised, for this image and every larger one: a
// split launch never has more blocks than the device has slots, and where an image needs no split, no larger one does.
// For an empty batch it covers all larger ones.
std::int64_t workspace_bound(Tile const &tile, Problem const &p, Target const &target);

// Predicted microseconds inside a network, where operands lie in the L2 cache; every size is known. Tiles are ranked by
// it, and what a site gains is computed from it.
double sm80_us(Tile const &tile, Problem const &p, Target const &target);

}  // namespace cutefuse::conv
