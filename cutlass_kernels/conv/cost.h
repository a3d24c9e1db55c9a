// Which of the Ampere path's tiles run a problem, and how: blocks, splits of the reduction, workspace, predicted time.
// Host code for all number types.
#pragma once

#include "conv/sm80/tiles.h"

namespace cutefuse::conv {

// The device and the workspace that a launch is planned for.
struct Target {
  std::int32_t sm;  // 0: any
  std::int32_t sm_count;
  std::int64_t workspace_bytes;  // promised to it; negative: no limit

  explicit Target(Call const &call);
};

constexpr int kMostSplits = 16;

// The part of a problem that a tile of its type cannot run, worded to follow "cannot run"; null: it runs all. A width
// that is not known counts as wide enough. sm 0: any device.
char const *obstacle_of(Tile const &tile, Problem const &p, std::int32_t sm);
bool runs(Tile const &tile, Problem const &p, std::int32_t sm);

// Of a tile that has a cut.
BlockCut cut_of(Tile const &tile, Problem const &p, int sm_count);

std::int64_t output_tiles(Tile const &tile, Problem const &p);

// Blocks of a tile that share a multiprocessor.
int resident_blocks(Tile const &tile, std::int32_t sm);

// Parts into which the reduction is divided where the tiles would leave half of the multiprocessors idle. Each part
// keeps four k-tiles or more, and the sums of all fit the workspace that was promised.
int splits_of(Tile const &tile, Problem const &p, Target const &target);

// Bytes of the float32 sums that a launch leaves in the workspace, [splits][N*P*Q][split_ld].
std::int64_t split_bytes(Problem const &p, int splits);

// Bytes with which the tile divides the reduction freely, whatever is promised, for this image and every larger one: a
// split launch never has more blocks than the device has slots, and where an image needs no split, no larger one does.
// For an empty batch it covers all larger ones.
std::int64_t workspace_bound(Tile const &tile, Problem const &p, Target const &target);

// Whether a kernel may start before the one in front of it has ended: the code that runs there can wait for that end.
bool can_start_early(std::int32_t sm);

// Whether the main kernel should. Its blocks then crowd onto the multiprocessors that are free at that moment, as many
// on each as fit. That does no harm where an even spread needs as many, or where the kernel is so small that several
// such kernels leave multiprocessors free. Depthwise tiles count with it where they are cut.
bool starts_early(Tile const &tile, Problem const &p, Target const &target);

// Predicted microseconds inside a network, where operands lie in the L2 cache; every size is known. Tiles are ranked by
// it, and what a site gains is computed from it.
double sm80_us(Tile const &tile, Problem const &p, Target const &target);

}  // namespace cutefuse::conv
