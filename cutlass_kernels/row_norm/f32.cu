#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

void const *find_forward_f32(Tile const &tile, ForwardParams const &params) {
  return pick_forward<float>(tile, params);
}

BackwardKernels find_backward_f32(BackwardParams const &params, bool pipelined) {
  return pick_backward<float>(params, pipelined);
}

}  // namespace cutefuse::row_norm
