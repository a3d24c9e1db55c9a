#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_any_f32(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::tfloat32_t, Row<35>, Row<36>, Row<40>, Row<41>>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
