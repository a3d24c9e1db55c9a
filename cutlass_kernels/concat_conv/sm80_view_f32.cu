#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

Kernels find_sm80_view_f32(int tile_id) { return find_sm80<cutlass::tfloat32_t, Row<34>, Row<38>, Row<39>>(tile_id); }

}  // namespace cutefuse::concat_conv
