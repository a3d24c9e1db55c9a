// The CUDA runtime library's device, memory and kernels, for one emulated GPU whose memory is the host's.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tensor_map.h"

namespace emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_sentence;

constexpr int kThreadsPerBlock = 1024, kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;
constexpr int kReservedShared = 1024;  // of each block, for the system
constexpr unsigned kPortableCluster = 8;

constexpr DeviceTable kDevices[] = {{90, 132, 232448, 233472}, {89, 128, 101376, 102400}, {80, 108, 166912, 167936}};

Dim3 of(dim3 const &d) { return {d.x, d.y, d.z}; }
unsigned count(Dim3 const &d) { return d.x * d.y * d.z; }

Dim3 cluster_of(cudaLaunchConfig_t const &config) {
  Dim3 cluster;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    auto const &value = config.attrs[i].val;
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
    }
  }
  return cluster;
}

bool starts_early(cudaLaunchConfig_t const &config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) continue;
    return config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  return false;
}

}  // namespace

DeviceTable const &device() {
  static DeviceTable const chosen = [] {
    char const *name = std::getenv("CUTEFUSE_EMULATED_SM");
    int const sm = name == nullptr ? 90 : std::atoi(name);
    for (DeviceTable const &row : kDevices) {
      if (row.sm != sm) continue;
      DeviceTable found = row;
      if (char const *fewer = std::getenv("CUTEFUSE_EMULATED_MULTIPROCESSORS"))
        found.multiprocessors = std::atoi(fewer);
      return found;
    }
    std::fprintf(stderr, "emulator: CUTEFUSE_EMULATED_SM is '%s'; write 90, 89 or 80\n", name);
    std::exit(1);
  }();
  return chosen;
}

cudaError_t failed(cudaError_t error, std::string sentence) {
  std::fprintf(stderr, "emulator: %s\n", sentence.c_str());
  last_sentence = std::move(sentence);
  return last_error = error;
}

cudaError_t guarded(std::function<cudaError_t()> const &work) {
  try {
    return work();
  } catch (std::exception const &e) {
    return failed(cudaErrorLaunchFailure, e.what());
  }
}

cudaError_t start(Start const &start, void **parameters, cudaStream_t stream) {
  return guarded([&] {
    Function const function = function_of(*start.kernel);
    FunctionFacts const known = facts(function);
    std::string const &name = start.kernel->name;
    unsigned const threads = count(start.block), cluster = count(start.cluster);
    if (count(start.grid) == 0 || threads == 0 || threads > kThreadsPerBlock ||
        (known.max_threads > 0 && threads > static_cast<unsigned>(known.max_threads))) {
      return failed(cudaErrorInvalidConfiguration, name + " is launched with a grid or a block that it does not allow");
    }
    if (start.dynamic_shared_bytes > static_cast<std::size_t>(start.kernel->dynamic_limit)) {
      return failed(cudaErrorInvalidValue, name + " asks for more shared memory than cudaFuncSetAttribute allowed it");
    }
    bool const whole = cluster != 0 && start.grid.x % start.cluster.x == 0 && start.grid.y % start.cluster.y == 0 &&
                       start.grid.z % start.cluster.z == 0;
    if (!whole || cluster > kPortableCluster || (cluster > 1 && device().sm < 90)) {
      return failed(cudaErrorInvalidClusterSize,
                    name + " is launched in clusters that the grid or the GPU does not allow");
    }
    GridLaunch const launch{function, start.grid, start.block, start.cluster, start.dynamic_shared_bytes, start.early};
    cudaStreamCaptureStatus status{};
    cudaStreamIsCapturing(stream, &status);
    if (status == cudaStreamCaptureStatusNone) {
      run(launch, parameters);
      return cudaSuccess;
    }
    // The kernels take one structure each; the caller's is gone when the graph is launched.
    auto const *bytes = static_cast<unsigned char const *>(parameters[0]);
    std::vector<unsigned char> const copy(bytes, bytes + known.parameter_bytes);
    auto const work = [launch, copy] {
      return guarded([&] {
        void *only = const_cast<unsigned char *>(copy.data());
        run(launch, &only);
        return cudaSuccess;
      });
    };
    record(stream, work, start.kernel);
    return cudaSuccess;
  });
}

}  // namespace emulator

using emulator::device;
using emulator::failed;
using emulator::guarded;

extern "C" {

// The last sentence of this thread, for whoever got nothing but a number.
char const *cutefuse_emulator_error() { return emulator::last_sentence.c_str(); }

// For the tests' own tensors: see grid.h.
void cutefuse_emulator_allow(void const *data, std::size_t bytes) { emulator::allow(data, bytes); }
void cutefuse_emulator_forbid(void const *data) { emulator::forbid(data); }
void cutefuse_emulator_timing(int timing, std::uint64_t seed) {
  emulator::set_timing(static_cast<emulator::Timing>(timing), seed);
}

// ---- errors ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  cudaError_t const error = emulator::last_error;
  emulator::last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return emulator::last_error; }

