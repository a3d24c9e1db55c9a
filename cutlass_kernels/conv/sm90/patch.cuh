// Where a tile begins whose pixels are a patch of an image.
#pragma once

#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// First output pixel of a tile along the patch's axes.
struct Patch {
  int a, b, n;
  CUTE_DEVICE Patch(Sm90Params const &params, int tile_x, int pixels_a, int pixels_b) {
    int const column = params.by_a.divide(tile_x);
    n = params.by_b.divide(column);
    a = (tile_x - column * params.tiles_a) * pixels_a, b = (column - n * params.tiles_b) * pixels_b;
  }
};

}  // namespace cutefuse::conv
