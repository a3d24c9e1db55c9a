// Sources of several scales. In one sum: it counts in units of the scale of the source that is being added up, and is
// brought to the next source's unit before that source's products come. Small tiles, which have registers to spare,
// drain the sum of a source into float32 sums instead: less code, and a jump to more of it costs them 0.2 us.
#pragma once

#include "conv/sm90/k_tiles.cuh"
#include "conv/sm90/scaled_store.cuh"

namespace cutefuse::conv {

// Brings sums to another unit. Integers are rounded: by at most half of the smallest product of the source that comes
// next. The product with `whole` takes half as long as that with `fraction`; a mask takes nothing beside it.
template <class Sum, int kValues>
CUTE_DEVICE void rescale(Sum (&sums)[kValues], Rescale const &by) {
  auto const each = [&](auto f) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) sums[i] = f(sums[i]);
  };
  if constexpr (cute::is_same_v<Sum, float>) {
    each([&](float sum) { return sum * by.factor; });
  } else {
    auto const rounded = [&](int sum, int whole) {
      int64_t const whole_and_half = int64_t(whole) << 32 | 0x80000000u;
      return uint32_t((int64_t(sum) * by.fraction + whole_and_half) >> 32);
    };
    if (by.whole == 0 || by.whole == 1) {
      each([&, mask = -by.whole](uint32_t sum) { return rounded(int(sum), int(sum) & mask); });
    } else {
      each([&](uint32_t sum) { return rounded(int(sum), int(sum) * by.whole); });
    }
  }
}

// Raised sums. Where no sum is larger than 2^22 when its unit changes, integers are kept kRaise, 1.5 * 2^23, higher,
// with the bits of that float32. Float32 of this size are 1 apart: to wgmma such a register is an integer, and one FFMA
// brings it to another unit. For a register of two warpgroups that takes 2.5 clocks, where integers take 8.3 or 12.3.
// In between a sum may be larger, since integers are added and subtracted modulo 2^32. Patches (halo.cuh) keep plain
// integers: the largest of them would spill.

// Begins the sums of a tile; the first step overwrites those that are not raised.
template <class Sum, int kRowTiles, int kValues>
CUTE_DEVICE SM90::GMMA::ScaleOut begin_sums(Sum (&acc)[kRowTiles][kValues], Sm90Params const &params) {
  if constexpr (!cute::is_same_v<Sum, float>) {
    if (params.raised) {
      for_each_value(acc, [](uint32_t &sum) { sum = __float_as_uint(float(kRaise)); });
      return SM90::GMMA::ScaleOut::One;
    }
  }
  return SM90::GMMA::ScaleOut::Zero;
}

// Brings the sums of a tile to the unit of `source`.
template <class Sum, int kRowTiles, int kValues>
CUTE_DEVICE void change_unit(Sum (&acc)[kRowTiles][kValues], Sm90Params const &params, int source) {
  CUTE_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    if constexpr (!cute::is_same_v<Sum, float>) {
      if (params.raised) {
        RaisedRescale const &by = params.raised_rescale[source];
        for_each_value(acc[m],
                       [&](uint32_t &sum) { sum = __float_as_uint(fmaf(__uint_as_float(sum), by.factor, by.term)); });
        continue;
      }
    }
    rescale(acc[m], params.rescale[source]);
  }
}

// Ends the sums of a tile: they are plain integers again.
template <class Sum, int kRowTiles, int kValues>
CUTE_DEVICE void lower_sums(Sum (&acc)[kRowTiles][kValues], Sm90Params const &params) {
  if constexpr (!cute::is_same_v<Sum, float>) {
    if (params.raised) for_each_value(acc, [](uint32_t &sum) { sum -= __float_as_uint(float(kRaise)); });
  }
}

// Calls issue(begin, end) for the k-tiles of a tile. Where the next source has another scale than those before it the
// sums are brought to its unit.
template <class Traits, class Issue>
CUTE_DEVICE void issue_by_scale(typename Traits::Sum (&acc)[Traits::kRowTiles][Traits::kN / 2], Ring &ring,
                                typename Traits::SharedStorage &shared, Sm90Params const &params,
                                Release const &release, Issue const &issue) {
  if constexpr (!Traits::kScaled) return issue(0, params.k_tiles);
  Problem const &p = params.problem;
  int begin = 0, end = 0;
  CUTE_NO_UNROLL
  for (int source = 0; begin < params.k_tiles; ++source) {
    int const first = source;
    do {
      end += ceil_div(p.C[source], Traits::kChannels) * params.by_taps.divisor;
    } while (end < params.k_tiles && params.rescale[source + 1].factor == 1.f && ++source);
    if (begin > 0) {
      finish_loop<Traits>(acc, ring, shared, release);
      change_unit(acc, params, first);
    }
    issue(begin, end);
    begin = end;
  }
}

// Adds a source's sums to those of the earlier ones.
template <class Sum, int kValues>
CUTE_DEVICE void drain(Sum const (&acc)[kValues], float scale, float (&sums)[kValues]) {
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) sums[i] = fmaf(to_float(acc[i]), scale, sums[i]);
}

}  // namespace cutefuse::conv
