// From a warpgroup's sums, (filter,pixel), to outputs: bias and activation in registers, the transpose on the way to
// shared memory (stmatrix.trans), and whole pixels stored by TMA.
#pragma once

#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// ---- bias, activation and rounding ----------------------------------------------------------------------------------

// The two filters of a thread's accumulator rows, which are 8 apart: their biases, and how many filters the output has
// from the first of the two on.
struct FilterPair {
  static constexpr int kColumns = kStoreColumns;  // filters of a staged pixel
  int left;
  float bias[2];

  FilterPair() = default;
  CUTE_DEVICE FilterPair(Sm90Params const &params, TileFilters const &filters, int columns = kColumns) {
    int const column = threadIdx.x % 128 / 32 * 16 % columns;
    left = params.outputs[filters.output].last - filters.first - column - threadIdx.x % 32 / 4;
    float const *const b = params.b + params.outputs[filters.output].last - left;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) bias[row] = left > 8 * row ? __ldg(b + 8 * row) : 0.f;
  }
  // values holds (2,2,kGroups) = (pixel,filter,group).
  template <int kValues>
  CUTE_DEVICE void add_to(float (&values)[kValues]) const {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] += bias[i / 2 % 2];
  }
};

// Two values rounded into one register, with ReLU first where it is asked for; a NaN is propagated.
template <class Element, bool kRelu>
CUTE_DEVICE uint32_t pack(float first, float second) {
  uint32_t packed;
  if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
    if constexpr (kRelu) {
      asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
  } else if constexpr (kRelu) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  }
  return packed;
}

// Activations with code of their own for a whole tile, without branches. For the rest, kOther branches on the kind for
// every slice of values. Such a branch jumps over the code of the other kinds, and costs as much as some ten values.
enum class Finish { kNone, kRelu, kSilu, kSigmoid, kOther };

template <class Body>
CUTE_DEVICE void with_finish(Activation kind, Body const &body) {
  if (kind == Activation::kSilu) {
    body(std::integral_constant<Finish, Finish::kSilu>{});
  } else if (kind == Activation::kSigmoid) {
    body(std::integral_constant<Finish, Finish::kSigmoid>{});
  } else if (kind == Activation::kRelu) {
    body(std::integral_constant<Finish, Finish::kRelu>{});
  } else if (kind == Activation::kNone) {
    body(std::integral_constant<Finish, Finish::kNone>{});
  } else {
    body(std::integral_constant<Finish, Finish::kOther>{});
  }
}

// Bias and activation: values holds (2,2,kGroups) = (pixel,filter,group). Returns whether a ReLU is left to the
// rounding. kFewest: the fewest instructions win. Otherwise the special-function unit limits, as it does where both
// warpgroups of a large tile convert at once.
template <Finish kFinish, bool kFewest = false, int kValues, class Pair>
CUTE_DEVICE bool finish_values(float (&values)[kValues], Pair const &pair, Problem const &p) {
  pair.add_to(values);
  bool relu = kFinish == Finish::kRelu;
  if constexpr (kFinish == Finish::kSilu && kFewest) {
    for_each_value(values, [](float &value) { value *= sigmoid(value); });
  } else if constexpr (kFinish == Finish::kSilu) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; i += 2) silu_pair(values[i], values[i + 1]);
  } else if constexpr (kFinish == Finish::kSigmoid) {
    for_each_value(values, [](float &value) { value = sigmoid(value); });
  } else if constexpr (kFinish == Finish::kOther) {
    activate<false>(make_tensor(&values[0], Layout<Int<kValues>>{}), p);
  }
  return relu;
}

// Bias, activation and rounding. Each element of `packed` has two pixels of one filter.
template <Finish kFinish, class Element, bool kFewest = false, int kValues, class Pair>
CUTE_DEVICE void convert(float (&values)[kValues], uint32_t (&packed)[kValues / 2], Pair const &pair,
                         Problem const &p) {
  if (finish_values<kFinish, kFewest>(values, pair, p)) {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) packed[i] = pack<Element, true>(values[2 * i], values[2 * i + 1]);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) packed[i] = pack<Element, false>(values[2 * i], values[2 * i + 1]);
  }
}

// Whether a thread of this warp has a pad lane. Pad lanes are stored as zeros, whatever the activation makes of zero.
CUTE_DEVICE bool holds_pad_lanes(FilterPair const &pair) { return __any_sync(~0u, pair.left <= 8); }

// The same biases, which become known only after the value `after`: otherwise the compiler starts on more values than
// registers hold.
template <class Pair>
CUTE_DEVICE Pair biases_after(uint32_t after, Pair pair, Problem const &p) {
  uint32_t const zero = after & uint32_t(p.outputs >> 16);  // 0, but only the host knows
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) pair.bias[row] = __uint_as_float(__float_as_uint(pair.bias[row]) ^ zero);
  return pair;
}

template <int kPacked>
CUTE_DEVICE void clear_pad_lanes(uint32_t (&packed)[kPacked], FilterPair const &pair) {
  CUTE_UNROLL
  for (int i = 0; i < kPacked; ++i) packed[i] = pair.left > 8 * (i % 2) ? packed[i] : 0;
}

// ---- stores through shared memory -----------------------------------------------------------------------------------

