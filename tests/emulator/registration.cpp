// What the code that nvcc generates for the host calls: kernels and their fat binaries are registered as a library is
// loaded, and looked up by the address of a host function when they are launched.
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>

#include "fatbin.h"
#include "runtime.h"

namespace emulator {

struct FatBinary {
  void const *wrapper;
  std::once_flag parsing;
  std::shared_ptr<Module const> module;
};

namespace {

std::mutex mutex;

// Kernels register before main(), in any order among the files: no plain global would be there in time.
std::map<void const *, Kernel> &kernels() {
  static std::map<void const *, Kernel> all;
  return all;
}

struct CallConfiguration {
  dim3 grid, block;
  std::size_t shared;
  void *stream;
};
thread_local std::vector<CallConfiguration> configurations;

}  // namespace

Kernel &kernel_at(void const *host_function) {
  std::lock_guard const lock(mutex);
  auto const found = kernels().find(host_function);
  if (found == kernels().end()) throw std::runtime_error("no kernel was registered at this host function's address");
  return found->second;
}

Function function_of(Kernel const &kernel) {
  FatBinary &binary = *kernel.binary;
  std::call_once(binary.parsing, [&] {
    std::vector<Ptx> const all = ptx_in(binary.wrapper);
    Ptx const *ptx = choose(all, device().sm);
    if (ptx == nullptr) {
      throw std::runtime_error("the fat binary of " + kernel.name + " has no PTX that sm_" +
                               std::to_string(device().sm) + " runs");
    }
    binary.module = parse(ptx->text);
  });
  return {binary.module, kernel.name};
}

}  // namespace emulator

using emulator::FatBinary;

extern "C" {

void **__cudaRegisterFatBinary(void *wrapper) {
  auto *binary = new FatBinary{wrapper, {}, {}};
  return reinterpret_cast<void **>(binary);
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **handle) {
  auto *binary = reinterpret_cast<FatBinary *>(handle);
  std::lock_guard const lock(emulator::mutex);
  auto &all = emulator::kernels();
  for (auto next = all.begin(); next != all.end();) {
    next = next->second.binary == binary ? all.erase(next) : std::next(next);
  }
  delete binary;
}

void __cudaRegisterFunction(void **handle, char const *host_function, char *, char const *name, int, uint3 *, uint3 *,
                            dim3 *, dim3 *, int *) {
  std::lock_guard const lock(emulator::mutex);
  emulator::kernels()[host_function] = {reinterpret_cast<FatBinary *>(handle), name};
}

// Constants of CUTLASS that nobody copies to: the interpreter reads them from the PTX.
void __cudaRegisterVar(void **, char *, char *, char const *, int, std::size_t, int, int) {}

char __cudaInitModule(void **) { return 0; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void *stream) {
  emulator::configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, std::size_t *shared, void *stream) {
  auto &all = emulator::configurations;
  if (all.empty())
    return emulator::failed(cudaErrorMissingConfiguration, "a kernel is called without <<<grid, block>>>");
  *grid = all.back().grid;
  *block = all.back().block;
  *shared = all.back().shared;
  *static_cast<void **>(stream) = all.back().stream;
  all.pop_back();
  return cudaSuccess;
}

// The handle is the host function's address.
cudaError_t __cudaGetKernel(cudaKernel_t *handle, void const *host_function) {
  *handle = static_cast<cudaKernel_t>(const_cast<void *>(host_function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void **parameters, std::size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(handle, grid, block, parameters, shared, stream);
}

}  // extern "C"
