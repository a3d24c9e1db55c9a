// From the sums of a small tile's unit to its outputs, through registers alone: bias, activation and shortcut, and
// 16-bit or 8-bit outputs. A unit is 8 columns of the sums: 8 pixels or, of pre-activated sources, 8 filters.
#pragma once

#include "conv/sm90/patch.cuh"
#include "conv/sm90/scaled_store.cuh"
#include "conv/sm90/shortcut.cuh"

namespace cutefuse::conv {

// ---- place ----------------------------------------------------------------------------------------------------------

// An 8 x 8 matrix of 16-bit elements, a row in four threads, with rows and columns exchanged. CuTe has no atom for it.
CUTE_DEVICE uint32_t transposed(uint32_t two) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
}

// The outputs of a thread, and the shortcut's elements that belong to them: of each unit two neighbouring filters of
// one pixel, and the two that are 8 filters on. A warp's 16 filters of a pixel are one sector of memory, so they are
// loaded and stored by registers, without a barrier.
template <class Element>
struct UnitPlace {
  using Output = Element;
  Element *y;
  Element const *z;
  int64_t step_y, step_z;  // elements from unit to unit
  int units, words;        // how many units, and how many pairs of filters, exist from here on

  // Of the unit that begins at pixel `first`. together: filters that a thread stores at once.
  CUTE_DEVICE UnitPlace(Sm90Params const &params, TileFilters const &filters, FilterPair const &pair, int first,
                        int together = 2) {
    Problem const &p = params.problem;
    int const pixel = first + threadIdx.x % 32 / 4;
    begin(params, filters, pair, pixel, 8, together), units = ceil_div(p.N * p.P * p.Q - pixel, 8);
  }
  // Of a patch, whose rows are units.
  CUTE_DEVICE UnitPlace(Sm90Params const &params, TileFilters const &filters, FilterPair const &pair,
                        Patch const &patch) {
    Problem const &p = params.problem;
    HaloPlan const &plan = params.halo;
    int const a = patch.a + threadIdx.x % 32 / 4, row = plan.swapped ? patch.n * p.P + a : patch.n * p.P + patch.b;
    begin(params, filters, pair, row * p.Q + (plan.swapped ? patch.b : a), plan.swapped ? 1 : p.Q, 2);
    units = a < plan.size_a ? plan.size_b - patch.b : 0;
  }
  CUTE_DEVICE void load(uint32_t (&shortcut)[2], int unit) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool const exists = unit < units && i < words;
      shortcut[i] = exists ? __ldcg(reinterpret_cast<uint32_t const *>(z + unit * step_z + 8 * i)) : 0;
    }
  }
  CUTE_DEVICE void store(uint32_t const (&packed)[2], int unit) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const two = transposed(packed[i]);
      if (unit < units && i < words) *reinterpret_cast<uint32_t *>(y + unit * step_y + 8 * i) = two;
    }
  }

 private:
  // `pixel` is the thread's in the first unit, `step` lies from unit to unit.
  CUTE_DEVICE void begin(Sm90Params const &params, TileFilters const &filters, FilterPair const &pair, int pixel,
                         int step, int together) {
    Sm90Output const &output = params.outputs[filters.output];
    int const lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 16 + lane % 4 * together;
    int64_t const ldz = params.problem.ldz;
    y = static_cast<Element *>(output.y) + pixel * output.ld + filters.in_output + column;
    z = static_cast<Element const *>(params.shortcut) + pixel * ldz + filters.first + column;
    step_y = step * output.ld, step_z = step * ldz;
    words = ceil_div(pair.left + lane / 4, 8);
  }
};

