// RMSNorm and LayerNorm forward, one body for both. The lanes of a warp or the threads of a block keep a row in
// registers until it is written. Rows that fit nowhere are read twice.
#pragma once

#include "forward_even.cuh"
#include "forward_shared.cuh"

namespace cutefuse::row_norm {

// gamma or beta beside the vectors of a thread. Held: they stay in registers until the row's sums are known; otherwise
// they are loaded where they are used, as are two vectors of parameters wider than the row.
template <class Element, int kVectors, bool kHeld>
struct Parameters {
  static constexpr int kMost = kVectors == 1 ? 4 / int(sizeof(Element)) : 1;  // loads beside a vector
  uint4 raw[kHeld ? kVectors * kMost : 1];

  template <class Param>
  static constexpr bool kWaits = kHeld && int(sizeof(Param) / sizeof(Element)) <= kMost;

  template <class Param, bool kShifted>
  CUTE_DEVICE void load(void const *mP, Row<Element, kShifted> const &row, int first, int stride, uint32_t absent) {
    if constexpr (kWaits<Param>) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        Parameter<Element, Param, kShifted> const one(mP, row, i * stride + first, absent);
        CUTE_UNROLL
        for (int k = 0; k < one.kLoads; ++k) raw[i * one.kLoads + k] = one.raw[k];
      }
    }
  }
  template <class Param, bool kShifted>
  CUTE_DEVICE Parameter<Element, Param, kShifted> get(void const *mP, Row<Element, kShifted> const &row, int i, int v,
                                                      uint32_t absent) const {
    if constexpr (kWaits<Param>) {
      return reinterpret_cast<Parameter<Element, Param, kShifted> const &>(
          raw[i * Parameter<Element, Param, kShifted>::kLoads]);
    } else {
      return {mP, row, v, absent};
    }
  }
};

template <class Param, bool kLayer, class Element, int kVectors, bool kShifted, bool kPacked, bool kHeld>
CUTE_DEVICE void write_row(ForwardParams const &p, Row<Element, kShifted> const &row, int first, int stride,
                           Fragment<Element, kVectors, kPacked> &rX, Statistics const &of,
                           Parameters<Element, kVectors, kHeld> const &rG,
                           Parameters<Element, kVectors, kHeld> const &rB) {
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * stride + first;
    if (kVectors == 4) rX.forget(i, p.zero);
    auto const gamma = rG.template get<Param>(p.gamma, row, i, v, ones<Param>());
    auto const beta = rB.template get<Param>(p.beta, row, i, v, 0);
    row.store(p.y, v, from_float<Element>(normalise<kLayer>(rX[i], of, gamma, beta)));
  }
}

template <class Element, int kVectors, bool kWarp, bool kShifted, bool kResidual, bool kLayer>
__global__ void __launch_bounds__(forward_threads(kWarp, kVectors),
                                  forward_blocks(kWarp, kVectors, kResidual || (kLayer && !kClusters)))
    row_norm_forward(ForwardParams const p) {
  __shared__ MomentSlots<kWarp ? 1 : 32> slots;
  int const lanes = kWarp ? 1 << p.log_lanes : int(blockDim.x),
            thread = kWarp ? threadIdx.x & (lanes - 1) : threadIdx.x;
  int64_t const index = kWarp ? (int64_t(blockIdx.x) * kForwardWarpThreads + threadIdx.x) >> p.log_lanes : blockIdx.x;
  Row<Element, kShifted> const row(index, p.problem);
  wait_for_previous_kernel();
  let_next_kernel_start();  // here, since the assembler moves it after the first use of the loaded values otherwise

  // All loads before the first use: a memory-bound kernel is as fast as it has bytes in flight.
  Vector<Element> raw[kVectors], other[kResidual ? kVectors : 1];
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) raw[i] = row.load(p.x, i * lanes + thread);
  if constexpr (kResidual) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) other[i] = row.load(p.residual, i * lanes + thread);
  }
  bool const wide = sizeof(Element) == 2 && p.problem.param_type == Type::kFloat32;
  Parameters<Element, kVectors, !kShifted && (kVectors == 1 || (kVectors == 2 && !kResidual))> rG, rB;
  if (wide) {
    rG.template load<float>(p.gamma, row, thread, lanes, ones<float>());
    if (kLayer) rB.template load<float>(p.beta, row, thread, lanes, 0);
  } else {
    rG.template load<Element>(p.gamma, row, thread, lanes, ones<Element>());
    if (kLayer) rB.template load<Element>(p.beta, row, thread, lanes, 0);
  }
  Fragment<Element, kVectors, !kResidual> rX;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kResidual) {
      rX.values[i] = to_float<Element>(raw[i]);
      Values<Element> const rR = to_float<Element>(other[i]);
      CUTE_UNROLL
      for (int j = 0; j < kVector<Element>; ++j) rX.values[i][j] += rR[j];
      row.store(p.sum, i * lanes + thread, from_float<Element>(rX[i]));
    } else {
      rX.raw[i] = raw[i];
    }
  }
  Moments moments;
  if (kLayer && sizeof(Element) == 2 && !kShifted && p.full) {
    moments = moments_of<kLayer, true>(p, row, thread, lanes, rX);
    moments = merge_row<kWarp, kLayer, true>(moments, lanes, slots);
  } else {
    moments = moments_of<kLayer, false>(p, row, thread, lanes, rX);
    moments = merge_row<kWarp, kLayer, false>(moments, lanes, slots);
  }
  Statistics const of = statistics_of<Element>(p, moments);
  if (wide) {
    write_row<float, kLayer>(p, row, thread, lanes, rX, of, rG, rB);
  } else {
    write_row<Element, kLayer>(p, row, thread, lanes, rX, of, rG, rB);
  }
  if (thread == 0 && row.last > 0) save_statistics(p, index, of);
}

