#include "device.h"

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>

#include "capture.h"
#endif

namespace cutefuse {

#if CUTEFUSE_WITH_CUDA

char const *text_of(std::int32_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // without this, the application's next check would see an error that it did not cause
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

namespace {

struct Prepared {
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};

  Prepared(Launch const &launch, void *stream) {
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch.kernel.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(launch.kernel.shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    // Others let no kernel start early, and to ask for it all the same costs 0.2 to 0.6 us on an H200.
    if (launch.early && !follows_others(stream)) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch.cluster > 1) {
      cudaLaunchAttribute &size = attributes[config.numAttrs++];
      size.id = cudaLaunchAttributeClusterDimension;
      size.val.clusterDim.x = static_cast<unsigned>(launch.cluster);
      size.val.clusterDim.y = size.val.clusterDim.z = 1;
      // By default a multiprocessor may get two blocks of small tiles while others get none.
      cudaLaunchAttribute &policy = attributes[config.numAttrs++];
      policy.id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
      policy.val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
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
  if (launch.blocks > kMostBlocks) return "it takes more than the 2^31 blocks of one launch; split the batch";
  return here ? allow_shared(launch) : nullptr;
}

}  // namespace cutefuse
