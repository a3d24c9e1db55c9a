#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_view_f32(int tile_id) {
  return find_sm80<cutlass::tfloat32_t, Row<34>, Row<38>, Row<39>>(tile_id);
}
