// A shortcut on Hopper, called residual elsewhere: a tensor like the output that is added in float32 before or after
// the activation. TMA brings it in the layout in which outputs are staged, and the transposed loads that mirror their
// stores give each thread the values that belong to its sums.
#pragma once

#include "conv/sm90/outputs.cuh"

namespace cutefuse::conv {

CUTE_DEVICE bool has_shortcut(Problem const &p) { return p.residual != Residual::kNone; }

// Two neighbouring values of shared memory as they follow each other.
template <class Element>
CUTE_DEVICE float2 widen(uint32_t pair) {
  if constexpr (cute::is_same_v<Element, cutlass::half_t>) return __half22float2(reinterpret_cast<__half2 &>(pair));
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};  // bfloat16 is the upper half of float32
}

// values(2,2,kGroups) = (pixel,filter,group) += the shortcut's pixels at `tile`, a row of kColumns filters each.
template <class Element, int kGroups, int kColumns = kStoreColumns>
CUTE_DEVICE void add_shortcut(float *values, Element const *tile) {
  int const thread = opaque(threadIdx.x);  // else the compiler keeps the place in a register through the main loop
  CUTE_UNROLL
  for (int group = 0; group < kGroups; group += 2) {
    bool const last = group + 1 == kGroups;  // an odd count ends with a single group
    auto const &from = *reinterpret_cast<uint128_t const *>(tile + staged_row<kColumns>(thread, group, last));
    uint32_t r[4];  // (filter,group)
    if (last) {
      SM75_U16x4_LDSM_T::copy(from, r[0], r[1]);
    } else {
      SM75_U16x8_LDSM_T::copy(from, r[0], r[1], r[2], r[3]);
    }
    CUTE_UNROLL
    for (int i = 0; i < (last ? 2 : 4); ++i) {
      float2 const z = widen<Element>(r[i]);
      values[4 * group + 2 * i] += z.x, values[4 * group + 2 * i + 1] += z.y;
    }
  }
}

// Bias and activation, SiLU or any other, for as many values at a time as registers hold.
template <bool kSilu, int kValues>
CUTE_DEVICE void finish_slices(float (&acc)[kValues], FilterPair pair, Problem const &p) {
  constexpr int kSlice = kValues % 16 == 0 ? 16 : kValues % 20 == 0 ? 20 : kValues;
  static_assert(kValues % kSlice == 0);
  CUTE_UNROLL
  for (int first = 0; first < kValues; first += kSlice) {
    CUTE_UNROLL
    for (int i = first; i < first + kSlice; ++i) acc[i] += pair.bias[(i - first) / 2 % 2];
    if constexpr (kSilu) {
      CUTE_UNROLL
      for (int i = first; i < first + kSlice; i += 2) silu_pair(acc[i], acc[i + 1]);
    } else {
      activate(make_tensor(&acc[first], Layout<Int<kSlice>>{}), p);
    }
    pair = biases_after(__float_as_uint(acc[first + kSlice - 1]), pair, p);
  }
}

// Bias and activation of a warpgroup's sums where the shortcut comes after them. Returns what is left for the epilogue
// to apply, with the bias in `pair`.
template <int kValues>
CUTE_DEVICE Activation finish_before_shortcut(float (&acc)[kValues], FilterPair &pair, Problem const &p) {
  if (p.residual != Residual::kAfter) return p.activation;
  if (p.activation == Activation::kSilu) {
    finish_slices<true>(acc, pair, p);
  } else {
    finish_slices<false>(acc, pair, p);
  }
  pair.bias[0] = pair.bias[1] = 0.f;
  return Activation::kNone;
}

}  // namespace cutefuse::conv
