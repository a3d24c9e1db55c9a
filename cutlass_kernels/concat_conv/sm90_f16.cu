#include "concat_conv/tiles.h"
#include "conv/sm90/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm90_f16(int tile_id) {
  return find_sm90<cutlass::half_t>(tile_id);
}
