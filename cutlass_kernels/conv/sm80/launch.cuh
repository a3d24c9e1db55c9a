// Host side of the Ampere kernels: shared-memory limit, grid, and the dispatch over the table's tiles.
#pragma once

#include <atomic>

#include "conv/sm80/main_loop.cuh"
#include "conv/sm80/taps.cuh"

namespace cutefuse::conv {

// Null when the kernel was enqueued, else one sentence. Raises the kernel's shared-memory limit once per device.
template <class Traits>
char const *launch_sm80(Params params, void *stream) {
  params.k_blocks = k_blocks<Traits::kK>(params.problem);
  auto *const kernel = [] {
    if constexpr (Traits::kSharesTaps) {
      return &concat_conv_sm80_taps<Traits>;
    } else {
      return &concat_conv_sm80<Traits>;
    }
  }();
  static std::atomic<uint64_t> ready{0};  // one bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (error == cudaSuccess && !(ready.load(std::memory_order_relaxed) & bit)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
    ready.fetch_or(error == cudaSuccess ? bit : 0, std::memory_order_relaxed);
  }
  Problem const &p = params.problem;
  int64_t const tiles = int64_t(ceil_div(p.N * p.P * p.Q, Traits::kM)) * ceil_div(p.K, Traits::kN);
  int64_t const blocks = tiles * params.splits;
  if (blocks > 0x7fffffff) {
    return sentence("concat_conv: %lld blocks exceed the 2^31 of one launch; split the batch", (long long)blocks);
  }
  if (error == cudaSuccess) {
    kernel<<<unsigned(blocks), Traits::kThreads, Traits::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess && params.splits > 1) {
    error = launch_finish<typename Traits::Output>(params, static_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return nullptr;
  return sentence("concat_conv: tile %s could not be launched (%s); check that the library was built for this GPU",
                  Traits::kTile.name, cudaGetErrorString(error));
}

// One switch per element type over the tiles of the table that it can run.
template <class Element, class... Rows>
char const *launch_sm80_tile(int tile_id, Params const &params, void *stream) {
  char const *reason = nullptr;
  bool const found =
      ((tile_id == Rows::kTile.id && (reason = launch_sm80<Sm80<Element, Rows>>(params, stream), true)) || ...);
  return found ? reason : sentence("concat_conv: tile %d is not built for this type", tile_id);
}

}  // namespace cutefuse::conv
