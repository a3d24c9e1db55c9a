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

// 1 / (1 + 2^x): the forms that flush denormals need no scaling around them.
__device__ __forceinline__ float inverse_of_power(float x) {
  float e, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + e));
  return y;
}

// 1 / (1 + exp(-x)) in five instructions.
__device__ __forceinline__ float sigmoid(float x) { return inverse_of_power(x * -1.4426950408889634f); }

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

// x * (1 + erf(x / sqrt(2))) / 2 as x * sigmoid(x * Q(x^2)), off by 3e-6 at most: calibration/gelu.py fits Q, here in
// powers of two. erff takes more registers than some tiles have.
__device__ __forceinline__ float gelu(float x) {
  float const u = x * x;
  float q = -3.22899101e-06f;
  q = q * u + 8.82381719e-05f;
  q = q * u + 0.000360274335f;
  q = q * u - 0.105226687f;
  q = q * u - 2.30204539f;
  return x * inverse_of_power(x * q);
}

// acc = f(acc), two values at a time, in a loop through which the registers move: unrolled, a long function would make
// every kernel up to half as long again, and code that does not run costs time and registers too.
template <class Tensor, class Function>
__device__ __forceinline__ void each_in_a_loop(Tensor &acc, Function f) {
  constexpr int kSize = decltype(cute::size(acc))::value, kStep = kSize % 2 == 0 ? 2 : 1;
  CUTE_NO_UNROLL
  for (int done = 0; done < kSize; done += kStep) {
    float y[kStep];
    CUTE_UNROLL
    for (int i = 0; i < kStep; ++i) y[i] = f(acc(i));
    CUTE_UNROLL
    for (int i = 0; i < kSize - kStep; ++i) acc(i) = acc(i + kStep);
    CUTE_UNROLL
    for (int i = 0; i < kStep; ++i) acc(kSize - kStep + i) = y[i];
  }
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
    each_in_a_loop(acc, [](float x) { return gelu(x); });
  } else {  // tanh, through one exponential: tanhf branches
    each([](float x) { return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x)); });
  }
}

}  // namespace cutefuse::conv
