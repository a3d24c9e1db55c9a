#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

Kernels find_sm80_taps_f16(int tile_id) { return find_sm80<cutlass::half_t, Row<14>, Row<15>>(tile_id); }

}  // namespace cutefuse::concat_conv
