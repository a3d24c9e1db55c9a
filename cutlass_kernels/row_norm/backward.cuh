// Backward of both norms. With xhat = (x - mean) * rstd and wdy = dy * gamma:
//   dx     = (wdy - mean_j(wdy) - xhat * mean_j(xhat * wdy)) * rstd + dsum      (RMSNorm: without the first mean)
//   dgamma = sum over rows of dy * xhat, dbeta = sum over rows of dy
// Persistent blocks walk over rows while the next ones are copied (cp.async); each thread owns some vectors of columns
// and keeps their share of dgamma and dbeta in registers. Shares go to the workspace and are added in a fixed order.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "backward_any.cuh"

namespace cutefuse::row_norm {

// Waits until at most `pending` of this thread's newest copies are under way.
CUTE_DEVICE void wait_copies(int pending) {
  switch (pending) {
    case 0:
      return cute::cp_async_wait<0>();
    case 1:
      return cute::cp_async_wait<1>();
    default:
      return cute::cp_async_wait<2>();
  }
}

template <class Element, int kVectors>
using Columns = Values<Element>[kVectors];

// gamma beside vector v; ones where there is none.
template <class Element>
CUTE_DEVICE Values<Element> gamma_of(BackwardParams const &p, Row<Element, false> const &first, int v) {
  if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32)
    return Parameter<Element, float, false>(p.gamma, first, v, ones<float>()).values();
  return Parameter<Element, Element, false>(p.gamma, first, v, ones<Element>()).values();
}

// Writes one of the block's sums over its rows, dgamma or dbeta, to the workspace. Groups of threads that walked over
// different rows put their shares side by side into shared memory; each column is then added in their order.
template <class Element, int kVectors>
CUTE_DEVICE void write_partial(BackwardParams const &p, float *mPartial, float *shared, int thread, int threads,
                               Columns<Element, kVectors> &rSum) {
  constexpr int kVec = kVector<Element>;
  int const lanes = p.lanes, columns = int(p.problem.columns);
  // To vector `at` of `to` and every `step` from there.
  auto const write = [&](float *to, int at, int step) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if ((i * threads + thread) * kVec >= columns) continue;
      CUTE_UNROLL
      for (int j = 0; j < kVec; j += 4) {
        *reinterpret_cast<float4 *>(to + (i * step + at) * kVec + j) =
            make_float4(rSum[i][j], rSum[i][j + 1], rSum[i][j + 2], rSum[i][j + 3]);
      }
    }
  };
  if (lanes == int(blockDim.x)) return write(mPartial, thread, threads);
  for (int offset = lanes; offset < 32; offset *= 2) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) rSum[i][j] += __shfl_xor_sync(0xffffffffu, rSum[i][j], offset);
    }
  }
  int const width = lanes < 32 ? 32 : lanes, teams = blockDim.x / width;
  int const turn = lanes * kVec, span = kVectors * turn, rank = thread / lanes;  // `rank`: of this block in its cluster
  __syncthreads();
  if (int(threadIdx.x) % width < lanes) write(shared + threadIdx.x / width * span, threadIdx.x % width, lanes);
  __syncthreads();
  for (int c = threadIdx.x; c < span; c += blockDim.x) {
    int const column = (c / turn * threads + rank * lanes) * kVec + c % turn;
    if (column >= columns) continue;
    float sum = 0.f;
    for (int t = 0; t < teams; ++t) sum += shared[t * span + c];
    mPartial[column] = sum;
  }
}

