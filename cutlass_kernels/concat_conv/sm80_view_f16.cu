#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_view_f16(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::half_t, Row<31>, Row<33>, Row<37>>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
