// Division by a number that is known when a call is planned, for host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CUTEFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUTEFUSE_HOST_DEVICE inline
#endif

namespace cutefuse {

// Division of 0 <= n < 2^31 by a run-time constant with one multiplication (Granlund and Montgomery 1994, section 4).
struct Divider {
  int divisor = 1;
  std::uint32_t multiplier = 0;
  int shift = 0;

  Divider() = default;
  explicit Divider(int d) : divisor(d) {
    while ((std::int64_t(1) << shift) < d) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t(1) << (31 + shift)) + d - 1) / d);
    --shift;
  }
  CUTEFUSE_HOST_DEVICE int divide(int n) const {
    return divisor == 1 ? n : static_cast<int>(std::uint64_t(n) * multiplier >> 32 >> shift);
  }
};

}  // namespace cutefuse
