// From the sums of sources that have scales to the outputs of a Hopper tile: the sources' scales, those of the filters,
// bias and activation, and float16, int8 or float8.
#pragma once

#include "conv/sm90/outputs.cuh"

namespace cutefuse::conv {

CUTE_DEVICE float to_float(uint32_t sum) { return float(int(sum)); }
CUTE_DEVICE float to_float(float sum) { return sum; }

// The two filters of a thread's accumulator rows with their scales, which include the sources' scale unless draining
// has applied it. The accumulator is declared as float, but its registers hold values of type Sum. For 8-bit outputs
// the two filters are neighbours (load_filters), otherwise, and kInOrder, 8 apart as in FilterPair.
template <class Sum, bool kDrained, bool kInOrder = false>
struct ScaledPair : FilterPair {
  float scale[2];

  ScaledPair() = default;
  CUTE_DEVICE ScaledPair(Sm90Params const &params, TileFilters const &filters) : FilterPair(params, filters) {
    bool const neighbours = !kInOrder && size_of(params.problem.output_type) == 1;
    int const first = filters.first + threadIdx.x % 128 / 32 * 16, pair = threadIdx.x % 32 / 4;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      int const at = first + (neighbours ? 2 * pair + row : pair + 8 * row);
      bool const exists = at < params.problem.K;
      bias[row] = exists ? __ldg(params.b + at) : 0.f;
      scale[row] =
          exists ? __ldg(params.w_scale + at) * (kDrained ? 1.f : params.problem.scale[params.problem.sources - 1])
                 : 0.f;
    }
  }
  template <int kValues>
  CUTE_DEVICE void add_to(float (&values)[kValues]) const {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) {
      values[i] = fmaf(to_float(reinterpret_cast<Sum &>(values[i])), scale[i / 2 % 2], bias[i / 2 % 2]);
    }
  }
};

template <class Traits>
using Pair = cute::conditional_t<Traits::kScaled, ScaledPair<typename Traits::Sum, false>, FilterPair>;

// Four values, rounded to nearest even and saturated.
template <class Element>
CUTE_DEVICE uint32_t pack_bytes(float a, float b, float c, float d) {
  if constexpr (cute::is_same_v<Element, int8_t>) {
    cutlass::Array<int, 4> const values = {__float2int_rn(a), __float2int_rn(b), __float2int_rn(c), __float2int_rn(d)};
    auto const packed = cutlass::NumericArrayConverter<int8_t, int, 4>::convert(values);
    return reinterpret_cast<uint32_t const &>(packed);
  } else {
    cutlass::Array<float, 4> const values = {a, b, c, d};
    auto const packed = cutlass::NumericArrayConverter<Element, float, 4>::convert(values);
    return reinterpret_cast<uint32_t const &>(packed);
  }
}

// Transposes 8-pixel groups of bytes: pixel i of the staging tile becomes a row of 64 filters, 16-byte chunks XORed
// with the row as SWIZZLE_64B does. packed: (2 filters,2 pixels) of each group.
template <int kGroups>
CUTE_DEVICE void stage_bytes(uint32_t const *packed, uint8_t *staging) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  auto const row = [&](int pixel) {  // the address that this lane passes to stmatrix
    return reinterpret_cast<uint128_t *>(staging + pixel * kStoreColumns + (warp ^ pixel / 2 % 4) * 16);
  };
  static_assert(kGroups % 4 <= 2);
  CUTE_UNROLL
  for (int group = 0; group + 4 <= kGroups; group += 4) {
    uint32_t const *const r = packed + group;
    SM90_U16x8_STSM_T::copy(r[0], r[1], r[2], r[3], *row(8 * group + lane));
  }
  if constexpr (kGroups % 4 == 1) SM90_U16x2_STSM_T::copy(packed[kGroups - 1], *row(8 * (kGroups - 1) + lane % 8));
  if constexpr (kGroups % 4 == 2) {
    SM90_U16x4_STSM_T::copy(packed[kGroups - 2], packed[kGroups - 1], *row(8 * (kGroups - 2) + lane % 16));
  }
}

// store_outputs() for int8 and float8 outputs.
template <class Element, int kPixels, int kRows, int kStagings, bool kFewest, class Pair, class Store>
CUTE_DEVICE void store_bytes(float (&acc)[kPixels / 2], Pair const &pair, Sm90Params const &params, uint8_t *staging,
                             int warpgroup, Store const &store) {
  bool const issues = threadIdx.x % 128 == 0;
  Problem const &p = params.problem;
  float const inverse_scale = params.inverse_output_scale;
  with_finish(p.activation, [&](auto finish) {
    constexpr int kTiles = kPixels / kRows, kValues = kRows / 2;
    CUTE_UNROLL
    for (int first = 0; first < kTiles; first += kStagings) {
      if (issues) tma_store_wait<0>();  // the last stores have read the staging tiles
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      Pair next = pair;
      CUTE_UNROLL
      for (int i = 0; i < kStagings; ++i) {
        auto &values = reinterpret_cast<float (&)[kValues]>(acc[kValues * (first + i)]);
        bool const relu = finish_values<decltype(finish)::value, kFewest>(values, next, p);
        uint32_t packed[kValues / 4];
        CUTE_UNROLL
        for (int group = 0; group < kValues / 4; ++group) {
          float *const v = values + 4 * group;
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) v[j] = (relu ? max_nan(v[j], 0.f) : v[j]) * inverse_scale;
          packed[group] = pack_bytes<Element>(v[0], v[2], v[1], v[3]);
        }
        next = biases_after(packed[kValues / 4 - 1], next, p);
        stage_bytes<kRows / 8>(packed, staging + i * kRows * kStoreColumns);
      }
      store_staged<kStagings, kRows>(first, issues, staging, warpgroup, store);
    }
  });
}

// The outputs of 64 filters, whichever the number type.
template <class Traits, int kRowTiles = 1, bool kFewest = false, class Pair, class Store>
CUTE_DEVICE void store_tile(typename Traits::Sum (&acc)[Traits::kN / 2], Pair const &pair, Activation activation,
                            Sm90Params const &params, typename Traits::Output *staging, int warpgroup,
                            Store const &store) {
  auto &sums = reinterpret_cast<float (&)[Traits::kN / 2]>(acc);
  if constexpr (Traits::kScaled) {
    if (size_of(params.problem.output_type) == 1) {
      store_bytes<typename Traits::Element, Traits::kN, Traits::kStoreRows, Traits::kStagings, kFewest>(
          sums, pair, params, reinterpret_cast<uint8_t *>(staging), warpgroup, store);
      return;
    }
  }
  store_outputs<typename Traits::Output, Traits::kN, Traits::kStoreRows, Traits::kStagings, kRowTiles, kFewest>(
      sums, pair, activation, params.problem, staging, warpgroup, store);
}

}  // namespace cutefuse::conv
