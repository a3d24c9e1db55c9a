#include "sm80.cuh"

namespace cutefuse::quant_concat_conv {

char const *launch_drain(int tile_id, Params const &params, void *stream) {
  return launch_tile<11, 12, 13, 14>(tile_id, params, stream);
}

}  // namespace cutefuse::quant_concat_conv