template <class Element, int kVectors, bool kWarp, bool kLayer>
__global__ void __launch_bounds__(kBackwardThreads, 1) row_norm_backward(BackwardParams const p) {
  constexpr int kVec = kVector<Element>;
  constexpr bool kHeld = kVectors * kVec <= 16;  // gamma fits the registers too, else it is in shared memory
  constexpr int kWarps = kWarp ? 1 : kBackwardThreads / 32 * kMaxCluster;  // the most that share a row
  // [stage][dy, x, dsum][vector][thread]: each thread reads what it copied. 16 bytes past a multiple of 32 cost 10 %.
  extern __shared__ __align__(32) uint4 ring[];
  __shared__ RowSlots<kWarps> slots;
  let_next_kernel_start();
  int const cluster = kWarp || !kClusters ? 1 : p.cluster;
  if (cluster > 1) slots.announce();
  wait_for_previous_kernel();

  int const lanes = p.lanes, threads = lanes * cluster, groups = blockDim.x / lanes, group = threadIdx.x / lanes;
  int const thread = (cluster > 1 ? int(cute::block_rank_in_cluster()) * lanes : 0) + threadIdx.x - group * lanes;
  int const tensors = p.problem.residual ? 3 : 2;
  uint32_t const columns = uint32_t(p.problem.columns), rows = uint32_t(p.problem.rows);
  uint32_t const step = gridDim.x / cluster * groups;
  uint32_t row = blockIdx.x / cluster * groups + group;
  int const vectors = (int(columns) / kVec - thread + threads - 1) / threads;  // that this thread has of a row
  auto const has = [&](int i) { return i < vectors; };
  // Bytes of this thread's first vector in a row, and on to its next one.
  auto const bytes_of = [&](uint32_t r) { return (int64_t(r) * columns + thread * kVec) * int(sizeof(Element)); };
  int const next_vector = threads * kVectorBytes;

  // Stages are indices: pointers take two registers.
  auto const slot = [&](int stage, int tensor, int i) -> uint4 & {
    return ring[stage + (tensor * kVectors + i) * kBackwardThreads];
  };
  auto const fetch = [&](uint32_t from, int stage) {
    int64_t const offset = bytes_of(from);
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (from >= rows || !has(i)) continue;
      auto const copy = [&](int tensor, void const *mX) {
        char const *const source = static_cast<char const *>(mX) + offset + i * next_vector;
        cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(*reinterpret_cast<uint4 const *>(source), slot(stage, tensor, i));
      };
      copy(0, p.dy);
      copy(1, p.x);
      if (tensors == 3) copy(2, p.dsum);
    }
    cute::cp_async_fence();
  };

  int const stage_size = tensors * kVectors * kBackwardThreads;
  int const first_stage = threadIdx.x, end_stage = first_stage + p.stages * stage_size;
  for (int s = 0; s < p.stages; ++s) fetch(row + s * step, first_stage + s * stage_size);
  Row<Element, false> const first(0, p.problem);
  Columns<Element, kVectors> rDgamma, rDbeta;
  Columns<Element, kHeld ? kVectors : 1> rHeld;
  // Packed as in memory, behind the ring: [vector][half][thread], halves where gamma is wider than the row. Ones where
  // there is no gamma or no column, since zero times shared memory may be NaN.
  bool const wide = sizeof(Element) == 2 && p.problem.param_type == Type::kFloat32;
  int const halves = wide ? 2 : 1;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    rDgamma[i].clear(), rDbeta[i].clear();
    if constexpr (kHeld) {
      rHeld[i] = gamma_of(p, first, i * threads + thread);
    } else {
      uint4 const *const mG = static_cast<uint4 const *>(p.gamma) + (i * threads + thread) * halves;
      uint32_t const one = wide ? 0x3f800000u : ones<Element>();
      uint4 *const sGamma = ring + end_stage + i * halves * kBackwardThreads;
      for (int h = 0; h < halves; ++h) {
        uint4 const r = p.gamma != nullptr && has(i) ? __ldg(mG + h) : make_uint4(one, one, one, one);
        sGamma[h * kBackwardThreads] = r;
      }
    }
  }
  auto const gamma = [&](int i) {
    if constexpr (kHeld) {
      return rHeld[i];
    } else {
      uint4 const *const from = ring + end_stage + i * halves * kBackwardThreads;
      uint4 const low = load_shared(from);
      if (!wide) return to_float<Element>(reinterpret_cast<Vector<Element> const &>(low));
      uint4 const high = load_shared(from + kBackwardThreads);
      Values<Element> rG;
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j)
        rG[j] = reinterpret_cast<float const *>(j < kVec / 2 ? &low : &high)[j % (kVec / 2)];
      return rG;
    }
  };
  auto const statistic = [&](float const *mS, uint32_t at) { return at < rows ? __ldg(mS + at) : 0.f; };
  float mean = kLayer ? statistic(p.mean, row) : 0.f, rstd = statistic(p.rstd, row);
  float const inverse = 1.f / float(int(columns));
  if (cluster > 1) cute::cluster_wait();
  RowSum<kWarp, kWarps, true> row_sum{slots, p.log_lanes, group, lanes / 32, cluster};

  int stage = first_stage;
  // All lanes of a warp, and all groups of a block, stay in the loop while one of them has a row. If some groups passed
  // their named barrier more often than others, racecheck would report hazards across the barrier in write_partial.
  for (uint32_t base = row - (kWarp ? threadIdx.x % 32 / lanes : group); base < rows; base += step, row += step) {
    bool const valid = row < rows;
    float const next_mean = kLayer ? statistic(p.mean, row + step) : 0.f, next_rstd = statistic(p.rstd, row + step);
    wait_copies(p.stages - 1);
    auto const fragment = [&](int tensor, int i) {
      Vector<Element> r;
      r.clear();
      if (valid && has(i)) reinterpret_cast<uint4 &>(r) = load_shared(&slot(stage, tensor, i));
      return to_float<Element>(r);
    };
    cutlass::Array<float, kLayer ? 2 : 1> sums;  // of (x - mean) * wdy, and of wdy
    sums.clear();
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Values<Element> const rDy = fragment(0, i), rX = fragment(1, i), rG = gamma(i);
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        float const product = rDy[j] * (kLayer ? rX[j] - mean : rX[j]);
        sums[0] += product * rG[j];
        rDgamma[i][j] += product * rstd;
        if constexpr (kLayer) sums[1] += rDy[j] * rG[j], rDbeta[i][j] += rDy[j];
      }
    }
    sums = row_sum(sums);
    float const c1 = -sums[0] * inverse * rstd * rstd, c2 = kLayer ? -sums[sums.size() - 1] * inverse : 0.f;
    // Reads the fragments from shared memory again: keeping them over the reduction would take too many registers.
    auto const write_dx = [&](int i) {
      Values<Element> const rDy = fragment(0, i), rX = fragment(1, i), rG = gamma(i);
      Values<Element> rDx;
      rDx.clear();
      if (tensors == 3) rDx = fragment(2, i);
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        float const shift = kLayer ? (rX[j] - mean) * c1 + c2 : rX[j] * c1;
        rDx[j] += (rDy[j] * rG[j] + shift) * rstd;
      }
      if (!valid || !has(i)) return;
      Vector<Element> const r = from_float<Element>(rDx);
      store_vector(static_cast<char *>(p.dx) + bytes_of(row) + i * next_vector, reinterpret_cast<uint4 const &>(r));
    };
    if constexpr (kHeld) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) write_dx(i);
    } else {
      CUTE_NO_UNROLL
      for (int i = 0; i < kVectors; ++i) write_dx(i);
    }
    fetch(row + p.stages * step, stage);
    mean = next_mean, rstd = next_rstd;
    stage += stage_size;
    if (stage == end_stage) stage = first_stage;
  }
  cute::cp_async_wait<0>();
  if (p.partial == nullptr) return;
  float *const mPartial = p.partial + int64_t(blockIdx.x / cluster) * columns;
  float *const shared = reinterpret_cast<float *>(ring);
  write_partial<Element, kVectors>(p, mPartial, shared, thread, threads, rDgamma);
  if (kLayer && p.dbeta != nullptr) {
    write_partial<Element, kVectors>(p, mPartial + int64_t(p.parts) * columns, shared, thread, threads, rDbeta);
  }
}

// ---- choice ---------------------------------------------------------------------------------------------------------

template <class Element>
BackwardKernels pick_backward(BackwardParams const &params, bool pipelined) {
  using Kernel = void (*)(BackwardParams);
  // 16-bit types take four vectors only for rows that fill a block, so that no such kernel is made for a warp.
  constexpr bool kFloat32 = sizeof(Element) == 4;
  auto const rows = [&](auto warp, auto layer) -> Kernel {
    constexpr int kVectors = kFloat32 ? 4 : 2;
    constexpr bool kFourOnWarp = kFloat32 && decltype(warp)::value;
    if (!kFloat32 && params.vectors == 4) return row_norm_backward<Element, 4, kFourOnWarp, layer>;
    return row_norm_backward<Element, kVectors, warp, layer>;
  };
  Kernel const stream = row_norm_backward_stream<Element>;
  auto const address = [](Kernel kernel) { return reinterpret_cast<void const *>(kernel); };
  return {address(pipelined ? pick(rows, params.lanes <= 32, params.problem.layer) : stream),
          address(row_norm_backward_columns<Element>), address(row_norm_backward_final<Element>)};
}

}  // namespace cutefuse::row_norm
