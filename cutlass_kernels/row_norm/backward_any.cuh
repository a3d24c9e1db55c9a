// The parts of the backward that take rows of any length and alignment, and the last step of both ways: sums over rows.
#pragma once

#include <cutlass/arch/barrier.h>

#include "row.cuh"

namespace cutefuse::row_norm {

constexpr int kFinalRows = 16;  // threads that share a column where partial sums are added

// The sums of both values over the row of this thread: 2^log_lanes lanes of a warp (kWarp), or `lanes` threads of a
// block, a multiple of 32, times `cluster` blocks.
template <bool kWarp>
CUTE_DEVICE float2 group_sum(float2 value, float2 *slots, int log_lanes, int lanes, int cluster) {
  auto const add = [&](int offset) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  };
  if constexpr (kWarp) {
    for (int i = 0; i < log_lanes; ++i) add(1 << i);
  } else {
    CUTE_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) add(offset);
    int const lane = threadIdx.x % 32, warps = lanes / 32, group = threadIdx.x / lanes;
    int const warp = threadIdx.x / 32 - group * warps, all = warps * cluster;
    float2 *const sums = slots + group * warps;
    if (kClusters && cluster > 1) {
      float2 *const mine = &sums[int(cute::block_rank_in_cluster()) * warps + warp];
      if (lane < cluster) {
        store_remote(&mine->x, lane, value.x);
        store_remote(&mine->y, lane, value.y);
      }
      cute::cluster_arrive();
      cute::cluster_wait();
    } else {
      if (lane == 0) sums[warp] = value;
      cutlass::arch::NamedBarrier::sync(lanes, group);
    }
    value = lane < all ? sums[lane] : float2{0.f, 0.f};
    for (int i = lane + 32; i < all; i += 32) value.x += sums[i].x, value.y += sums[i].y;
    CUTE_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) add(offset);
  }
  return value;
}

template <class Element>
CUTE_DEVICE float gamma_at(BackwardParams const &p, int64_t column) {
  if (p.gamma == nullptr) return 1.f;
  if (p.problem.param_type == Type::kFloat32) return static_cast<float const *>(p.gamma)[column];
  return float(static_cast<Element const *>(p.gamma)[column]);
}

// dx, one row per block, read twice.
template <class Element>
__global__ void __launch_bounds__(kStreamThreads) row_norm_backward_stream(BackwardParams const p) {
  constexpr int kVec = kVector<Element>;
  __shared__ float2 slots[kStreamThreads / 32];
  wait_for_previous();
  let_next_start();
  Row<Element, true> const row(blockIdx.x, p.problem);
  float const mean = p.mean != nullptr ? p.mean[blockIdx.x] : 0.f, rstd = p.rstd[blockIdx.x];
  auto const load = [&](int v, Values<Element> &rXhat, Values<Element> &rWdy) {
    Values<Element> const rX = to_float<Element>(row.load(p.x, v)), rDy = to_float<Element>(row.load(p.dy, v));
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      rXhat[j] = (rX[j] - mean) * rstd;
      rWdy[j] = row.has(v, j) ? rDy[j] * gamma_at<Element>(p, row.column(v) + j) : 0.f;
    }
  };
  Values<Element> rXhat, rWdy;
  float2 sums = {0.f, 0.f};
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    load(v, rXhat, rWdy);
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) sums.x += rXhat[j] * rWdy[j], sums.y += rWdy[j];
  }
  sums = group_sum<false>(sums, slots, 0, kStreamThreads, 1);
  float const c1 = sums.x / float(p.problem.columns), c2 = p.problem.layer ? sums.y / float(p.problem.columns) : 0.f;
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    load(v, rXhat, rWdy);
    Values<Element> rDx;
    rDx.clear();
    if (p.problem.residual) rDx = to_float<Element>(row.load(p.dsum, v));
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) rDx[j] += (rWdy[j] - c2 - rXhat[j] * c1) * rstd;
    row.store(p.dx, v, from_float<Element>(rDx));
  }
}

// Adds `mine` over threadIdx.y in order; valid where threadIdx.y is 0. Blocks are 32 columns wide.
CUTE_DEVICE float column_sum(float mine, float (*slots)[32]) {
  int const x = threadIdx.x % 32, y = threadIdx.x / 32;
  slots[y][x] = mine;
  __syncthreads();
  float sum = 0.f;
  if (y == 0) {
    for (int i = 0; i < kFinalRows; ++i) sum += slots[i][x];
  }
  __syncthreads();
  return sum;
}

// Partial dgamma and dbeta of 32 columns over every parts-th set of rows.
template <class Element>
__global__ void __launch_bounds__(32 * kFinalRows) row_norm_backward_columns(BackwardParams const p) {
  __shared__ float slots[kFinalRows][32];
  wait_for_previous();
  let_next_start();
  int64_t const columns = p.problem.columns, part = blockIdx.x % p.parts;
  int64_t const column = int64_t(blockIdx.x / p.parts) * 32 + threadIdx.x % 32;
  float dgamma = 0.f, dbeta = 0.f;
  if (column < columns) {
    for (int64_t row = part * kFinalRows + threadIdx.x / 32; row < p.problem.rows; row += p.parts * kFinalRows) {
      float const dy = float(static_cast<Element const *>(p.dy)[row * columns + column]);
      float const x = float(static_cast<Element const *>(p.x)[row * columns + column]);
      dgamma += dy * (x - (p.mean != nullptr ? p.mean[row] : 0.f)) * p.rstd[row];
      dbeta += dy;
    }
  }
  dgamma = column_sum(dgamma, slots);
  dbeta = column_sum(dbeta, slots);
  if (threadIdx.x >= 32 || column >= columns) return;
  p.partial[part * columns + column] = dgamma;
  if (p.dbeta != nullptr) p.partial[(p.parts + part) * columns + column] = dbeta;
}

// dgamma and dbeta from their parts.
template <class Element>
__global__ void __launch_bounds__(32 * kFinalRows) row_norm_backward_final(BackwardParams const p) {
  __shared__ float slots[kFinalRows][32];
  wait_for_previous();
  let_next_start();
  int64_t const columns = p.problem.columns, column = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  auto const total = [&](float const *partial) {
    float sum = 0.f;
    if (column < columns) {
      for (int i = threadIdx.x / 32; i < p.parts; i += kFinalRows) sum += partial[i * columns + column];
    }
    return column_sum(sum, slots);
  };
  auto const write = [&](void *mD, float value) {
    if (threadIdx.x >= 32 || column >= columns) return;
    if (p.problem.param_type == Type::kFloat32) {
      static_cast<float *>(mD)[column] = value;
    } else {
      static_cast<Element *>(mD)[column] = Element(value);
    }
  };
  if (p.dgamma != nullptr) write(p.dgamma, total(p.partial));
  if (p.dbeta != nullptr) write(p.dbeta, total(p.partial + p.parts * columns));
}

}  // namespace cutefuse::row_norm
