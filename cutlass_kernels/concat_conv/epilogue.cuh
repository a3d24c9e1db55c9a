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

// 1 / (1 + exp(-x)) in five instructions: the forms that flush denormals need no scaling around them.
__device__ __forceinline__ float sigmoid(float x) {
  float e, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + e));
  return y;
}

// acc = act(acc) for every element, in place. Call it on slices of the accumulator: five unrolled bodies over all of it
// at once would keep too many registers alive.
template <class Tensor>
__device__ __forceinline__ void activate(Tensor &&acc, Problem const &p) {
  auto const each = [&](auto f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) acc(i) = f(acc(i));
  };
  Activation const kind = p.activation;
  if (kind == Activation::kNone || kind == Activation::kRelu || kind == Activation::kClip) {
    float const infinity = __int_as_float(0x7f800000);
    float const lo = kind == Activation::kClip ? p.lo : kind == Activation::kRelu ? 0.f : -infinity;
    float const hi = kind == Activation::kClip ? p.hi : infinity;
    each([=](float x) { return min_nan(max_nan(x, lo), hi); });
  } else if (kind == Activation::kSilu) {
    each([](float x) { return x * sigmoid(x); });
  } else if (kind == Activation::kSigmoid) {
    each([](float x) { return sigmoid(x); });
  } else if (kind == Activation::kLeakyRelu) {
    each([a = p.alpha](float x) { return x > 0.f ? x : a * x; });
  } else if (kind == Activation::kHardSwish) {
    each([](float x) { return x * min_nan(max_nan(x * (1.f / 6.f) + 0.5f, 0.f), 1.f); });
  } else {  // tanh, through one exponential: tanhf branches
    each([](float x) { return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x)); });
  }
}

}  // namespace cutefuse::concat_conv
