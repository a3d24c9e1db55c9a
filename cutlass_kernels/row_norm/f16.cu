#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

void const *find_forward_f16(Tile const &tile, ForwardParams const &params) {
  return pick_forward<cutlass::half_t>(tile, params);
}

BackwardKernels find_backward_f16(BackwardParams const &params, bool pipelined) {
  return pick_backward<cutlass::half_t>(params, pipelined);
}

}  // namespace cutefuse::row_norm
