#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_view_bf16(int tile_id) {
  return find_sm80<cutlass::bfloat16_t, Row<31>, Row<33>, Row<37>>(tile_id);
}