// ---- rows that fit neither registers nor shared memory --------------------------------------------------------------

// The second read finds most of the row in L2.
template <class Element>
__global__ void __launch_bounds__(kStreamThreads) row_norm_forward_stream(ForwardParams const p) {
  constexpr int kVec = kVector<Element>;
  __shared__ MomentSlots<kStreamThreads / 32> slots;
  let_next_kernel_start();
  wait_for_previous_kernel();
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

  Moments mine;
  for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
    Values<Element> const rX = load(v);
    float const count = float(row.elements(v));
    Deviations<true> of;
    if (p.problem.layer) {
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) of.centre += rX[j];
      of.centre = __fdividef(of.centre, count);
    }
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      if (row.has(v, j)) of.add(rX[j]);
    }
    if (!p.problem.layer) of.sum = 0.f;  // squares about zero
    Moments const parts[2] = {mine, of.moments(count)};
    mine = merge_lanes<true>(parts, 1);
  }
  mine = merge_row<false, true, false>(mine, kStreamThreads, slots);
  Statistics const of = statistics_of<Element>(p, mine);
  if (threadIdx.x == 0) save_statistics(p, blockIdx.x, of);
  auto const write = [&](auto param) {
    using Param = decltype(param);
    for (int v = threadIdx.x; row.touches(v); v += kStreamThreads) {
      Values<Element> const rX = load(v);
      if (p.sum != nullptr) row.store(p.sum, v, from_float<Element>(rX));
      Parameter<Element, Param, true> const gamma(p.gamma, row, v, ones<Param>()), beta(p.beta, row, v, 0);
      row.store(p.y, v, from_float<Element>(normalise<true>(rX, of, gamma, beta)));
    }
  };
  p.problem.param_type == Type::kFloat32 ? write(0.f) : write(Element());
}

// ---- choice ---------------------------------------------------------------------------------------------------------

template <class Element>
void const *pick_forward(Tile const &tile, ForwardParams const &params) {
  Problem const &p = params.problem;
  int const vectors = tile.vectors;
  bool const shifted = is_shifted(p), warp = tile.scope == Scope::kWarp, cluster = tile.scope == Scope::kCluster;
  auto const shared = [](auto is_shifted, auto layer) -> ForwardKernel {
    return row_norm_forward_shared<Element, is_shifted, layer>;
  };
  auto const registers = [&](auto warp, auto residual, auto layer) -> ForwardKernel {
    return shifted        ? row_norm_forward<Element, 4, warp, true, residual, layer>
           : vectors == 1 ? row_norm_forward<Element, 1, warp, false, residual, layer>
           : vectors == 2 ? row_norm_forward<Element, 2, warp, false, residual, layer>
                          : row_norm_forward<Element, 4, warp, false, residual, layer>;
  };
  ForwardKernel kernel = row_norm_forward_stream<Element>;
  if (tile.scope == Scope::kShared) kernel = pick(shared, shifted, p.layer);
  if (warp || tile.scope == Scope::kBlock) kernel = pick(registers, warp, p.residual, p.layer);
  if constexpr (sizeof(Element) == 2) {
    auto const even = [&](auto warp, auto layer) -> ForwardKernel {
      return cluster        ? row_norm_forward_cluster<Element, layer>
             : vectors == 1 ? row_norm_forward_even<Element, 1, warp, layer>
             : vectors == 2 ? row_norm_forward_even<Element, 2, warp, layer>
                            : row_norm_forward_even<Element, 4, warp, layer>;
    };
    if (params.full && is_plain(p)) kernel = pick(even, warp, p.layer);
  }
  return reinterpret_cast<void const *>(kernel);
}

}  // namespace cutefuse::row_norm
