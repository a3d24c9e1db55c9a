// Device memory, streams and timing for the host's callers, so that nothing but this library is needed on a machine
// with a GPU. Every function returns 0 or a CUDA error code (-1 in a build without CUDA).
#include <algorithm>
#include <cstdint>
#include <vector>

#include "host.h"

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#define CUTEFUSE_HOST_EXPORT extern "C" __attribute__((visibility("default")))

#if CUTEFUSE_WITH_CUDA

CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_use(std::int32_t index) { return cudaSetDevice(index); }
CUTEFUSE_HOST_EXPORT char const *cutefuse_device_error(std::int32_t code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_alloc(void **pointer, std::size_t bytes) {
  return cudaMalloc(pointer, bytes);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_free(void *pointer) { return cudaFree(pointer); }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_copy(void *to, void const *from, std::size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_stream(void **stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t *>(stream), cudaStreamNonBlocking);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_free_stream(void *stream) {
  return cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_wait(void *stream) {
  return cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

// Captures enqueue in a CUDA graph, as trtexec does, and replays it: median time of one enqueue in microseconds, input
// data warm in the caches. A plugin that allocates or synchronises in enqueue fails here.
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_time(void *context, void const *const *inputs, void *const *outputs,
                                                     void *workspace, std::int32_t repeats, float *median_us) {
  auto const &live = static_cast<cutefuse::host::Handle<cutefuse::host::Context> *>(context)->object;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::vector<float> times;
  auto const run = [&]() -> cudaError_t {
    cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaEventCreate(&begin);
    if (code == cudaSuccess) code = cudaEventCreate(&end);
    if (code != cudaSuccess) return code;
    // One call outside of the capture: modules load and attributes are set.
    if (live->enqueue(inputs, outputs, workspace, stream) != 0) return cudaErrorLaunchFailure;
    code = cudaStreamSynchronize(stream);
    if (code == cudaSuccess) code = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (code != cudaSuccess) return code;
    std::int32_t const enqueued = live->enqueue(inputs, outputs, workspace, stream);
    code = cudaStreamEndCapture(stream, &graph);
    if (code == cudaSuccess && enqueued != 0) code = cudaErrorLaunchFailure;
    if (code == cudaSuccess) code = cudaGraphInstantiate(&replay, graph, 0);
    for (std::int32_t i = 0; i < repeats + 3 && code == cudaSuccess; ++i) {
      float ms = 0;
      code = cudaEventRecord(begin, stream);
      if (code == cudaSuccess) code = cudaGraphLaunch(replay, stream);
      if (code == cudaSuccess) code = cudaEventRecord(end, stream);
      if (code == cudaSuccess) code = cudaEventSynchronize(end);
      if (code == cudaSuccess) code = cudaEventElapsedTime(&ms, begin, end);
      if (i >= 3) times.push_back(1000.0f * ms);
    }
    return code;
  };
  cudaError_t const code = run();
  if (replay) cudaGraphExecDestroy(replay);
  if (graph) cudaGraphDestroy(graph);
  if (begin) cudaEventDestroy(begin);
  if (end) cudaEventDestroy(end);
  if (stream) cudaStreamDestroy(stream);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return code;
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  *median_us = times.empty() ? 0 : times[times.size() / 2];
  return 0;
}

#else

CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_count() { return 0; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_use(std::int32_t) { return -1; }
CUTEFUSE_HOST_EXPORT char const *cutefuse_device_error(std::int32_t) {
  return "the plugin host was built without CUDA; install nvcc and build again";
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_alloc(void **, std::size_t) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_free(void *) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_copy(void *, void const *, std::size_t) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_stream(void **) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_free_stream(void *) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_device_wait(void *) { return -1; }
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_time(void *, void const *const *, void *const *, void *, std::int32_t,
                                                     float *) {
  return -1;
}

#endif
