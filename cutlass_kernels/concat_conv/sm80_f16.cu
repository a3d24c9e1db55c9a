#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_f16(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::half_t, 1, 3, 4, 5, 6, 8, 10, 13, 18>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
