#include "concat_conv/tiles.h"
#include "conv/sm80/launch.cuh"

namespace cutefuse::concat_conv {

char const *launch_sm80_f32(int tile_id, Params const &params, void *stream) {
  return launch_sm80_tile<cutlass::tfloat32_t, Row<21>, Row<22>, Row<23>, Row<24>, Row<25>>(tile_id, params, stream);
}

}  // namespace cutefuse::concat_conv
