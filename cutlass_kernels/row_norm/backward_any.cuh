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
  __shared__ SumSlots<kStreamThreads / 32> slots;
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
  sums = RowSum<false, kStreamThreads / 32, false>{slots, 0, {kStreamThreads / 32, 1, 0}}(sums);
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

// dgamma and dbeta of 32 columns, added in a fixed order: over the rows of a part, to the workspace (kRows), or over
// the parts.
template <class Element, bool kRows>
__global__ void __launch_bounds__(32 * kFinalRows) row_norm_backward_sums(BackwardParams const p) {
  __shared__ float slots[2][kFinalRows][32];
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const x = threadIdx.x % 32, y = threadIdx.x / 32, parts = kRows ? p.parts : 1, part = blockIdx.x % parts;
  int64_t const columns = p.problem.columns, column = int64_t(blockIdx.x / parts) * 32 + x;
  float sums[2] = {0.f, 0.f};
  if constexpr (kRows) {
    if (column < columns) {
      for (int64_t row = part * kFinalRows + y; row < p.problem.rows; row += int64_t(parts) * kFinalRows) {
        float const dy = float(static_cast<Element const *>(p.dy)[row * columns + column]);
        float const value = float(static_cast<Element const *>(p.x)[row * columns + column]);
        sums[0] += dy * (value - (p.mean != nullptr ? p.mean[row] : 0.f)) * p.rstd[row];
        sums[1] += dy;
      }
    }
  } else {
    // Loads of several parts at once: one after another, their latency would be the kernel's time.
    constexpr int kAtOnce = 4;
    for (int i = y; i < p.parts; i += kFinalRows * kAtOnce) {
      float rP[2][kAtOnce];
      CUTE_UNROLL
      for (int k = 0; k < 2 * kAtOnce; ++k) {
        int const from = i + k / 2 * kFinalRows;
        bool const there = (k % 2 == 0 ? p.dgamma : p.dbeta) != nullptr && from < p.parts && column < columns;
        rP[k % 2][k / 2] = there ? __ldcg(p.partial + (int64_t(k % 2) * p.parts + from) * columns + column) : 0.f;
      }
      CUTE_UNROLL
      for (int k = 0; k < kAtOnce; ++k) sums[0] += rP[0][k], sums[1] += rP[1][k];
    }
  }
  slots[0][y][x] = sums[0], slots[1][y][x] = sums[1];
  __syncthreads();
  // Warp 0 has dgamma, warp 1 dbeta, the others nothing.
  if (y > 1 || column >= columns) return;
  float sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kFinalRows; ++i) sum += slots[y][i][x];
  void *const mD = y == 0 ? p.dgamma : p.dbeta;
  if (kRows) {
    if (y == 0 || mD != nullptr) p.partial[(int64_t(y) * parts + part) * columns + column] = sum;
  } else if (mD != nullptr && p.problem.param_type == Type::kFloat32) {
    static_cast<float *>(mD)[column] = sum;
  } else if (mD != nullptr) {
    static_cast<Element *>(mD)[column] = Element(sum);
  }
}

}  // namespace cutefuse::row_norm
