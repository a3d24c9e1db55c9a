// RMSNorm and LayerNorm forward: one body for both, for a row on some lanes of a warp, on a block or on a cluster.
// Every element is read once and kept in registers as float32 until it is written.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

// The mean is the sum `mean + rest`: float32 rows far from zero would show the rounding of a single one.
struct Statistics {
  float mean, rest, rstd;
};

// The values of a thread are its vectors first, first + stride, ... of the row.
template <bool kLayer, class Element, int kVectors, bool kShifted, bool kPacked, class RowSum>
CUTE_DEVICE Statistics statistics_of(ForwardParams const &p, Row<Element, kShifted> const &row, int first, int stride,
                                     Fragment<Element, kVectors, kPacked> &rX, RowSum &row_sum) {
  constexpr int kVec = kVector<Element>;
  Statistics result = {0.f, 0.f, 0.f};
  if constexpr (kLayer) {
    cutlass::Array<float, 1> sum;
    sum.clear();
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Values<Element> const values = rX[i];
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) sum[0] += values[j];
    }
    result.mean = __fmul_rn(row_sum(sum)[0], p.inverse);  // not contracted with what follows: equal values must cancel
  }
  constexpr bool kRest = kLayer && sizeof(Element) == 4;
  cutlass::Array<float, kRest ? 2 : 1> moments;  // of x - mean: squares, and sum
  moments.clear();
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * stride + first;
    rX.forget(i, p.zero);
    Values<Element> const values = rX[i];
    // Outside of the row the values are zero, which is not the mean.
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      float const centred = kLayer ? row.touches(v) && row.has(v, j) ? values[j] - result.mean : 0.f : values[j];
      moments[0] += centred * centred;
      if constexpr (kRest) moments[1] += centred;
    }
  }
  moments = row_sum(moments);
  if constexpr (kRest) {
    result.rest = moments[1] * p.inverse;
    moments[0] -= result.rest * moments[1];
  }
  result.rstd = rsqrtf(moments[0] * p.inverse + p.problem.epsilon);
  return result;
}

// What a row is multiplied with: nothing, gamma, or gamma and beta, in the memory type Param.
template <class Element, class Param, bool kLayer, int kVectors, bool kShifted, bool kPacked>
CUTE_DEVICE void write_row(ForwardParams const &p, Row<Element, kShifted> const &row, int first, int stride,
                           Fragment<Element, kVectors, kPacked> &rX, Statistics const &of) {
  bool const gamma = p.gamma != nullptr, beta = kLayer && p.beta != nullptr;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * stride + first;
    if (!row.touches(v)) continue;
    rX.forget(i, p.zero);
    Values<Element> rY = rX[i];
    CUTE_UNROLL
    for (int j = 0; j < rY.size(); ++j) {
      if (kLayer) rY[j] -= of.mean;
      if (kLayer && sizeof(Element) == 4) rY[j] -= of.rest;
      rY[j] *= of.rstd;
    }
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

// Statistics that are asked for, and y.
template <bool kLayer, class Element, int kVectors, bool kShifted, bool kPacked>
CUTE_DEVICE void finish_row(ForwardParams const &p, Row<Element, kShifted> const &row, int64_t index, int first,
                            int stride, Fragment<Element, kVectors, kPacked> &rX, Statistics const &of) {
  if (first == 0 && row.last > 0) {
    if (p.mean != nullptr) p.mean[index] = of.mean + of.rest;
    if (p.rstd != nullptr) p.rstd[index] = of.rstd;
  }
  if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32) {
    write_row<Element, float, kLayer>(p, row, first, stride, rX, of);
  } else {
    write_row<Element, Element, kLayer>(p, row, first, stride, rX, of);
  }
}

// Brings gamma and beta beside vector v to L1 while the row is on its way: their loads would wait for the row's sums.
// What it returns must be used after those by an instruction, or the assembler drops the loads.
template <class Element, bool kShifted>
CUTE_DEVICE uint32_t touch_parameters(ForwardParams const &p, Row<Element, kShifted> const &row, int v) {
  int const bytes = p.problem.param_type == Type::kFloat32 ? 4 : 2;
  int64_t const offset = int64_t(kShifted ? v * kVector<Element> : row.column(v)) * bytes;
  uint32_t touched = 0;
  if (!row.touches(v + (kShifted ? 1 : 0))) return touched;
  for (void const *mP : {p.gamma, p.beta}) {
    if (mP != nullptr) touched ^= __ldg(reinterpret_cast<uint32_t const *>(static_cast<char const *>(mP) + offset));
  }
  return touched;
}

