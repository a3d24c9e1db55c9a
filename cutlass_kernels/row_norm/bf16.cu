#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

namespace cutefuse::row_norm {

Kernels const kernels_bf16 = {pick_forward<cutlass::bfloat16_t>, pick_backward<cutlass::bfloat16_t>};

}  // namespace cutefuse::row_norm
