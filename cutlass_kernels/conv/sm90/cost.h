// How a problem runs on a Hopper tile: into how many parts its reduction is divided, and its predicted time.
#pragma once

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// room[b][i]: clusters of i blocks that run at once where up to b blocks share a multiprocessor, as only small tiles'
// do.
constexpr int kMaxResident = 3;
using Room = int[kMaxResident + 1][kMaxSplits + 1];

// Of a small tile's launch, whose reduction is divided into `splits` parts: the stages of a block's ring, and how many
// clusters run at once.
struct SmallLaunch {
  int stages, at_once;
};
SmallLaunch small_launch(Sm90Tile const &tile, Problem const &p, int splits, Room const &room);

// Blocks of a cluster that divide the reduction of one output tile.
int sm90_splits(Sm90Tile const &tile, Problem const &p, int sm_count, Room const &room);

// Predicted microseconds, as sm80_us.
double sm90_us(Sm90Tile const &tile, Problem const &p, int sm_count);

}  // namespace cutefuse::conv
