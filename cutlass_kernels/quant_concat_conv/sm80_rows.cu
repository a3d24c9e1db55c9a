#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

char const *launch_rows(int tile_id, Params const &params, void *stream) {
  return launch_tile<15, 16>(tile_id, params, stream);
}

}  // namespace cutefuse::quant_concat_conv
