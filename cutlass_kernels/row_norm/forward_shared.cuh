// Forward for rows that registers cannot hold: in the shared memory of a block, or of the blocks of a cluster. Copies
// into shared memory keep more bytes in flight than registers would.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "moments.cuh"

namespace cutefuse::row_norm {

// For 10.0 and newer the compiler takes more registers, and would spill them for so many blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kSharedBound = kSharedBlocks - 1;
#else
constexpr int kSharedBound = kSharedBlocks;
#endif

// Each block takes p.slice vectors of the row. Threads read what they copied themselves, so only sums need a barrier.
template <class Element, bool kShifted, bool kLayer>
__global__ void __launch_bounds__(kSharedThreads, kSharedBound) row_norm_forward_shared(ForwardParams const p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kVec = kVector<Element>, kPieces = 4;  // copies that are waited for one after another
  extern __shared__ uint4 held[];                      // x, then the residual
  __shared__ MomentSlots<kSharedThreads / 32 * kMaxCluster> slots;
  int const cluster = 1 << p.log_cluster, threads = blockDim.x;
  if (cluster > 1) announce_barriers<1>(&slots.arrived);
  int const begin = cluster > 1 ? int(cute::block_rank_in_cluster()) * p.slice : 0;
  int64_t const index = blockIdx.x >> p.log_cluster;
  Row<Element, kShifted> const row(index, p.problem);
  bool const residual = p.residual != nullptr;
  int const size = min(p.slice, (row.last + kVec - 1) / kVec - begin);  // vectors of this block
  int const turns = (p.slice + threads - 1) / threads, piece = (turns + kPieces - 1) / kPieces;
  auto const copy = [&](void const *mX, uint4 *to, int t) {
    if (row.whole(begin + t)) {
      uint4 const *const from = reinterpret_cast<uint4 const *>(row.at(static_cast<Element const *>(mX), begin + t));
      cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(*from, to[t]);
    } else {
      Vector<Element> const r = row.load(mX, begin + t);
      to[t] = reinterpret_cast<uint4 const &>(r);
    }
  };
  auto const values = [&](int t) {
    Values<Element> r = to_float<Element>(reinterpret_cast<Vector<Element> const &>(held[t]));
    if (residual) {
      Values<Element> const rR = to_float<Element>(reinterpret_cast<Vector<Element> const &>(held[p.slice + t]));
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) r[j] += rR[j];
    }
    return r;
  };
  wait_for_previous_kernel();
  let_next_kernel_start();

  CUTE_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    for (int turn = i * piece; turn < (i + 1) * piece; ++turn) {
      int const t = turn * threads + threadIdx.x;
      if (t >= size) break;
      copy(p.x, held, t);
      if (residual) copy(p.residual, held + p.slice, t);
    }
    cute::cp_async_fence();
  }
  Deviations<kLayer> of;
  int count = 0;
  auto const over = [&](int i, auto visit) {
    for (int turn = i * piece; turn < (i + 1) * piece; ++turn) {
      int const t = turn * threads + threadIdx.x;
      if (t >= size) break;
      visit(begin + t, values(t));
    }
  };
  auto const collect = [&](int v, Values<Element> const &r) {
    count += kShifted ? row.elements(v) : kVec;
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      if (!kLayer || row.has(v, j)) of.add(r[j]);
    }
  };
  cute::cp_async_wait<3>();
  if constexpr (kLayer) {
    // The mean of the first piece is close enough to the thread's mean for its squares not to cancel.
    float sum = 0.f;
    over(0, [&](int v, Values<Element> const &r) {
      count += kShifted ? row.elements(v) : kVec;
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) sum += r[j];
    });
    of.centre = count > 0 ? __fdividef(sum, float(count)) : 0.f;
    count = 0;
  }
  over(0, collect);
  cute::cp_async_wait<2>();
  over(1, collect);
  cute::cp_async_wait<1>();
  over(2, collect);
  cute::cp_async_wait<0>();
  over(3, collect);
  if (cluster > 1) cute::cluster_wait();  // the peers run, and their barriers are ready
  Moments const own = of.moments(float(count));
  Statistics const statistics =
      statistics_of<Element>(p, cluster > 1 ? merge_cluster<kLayer, false>(own, cluster, slots)
                                            : merge_row<false, kLayer, false>(own, threads, slots));
  auto const write = [&](auto param) {
    using Param = decltype(param);
    constexpr int kAtOnce =
        kLayer || sizeof(Param) > sizeof(Element) ? 1 : 2;  // vectors whose parameters are being loaded
    for (int base = threadIdx.x; base < size; base += kAtOnce * threads) {
      Vector<Element> rY[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        // `t` is always below `size`, so the min changes nothing, but without it ptxas spills in LayerNorm of 16-bit
        // types.
        int const next = base + i * threads, t = min(next < size ? next : base, size - 1), v = begin + t;
        Parameter<Element, Param, kShifted> const gamma(p.gamma, row, v, ones<Param>());
        Parameter<Element, Param, kShifted> const beta(kLayer ? p.beta : nullptr, row, v, 0);
        rY[i] = from_float<Element>(normalise<kLayer>(values(t), statistics, gamma, beta));
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const t = base + i * threads;
        if (t >= size) break;
        if (residual) row.store(p.sum, begin + t, from_float<Element>(values(t)));
        row.store(p.y, begin + t, rY[i]);
      }
    }
  };
  p.problem.param_type == Type::kFloat32 ? write(0.f) : write(Element());
  if (begin + threadIdx.x == 0) save_statistics(p, index, statistics);
#endif
}

}  // namespace cutefuse::row_norm
