#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

Kernels const kernels_f32 = {pick_forward<float>, pick_backward<float>};

}  // namespace cutefuse::row_norm
