#include "backward.cuh"
#include "forward.cuh"

namespace cutefuse::row_norm {

char const *launch_forward_f32(Tile const &tile, ForwardParams const &params, Launch const &launch, int sm,
                               void *stream) {
  return launch_forward<float>(tile, params, launch, sm, stream);
}

char const *launch_backward_f32(BackwardParams const &params, Launch const &launch, int sm, void *stream) {
  return launch_backward<float>(params, launch, sm, stream);
}

}  // namespace cutefuse::row_norm
