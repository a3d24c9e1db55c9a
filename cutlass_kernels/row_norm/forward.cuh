// RMSNorm and LayerNorm forward: one body for both, for a row on some lanes of a warp or on a block, which keep it in
// registers until it is written.
#pragma once

#include "forward_even.cuh"
#include "forward_long.cuh"

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

template <class Element, int kVectors, Scope kScope, bool kShifted, bool kResidual, bool kLayer>
__global__ void __launch_bounds__(forward_threads(kScope, kVectors),
                                  forward_blocks(kScope, kVectors, kResidual || (kLayer && !kClusters)))
    row_norm_forward(ForwardParams const p) {
  constexpr int kVec = kVector<Element>;
  constexpr bool kWarp = kScope == Scope::kWarp;
  __shared__ MomentSlots<kWarp ? 1 : 32> slots;
  int const lanes = kWarp ? 1 << p.log_lanes : int(blockDim.x),
            thread = kWarp ? threadIdx.x & (lanes - 1) : threadIdx.x;
  int64_t const index = kWarp ? (int64_t(blockIdx.x) * kForwardWarpThreads + threadIdx.x) >> p.log_lanes : blockIdx.x;
  Row<Element, kShifted> const row(index, p.problem);
  wait_for_previous_kernel();
  let_next_kernel_start();  // here, or the assembler moves it after the first use of the loaded values

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
  auto const load_parameters = [&](auto param) {
    using Param = decltype(param);
    rG.template load<Param>(p.gamma, row, thread, lanes, ones<Param>());
    if (kLayer) rB.template load<Param>(p.beta, row, thread, lanes, 0);
  };
  wide ? load_parameters(0.f) : load_parameters(Element());
  Fragment<Element, kVectors, !kResidual> rX;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kResidual) {
      rX.values[i] = to_float<Element>(raw[i]);
      Values<Element> const rR = to_float<Element>(other[i]);
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) rX.values[i][j] += rR[j];
      row.store(p.sum, i * lanes + thread, from_float<Element>(rX[i]));
    } else {
      rX.raw[i] = raw[i];
    }
  }
  auto const merged = [&](auto equal) {
    Moments const mine = moments_of<kLayer, equal>(p, row, thread, lanes, rX);
    return merge_row<kWarp, kLayer, equal>(mine, lanes, 1, slots);
  };
  bool const equal = kLayer && sizeof(Element) == 2 && !kShifted && p.full;
  Statistics const of = statistics_of<Element>(p, equal ? merged(std::true_type{}) : merged(std::false_type{}));
  auto const write = [&](auto param) {
    using Param = decltype(param);
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      int const v = i * lanes + thread;
      if (kVectors == 4) rX.forget(i, p.zero);
      auto const gamma = rG.template get<Param>(p.gamma, row, i, v, ones<Param>());
      auto const beta = rB.template get<Param>(p.beta, row, i, v, 0);
      row.store(p.y, v, from_float<Element>(normalise<kLayer>(rX[i], of, gamma, beta)));
    }
  };
  wide ? write(0.f) : write(Element());
  if (thread == 0 && row.last > 0) save_statistics(p, index, of);
}

// ---- choice ---------------------------------------------------------------------------------------------------------

template <class Element>
void const *pick_forward(Tile const &tile, ForwardParams const &params) {
  Problem const &p = params.problem;
  bool const shifted = is_shifted(p);
  if constexpr (sizeof(Element) == 2) {
    if (params.full && is_plain(p)) return pick_even<Element>(tile, p.layer);
  }
  if (tile.scope == Scope::kShared || tile.scope == Scope::kStream) {
    return with_flags(
        [&](auto layer) {
          if (tile.scope == Scope::kStream) return address(row_norm_forward_long<Element, true, layer, false>);
          return shifted ? address(row_norm_forward_long<Element, true, layer, true>)
                         : address(row_norm_forward_long<Element, false, layer, true>);
        },
        p.layer);
  }
  return with_flags(
      [&](auto warp, auto residual, auto layer) {
        constexpr Scope kScope = warp ? Scope::kWarp : Scope::kBlock;
        constexpr bool kResidual = residual, kLayer = layer;
        if (shifted) return address(row_norm_forward<Element, 4, kScope, true, kResidual, kLayer>);
        return with_vectors(tile.vectors, [](auto vectors) {
          return address(row_norm_forward<Element, vectors, kScope, false, kResidual, kLayer>);
        });
      },
      tile.scope == Scope::kWarp, p.residual, p.layer);
}

}  // namespace cutefuse::row_norm
