#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_any_f32(int tile_id) {
  return find_sm80<cutlass::tfloat32_t, Row<35>, Row<36>, Row<40>, Row<41>>(tile_id);
}
