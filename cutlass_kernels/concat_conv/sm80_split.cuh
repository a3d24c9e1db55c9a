// Deterministic split-K: every split of a tile leaves its sums in the workspace, the last one to arrive adds them in
// order.
#pragma once

#include <cute/tensor.hpp>

#include "tiles.h"

namespace cutefuse::concat_conv {

// Returns true in the block that now holds the whole tile in `acc`; the others are done. Sums lie in the order of the
// fragments, so every access is 16 bytes a thread and whole lines a warp. `flag` is shared memory nobody else uses now.
// The counter is zero before the launch and after it.
template <int kThreads, class Tensor>
__device__ __forceinline__ bool reduce_splits(Tensor &acc, Params const &params, int tile, int split, unsigned *flag) {
  constexpr int kVectors = decltype(cute::size(acc))::value / 4;
  int const thread = threadIdx.x;
  float4 *const of_tile = static_cast<float4 *>(params.partials) + int64_t(tile) * params.splits * kVectors * kThreads;
  float4 *const mine = of_tile + int64_t(split) * kVectors * kThreads + thread;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    __stcg(mine + i * kThreads, make_float4(acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)));
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) *flag = atomicAdd(params.counters + tile, 1u);
  __syncthreads();
  bool const last = *flag == unsigned(params.splits - 1);
  __syncthreads();  // the epilogue reuses the flag's memory
  if (!last) return false;
  __threadfence();
  if (thread == 0) params.counters[tile] = 0;
  cute::clear(acc);
  CUTE_NO_UNROLL
  for (int part = 0; part < params.splits;
       ++part) {  // in this order always; the loads of one part are in flight together
    float4 const *const from = of_tile + int64_t(part) * kVectors * kThreads + thread;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float4 const sum = __ldcg(from + i * kThreads);
      acc(4 * i) += sum.x, acc(4 * i + 1) += sum.y, acc(4 * i + 2) += sum.z, acc(4 * i + 3) += sum.w;
    }
  }
  return true;
}

}  // namespace cutefuse::concat_conv
