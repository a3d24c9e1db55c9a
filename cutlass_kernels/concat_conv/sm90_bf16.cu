#include "concat_conv/tiles.h"
#include "conv/sm90/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm90_bf16(int tile_id, Params const &params, void *stream) {
  return launch_sm90<cutlass::bfloat16_t>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
