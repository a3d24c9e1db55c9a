#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_f32(int tile_id) {
  return find_sm80<cutlass::tfloat32_t, Row<21>, Row<22>, Row<23>, Row<24>, Row<25>>(tile_id);
}
