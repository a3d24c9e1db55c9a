// The parts of the backward that take rows of any length and alignment, and the last step of both ways: sums over rows.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

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
  __shared__ RowSlots<kStreamThreads / 32> slots;
  let_next_kernel_start();
  wait_for_previous_kernel();
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
  cutlass::Array<float, 2> sums;
  sums.clear();
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    load(v, rXhat, rWdy);
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) sums[0] += rXhat[j] * rWdy[j], sums[1] += rWdy[j];
  }
  sums = RowSum<false, kStreamThreads / 32, false>{slots, 0, 0, kStreamThreads / 32, 1}(sums);
  float const c1 = sums[0] / float(p.problem.columns), c2 = p.problem.layer ? sums[1] / float(p.problem.columns) : 0.f;
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

// The shares of dgamma and dbeta that the threads of a block have in 32 columns.
using ColumnSlots = float[2][kFinalRows][32];

// Adds them in order: warp 0 gets dgamma, warp 1 dbeta, the others nothing.
CUTE_DEVICE float column_sum(float dgamma, float dbeta, ColumnSlots &slots) {
  int const x = threadIdx.x % 32, y = threadIdx.x / 32;
  slots[0][y][x] = dgamma, slots[1][y][x] = dbeta;
  __syncthreads();
  float sum = 0.f;
  if (y < 2) {
    CUTE_UNROLL
    for (int i = 0; i < kFinalRows; ++i) sum += slots[y][i][x];
  }
  return sum;
}

// Partial dgamma and dbeta of 32 columns over every parts-th set of rows.
template <class Element>
__global__ void __launch_bounds__(32 * kFinalRows) row_norm_backward_columns(BackwardParams const p) {
  __shared__ ColumnSlots slots;
  let_next_kernel_start();
  wait_for_previous_kernel();
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
  float const sum = column_sum(dgamma, dbeta, slots);
  int const which = threadIdx.x / 32;
  if (which > 1 || (which == 1 && p.dbeta == nullptr) || column >= columns) return;
  p.partial[(which * p.parts + part) * columns + column] = sum;
}

// dgamma and dbeta from their parts.
template <class Element>
__global__ void __launch_bounds__(32 * kFinalRows) row_norm_backward_final(BackwardParams const p) {
  __shared__ ColumnSlots slots;
  let_next_kernel_start();
  wait_for_previous_kernel();
  int64_t const columns = p.problem.columns, column = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  float sums[2] = {0.f, 0.f};
  // Loads of several parts at once: one after another, their latency would be the kernel's time.
  constexpr int kAtOnce = 4;
  for (int i = threadIdx.x / 32; i < p.parts; i += kFinalRows * kAtOnce) {
    float rP[2][kAtOnce];
    CUTE_UNROLL
    for (int k = 0; k < 2 * kAtOnce; ++k) {
      int const part = i + k / 2 * kFinalRows;
      bool const there = (k % 2 == 0 ? p.dgamma : p.dbeta) != nullptr && part < p.parts && column < columns;
      rP[k % 2][k / 2] = there ? __ldcg(p.partial + (k % 2 * p.parts + part) * columns + column) : 0.f;
    }
    CUTE_UNROLL
    for (int k = 0; k < kAtOnce; ++k) sums[0] += rP[0][k], sums[1] += rP[1][k];
  }
  float const sum = column_sum(sums[0], sums[1], slots);
  int const which = threadIdx.x / 32;
  void *const mD = which == 0 ? p.dgamma : p.dbeta;
  if (which > 1 || mD == nullptr || column >= columns) return;
  if (p.problem.param_type == Type::kFloat32) {
    static_cast<float *>(mD)[column] = sum;
  } else {
    static_cast<Element *>(mD)[column] = Element(sum);
  }
}

}  // namespace cutefuse::row_norm
