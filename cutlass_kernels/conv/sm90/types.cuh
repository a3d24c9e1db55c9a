// What a number type means to the Hopper kernels: the type of wgmma's sums, and the type in which outputs are staged.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

namespace cutefuse::conv {

template <class Element>
struct Sm90Numbers {
  // Sources and filters of int8 and float8 have scales. Outputs are float16, or of their own type in half of that room.
  static constexpr bool kScaled = sizeof(Element) == 1;
  // Float32 in memory, which TMA rounds to tf32 on its way to shared memory. Outputs are not staged there: stmatrix
  // moves 16 bits, and 64 filters are twice a staging row (direct_store.cuh).
  static constexpr bool kDirect = sizeof(Element) == 4;
  using Output = std::conditional_t<kScaled, cutlass::half_t, std::conditional_t<kDirect, float, Element>>;
  // Sums of int8 are 32-bit integers, in unsigned registers as wgmma declares them. Of float8 products the tensor cores
  // keep some 14 bits of a sum.
  using Sum = std::conditional_t<std::is_same_v<Element, std::int8_t>, std::uint32_t, float>;
};

constexpr int kStepBytes = 32;  // of a pixel's channels, in one step of wgmma

}  // namespace cutefuse::conv
