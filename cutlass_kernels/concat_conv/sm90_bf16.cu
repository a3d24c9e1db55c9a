#include "concat_conv/tiles.h"
#include "conv/sm90/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm90_bf16(int tile_id) {
  return find_sm90<cutlass::bfloat16_t>(tile_id);
}
