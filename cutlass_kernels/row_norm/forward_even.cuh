// Forward for what most models have: 16-bit rows that fill their threads, beside gamma and beta of their type. The same
// work as in forward.cuh, but every case is decided at compile time, and LayerNorm reads its values twice, not three
// times.
#pragma once

#include "moments.cuh"

namespace cutefuse::row_norm {

// A row on lanes of a warp, or on a block.
template <class Element, int kVectors, bool kWarp, bool kLayer>
__global__ void __launch_bounds__(forward_threads(kWarp, kVectors),
                                  forward_blocks(kWarp, kVectors, kLayer && !kClusters))
    row_norm_forward_even(ForwardParams const p) {
  constexpr bool kHeld = kVectors < 4;              // registers hold gamma and beta until the row's sums are there
  constexpr int kAtOnce = kWarp && !kHeld ? 2 : 1;  // vectors whose parameters are loaded at once after the sums
  __shared__ MomentSlots<kWarp ? 1 : 32> slots;
  int const lanes = kWarp ? 1 << p.log_lanes : int(blockDim.x);
  int const thread = kWarp ? threadIdx.x & (lanes - 1) : threadIdx.x;
  int64_t const index = kWarp ? (int64_t(blockIdx.x) * kForwardWarpThreads + threadIdx.x) >> p.log_lanes : blockIdx.x;
  // Lanes beyond the last row work on the last row again, since their warp shuffles, and store nothing.
  bool const valid = !kWarp || index < p.problem.rows;
  Row<Element, false> const row(valid ? index : p.problem.rows - 1, p.problem);
  uint4 const *const mG = static_cast<uint4 const *>(p.gamma) + thread;
  uint4 const *const mB = static_cast<uint4 const *>(p.beta) + thread;
  wait_for_previous_kernel();
  let_next_kernel_start();

  Fragment<Element, kVectors, true> rX;
  Parameter<Element, Element, false> rG[kVectors], rB[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    reinterpret_cast<uint4 &>(rX.raw[i]) = load_vector(row.at(static_cast<Element const *>(p.x), i * lanes + thread));
  }
  auto const load_parameters = [&](int i) {
    rG[i].raw[0] = load_vector(mG + i * lanes);
    if (kLayer) rB[i].raw[0] = load_vector(mB + i * lanes);
  };
  CUTE_UNROLL
  for (int i = 0; kHeld && i < kVectors; ++i) load_parameters(i);
  Moments moments = moments_of_vectors<kLayer, kVectors>([&](int i) { return rX[i]; });
  moments = merge_row<kWarp, kLayer, true>(moments, lanes, slots);
  Statistics const of = statistics_of<Element>(p, moments);
  CUTE_UNROLL
  for (int i = 0; !kHeld && i < kVectors; ++i) rX.forget(i, p.zero);
  CUTE_UNROLL
  for (int base = 0; base < kVectors; base += kAtOnce) {
    CUTE_UNROLL
    for (int i = base; !kHeld && i < base + kAtOnce; ++i) load_parameters(i);
    CUTE_UNROLL
    for (int i = base; i < base + kAtOnce; ++i) {
      Vector<Element> const rY = from_float<Element>(normalise<kLayer>(rX[i], of, rG[i], rB[i]));
      void *const to = row.at(static_cast<Element *>(p.y), i * lanes + thread);
      if (valid) store_vector(to, reinterpret_cast<uint4 const &>(rY));
    }
  }
  if (thread == 0 && valid) save_statistics(p, index, of);
}

// A long row on a cluster, in the registers of blocks small enough that four share a multiprocessor: while one waits
// for the cluster's sums, the others load and store.
template <class Element, bool kLayer>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocks) row_norm_forward_cluster(ForwardParams const p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kVectors = kClusterVectors, kThreads = kClusterThreads;
  constexpr int kAtOnce = 2;  // vectors whose parameters are loaded at once
  __shared__ MomentSlots<kThreads / 32 * kMaxCluster> slots;
  announce_barriers<1>(&slots.arrived);
  uint32_t const index = blockIdx.x >> p.log_cluster;
  uint32_t const begin = cute::block_rank_in_cluster() * (kThreads * kVectors) + threadIdx.x;
  int64_t const origin = int64_t(index) * (kThreads * kVectors << p.log_cluster) + begin;
  uint4 const *const mX = static_cast<uint4 const *>(p.x) + origin;
  uint4 const *const mG = static_cast<uint4 const *>(p.gamma) + begin;
  uint4 const *const mB = static_cast<uint4 const *>(p.beta) + begin;
  uint4 *const mY = static_cast<uint4 *>(p.y) + origin;
  wait_for_previous_kernel();
  let_next_kernel_start();

  Fragment<Element, kVectors, true> rX;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4 &>(rX.raw[i]) = load_vector(mX + i * kThreads);
  Moments const mine = moments_of_vectors<kLayer, kVectors>([&](int i) { return rX[i]; });
  cute::cluster_wait();  // the peers run, and their barriers are ready
  Statistics const of = statistics_of<Element>(p, merge_cluster<kLayer, true>(mine, 1 << p.log_cluster, slots));
  if (begin == 0) save_statistics(p, index, of);
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) rX.forget(i, p.zero);
  CUTE_UNROLL
  for (int base = 0; base < kVectors; base += kAtOnce) {
    Parameter<Element, Element, false> rG[kAtOnce], rB[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      rG[i].raw[0] = load_vector(mG + (base + i) * kThreads);
      if (kLayer) rB[i].raw[0] = load_vector(mB + (base + i) * kThreads);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      Vector<Element> const rY = from_float<Element>(normalise<kLayer>(rX[base + i], of, rG[i], rB[i]));
      store_vector(mY + (base + i) * kThreads, reinterpret_cast<uint4 const &>(rY));
    }
  }
#endif
}

}  // namespace cutefuse::row_norm
