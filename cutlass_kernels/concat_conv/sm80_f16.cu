#include "sm80_launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_f16(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::half_t, 1, 2, 3, 4, 5, 6, 7, 8>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
