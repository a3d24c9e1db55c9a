// What a number type means to the Hopper kernels: the type of wgmma's sums, and the type in which outputs are staged.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>

namespace cutefuse::conv {

template <class Element>
struct Sm90Numbers {
  using Sum = float;
  using Output = Element;
  static constexpr bool kScaled = false, kDirect = false;
};

// Float32 in memory, which TMA rounds to tf32 on its way to shared memory. Outputs are not staged there: stmatrix moves
// 16 bits, and 64 filters are twice a staging row (direct_store.cuh).
template <>
struct Sm90Numbers<cutlass::tfloat32_t> {
  using Sum = float;
  using Output = float;
  static constexpr bool kScaled = false, kDirect = true;
};

// Sums are 32-bit integers, in unsigned registers as wgmma declares them. Outputs are float16, or int8 in half of that
// room.
template <>
struct Sm90Numbers<std::int8_t> {
  using Sum = std::uint32_t;
  using Output = cutlass::half_t;
  static constexpr bool kScaled = true, kDirect = false;  // sources and filters have scales
};

// The tensor cores keep some 14 bits of a sum of float8 products.
template <>
struct Sm90Numbers<cutlass::float_e4m3_t> {
  using Sum = float;
  using Output = cutlass::half_t;
  static constexpr bool kScaled = true, kDirect = false;
};

constexpr int kStepBytes = 32;  // of a pixel's channels, in one step of wgmma

}  // namespace cutefuse::conv