char const *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : emulator::last_sentence.c_str();
}

char const *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

// ---- device ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *index) {
  *index = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int index) {
  return index == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice, "the emulator has one device, 0");
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index) {
  if (index != 0) return failed(cudaErrorInvalidDevice, "the emulator has one device, 0");
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = device().sm / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = device().sm % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = device().multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device().shared_per_block;
      return cudaSuccess;
    default:
      return failed(cudaErrorInvalidValue, "the emulator does not know device attribute " + std::to_string(attribute));
  }
}

// ---- memory: what nobody wrote is NaN -------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **pointer, std::size_t bytes) {
  std::size_t const rounded = std::max<std::size_t>(256, (bytes + 255) / 256 * 256);
  *pointer = std::aligned_alloc(256, rounded);
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation, "out of memory");
  std::memset(*pointer, 0xff, rounded);
  emulator::allow(*pointer, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  if (pointer != nullptr) emulator::forbid(pointer);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, void const *from, std::size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, std::size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, void const *from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  auto const work = [=] { return cudaMemcpy(to, from, bytes, kind); };
  return emulator::record(stream, work) ? cudaSuccess : work();
}

cudaError_t cudaMemsetAsync(void *to, int value, std::size_t bytes, cudaStream_t stream) {
  auto const work = [=] { return cudaMemset(to, value, bytes); };
  return emulator::record(stream, work) ? cudaSuccess : work();
}

// ---- kernels --------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void const *host_function) {
  return guarded([&] {
    emulator::Kernel const &kernel = emulator::kernel_at(host_function);
    emulator::FunctionFacts const known = emulator::facts(emulator::function_of(kernel));
    *attributes = {};
    attributes->sharedSizeBytes = static_cast<std::size_t>(known.static_shared_bytes);
    attributes->maxThreadsPerBlock = known.max_threads > 0 ? known.max_threads : emulator::kThreadsPerBlock;
    attributes->maxDynamicSharedSizeBytes = kernel.dynamic_limit;
    attributes->ptxVersion = attributes->binaryVersion = device().sm;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(void const *host_function, cudaFuncAttribute attribute, int value) {
  return guarded([&] {
    emulator::Kernel &kernel = emulator::kernel_at(host_function);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;  // hints, all of the others
    int const fixed = emulator::facts(emulator::function_of(kernel)).static_shared_bytes;
    if (value < 0 || value + fixed > device().shared_per_block) {
      return failed(cudaErrorInvalidValue, kernel.name + " asks for more shared memory than a block of this GPU has");
    }
    kernel.dynamic_limit = value;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const *config, void const *host_function, void **parameters) {
  return guarded([&] {
    emulator::Kernel &kernel = emulator::kernel_at(host_function);
    emulator::Start const start{&kernel,
                                emulator::of(config->gridDim),
                                emulator::of(config->blockDim),
                                emulator::cluster_of(*config),
                                config->dynamicSmemBytes,
                                emulator::starts_early(*config)};
    return emulator::start(start, parameters, config->stream);
  });
}

cudaError_t cudaLaunchKernel(void const *host_function, dim3 grid, dim3 block, void **parameters, std::size_t shared,
                             cudaStream_t stream) {
  cudaLaunchConfig_t const config{grid, block, shared, stream, nullptr, 0};
  return cudaLaunchKernelExC(&config, host_function, parameters);
}

// Without the borders of a GPU's processing clusters, which leave a few multiprocessors over on some.
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, void const *host_function, cudaLaunchConfig_t const *config) {
  return guarded([&] {
    int const fixed = emulator::facts(emulator::function_of(emulator::kernel_at(host_function))).static_shared_bytes;
    int const shared = fixed + static_cast<int>(config->dynamicSmemBytes) + emulator::kReservedShared;
    int const threads = static_cast<int>(emulator::count(emulator::of(config->blockDim)));
    int const blocks = std::min({device().shared_per_multiprocessor / shared,
                                 emulator::kThreadsPerMultiprocessor / threads, emulator::kBlocksPerMultiprocessor});
    *clusters = blocks * device().multiprocessors / static_cast<int>(emulator::count(emulator::cluster_of(*config)));
    return cudaSuccess;
  });
}

// ---- the driver's functions -----------------------------------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(char const *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  std::string const wanted = name;
  *function = wanted == "cuTensorMapEncodeTiled"      ? reinterpret_cast<void *>(&emulator::encode_tiled)
              : wanted == "cuTensorMapEncodeIm2col"   ? reinterpret_cast<void *>(&emulator::encode_im2col)
              : wanted == "cuTensorMapReplaceAddress" ? reinterpret_cast<void *>(&emulator::replace_address)
                                                      : nullptr;
  *found = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(char const *name, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *found) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}

}  // extern "C"
