// How depthwise tiles cut a problem into blocks, and how long those take. Host code.
#pragma once

#include "conv/cost.h"

namespace cutefuse::conv {

// `height` is 0 where nothing fits the shared memory.
BlockCut depthwise_cut(Problem const &p);

// How many blocks compute so many tiles. Where some compute several, the cut gets shared memory for a second one's
// pixels.
std::int64_t depthwise_blocks(Tile const &tile, Target const &target, BlockCut &cut, std::int64_t tiles);

// As obstacle_of, which calls it.
char const *obstacle_to_depthwise(Problem const &p);

// As sm80_us, from the start of the kernel's blocks on.
double depthwise_us(Problem const &p, int sm_count);

}  // namespace cutefuse::conv
