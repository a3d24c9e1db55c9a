// Programmatic dependent launch: on Hopper and newer GPUs a kernel may start while the one before it in the stream
// drains. It must wait before it touches what that kernel writes.
#pragma once

namespace cutefuse {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CUTEFUSE_DEPENDENT_LAUNCH 1
#endif

// CUTLASS's wait_on_dependent_grids() names no memory, so the compiler could move loads before it, and is empty on
// architectures that have the instruction.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if CUTEFUSE_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if CUTEFUSE_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The next kernel starts at most one ahead. Where room for more is left, launches that wait for each other fill the
// GPU, and each takes longer.
__device__ __forceinline__ void wait_and_let_next_start() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

}  // namespace cutefuse
