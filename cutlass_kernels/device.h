// The one thing that host code asks the CUDA runtime: which device will run the kernels.
#pragma once

#include <cstdint>

namespace cutefuse {

// Compute capability * 10 and multiprocessors of the calling thread's current device. False without a usable device or
// in a build without CUDA, and then both are 0, which operators read as "any device". Never leaves a CUDA error behind.
bool current_device(std::int32_t *sm, std::int32_t *sm_count);

}  // namespace cutefuse
