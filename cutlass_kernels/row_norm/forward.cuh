// RMSNorm and LayerNorm forward: one body for both, for a row on some lanes of a warp, on a block or on a cluster.
// Every element is read once and kept in registers as float32 until it is written.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

// Sums over a row whose threads are `lanes` of a warp (kWarp), or the blocks of a cluster. At most two per kernel.
template <bool kWarp>
struct RowSum {
  float *slots;  // shared memory: two turns of kMaxCluster * 32 warps
  int lanes, cluster;
  int turn = 0;

  CUTE_DEVICE float operator()(float value) {
    if constexpr (kWarp) return lane_sum(value, lanes);
    value = lane_sum(value, 32);
    float *const sums = slots + turn++ * kMaxCluster * 32;
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (kClusters && cluster > 1) {
      if (turn == 1) cute::cluster_wait();  // for the arrival at the kernel's start: the peers run
      if (lane < cluster) store_remote(&sums[int(cute::block_rank_in_cluster()) * warps + warp], lane, value);
      cute::cluster_arrive();
      cute::cluster_wait();
    } else {
      if (lane == 0) sums[warp] = value;
      __syncthreads();
    }
    float total = 0.f;
    for (int i = lane; i < warps * cluster; i += 32) total += sums[i];
    return lane_sum(total, 32);
  }
};

// What a row is multiplied with: nothing, gamma, or gamma and beta, in the memory type Param.
template <class Element, class Param, int kVectors, bool kShifted, bool kPacked>
CUTE_DEVICE void write_row(ForwardParams const &p, Row<Element, kShifted> const &row, int thread, int threads,
                           Fragment<Element, kVectors, kPacked> const &rX, float mean, float rstd) {
  bool const gamma = p.gamma != nullptr, beta = p.beta != nullptr;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * threads + thread;
    if (!row.touches(v)) continue;
    Values<Element> rY = rX[i];
    CUTE_UNROLL
    for (int j = 0; j < rY.size(); ++j) rY[j] = (rY[j] - mean) * rstd;
    if (gamma) {
      Values<Element> const rG = row.template parameter<Param>(p.gamma, v);
      CUTE_UNROLL
      for (int j = 0; j < rY.size(); ++j) rY[j] *= rG[j];
    }
    if (beta) {
      Values<Element> const rB = row.template parameter<Param>(p.beta, v);
      CUTE_UNROLL
      for (int j = 0; j < rY.size(); ++j) rY[j] += rB[j];
    }
    row.store(p.y, v, from_float<Element>(rY));
  }
}

template <class Element, int kVectors, bool kWarp, bool kShifted, bool kResidual>
__global__ void __launch_bounds__(kWarp ? kForwardWarpThreads : forward_threads(kVectors, sizeof(Element), kResidual),
                                  kWarp ? forward_threads(kVectors, sizeof(Element), kResidual) / kForwardWarpThreads : 1)
    row_norm_forward(ForwardParams const p) {
  constexpr int kVec = kVector<Element>;
  __shared__ float slots[kWarp ? 1 : 2 * kMaxCluster * 32];
  bool const clustered = kClusters && !kWarp && p.cluster > 1;
  if (clustered) cute::cluster_arrive_relaxed();
  wait_for_previous();

  int const lanes = kWarp ? p.lanes : int(blockDim.x);
  int const threads = lanes * p.cluster;  // of one row
  int const thread = kWarp       ? threadIdx.x % lanes
                     : clustered ? int(cute::block_rank_in_cluster()) * lanes + threadIdx.x
                                 : threadIdx.x;
  int64_t const index = kWarp ? int64_t(blockIdx.x) * (kForwardWarpThreads / lanes) + threadIdx.x / lanes
                              : int64_t(blockIdx.x) / p.cluster;
  Row<Element, kShifted> const row(index, p.problem);

  // All loads before the first use: a memory-bound kernel lives on the bytes it has in flight.
  Vector<Element> raw[kVectors], other[kResidual ? kVectors : 1];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) raw[i] = row.load(p.x, i * threads + thread);
  if constexpr (kResidual) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) other[i] = row.load(p.residual, i * threads + thread);
  }
  Fragment<Element, kVectors, !kResidual> rX;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kResidual) {
      rX.values[i] = to_float<Element>(raw[i]);
      Values<Element> const rR = to_float<Element>(other[i]);
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) rX.values[i][j] += rR[j];
      row.store(p.sum, i * threads + thread, from_float<Element>(rX[i]));
    } else {
      rX.raw[i] = raw[i];
    }
  }
  let_next_start();

  RowSum<kWarp> row_sum{slots, lanes, p.cluster};
  float const inverse = 1.f / float(p.problem.columns);
  float mean = 0.f, squares = 0.f;
  if (p.problem.layer) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Values<Element> const values = rX[i];
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) sum += values[j];
    }
    mean = row_sum(sum) * inverse;
    rX.forget();
  }
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * threads + thread;
    Values<Element> const values = rX[i];
    // Outside of the row the values are zero, which is not the mean.
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      float const centred = row.touches(v) && row.has(v, j) ? values[j] - mean : 0.f;
      squares += centred * centred;
    }
  }
  float const rstd = __frsqrt_rn(row_sum(squares) * inverse + p.problem.epsilon);
  if (thread == 0 && row.last > 0) {
    if (p.mean != nullptr) p.mean[index] = mean;
    if (p.rstd != nullptr) p.rstd[index] = rstd;
  }
  rX.forget();
  if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32) {
    write_row<Element, float>(p, row, thread, threads, rX, mean, rstd);
  } else {
    write_row<Element, Element>(p, row, thread, threads, rX, mean, rstd);
  }
}

