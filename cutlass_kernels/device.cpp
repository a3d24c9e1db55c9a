#include "device.h"

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace cutefuse {

bool current_device(std::int32_t *sm, std::int32_t *sm_count) {
  *sm = *sm_count = 0;
#if CUTEFUSE_WITH_CUDA
  int device = 0, major = 0, minor = 0, count = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    *sm = 10 * major + minor;
    *sm_count = count;
    return true;
  }
  // Without this, the application's next check would see an error that it did not cause.
  cudaGetLastError();
#endif
  return false;
}

}  // namespace cutefuse
