#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

Kernels const kernels_f16 = {pick_forward<cutlass::half_t>, pick_backward<cutlass::half_t>};

}  // namespace cutefuse::row_norm
