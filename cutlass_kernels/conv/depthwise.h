// How depthwise tiles cut a problem into blocks, and how long those take. Host code.
#pragma once

#include "conv/params.h"

namespace cutefuse::conv {

constexpr int kDepthwiseColumns = 8;  // outputs of a row that a thread computes at a time, 4 channels of each
constexpr int kDepthwiseThreads = 128;
constexpr int kDepthwiseBlocks = 4;  // of a multiprocessor, where its shared memory holds so many

// The cut that takes the least time on so many multiprocessors. `height` is 0 where nothing fits the shared memory.
BlockCut depthwise_cut(Problem const &p, int sm_count);

// As obstacle_of, which calls it.
char const *obstacle_to_depthwise(Problem const &p);

// As sm80_us, of a kernel that starts early.
double depthwise_us(Problem const &p, int sm_count);

}  // namespace cutefuse::conv
