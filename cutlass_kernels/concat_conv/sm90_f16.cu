#include "concat_conv/tiles.h"
#include "conv/sm90/launch.cuh"

namespace cutefuse::concat_conv {

Kernels find_sm90_f16(int tile_id) { return find_sm90<cutlass::half_t>(tile_id); }

}  // namespace cutefuse::concat_conv
