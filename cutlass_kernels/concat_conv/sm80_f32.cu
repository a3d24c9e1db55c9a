#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_f32(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::tfloat32_t, 21, 22, 23, 24, 25>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
