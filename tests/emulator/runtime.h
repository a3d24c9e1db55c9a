// What the files of the stand-in for the CUDA runtime library share.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "grid.h"

namespace emulator {

// A device that stands for a GPU of its compute capability: CUDA programming guide, technical specifications.
struct DeviceTable {
  int sm, multiprocessors, shared_per_block, shared_per_multiprocessor;
};
// CUTEFUSE_EMULATED_SM: 90 (also without it), 89 or 80; with CUTEFUSE_EMULATED_MULTIPROCESSORS of them.
DeviceTable const &device();

// Keeps an error as the last one of this thread and returns it; the sentence is what cudaGetErrorString says of it.
cudaError_t failed(cudaError_t error, std::string sentence);
// What `work` returns; what it throws becomes cudaErrorLaunchFailure and its sentence.
cudaError_t guarded(std::function<cudaError_t()> const &work);

// A kernel as the host knows it. Its module is parsed when it is first needed.
struct FatBinary;
struct Kernel {
  FatBinary *binary;
  std::string name;
  int dynamic_limit = 48 * 1024;  // as cudaFuncSetAttribute raises it
};
// By the address of its host function, which stays that of one kernel. Throws where no kernel has it.
Kernel &kernel_at(void const *host_function);
Function function_of(Kernel const &kernel);

struct Start {
  Kernel *kernel;
  Dim3 grid, block, cluster;
  std::size_t dynamic_shared_bytes;
  bool early = false;  // as in GridLaunch
};
// Checks what CUDA checks at a launch, then runs it, or records it where the stream is captured.
cudaError_t start(Start const &start, void **parameters, cudaStream_t stream);

// Records work as the next node of a stream's graph, `kernel` null where it is none. False: the stream is not captured.
bool record(cudaStream_t stream, std::function<cudaError_t()> work, Kernel const *kernel = nullptr);

}  // namespace emulator
