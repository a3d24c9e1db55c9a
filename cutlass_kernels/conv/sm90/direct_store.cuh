// Outputs that go straight from registers to global memory, and a shortcut that comes the same way: for float32, which
// stmatrix cannot transpose. Eight lanes hold eight neighbouring filters of a pixel, which fill a sector of 32 bytes.
#pragma once

#include "conv/sm90/shortcut.cuh"

namespace cutefuse::conv {

// The pixels of a thread's sums: two neighbours along `a` of every 8, and those above them along `b`, a group each.
struct DirectPixels {
  int64_t first;
  int step_a, step_b;
  int groups;      // how many groups, from the first one on, lie in the image
  bool inside[2];  // along `a`

  // (a,b) of image n: where the warpgroup's pixels begin.
  CUTE_DEVICE DirectPixels(Sm90Params const &params, int a, int b, int n) {
    Problem const &p = params.problem;
    HaloPlan const &plan = params.halo;
    a += opaque(threadIdx.x) % 4 * 2;
    step_a = plan.swapped ? p.Q : 1, step_b = plan.swapped ? 1 : p.Q;
    first = (int64_t(n) * p.P * p.Q) + (int64_t(a) * step_a) + (int64_t(b) * step_b);
    groups = plan.size_b - b;
    inside[0] = a < plan.size_a, inside[1] = a + 1 < plan.size_a;
  }

  // Calls f(i, element) for those of a thread's values (2,2,kGroups) = (pixel,filter,group) that exist, from group
  // `from` on. `at` is where that group begins in a tensor of a pixel every `ld` elements, and moves past the last one;
  // from there on the tensor has `left` filters.
  template <int kGroups, class Element, class F>
  CUTE_DEVICE void each(int from, Element *&at, int64_t ld, int left, F const &f) const {
    int64_t const next_a = step_a * ld, next_b = step_b * ld;
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group, at += next_b) {
      if (from + group >= groups) continue;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (inside[i % 2] && left > 8 * (i / 2)) f(4 * group + i, at + (i % 2 == 0 ? 0 : next_a) + 8 * (i / 2));
      }
    }
  }
};

// acc(2,2,kGroups) += the shortcut. As many of its loads are in flight as registers can hold beside the sums.
template <int kGroups>
CUTE_DEVICE void add_shortcut(float (&acc)[4 * kGroups], DirectPixels const &pixels, float const *at, int64_t ld,
                              int left) {
  constexpr int kSlice = 8;
  static_assert(kGroups % kSlice == 0);
  CUTE_UNROLL
  for (int from = 0; from < kGroups; from += kSlice) {
    float z[4 * kSlice] = {};
    pixels.each<kSlice>(from, at, ld, left, [&](int i, float const *value) { z[i] = __ldcg(value); });
    CUTE_UNROLL
    for (int i = 0; i < 4 * kSlice; ++i) acc[4 * from + i] += z[i];
  }
}

// Writes the outputs of a warpgroup's sums of 64 filters x (8 x kGroups) pixels.
template <int kGroups>
CUTE_DEVICE void store_directly(float (&acc)[4 * kGroups], FilterPair pair, Sm90Params const &params,
                                TileFilters const &filters, DirectPixels const &pixels) {
  constexpr int kSlice = 4;
  static_assert(kGroups % kSlice == 0);
  Problem const &p = params.problem;
  int const thread = opaque(threadIdx.x), filter = thread % 128 / 32 * 16 + thread % 32 / 4;
  Activation activation = p.activation;
  if (has_shortcut(p)) {
    activation = finish_before_shortcut(acc, pair, p);
    auto const *const z = static_cast<float const *>(params.shortcut) + filters.first + filter;
    add_shortcut<kGroups>(acc, pixels, z + pixels.first * p.ldz, p.ldz, pair.left);
  }
  Sm90Output const &output = params.outputs[filters.output];
  auto *const y = static_cast<float *>(output.y) + filters.in_output + filter + pixels.first * output.ld;
  with_finish(activation, [&](auto finish) {
    float *at = y;
    CUTE_UNROLL
    for (int from = 0; from < kGroups; from += kSlice) {
      auto &values = reinterpret_cast<float (&)[4 * kSlice]>(acc[4 * from]);
      bool const relu = finish_values<decltype(finish)::value>(values, pair, p);
      for_each_value(values, [&](float &value) { value = relu ? max_nan(value, 0.f) : value; });
      pixels.each<kSlice>(from, at, output.ld, pair.left, [&](int i, float *value) { *value = values[i]; });
    }
  });
}

}  // namespace cutefuse::conv