template <class Element, int kVectors, bool kWarp, bool kShifted, bool kResidual, bool kLayer>
__global__ void __launch_bounds__(kWarp ? kForwardWarpThreads : forward_threads(kVectors, kResidual, kLayer),
                                  kWarp ? forward_warp_blocks(kVectors, kResidual, kLayer)
                                        : forward_blocks(kVectors, kResidual)) row_norm_forward(ForwardParams const p) {
  constexpr int kVec = kVector<Element>;
  if (p.few) let_next_start();
  constexpr int kWarps = kWarp ? 1 : 32 * kMaxCluster;  // that share a row, at most
  __shared__ RowSlots<kWarps> slots;
  int const cluster = kWarp || !kClusters ? 1 : 1 << p.log_cluster;
  if (cluster > 1) slots.announce();

  int const lanes = kWarp ? 1 << p.log_lanes : int(blockDim.x), threads = lanes * cluster;  // of a block, of all
  int const thread = kWarp         ? threadIdx.x & (lanes - 1)
                     : cluster > 1 ? int(cute::block_rank_in_cluster()) * lanes + threadIdx.x
                                   : threadIdx.x;
  int64_t const index = kWarp ? (int64_t(blockIdx.x) * kForwardWarpThreads + threadIdx.x) >> p.log_lanes
                              : blockIdx.x >> (kClusters ? p.log_cluster : 0);
  Row<Element, kShifted> const row(index, p.problem);
  wait_for_previous();

  // All loads before the first use: a memory-bound kernel lives on the bytes it has in flight.
  Vector<Element> raw[kVectors], other[kResidual ? kVectors : 1];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) raw[i] = row.load(p.x, i * threads + thread);
  if constexpr (kResidual) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) other[i] = row.load(p.residual, i * threads + thread);
  }
  uint32_t touched = 0;
  if (kVectors <= 2 && p.few) {  // four vectors leave no register for it
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) touched ^= touch_parameters(p, row, i * threads + thread);
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
  if (!p.few) let_next_start();
  if (cluster > 1) cute::cluster_wait();  // the peers run, and their barriers are ready
  RowSum<kWarp, kWarps, false> row_sum{slots, p.log_lanes, 0, lanes / 32, cluster};
  Statistics of = statistics_of<kLayer>(p, row, thread, threads, rX, row_sum);
  of.rstd = __uint_as_float(__float_as_uint(of.rstd) ^ (touched & p.zero));
  finish_row<kLayer>(p, row, index, thread, threads, rX, of);
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
  let_next_start();
  wait_for_previous();
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
  float const rstd = rsqrtf(moments.squares * p.inverse + p.problem.epsilon);
  Statistics const of = {moments.mean, 0.f, rstd};
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[blockIdx.x] = of.mean;
    if (p.rstd != nullptr) p.rstd[blockIdx.x] = of.rstd;
  }
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    Fragment<Element, 1, false> rX;
    rX.values[0] = load(v);
    if (p.sum != nullptr) row.store(p.sum, v, from_float<Element>(rX[0]));
    if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32) {
      write_row<Element, float, true>(p, row, v, 0, rX, of);
    } else {
      write_row<Element, Element, true>(p, row, v, 0, rX, of);
    }
  }
}

// ---- launcher -------------------------------------------------------------------------------------------------------

using ForwardKernel = void (*)(ForwardParams);

template <class Element, int kVectors, bool kShifted, bool kWarp, bool kResidual, bool kLayer>
constexpr ForwardKernel forward_kernel() {
  return row_norm_forward<Element, kVectors, kWarp, kShifted, kResidual, kLayer>;
}

template <class Element, bool... kFlags>
ForwardKernel pick_forward(int vectors, bool shifted) {
  return shifted        ? forward_kernel<Element, 4, true, kFlags...>()
         : vectors == 1 ? forward_kernel<Element, 1, false, kFlags...>()
         : vectors == 2 ? forward_kernel<Element, 2, false, kFlags...>()
                        : forward_kernel<Element, 4, false, kFlags...>();
}

// Run-time flags to template arguments: warp, residual, layer.
template <class Element, bool... kFlags, class... Flags>
ForwardKernel pick_forward(int vectors, bool shifted, bool flag, Flags... flags) {
  return flag ? pick_forward<Element, kFlags..., true>(vectors, shifted, flags...)
              : pick_forward<Element, kFlags..., false>(vectors, shifted, flags...);
}

template <class Element>
char const *launch_forward(Tile const &tile, ForwardParams const &params, Launch const &launch, int sm, void *stream) {
  ForwardKernel const kernel =
      tile.scope == Scope::kStream
          ? row_norm_forward_stream<Element>
          : pick_forward<Element>(tile.vectors, is_shifted(params.problem), tile.scope == Scope::kWarp,
                                  params.residual != nullptr, params.problem.layer);
  return start(kernel, params, launch, 0, sm, stream);
}

}  // namespace cutefuse::row_norm
