// How image tiles and depthwise ones cut a problem into blocks, and how long those take. Host code.
#pragma once

#include "conv/sm80/tiles.h"

namespace cutefuse::conv {

constexpr int kDepthwiseColumns = 8;  // outputs of a row that a thread computes at a time, 4 channels of each
constexpr int kDepthwiseThreads = 128;
constexpr int kDepthwiseBlocks = 4;  // of a multiprocessor, where its shared memory holds so many

// `height` is 0 where nothing fits the shared memory. A depthwise cut takes the least time on so many multiprocessors.
BlockCut image_cut(Tile const &tile, Problem const &p);
BlockCut depthwise_cut(Problem const &p, int sm_count);

// As obstacle_of, which calls them.
char const *obstacle_to_image(Tile const &tile, Problem const &p);
char const *obstacle_to_depthwise(Problem const &p);

// As sm80_us, of an image tile from the start of the kernel's blocks on, and of a depthwise kernel that starts early.
// Image tiles were fitted by hand to calibration/data/tiles_images_h200.csv and early_layers_h200.csv, by which `make
// calibrate` judges them.
double image_us(Tile const &tile, Problem const &p, int sm_count);
double depthwise_us(Problem const &p, int sm_count);

}  // namespace cutefuse::conv
