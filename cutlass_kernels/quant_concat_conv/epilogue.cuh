// From sums to outputs: filter scale, bias, activation, and the output's type and layout. Shared by the kernel and by
// the second half of split-K.
#pragma once

#include <cutlass/numeric_types.h>

#include "conv/epilogue.cuh"
#include "conv/sm80/store.cuh"
#include "quant_concat_conv/tiles.h"

namespace cutefuse::quant_concat_conv {

// float -> output; int8 is rounded to nearest even and saturated.
template <class Output>
__device__ __forceinline__ Output output_of(float y, float inverse_scale) {
  if constexpr (sizeof(Output) == 1) {
    return Output(max(-128, min(127, __float2int_rn(y * inverse_scale))));
  } else {
    return Output(y);
  }
}

// Where channel k of output pixel m lies; k is the first of a vector, so that the vector stays in one block.
template <class Output>
__device__ __forceinline__ Output *output_at(Params const &params, int64_t m, int k) {
  Problem const &p = params.problem;
  Output *const y = static_cast<Output *>(params.y);
  if (sizeof(Output) > 1 || p.layout == cutefuse::Layout::kChannelsLast) return y + m * p.ldy + k;
  Strides const at = strides_of(p.layout, p.ldy, p.K, int64_t(p.P) * p.Q);
  int const n = params.by_image.divide(int(m));
  return y + n * at.image + (m - int64_t(n) * params.by_image.divisor) * at.pixel + k / kLayoutBlock * at.block +
         k % kLayoutBlock;
}

// Calls body(Output{}) with the C++ type of the output.
template <class Body>
__device__ __forceinline__ void with_output_type(Problem const &p, Body const &body) {
  switch (p.output_type) {
    case Type::kFloat32:
      return body(float{});
    case Type::kFloat16:
      return body(cutlass::half_t{});
    case Type::kBFloat16:
      return body(cutlass::bfloat16_t{});
    default:
      return body(int8_t{});
  }
}

}  // namespace cutefuse::quant_concat_conv
