// Backward of both norms. With xhat = (x - mean) * rstd and wdy = dy * gamma:
//   dx     = (wdy - mean_j(wdy) - xhat * mean_j(xhat * wdy)) * rstd + dsum      (RMSNorm: without the first mean)
//   dgamma = sum over rows of dy * xhat, dbeta = sum over rows of dy
// Persistent blocks walk over rows with the next ones on their way (cp.async); each thread owns some vectors of columns
// and keeps their share of dgamma and dbeta in registers. Shares go to the workspace and are added in a fixed order.
#pragma once

#include <atomic>
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

// Volatile, or the assembler loads every vector of a row at once and spills.
CUTE_DEVICE uint4 load_shared(uint4 const *from) {
  uint4 r;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(cute::cast_smem_ptr_to_uint(from)));
  return r;
}

template <class Element, int kVectors>
using Columns = Values<Element>[kVectors];

// gamma beside vector v; ones where there is none. Read anew for every row: it stays in L1, and registers are scarce.
template <class Element>
CUTE_DEVICE Values<Element> gamma_of(BackwardParams const &p, Row<Element, false> const &first, int v) {
  Values<Element> rG;
  rG.fill(1.f);
  if (p.gamma == nullptr || !first.touches(v)) return rG;
  if (sizeof(Element) == 4 || p.problem.param_type == Type::kFloat32)
    return first.template parameter<float>(p.gamma, v);
  return first.template parameter<Element>(p.gamma, v);
}

// Writes one of the block's sums over its rows, dgamma or dbeta, to the workspace. Groups of threads that walked over
// different rows put their shares side by side into shared memory; each column is then added in their order.
template <class Element, int kVectors>
CUTE_DEVICE void write_partial(BackwardParams const &p, float *mPartial, float *shared, int thread, int threads,
                               Columns<Element, kVectors> &rSum) {
  constexpr int kVec = kVector<Element>;
  int const lanes = p.lanes, columns = int(p.problem.columns);
  auto const write = [&](float *to) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      int const column = (i * threads + thread) * kVec;
      if (column >= columns) continue;
      CUTE_UNROLL
      for (int j = 0; j < kVec; j += 4) {
        *reinterpret_cast<float4 *>(to + column + j) =
            make_float4(rSum[i][j], rSum[i][j + 1], rSum[i][j + 2], rSum[i][j + 3]);
      }
    }
  };
  if (lanes == int(blockDim.x)) return write(mPartial);
  for (int offset = lanes; offset < 32; offset *= 2) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) rSum[i][j] += __shfl_xor_sync(0xffffffffu, rSum[i][j], offset);
    }
  }
  int const width = lanes < 32 ? 32 : lanes, teams = blockDim.x / width;
  __syncthreads();
  if (int(threadIdx.x) % width < lanes) write(shared + threadIdx.x / width * columns);
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float sum = 0.f;
    for (int t = 0; t < teams; ++t) sum += shared[t * columns + c];
    mPartial[c] = sum;
  }
}

template <class Element, int kVectors, bool kWarp, bool kLayer>
__global__ void __launch_bounds__(kBackwardThreads, 1) row_norm_backward(BackwardParams const p) {
  constexpr int kVec = kVector<Element>;
  constexpr bool kHeld = kVectors * kVec <= 16;  // gamma fits the registers too
  extern __shared__ uint4 ring[];  // [stage][dy, x, dsum][vector][thread]: each thread reads what it copied
  __shared__ float2 slots[2][kMaxCluster * kBackwardThreads / 32];
  int const cluster = kWarp || !kClusters ? 1 : p.cluster;
  if (cluster > 1) cute::cluster_arrive_relaxed();
  wait_for_previous();

  int const lanes = p.lanes, threads = lanes * cluster, groups = blockDim.x / lanes, group = threadIdx.x / lanes;
  int const thread = (cluster > 1 ? int(cute::block_rank_in_cluster()) * lanes : 0) + threadIdx.x - group * lanes;
  int const tensors = p.problem.residual ? 3 : 2;
  uint32_t const columns = uint32_t(p.problem.columns), rows = uint32_t(p.problem.rows);
  uint32_t const step = gridDim.x / cluster * groups;
  uint32_t row = blockIdx.x / cluster * groups + group;
  auto const has = [&](int i) { return (i * threads + thread) * kVec < int(columns); };
  // Bytes of this thread's first vector in a row, and on to its next one.
  auto const bytes_of = [&](uint32_t r) { return (int64_t(r) * columns + thread * kVec) * int(sizeof(Element)); };
  int const next_vector = threads * kVectorBytes;

  auto const slot = [&](uint4 *stage, int tensor, int i) -> uint4 & {
    return stage[(tensor * kVectors + i) * kBackwardThreads];
  };
  auto const fetch = [&](uint32_t from, uint4 *stage) {
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
  uint4 *const first_stage = ring + threadIdx.x, *const end_stage = first_stage + p.stages * stage_size;
  for (int s = 0; s < p.stages; ++s) fetch(row + s * step, first_stage + s * stage_size);
  let_next_start();
  Row<Element, false> const first(0, p.problem);
  Columns<Element, kVectors> rDgamma, rDbeta;
  Columns<Element, kHeld ? kVectors : 1> rHeld;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    rDgamma[i].clear(), rDbeta[i].clear();
    if constexpr (kHeld) rHeld[i] = gamma_of(p, first, i * threads + thread);
  }
  auto const gamma = [&](int i) {
    if constexpr (kHeld) return rHeld[i];
    return gamma_of(p, first, i * threads + thread);
  };
  auto const statistic = [&](float const *mS, uint32_t at) { return at < rows ? __ldg(mS + at) : 0.f; };
  float mean = kLayer ? statistic(p.mean, row) : 0.f, rstd = statistic(p.rstd, row);
  float const inverse = 1.f / float(int(columns));
  if (cluster > 1) cute::cluster_wait();

  int turn = 0;
  uint4 *stage = first_stage;
  // All lanes of a warp stay in the loop while one has a row.
  for (uint32_t base = row - (kWarp ? threadIdx.x % 32 / lanes : 0); base < rows; base += step, row += step) {
    bool const valid = row < rows;
    float const next_mean = kLayer ? statistic(p.mean, row + step) : 0.f, next_rstd = statistic(p.rstd, row + step);
    wait_copies(p.stages - 1);
    auto const fragment = [&](int tensor, int i) {
      Vector<Element> r;
      r.clear();
      if (valid && has(i)) reinterpret_cast<uint4 &>(r) = load_shared(&slot(stage, tensor, i));
      return to_float<Element>(r);
    };
    float2 sums = {0.f, 0.f};
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Values<Element> const rDy = fragment(0, i), rX = fragment(1, i), rG = gamma(i);
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        float const xhat = (kLayer ? rX[j] - mean : rX[j]) * rstd, wdy = rDy[j] * rG[j];
        sums.x += xhat * wdy;
        rDgamma[i][j] += rDy[j] * xhat;
        if (kLayer) sums.y += wdy, rDbeta[i][j] += rDy[j];
      }
    }
    sums = group_sum<kWarp>(sums, slots[turn], p.log_lanes, lanes, cluster);
    float const c1 = -sums.x * inverse * rstd, c2 = -sums.y * inverse;
    // From shared memory again: keeping the fragments over the reduction would take too many registers.
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
    turn ^= 1;
  }
  cute::cp_async_wait<0>();
  if (p.partial == nullptr) return;
  float *const mPartial = p.partial + int64_t(blockIdx.x / cluster) * columns, *const shared =
                                                                                   reinterpret_cast<float *>(ring);
  write_partial<Element, kVectors>(p, mPartial, shared, thread, threads, rDgamma);
  if (kLayer && p.dbeta != nullptr) {
    write_partial<Element, kVectors>(p, mPartial + int64_t(p.parts) * columns, shared, thread, threads, rDbeta);
  }
}