// ---- rows that fit no register file ---------------------------------------------------------------------------------

// Count, mean and sum of squared deviations; merging is Chan's parallel form of Welford's update.
struct Moments {
  float count = 0.f, mean = 0.f, squares = 0.f;

  CUTE_DEVICE void merge(float other_count, float other_mean, float other_squares) {
    float const total = count + other_count;
    if (other_count == 0.f) return;
    float const share = other_count / total, delta = other_mean - mean;
    mean += delta * share;
    squares += other_squares + delta * delta * count * share;
    count = total;
  }
};

CUTE_DEVICE Moments block_moments(Moments mine, Moments *slots) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto const over_lanes = [&] {
    for (int offset = 16; offset > 0; offset /= 2) {
      // Both partners must get the same result: the lower lane's moments are always the left operand.
      Moments const other = {__shfl_xor_sync(0xffffffffu, mine.count, offset),
                             __shfl_xor_sync(0xffffffffu, mine.mean, offset),
                             __shfl_xor_sync(0xffffffffu, mine.squares, offset)};
      Moments left = lane & offset ? other : mine;
      Moments const right = lane & offset ? mine : other;
      left.merge(right.count, right.mean, right.squares);
      mine = left;
    }
  };
  over_lanes();
  if (lane == 0) slots[warp] = mine;
  __syncthreads();
  mine = lane < int(blockDim.x) / 32 ? slots[lane] : Moments{};
  over_lanes();
  return mine;
}

// The second read finds most of the row in L2.
template <class Element>
__global__ void __launch_bounds__(kStreamThreads) row_norm_forward_stream(ForwardParams const p) {
  constexpr int kVec = kVector<Element>;
  __shared__ Moments slots[kStreamThreads / 32];
  wait_for_previous();
  let_next_start();
  Row<Element, true> const row(blockIdx.x, p.problem);
  auto const load = [&](int v) {
    Values<Element> rX = to_float<Element>(row.load(p.x, v));
    if (p.residual != nullptr) {
      Values<Element> const rR = to_float<Element>(row.load(p.residual, v));
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) rX[j] += rR[j];
    }
    return rX;
  };

  Moments moments;
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    Values<Element> const rX = load(v);
    Moments local;
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      local.count += row.has(v, j) ? 1.f : 0.f;
      local.mean += rX[j];
    }
    local.mean = p.problem.layer ? local.mean / local.count : 0.f;
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      float const centred = row.has(v, j) ? rX[j] - local.mean : 0.f;
      local.squares += centred * centred;
    }
    moments.merge(local.count, local.mean, local.squares);
  }
  moments = block_moments(moments, slots);
  float const rstd = __frsqrt_rn(moments.squares / float(p.problem.columns) + p.problem.epsilon);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[blockIdx.x] = moments.mean;
    if (p.rstd != nullptr) p.rstd[blockIdx.x] = rstd;
  }
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    Fragment<Element, 1, false> rX;
    rX.values[0] = load(v);
    if (p.sum != nullptr) row.store(p.sum, v, from_float<Element>(rX[0]));
    if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32) {
      write_row<Element, float>(p, row, v, 0, rX, moments.mean, rstd);
    } else {
      write_row<Element, Element>(p, row, v, 0, rX, moments.mean, rstd);
    }
  }
}

// ---- launcher -------------------------------------------------------------------------------------------------------

using ForwardKernel = void (*)(ForwardParams);

template <class Element, bool kWarp, bool kResidual>
ForwardKernel pick_forward(int vectors, bool shifted) {
  if (shifted) return row_norm_forward<Element, 4, kWarp, true, kResidual>;
  if (vectors == 1) return row_norm_forward<Element, 1, kWarp, false, kResidual>;
  if (vectors == 2) return row_norm_forward<Element, 2, kWarp, false, kResidual>;
  return row_norm_forward<Element, 4, kWarp, false, kResidual>;
}

template <class Element>
char const *launch_forward(Tile const &tile, ForwardParams const &params, Launch const &launch, int sm, void *stream) {
  bool const shifted = is_shifted(params.problem), warp = tile.scope == Scope::kWarp;
  ForwardKernel kernel = row_norm_forward_stream<Element>;
  if (tile.scope != Scope::kStream && params.residual != nullptr) {
    kernel = warp ? pick_forward<Element, true, true>(tile.vectors, shifted)
                  : pick_forward<Element, false, true>(tile.vectors, shifted);
  } else if (tile.scope != Scope::kStream) {
    kernel = warp ? pick_forward<Element, true, false>(tile.vectors, shifted)
                  : pick_forward<Element, false, false>(tile.vectors, shifted);
  }
  return start(kernel, params, launch, 0, sm, stream);
}

}  // namespace cutefuse::row_norm
