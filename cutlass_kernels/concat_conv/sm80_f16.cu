#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

Kernels find_sm80_f16(int tile_id) {
  return find_sm80<cutlass::half_t, Row<1>, Row<4>, Row<5>, Row<6>, Row<8>, Row<10>, Row<13>, Row<18>>(tile_id);
}

}  // namespace cutefuse::concat_conv
