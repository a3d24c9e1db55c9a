// Tiles whose pixels are wgmma's rows and whose filters are its columns, of which there may be any multiple of 8: so
// filters that do not fill blocks of 64 waste nothing. A thread's sums are neighbouring filters of a pixel, and are
// stored as they lie in registers.
#pragma once

#include "conv/sm90/unit_store.cuh"

namespace cutefuse::conv {

// ---- biases ---------------------------------------------------------------------------------------------------------

// Every filter is a column, so a thread has sums of kN / 4 filters. It reads their biases when it finishes them.
struct RowBiases {
  float const *from;
  int left;  // filters that the output has from the thread's first one on
  CUTE_DEVICE RowBiases(Sm90Params const &params, TileFilters const &filters) {
    int const column = threadIdx.x % 4 * 2;
    from = params.b + filters.first + column, left = params.outputs[filters.output].last - filters.first - column;
  }
};

// The biases of a unit's two filters.
struct UnitBiases {
  float bias[2];
  UnitBiases() = default;
  CUTE_DEVICE UnitBiases(RowBiases const &all, int unit) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) bias[i] = 8 * unit + i < all.left ? __ldg(all.from + 8 * unit + i) : 0.f;
  }
  // values holds (2,2) = (filter,pixel).
  CUTE_DEVICE void add_to(float (&values)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) values[i] += bias[i % 2];
  }
};

// Brings the biases of a tile's filters into L1 while its sums are computed: a thread reads too many to keep them, and
// would wait for L2 when it finishes its sums.
template <int kFilters>
CUTE_DEVICE void fetch_biases(Sm90Params const &params, TileFilters const &filters) {
  static_assert(kFilters % 8 == 0 && kFilters <= 256);
  int const at = filters.first + threadIdx.x % 32 * 8;  // 8 of them are a sector
  if (threadIdx.x % 32 < kFilters / 8 && at < params.outputs[filters.output].last) {
    float bias;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(bias) : "l"(params.b + at));
  }
}

// What is added to sums that begin with their biases: nothing more.
struct BegunWithBias {
  CUTE_DEVICE BegunWithBias(Sm90Params const &, TileFilters const &) {}
  template <int kValues>
  CUTE_DEVICE void add_to(float (&)[kValues]) const {}
};

// What is added to the sums of a unit.
template <class Pair>
CUTE_DEVICE Pair const &pair_of_unit(Pair const &pair, int) {
  return pair;
}
CUTE_DEVICE UnitBiases pair_of_unit(RowBiases const &biases, int unit) { return {biases, unit}; }

// RowPlace clears pad lanes.
CUTE_DEVICE bool holds_pad_lanes(RowBiases const &) { return false; }
CUTE_DEVICE bool holds_pad_lanes(BegunWithBias const &) { return false; }

// ---- outputs --------------------------------------------------------------------------------------------------------

// As UnitPlace, where a unit is 8 filters of a warpgroup's pixels: a thread has two neighbouring filters of one pixel,
// and of the one that is 8 rows of wgmma on.
template <class Element>
struct RowPlace {
  using Output = Element;
  Element *y;
  Element const *z;
  int64_t step_y, step_z;  // elements from one pixel to the other
  int pixels, units;       // how many of the two pixels, and how many units, exist
  int left;                // filters that the output has from the thread's first one on

