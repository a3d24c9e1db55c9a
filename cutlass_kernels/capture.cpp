#include "capture.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>

#include "branches.h"
#include "device.h"
#endif

namespace cutefuse {

namespace {

// Whether the environment says it: 1 allows it to threads that say nothing, 0 forbids it to all.
bool environment_says(char const *value) {
  char const *const text = std::getenv("CUTEFUSE_SIDE_BY_SIDE");
  return text != nullptr && std::strcmp(text, value) == 0;
}

thread_local bool allowed = environment_says("1");

}  // namespace

bool let_side_by_side(bool allow) { return std::exchange(allowed, allow && !environment_says("0")); }

#if CUTEFUSE_WITH_CUDA

namespace {

using Nodes = std::vector<Branches::Node>;

#if CUDART_VERSION >= 13000
constexpr auto kGetCaptureInfo = cudaStreamGetCaptureInfo;
constexpr auto kSetDependencies = cudaStreamUpdateCaptureDependencies;
#else
constexpr auto kGetCaptureInfo = cudaStreamGetCaptureInfo_v3;
constexpr auto kSetDependencies = cudaStreamUpdateCaptureDependencies_v2;
#endif

// A capture, and the nodes that the next one recorded waits for. `id` 0: nothing is captured.
struct Capture {
  unsigned long long id = 0;
  Nodes ends;
};

Capture capture_of(void *stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraphNode_t const *nodes = nullptr;
  cudaGraphEdgeData const *edges = nullptr;
  std::size_t count = 0;
  Capture found;
  cudaError_t const error =
      kGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &found.id, nullptr, &nodes, &edges, &count);
  if (text_of(error) != nullptr || status != cudaStreamCaptureStatusActive) return {};
  found.ends.assign(nodes, nodes + count);
  return found;
}

char const *wait_for(void *stream, Nodes const &nodes) {
  std::vector<cudaGraphNode_t> list;
  list.reserve(nodes.size() + 1);  // an address also where there is none
  for (Branches::Node const node : nodes) list.push_back(static_cast<cudaGraphNode_t>(node));
  return text_of(kSetDependencies(static_cast<cudaStream_t>(stream), list.data(), nullptr, list.size(),
                                  cudaStreamSetCaptureDependencies));
}

bool same(Nodes a, Nodes b) {
  std::sort(a.begin(), a.end()), std::sort(b.begin(), b.end());
  return a == b;
}

bool is_our_kernel(Branches::Node node) {
  auto const ours = static_cast<cudaGraphNode_t>(node);
  cudaGraphNodeType type{};
  cudaKernelNodeParams params{};
  char const *name = nullptr;  // mangled
  return text_of(cudaGraphNodeGetType(ours, &type)) == nullptr && type == cudaGraphNodeTypeKernel &&
         text_of(cudaGraphKernelNodeGetParams(ours, &params)) == nullptr &&
         text_of(cudaFuncGetName(&name, params.func)) == nullptr && std::strstr(name, "8cutefuse") != nullptr;
}

// What this thread captured last. Another thread, or another capture in between, finds that it does not know what the
// next launch comes after, and takes it all as not ours.
thread_local unsigned long long captured = 0;
thread_local Branches branches;

std::vector<Memory> memory_of(Plan const &plan, Operands const &operands) {
  std::vector<Memory> memory;
  auto const add = [&](void const *data, std::int64_t bytes, bool written) {
    auto const begin = reinterpret_cast<std::uintptr_t>(data);
    if (data != nullptr) memory.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), written});
  };
  for (std::int32_t i = 0; i < plan.num_inputs; ++i) add(operands.inputs[i], plan.extents[i], false);
  for (std::int32_t i = 0; i < plan.num_outputs; ++i) add(operands.outputs[i], plan.extents[plan.num_inputs + i], true);
  if (plan.workspace_bytes > 0) add(operands.workspace, plan.workspace_bytes, true);
  return memory;
}

}  // namespace

bool follows_others(void *stream) {
  Nodes const ends = capture_of(stream).ends;
  return !std::all_of(ends.begin(), ends.end(), is_our_kernel);
}

SideBySide::SideBySide(Plan const &plan, Operands const &operands) {
  if (!allowed) return;
  Capture const now = capture_of(operands.stream);
  if (now.id == 0) return;
  if (now.id != captured || !same(now.ends, branches.ends())) captured = now.id, branches = Branches(now.ends);
  awaited_ = branches.wait_for(memory_of(plan, operands));
  if (same(awaited_, now.ends) || wait_for(operands.stream, awaited_) == nullptr) stream_ = operands.stream;
}

char const *SideBySide::end() {
  if (stream_ == nullptr) return nullptr;
  Capture const now = capture_of(stream_);
  if (now.id == 0) return nullptr;                                // lost already: what was launched says why
  if (!same(now.ends, awaited_)) branches.add(now.ends.front());  // else the launch failed
  return same(now.ends, branches.ends()) ? nullptr : wait_for(stream_, branches.ends());
}

#else

bool follows_others(void *) { return false; }
SideBySide::SideBySide(Plan const &, Operands const &) {}
char const *SideBySide::end() { return nullptr; }

#endif

}  // namespace cutefuse