// As UnitPlace, of 8-bit outputs. Of a warp's 16 filters all exist, or none.
template <class Element, bool kInOrder>
struct BytePlace : UnitPlace<Element> {
  CUTE_DEVICE BytePlace(Sm90Params const &params, TileFilters const &filters, FilterPair const &pair, int first)
      : UnitPlace<Element>(params, filters, pair, first, kInOrder ? 2 : 4) {}
  // packed: (2 filters,2 pixels), the filters 8 apart where they are in their order, else neighbours.
  CUTE_DEVICE void store_bytes(uint32_t packed, int unit) const {
    uint32_t const four = transposed(packed);
    Element *const to = this->y + unit * this->step_y;
    if (unit >= this->units || this->words <= 0) return;
    if constexpr (kInOrder) {
      uint32_t const halves = __byte_perm(four, 0, 0x3120);  // two neighbours, then those 8 on
      *reinterpret_cast<uint16_t *>(to) = uint16_t(halves);
      *reinterpret_cast<uint16_t *>(to + 8) = uint16_t(halves >> 16);
    } else {
      *reinterpret_cast<uint32_t *>(to) = four;
    }
  }
};

// ---- conversion -----------------------------------------------------------------------------------------------------

// As kFewest: each scheduler has one or two warps that convert, and they wait for their own instructions. Two SiLUs
// with one reciprocal take longer.
constexpr bool kUnitFewest = true;

// As convert, of a unit with the shortcut's elements of the same thread, which lie as they are stored: kTransposed,
// unlike its sums.
template <Finish kFinish, class Element, bool kTransposed, class Pair>
CUTE_DEVICE void convert_with_shortcut(float (&values)[4], uint32_t (&packed)[2], uint32_t const (&shortcut)[2],
                                       Pair const &pair, Problem const &p) {
  uint32_t const before = p.residual == Residual::kBefore ? ~0u : 0u;
  float2 after[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const z = kTransposed ? transposed(shortcut[i]) : shortcut[i];  // as the sums lie
    float2 const added = widen<Element>(z & before);
    values[2 * i] += added.x, values[2 * i + 1] += added.y;
    after[i] = widen<Element>(z & ~before);
  }
  bool const relu = finish_values<kFinish, kUnitFewest>(values, pair, p);
  for_each_value(values, [&](float &value) { value = relu ? max_nan(value, 0.f) : value; });
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    packed[i] = pack<Element, false>(values[2 * i] + after[i].x, values[2 * i + 1] + after[i].y);
  }
}

// As convert, of a unit to 8-bit outputs: two pixels, of each of them two filters.
template <Finish kFinish, class Element, class Pair>
CUTE_DEVICE uint32_t convert_to_bytes(float (&values)[4], Pair const &pair, Sm90Params const &params) {
  bool const relu = finish_values<kFinish, kUnitFewest>(values, pair, params.problem);
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[i] = (relu ? max_nan(values[i], 0.f) : values[i]) * params.inverse_output_scale;
  }
  return pack_bytes<Element>(values[0], values[2], values[1], values[3]);
}

// ---- unit -----------------------------------------------------------------------------------------------------------

// Finishes a unit: values holds (2,2) = (pixel,filter) or, pre-activated, (filter,pixel).
template <class Traits, Finish kFinish, bool kShortcut, class Pair, class Place>
CUTE_DEVICE void store_unit(float (&values)[4], uint32_t const (&shortcut)[2], Pair const &pair, bool pads,
                            Sm90Params const &params, Place const &place, int unit) {
  using Element = typename Place::Output;
  if constexpr (sizeof(Element) == 1) {  // whole vectors: no pad lanes
    place.store_bytes(convert_to_bytes<kFinish, Element>(values, pair, params), unit);
  } else {
    uint32_t packed[2];
    if constexpr (kShortcut) {
      convert_with_shortcut<kFinish, Element, !Traits::kPixelRows>(values, packed, shortcut, pair, params.problem);
    } else {
      convert<kFinish, Element, kUnitFewest>(values, packed, pair, params.problem);
    }
    if constexpr (!Traits::kPixelRows) {
      if (pads) clear_pad_lanes(packed, pair);
    }
    place.store(packed, unit);
  }
}

}  // namespace cutefuse::conv