// Element of a staging tile at which a thread's row of the matrices of two 8-pixel groups begins, or of one: matrix
// lane / 8 holds filters 0-7 or 8-15 of this warp's 16 and the first group, then of the second. A row is a pixel with
// kColumns filters, 16-byte chunks XORed with its line of 128 bytes as TMA swizzles rows of this width. Where kColumns
// is less than 64, the warps' filters belong to several pixels, which follow each other in blocks of 64 columns.
template <int kColumns = kStoreColumns>
CUTE_DEVICE int staged_row(int thread, int group, bool single) {
  constexpr int kWarps = kColumns / 16;  // that have filters of the same pixels
  int const lane = thread % 32, warp = thread % 128 / 32, row = (single ? 0 : lane / 16 * 8) + lane % 8;
  int const block = group / 8 * (kStoreColumns / kColumns) + warp / kWarps;
  int const chunk = (2 * (warp % kWarps) + lane / 8 % 2) ^ (lane % 8 * kColumns / kStoreColumns);
  return (64 * block + 8 * (group % 8) + row) * kColumns + chunk * 8;
}

// Transposes 8-pixel groups: pixel i of the staging tile becomes a row of kColumns filters.
template <class Element, int kGroups, int kColumns>
CUTE_DEVICE void stage(uint32_t const *packed, Element *staging) {
  CUTE_UNROLL
  for (int group = 0; group < kGroups; group += 2) {
    uint32_t const *const r = packed + 2 * group;
    bool const last = group + 1 == kGroups;  // an odd count ends with a single group
    auto *const to = staging + staged_row<kColumns>(threadIdx.x, group, last);
    if (last) {
      SM90_U16x4_STSM_T::copy(r[0], r[1], *reinterpret_cast<uint128_t *>(to));
    } else {
      SM90_U16x8_STSM_T::copy(r[0], r[1], r[2], r[3], *reinterpret_cast<uint128_t *>(to));
    }
  }
}

// Stores kStagings tiles of kRows pixels, from the tile `first` on, once this warpgroup has staged them; one thread
// issues the stores.
template <int kStagings, int kRows, class Staged, class Store>
CUTE_DEVICE void store_staged(int first, bool issues, Staged *staging, int warpgroup, Store const &store) {
  tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  if (!issues) return;
  CUTE_UNROLL
  for (int i = 0; i < kStagings; ++i) store(first + i, staging + i * kRows * kStoreColumns);
  tma_store_arrive();
}

// Writes activation(acc(64 filters, kPixels) + bias) by TMA stores of kRows pixels. kStagings stores are converted at
// once, because fences, barriers and the wait for the last stores cost more than the conversion; it comes first, while
// those stores still read. store(tile, pointer) issues one store; one thread calls it. kRowTiles: how many accumulators
// of kPixels the warpgroup holds. kFewest as in finish_values.
template <class Element, int kPixels, int kRows, int kStagings, int kRowTiles = 1, bool kFewest = false, class Pair,
          class Store>
CUTE_DEVICE void store_outputs(float (&acc)[kPixels / 2], Pair const &pair, Activation activation, Problem const &p,
                               Element *staging, int warpgroup, Store const &store) {
  static_assert(kPixels / kRows % kStagings == 0);
  bool const issues = threadIdx.x % 128 == 0;
  with_finish(activation, [&](auto finish) {
    constexpr Finish kFinish = decltype(finish)::value;
    constexpr int kTiles = kPixels / kRows, kValues = kRows / 2;
    // Convert before the wait where earlier stores of this tile may still read, if registers hold the results beside
    // the sums.
    constexpr bool kExponential = kFinish == Finish::kSilu || kFinish == Finish::kSigmoid;
    constexpr bool kConvertFirst = kFinish != Finish::kOther && (kRowTiles > 1 || kTiles > kStagings) &&
                                   kRowTiles * kPixels <= 320 && !(kExponential && kPixels == 256);
    auto const wait = [&] {
      if (issues) tma_store_wait<0>();  // the last stores have read the staging tiles
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
    };
    CUTE_UNROLL
    for (int first = 0; first < kTiles; first += kStagings) {
      uint32_t packed[kStagings][kValues / 2];
      Pair next = pair;
      if (!kConvertFirst) wait();
      CUTE_UNROLL
      for (int i = 0; i < kStagings; ++i) {
        auto &values = reinterpret_cast<float (&)[kValues]>(acc[kValues * (first + i)]);
        convert<kFinish, Element, kFewest>(values, packed[i], next, p);
        if (kExponential) next = biases_after(packed[i][kValues / 2 - 1], next, p);
        if (holds_pad_lanes(pair)) clear_pad_lanes(packed[i], pair);
        if (!kConvertFirst) stage<Element, kRows / 8, Pair::kColumns>(packed[i], staging + i * kRows * kStoreColumns);
      }
      if (kConvertFirst) {
        wait();
        CUTE_UNROLL
        for (int i = 0; i < kStagings; ++i)
          stage<Element, kRows / 8, Pair::kColumns>(packed[i], staging + i * kRows * kStoreColumns);
      }
      store_staged<kStagings, kRows>(first, issues, staging, warpgroup, store);
    }
  });
}

}  // namespace cutefuse::conv