  // Of the warpgroup whose pixels begin at `first`.
  template <class Pair>
  CUTE_DEVICE RowPlace(Sm90Params const &params, TileFilters const &filters, Pair const &, int first)
      : RowPlace(params, filters, first + of_thread(), 8,
                 ceil_div(params.problem.N * params.problem.P * params.problem.Q - first - of_thread(), 8)) {}
  // Of `pixel` and the one `step` pixels on. As many of them exist as the caller says.
  CUTE_DEVICE RowPlace(Sm90Params const &params, TileFilters const &filters, int pixel, int step, int pixels_)
      : pixels(pixels_) {
    Problem const &p = params.problem;
    Sm90Output const &output = params.outputs[filters.output];
    int const column = threadIdx.x % 4 * 2;
    y = static_cast<Element *>(output.y) + pixel * output.ld + filters.in_output + column;
    z = static_cast<Element const *>(params.shortcut) + pixel * p.ldz + filters.first + column;
    step_y = step * output.ld, step_z = step * p.ldz;
    units = ceil_div(output.last - filters.first, 8), left = output.last - filters.first - column;
  }
  // Row of wgmma of a thread's first pixel.
  static CUTE_DEVICE int of_thread() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
  // The shortcut's elements that belong to a unit, and to two neighbouring ones: see store_two.
  CUTE_DEVICE void load(uint32_t (&shortcut)[2], int unit) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool const exists = unit < units && i < pixels;
      shortcut[i] = exists ? __ldcg(reinterpret_cast<uint32_t const *>(z + i * step_z + 8 * unit)) : 0;
    }
  }
  CUTE_DEVICE void load_two(uint32_t (&first)[2], uint32_t (&second)[2], int unit) const {
    int const odd = threadIdx.x % 2;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint2 two{};
      if (unit + odd < units && i < pixels) {
        two = __ldcg(reinterpret_cast<uint2 const *>(z + i * step_z + 8 * unit + 6 * odd));
      }
      uint32_t const other = __shfl_xor_sync(~0u, odd ? two.x : two.y, 1);
      first[i] = odd ? other : two.x, second[i] = odd ? two.y : other;
    }
  }
  // Pads are stored as zeros, whatever the activation makes of zero.
  CUTE_DEVICE uint32_t without_pads(uint32_t two, int unit) const {
    int const exist = left - 8 * unit;
    return two & (exist > 1 ? ~0u : exist == 1 ? 0xffffu : 0u);
  }
  CUTE_DEVICE void store(uint32_t const (&packed)[2], int unit) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (unit >= units || i >= pixels) continue;
      *reinterpret_cast<uint32_t *>(y + i * step_y + 8 * unit) = without_pads(packed[i], unit);
    }
  }
  // As store, of two neighbouring units: two lanes exchange halves, so that four of them store a whole sector of memory
  // at once. The even ones have four filters of the first unit then, the odd ones of the second.
  CUTE_DEVICE void store_two(uint32_t const (&first)[2], uint32_t const (&second)[2], int unit) const {
    int const odd = threadIdx.x % 2;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const a = without_pads(first[i], unit), b = without_pads(second[i], unit + 1);
      uint32_t const other = __shfl_xor_sync(~0u, odd ? a : b, 1);
      if (unit + odd >= units || i >= pixels) continue;
      // Of a struct the compiler would store 4 bytes at a time.
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(y + i * step_y + 8 * unit + 6 * odd), "r"(odd ? other : a),
                   "r"(odd ? b : other)
                   : "memory");
    }
  }
};

// Finishes two neighbouring units: values hold (2,2) = (filter,pixel).
template <Finish kFinish, bool kShortcut, class Pair, class Place>
CUTE_DEVICE void store_two_units(float (&first)[4], float (&second)[4], uint32_t const (&shortcut_first)[2],
                                 uint32_t const (&shortcut_second)[2], Pair const &pair, Sm90Params const &params,
                                 Place const &place, int unit) {
  using Output = typename Place::Output;
  Problem const &p = params.problem;
  auto const &pair_first = pair_of_unit(pair, unit), &pair_second = pair_of_unit(pair, unit + 1);
  uint32_t packed[2][2];
  if constexpr (kShortcut) {
    convert_with_shortcut<kFinish, Output, false>(first, packed[0], shortcut_first, pair_first, p);
    convert_with_shortcut<kFinish, Output, false>(second, packed[1], shortcut_second, pair_second, p);
  } else {
    convert<kFinish, Output, kUnitFewest>(first, packed[0], pair_first, p);
    convert<kFinish, Output, kUnitFewest>(second, packed[1], pair_second, p);
  }
  place.store_two(packed[0], packed[1], unit);
}

// Finishes and stores the sums of a warpgroup whose pixels begin at `first`.
template <class Output, int kRegisters>
CUTE_DEVICE void store_rows(float (&acc)[kRegisters], Sm90Params const &params, TileFilters const &filters, int first) {
  RowBiases const biases(params, filters);
  RowPlace<Output> const place(params, filters, biases, first);
  uint32_t const none[2] = {};
  with_finish(params.problem.activation, [&](auto finish) {
    CUTE_UNROLL
    for (int unit = 0; unit < kRegisters / 4; unit += 2) {
      store_two_units<decltype(finish)::value, false>(reinterpret_cast<float (&)[4]>(acc[4 * unit]),
                                                      reinterpret_cast<float (&)[4]>(acc[4 * unit + 4]), none, none,
                                                      biases, params, place, unit);
    }
  });
}

}  // namespace cutefuse::conv
