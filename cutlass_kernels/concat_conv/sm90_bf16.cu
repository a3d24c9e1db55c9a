#include "concat_conv/tiles.h"
#include "conv/sm90/launch.cuh"

namespace cutefuse::concat_conv {

Kernels find_sm90_bf16(int tile_id) { return find_sm90<cutlass::bfloat16_t>(tile_id); }

}  // namespace cutefuse::concat_conv
