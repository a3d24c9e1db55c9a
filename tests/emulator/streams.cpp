// Streams, events and graphs of the CUDA runtime library. Work is done when it is enqueued, so that a stream holds
// nothing but what its capture has recorded.
#include <algorithm>
#include <chrono>
#include <random>

#include "runtime.h"

using Clock = std::chrono::steady_clock;

// CUDA's handles point to these.
struct CUgraphNode_st {
  std::function<cudaError_t()> work;
  emulator::Kernel const *kernel;
  std::vector<CUgraphNode_st *> before;  // that it waits for
};
using Nodes = std::vector<std::shared_ptr<CUgraphNode_st>>;  // in the order in which they were recorded
struct CUgraph_st {
  Nodes nodes;
};
struct CUgraphExec_st {
  Nodes nodes;
  std::mt19937 random;
  bool launched = false;
};
struct Capture {
  unsigned long long id;
  Nodes nodes;
  std::vector<CUgraphNode_st *> ends;  // that the next node waits for
};
struct CUstream_st {
  std::unique_ptr<Capture> capture;
};
struct CUevent_st {
  Clock::time_point time;
};

namespace {

// torch hands over 0, and CUDA's names of its default streams are small numbers.
bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

Capture *captured(cudaStream_t stream) { return is_default(stream) ? nullptr : stream->capture.get(); }

}  // namespace

namespace emulator {

bool record(cudaStream_t stream, std::function<cudaError_t()> work, Kernel const *kernel) {
  Capture *const capture = captured(stream);
  if (capture == nullptr) return false;
  capture->nodes.push_back(
      std::make_shared<CUgraphNode_st>(CUgraphNode_st{std::move(work), kernel, std::move(capture->ends)}));
  capture->ends = {capture->nodes.back().get()};
  return true;
}

}  // namespace emulator

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
  static unsigned long long captures = 0;
  stream->capture = std::make_unique<Capture>(Capture{++captures, {}, {}});
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *, cudaGraphNode_t const **ends, cudaGraphEdgeData const **edges,
                                     std::size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (Capture const *const capture = captured(stream)) {
    if (id != nullptr) *id = capture->id;
    *ends = capture->ends.data(), *edges = nullptr, *count = capture->ends.size();
  }
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes, cudaGraphEdgeData const *,
                                                std::size_t count, unsigned flags) {
  Capture *const capture = captured(stream);
  if (capture == nullptr) return failed(cudaErrorIllegalState, "a stream that is not captured has no dependencies");
  if (flags != cudaStreamSetCaptureDependencies) return failed(cudaErrorNotSupported, "dependencies are only set here");
  capture->ends.assign(nodes, nodes + count);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = nullptr;
  if (captured(stream) == nullptr) return failed(cudaErrorIllegalState, "a capture ends that did not begin");
  *graph = new CUgraph_st{std::move(stream->capture->nodes)};
  stream->capture.reset();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type) {
  *type = node->kernel == nullptr ? cudaGraphNodeTypeMemset : cudaGraphNodeTypeKernel;
  return cudaSuccess;
}

// Here a kernel's function is what cudaFuncGetName knows it by.
cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams *params) {
  params->func = const_cast<emulator::Kernel *>(node->kernel);
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(char const **name, void const *function) {
  *name = static_cast<emulator::Kernel const *>(function)->name.c_str();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *replay, cudaGraph_t graph, unsigned long long) {
  *replay = new CUgraphExec_st{graph->nodes, std::mt19937{}};
  return cudaSuccess;
}

// Nodes that do not wait for each other may come in any order: at the first launch the one that was recorded last comes
// first, later any.
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t) {
  std::vector<CUgraphNode_st *> left, done;
  for (auto const &node : replay->nodes) left.push_back(node.get());
  auto const is_done = [&](CUgraphNode_st *node) { return std::find(done.begin(), done.end(), node) != done.end(); };
  while (!left.empty()) {
    std::vector<CUgraphNode_st *> ready;
    std::copy_if(left.begin(), left.end(), std::back_inserter(ready),
                 [&](CUgraphNode_st *node) { return std::all_of(node->before.begin(), node->before.end(), is_done); });
    if (ready.empty()) return failed(cudaErrorIllegalState, "a graph's nodes wait for each other");
    CUgraphNode_st *const next = replay->launched ? ready[replay->random() % ready.size()] : ready.back();
    if (cudaError_t const error = next->work(); error != cudaSuccess) return error;
    done.push_back(next);
    left.erase(std::find(left.begin(), left.end(), next));
  }
  replay->launched = true;
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
