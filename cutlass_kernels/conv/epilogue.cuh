// Bias and activation in float32 over a register tensor: the branch on the activation is outside the unrolled loops.
#pragma once

#include <cute/tensor.hpp>

#include "conv/problem.h"

namespace cutefuse::conv {

// min/max that propagate NaN, as PyTorch's relu and clamp do (fmaxf would hide it).
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

// Two SiLUs in three operations of the special-function unit, which takes eight clocks for each: one reciprocal of the
// product serves both. The bound keeps the product finite, and a NaN affects only its own value. Below -44 the result
// is x * 2^-63 for nearly zero: zero in float16, -1e-14 of x = -1e5. Of -inf it is -inf, not NaN.
__device__ __forceinline__ void silu_pair(float &x, float &y) {
  float a, b, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(fminf(x * -1.4426950408889634f, 63.f)));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(fminf(y * -1.4426950408889634f, 63.f)));
  a += 1.f, b += 1.f;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a * b));
  x *= inverse * b, y *= inverse * a;
}

// x * (1 + erf(x / sqrt(2))) / 2 as max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2. erfc is Hastings' polynomial under an
// exponential (Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most). Beyond 16 the second term is nothing; the bound
// keeps it from NaN for infinities. Volatile keeps one value behind the other: side by side they spill registers.
__device__ __forceinline__ float gelu(float x) {
  float const size = min_nan(fabsf(x), 16.f);
  float t, e;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.f + 0.23164189f * size));
  float erfc = 1.061405429f;
  erfc = erfc * t - 1.453152027f;
  erfc = erfc * t + 1.421413741f;
  erfc = erfc * t - 0.284496736f;
  erfc = erfc * t + 0.254829592f;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-0.72134752f * size * size));
  return max_nan(x, 0.f) - 0.5f * size * erfc * t * e;
}

// acc = act(acc) for every element, in place. Call it on slices of the accumulator: its unrolled bodies over all of it
// at once would keep too many registers alive. Without kCommon it leaves out none, ReLU, SiLU and sigmoid, for which
// the caller has code of its own.
template <bool kCommon = true, class Tensor>
__device__ __forceinline__ void activate(Tensor &&acc, Problem const &p) {
  auto const each = [&](auto f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) acc(i) = f(acc(i));
  };
  Activation const kind = p.activation;
  if (kind == Activation::kClip || (kCommon && (kind == Activation::kNone || kind == Activation::kRelu))) {
    float const infinity = __int_as_float(0x7f800000);
    bool const clip = !kCommon || kind == Activation::kClip;
    float const lo = clip ? p.lo : kind == Activation::kRelu ? 0.f : -infinity, hi = clip ? p.hi : infinity;
    each([=](float x) { return min_nan(max_nan(x, lo), hi); });
  } else if (kCommon && kind == Activation::kSilu) {
    each([](float x) { return x * sigmoid(x); });
  } else if (kCommon && kind == Activation::kSigmoid) {
    each([](float x) { return sigmoid(x); });
  } else if (kind == Activation::kLeakyRelu) {
    each([a = p.alpha](float x) { return x > 0.f ? x : a * x; });
  } else if (kind == Activation::kHardSwish) {
    each([](float x) { return x * min_nan(max_nan(x * (1.f / 6.f) + 0.5f, 0.f), 1.f); });
  } else if (kind == Activation::kGelu) {
    each(gelu);
  } else {  // tanh, through one exponential: tanhf branches
    each([](float x) { return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x)); });
  }
}

}  // namespace cutefuse::conv
