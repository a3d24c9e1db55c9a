#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

char const *launch_drain(int tile_id, Params const &params, void *stream) {
  return launch_tile<12, 13, 14>(tile_id, params, stream);
}

}  // namespace cutefuse::quant_concat_conv
