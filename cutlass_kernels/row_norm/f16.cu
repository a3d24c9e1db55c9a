#include "backward.cuh"
#include "forward.cuh"

namespace cutefuse::row_norm {

char const *launch_forward_f16(Tile const &tile, ForwardParams const &params, Launch const &launch, int sm,
                               void *stream) {
  return launch_forward<cutlass::half_t>(tile, params, launch, sm, stream);
}

char const *launch_backward_f16(BackwardParams const &params, Launch const &launch, int sm, void *stream) {
  return launch_backward<cutlass::half_t>(params, launch, sm, stream);
}

}  // namespace cutefuse::row_norm
