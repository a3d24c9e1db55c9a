#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_view_f32(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::tfloat32_t, Row<34>, Row<38>, Row<39>>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
