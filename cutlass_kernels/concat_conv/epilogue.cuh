// Bias and activation in float32 over a register tensor: the branch on the activation stands outside the unrolled
// loops.
#pragma once

#include <cute/tensor.hpp>

#include "problem.h"

namespace cutefuse::concat_conv {

// min/max that hand a NaN on, as PyTorch's relu and clamp do (fmaxf would hide it).
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// acc = act(acc) for every element, in place.
template <class Engine, class Layout>
__device__ __forceinline__ void activate(cute::Tensor<Engine, Layout> &acc, Problem const &p) {
  auto const each = [&](auto f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) acc(i) = f(acc(i));
  };
  switch (p.activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      each([](float x) { return max_nan(x, 0.f); });
      break;
    case Activation::kLeakyRelu:
      each([a = p.alpha](float x) { return x > 0.f ? x : a * x; });
      break;
    case Activation::kClip:
      each([lo = p.lo, hi = p.hi](float x) { return min_nan(max_nan(x, lo), hi); });
      break;
    case Activation::kSilu:
      each([](float x) { return x * sigmoid(x); });
      break;
    case Activation::kHardSwish:
      each([](float x) { return x * min_nan(max_nan(x * (1.f / 6.f) + 0.5f, 0.f), 1.f); });
      break;
    case Activation::kSigmoid:
      each([](float x) { return sigmoid(x); });
      break;
    case Activation::kTanh:
      each([](float x) { return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x)); });  // tanhf's branches spill registers
      break;
  }
}

}  // namespace cutefuse::concat_conv