// ---- launcher -------------------------------------------------------------------------------------------------------

// Lets a kernel ask for more shared memory than 48 KB, once per device.
template <class Kernel>
char const *allow_shared(Kernel kernel, int bytes, std::atomic<uint64_t> &ready) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (error == cudaSuccess && !(ready.load(std::memory_order_relaxed) & bit)) {
    int limit = 0;
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncAttributes attributes{};
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    int const dynamic = limit - int(attributes.sharedSizeBytes);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
    ready.fetch_or(error == cudaSuccess ? bit : 0, std::memory_order_relaxed);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return sentence(
      "row_norm: %d bytes of shared memory were refused (%s); check that the library was built for this GPU", bytes,
      cudaGetErrorString(error));
}

template <class Element, int kVectors, bool kWarp, bool kLayer>
char const *launch_pipelined(BackwardParams const &params, Launch const &launch, int sm, void *stream) {
  static std::atomic<uint64_t> ready{0};  // one bit per device
  auto *const kernel = row_norm_backward<Element, kVectors, kWarp, kLayer>;
  int const bytes = ring_bytes(params);
  if (char const *reason = allow_shared(kernel, bytes, ready)) return reason;
  return start(kernel, params, launch, bytes, sm, stream);
}

using PipelinedLaunch = char const *(*)(BackwardParams const &, Launch const &, int, void *);

template <class Element, int kVectors>
PipelinedLaunch pick_pipelined(bool warp, bool layer) {
  if (layer)
    return warp ? launch_pipelined<Element, kVectors, true, true> : launch_pipelined<Element, kVectors, false, true>;
  return warp ? launch_pipelined<Element, kVectors, true, false> : launch_pipelined<Element, kVectors, false, false>;
}

template <class Element>
char const *launch_backward(BackwardParams const &params, Launch const &launch, int sm, void *stream) {
  bool const sums = params.dgamma != nullptr || params.dbeta != nullptr, warp = params.lanes <= 32;
  int64_t const column_blocks = ceil_div(params.problem.columns, 32);
  char const *reason = nullptr;
  if (params.problem.rows > 0 && launch.threads > 0) {
    // Four vectors of 16-bit types only serve rows that fill a block, never one warp.
    PipelinedLaunch pipelined = nullptr;
    if constexpr (sizeof(Element) == 4) {
      pipelined = pick_pipelined<Element, 4>(warp, params.problem.layer);
    } else if (params.vectors == 2) {
      pipelined = pick_pipelined<Element, 2>(warp, params.problem.layer);
    } else {
      pipelined =
          params.problem.layer ? launch_pipelined<Element, 4, false, true> : launch_pipelined<Element, 4, false, false>;
    }
    reason = pipelined(params, launch, sm, stream);
  } else if (params.problem.rows > 0) {
    Launch const rows = {params.problem.rows, kStreamThreads, 1};
    Launch const columns = {column_blocks * params.parts, 32 * kFinalRows, 1};
    reason = start(row_norm_backward_stream<Element>, params, rows, 0, sm, stream);
    if (reason == nullptr && sums) reason = start(row_norm_backward_columns<Element>, params, columns, 0, sm, stream);
  }
  if (reason != nullptr || !sums) return reason;
  // Without rows there are no parts, and the sums are zero.
  return start(row_norm_backward_final<Element>, params, {column_blocks, 32 * kFinalRows, 1}, 0, sm, stream);
}

}  // namespace cutefuse::row_norm
