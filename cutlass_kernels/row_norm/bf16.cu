#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

void const *find_forward_bf16(Tile const &tile, ForwardParams const &params) {
  return pick_forward<cutlass::bfloat16_t>(tile, params);
}

BackwardKernels find_backward_bf16(BackwardParams const &params, bool pipelined) {
  return pick_backward<cutlass::bfloat16_t>(params, pipelined);
}

}  // namespace cutefuse::row_norm
