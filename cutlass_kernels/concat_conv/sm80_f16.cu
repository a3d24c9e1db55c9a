#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

cutefuse::conv::Kernels cutefuse::concat_conv::find_sm80_f16(int tile_id) {
  return find_sm80<cutlass::half_t, Row<1>, Row<4>, Row<5>, Row<6>, Row<8>, Row<10>, Row<13>, Row<18>>(tile_id);
}
