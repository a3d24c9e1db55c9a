#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "op.h"

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace cutefuse {

// ---- which GPU can run what -----------------------------------------------------------------------------------------

namespace {

// Shared memory of a block by compute capability (CUDA programming guide, table of technical specifications).
struct Limit {
  std::int32_t sm, shared_kib;
};
constexpr Limit kLimits[] = {{80, 163},  {86, 99},   {87, 163},  {89, 99},  {90, 227},
                             {100, 227}, {103, 227}, {110, 227}, {120, 99}, {121, 99}};

// The architectures that the build is configured for, by nvcc's names.
std::vector<std::string> const &targets() {
  static std::vector<std::string> const kNames = [] {
    std::istringstream text(CUTEFUSE_TARGETS);
    return std::vector<std::string>(std::istream_iterator<std::string>(text), {});
  }();
  return kNames;
}

}  // namespace

bool builds_for(char const *architecture) {
  return std::find(targets().begin(), targets().end(), architecture) != targets().end();
}

// Machine code runs on its own major version of the compute capability, from its minor version on; that of an
// architecture whose name ends in `a` on this one alone (CUDA programming guide, binary compatibility).
char const *reject_device(std::int32_t sm) {
  bool const runs = sm == 0 || std::any_of(targets().begin(), targets().end(), [&](std::string const &name) {
                      int const number = std::atoi(name.c_str());
                      return name.back() == 'a' ? number == sm : number / 10 == sm / 10 && number <= sm;
                    });
  if (runs) return nullptr;
  return sentence(
      "cutefuse: a GPU of compute capability %d.%d is asked for, this library holds code for %s alone; build it with "
      "-DCUTEFUSE_CUDA_ARCHS naming that architecture if the kernels know it, or leave the model unfused",
      sm / 10, sm % 10, CUTEFUSE_TARGETS);
}

std::int32_t shared_limit(std::int32_t sm) {
  std::int32_t kib = sm == 0 ? 227 : 99;  // an unknown device gets what all have
  for (Limit const &limit : kLimits) {
    if (limit.sm == sm) kib = limit.shared_kib;
  }
  return kib * 1024;
}

// ---- the CUDA runtime -----------------------------------------------------------------------------------------------

#if CUTEFUSE_WITH_CUDA

namespace {

char const *text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // without this, the application's next check would see an error that it did not cause
  return cudaGetErrorString(error);
}

struct Prepared {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};

  Prepared(Launch const &launch, void *stream) {
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch.kernel.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(launch.kernel.shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (launch.early) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch.cluster > 1) {
      cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(launch.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
  Prepared(Prepared const &) = delete;
};

std::int32_t current_device_index() {
  int index = -1;
  return text_of(cudaGetDevice(&index)) == nullptr ? index : -1;
}

char const *allow_shared(Launch const &launch) {
  if (launch.kernel.function == nullptr) return "the kernel is not in this library";
  int device = 0, limit = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, launch.kernel.function);
  if (error == cudaSuccess && attributes.maxDynamicSharedSizeBytes < launch.kernel.shared_bytes) {
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    // The whole limit: a plan of another shape, still in use, may have asked for more than this one.
    int const most = limit - static_cast<int>(attributes.sharedSizeBytes);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(launch.kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
  }
  return text_of(error);
}

}  // namespace

DeviceScope::DeviceScope(std::int32_t index) : before_(current_device_index()), entered_(index == before_) {
  if (entered_ || index < 0) return;
  changed_ = entered_ = text_of(cudaSetDevice(index)) == nullptr;
}

DeviceScope::~DeviceScope() {
  if (changed_) cudaSetDevice(before_);
}

Device current_device() {
  int const index = current_device_index();
  int major = 0, minor = 0, count = 0;
  if (index < 0 || text_of(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index)) != nullptr ||
      text_of(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index)) != nullptr ||
      text_of(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index)) != nullptr) {
    return {};
  }
  return {index, 10 * major + minor, count};
}

std::int32_t clusters_at_once(Kernel const &kernel, std::int32_t cluster) {
  Launch launch{kernel, std::int64_t(cluster) * 1024, cluster, false};
  Prepared const prepared(launch, nullptr);
  int clusters = 0;
  cudaError_t const error = cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &prepared.config);
  return text_of(error) == nullptr ? clusters : 0;
}

char const *start(Launch const &launch, void *params, void *stream) {
  Prepared const prepared(launch, stream);
  return text_of(cudaLaunchKernelExC(&prepared.config, launch.kernel.function, &params));
}

#else

DeviceScope::DeviceScope(std::int32_t index) : before_(-1), entered_(index == -1) {}

DeviceScope::~DeviceScope() = default;

Device current_device() { return {}; }

std::int32_t clusters_at_once(Kernel const &, std::int32_t) { return 0; }

char const *start(Launch const &, void *, void *) {
  return "this library was built without CUDA; install nvcc and build it again";
}

namespace {
char const *allow_shared(Launch const &) { return nullptr; }
}  // namespace

#endif

char const *prepare(Launch const &launch, bool here) {
  if (launch.blocks > 0x7fffffff) return "it takes more than the 2^31 blocks of one launch; split the batch";
  return here ? allow_shared(launch) : nullptr;
}

}  // namespace cutefuse
