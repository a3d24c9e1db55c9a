#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_taps_f16(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::half_t, Row<14>, Row<15>>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
