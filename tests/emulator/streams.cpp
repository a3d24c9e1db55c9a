// Streams, events and graphs of the CUDA runtime library. Work is done when it is enqueued, so that a stream holds
// nothing but what its capture has recorded.
#include <chrono>

#include "runtime.h"

using Work = std::vector<std::function<cudaError_t()>>;
using Clock = std::chrono::steady_clock;

// CUDA's handles point to these.
struct CUstream_st {
  std::unique_ptr<Work> capture;
};
struct CUgraph_st {
  Work work;
};
struct CUgraphExec_st {
  Work work;
};
struct CUevent_st {
  Clock::time_point time;
};

namespace {

// torch hands over 0, and CUDA's names of its default streams are small numbers.
bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

}  // namespace

namespace emulator {

Work *captured(cudaStream_t stream) { return is_default(stream) ? nullptr : stream->capture.get(); }

}  // namespace emulator

using emulator::captured;
using emulator::failed;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!is_default(stream)) delete stream;
  return cudaSuccess;
}

// As CUDA, which would have to wait for work that a capture only records.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captured(stream) == nullptr) return cudaSuccess;
  return failed(cudaErrorStreamCaptureUnsupported, "a stream was waited for while it is captured");
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  *status = captured(stream) == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (is_default(stream) || captured(stream) != nullptr) {
    return failed(cudaErrorStreamCaptureUnsupported, "the default stream, or one that is captured, cannot be captured");
  }
  stream->capture = std::make_unique<Work>();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = nullptr;
  if (captured(stream) == nullptr) return failed(cudaErrorIllegalState, "a capture ends that did not begin");
  *graph = new CUgraph_st{std::move(*stream->capture)};
  stream->capture.reset();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *replay, cudaGraph_t graph, unsigned long long) {
  *replay = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t) {
  for (auto const &work : replay->work) {
    if (cudaError_t const error = work(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  delete replay;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// ---- events ---------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}

}  // extern "C"
