// Forward for what most models have: 16-bit rows that fill their threads, beside gamma and beta of their type. The same
// work as in forward.cuh, but every case is decided at compile time, and LayerNorm reads its values twice, not three
// times.
#pragma once

#include "moments.cuh"

namespace cutefuse::row_norm {

// A row on lanes of a warp, on a block, or on a cluster of blocks small enough that four share a multiprocessor: while
// one waits for the cluster's sums, the others load and store.
template <class Element, int kVectors, Scope kScope, bool kLayer>
__global__ void __launch_bounds__(forward_threads(kScope, kVectors),
                                  forward_blocks(kScope, kVectors, kLayer && !kClusters))
    row_norm_forward_even(ForwardParams const p) {
  constexpr bool kWarp = kScope == Scope::kWarp, kCluster = kScope == Scope::kCluster;
  if constexpr (kCluster && !kClusters) return;
  constexpr bool kHeld = kVectors < 4;  // registers hold gamma and beta until the row's sums are known
  constexpr int kAtOnce = kHeld || kScope == Scope::kBlock ? 1 : 2;  // vectors whose parameters are loaded later
  __shared__ MomentSlots<kWarp ? 1 : kCluster ? kClusterThreads / 32 * kMaxCluster : 32> slots;
  if constexpr (kCluster) slots.announce();
  int const cluster = kCluster ? 1 << p.log_cluster : 1;
  int const lanes = kWarp ? 1 << p.log_lanes : kCluster ? kClusterThreads : int(blockDim.x);
  int64_t const index = kWarp      ? (int64_t(blockIdx.x) * kForwardWarpThreads + threadIdx.x) >> p.log_lanes
                        : kCluster ? blockIdx.x >> p.log_cluster
                                   : blockIdx.x;
  uint32_t first = kWarp ? threadIdx.x & (lanes - 1) : threadIdx.x;
  if constexpr (kCluster) first += cute::block_rank_in_cluster() * (kClusterThreads * kVectors);
  // Lanes beyond the last row repeat it, for the others of their warp, and store nothing.
  bool const valid = !kWarp || index < p.problem.rows;
  int64_t const origin = (valid ? index : p.problem.rows - 1) * p.problem.columns;
  auto const at = [&](void const *m, int64_t start) {
    return reinterpret_cast<uint4 const *>(static_cast<Element const *>(m) + start) + first;
  };
  uint4 const *const mX = at(p.x, origin), *const mG = at(p.gamma, 0), *const mB = at(p.beta, 0);
  uint4 *const mY = const_cast<uint4 *>(at(p.y, origin));
  wait_for_previous_kernel();
  let_next_kernel_start();

  Fragment<Element, kVectors, true> rX;
  Parameter<Element, Element, false> rG[kVectors], rB[kVectors];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4 &>(rX.raw[i]) = load_vector(mX + i * lanes);
  auto const load_parameters = [&](int i) {
    rG[i].raw[0] = load_vector(mG + i * lanes);
    if (kLayer) rB[i].raw[0] = load_vector(mB + i * lanes);
  };
  CUTE_UNROLL
  for (int i = 0; kHeld && i < kVectors; ++i) load_parameters(i);
  Moments moments = moments_of_vectors<kLayer, kVectors>([&](int i) { return rX[i]; });
  if constexpr (kCluster) cute::cluster_wait();  // the peers run, and their barriers are ready
  moments = merge_row<kWarp, kLayer, true>(moments, lanes, cluster, slots);
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
      if (valid) store_vector(mY + i * lanes, reinterpret_cast<uint4 const &>(rY));
    }
  }
  if (first == 0 && valid) save_statistics(p, index, of);
}

template <class Element>
void const *pick_even(Tile const &tile, bool layer) {
  return with_flags(
      [&](auto flag) {
        constexpr bool kLayer = flag;
        if (tile.scope == Scope::kCluster)
          return address(row_norm_forward_even<Element, kClusterVectors, Scope::kCluster, kLayer>);
        return with_vectors(tile.vectors, [&](auto vectors) {
          return tile.scope == Scope::kWarp ? address(row_norm_forward_even<Element, vectors, Scope::kWarp, kLayer>)
                                            : address(row_norm_forward_even<Element, vectors, Scope::kBlock, kLayer>);
        });
      },
      layer);
}

}  // namespace cutefuse::row_norm
