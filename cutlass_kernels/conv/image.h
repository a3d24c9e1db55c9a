// How image tiles cut a problem into blocks, and how long those take. Host code.
#pragma once

#include "conv/sm80/tiles.h"

namespace cutefuse::conv {

// `height` is 0 where nothing fits the shared memory.
BlockCut image_cut(Tile const &tile, Problem const &p);

// As obstacle_of, which calls it.
char const *obstacle_to_image(Tile const &tile, Problem const &p);

// As sm80_us, from the start of the kernel's blocks on. Fitted by hand to calibration/data/tiles_images_h200.csv and
// early_layers_h200.csv, by which `make calibrate` judges it.
double image_us(Tile const &tile, Problem const &p, int sm_count);

}  // namespace cutefuse::conv
