// max(0, x * scale + shift) of the values in one register; a NaN is propagated.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>

#include "conv/epilogue.cuh"

namespace cutefuse::conv {

// Scale and shift are of the element type: rounding them costs about what rounding x did, and the whole of it is one
// instruction for two values.
template <class Element>
__device__ __forceinline__ std::uint32_t pre_activate(std::uint32_t x, std::uint32_t scale, std::uint32_t shift) {
  if constexpr (sizeof(Element) == 4) {
    return __float_as_uint(max_nan(fmaf(__uint_as_float(x), __uint_as_float(scale), __uint_as_float(shift)), 0.f));
  } else {
    std::uint32_t y;
    if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
      asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(scale), "r"(shift));
    } else {
      asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(scale), "r"(shift));
    }
    return y;
  }
}

}  // namespace cutefuse::conv
