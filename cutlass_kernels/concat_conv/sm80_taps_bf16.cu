#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_taps_bf16(int tile_id) {
  return find_sm80<cutlass::bfloat16_t, Row<14>, Row<15>>(tile_id);
}
