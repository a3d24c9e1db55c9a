// How a problem runs on a Hopper tile: into how many parts its reduction is divided, and its predicted time.
#pragma once

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

using Room = int[kMaxSplits + 1];  // room[i] clusters of i blocks run at once

// Blocks of a cluster that divide the reduction of one output tile.
int sm90_splits(Sm90Tile const &tile, Problem const &p, int sm_count, Room const &room);

// Predicted microseconds, as sm80_us.
double sm90_us(Sm90Tile const &tile, Problem const &p, int sm_count);

}  // namespace cutefuse::conv
