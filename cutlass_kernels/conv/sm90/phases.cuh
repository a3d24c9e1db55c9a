// Sources that are enlarged by two under a 1x1 filter, on small tiles. An enlarged pixel and its three repetitions have
// the same products, so these are computed once. A tile is a run of pixels of the source and, for each of them, the 2 x
// 2 outputs above it, in four phases: first the even columns of even rows, last the odd columns of odd rows. Sums of
// enlarged sources come first, as wide as one phase, and every phase begins with them. Of a source of full size, im2col
// loads a phase as a tap of a 2 x 2 filter with stride 2.
#pragma once

#include "conv/sm90/narrow.cuh"
#include "conv/sm90/unit_store.cuh"

namespace cutefuse::conv {

// Keeps the ring full with the k-tiles of this block's part of the sums; one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_ring_in_phases(typename Traits::SharedStorage &shared, Sm90Params const &params,
                                     ClusterPlace const &place) {
  constexpr int kPhase = Traits::kPhasePixels;
  Problem const &p = params.problem;
  PhasePlan const &plan = params.phases;
  int const tile_f = place.tile_f(place.first_tile), filter = TileFilters(params, tile_f, Traits::kFilters, 0).first;
  FilterBox const box(params, tile_f);
  int const first = place.first_pixel<kPhase>(place.first_tile, params);
  int const image = params.by_image.divide(first), in_image = first - image * params.by_image.divisor;
  int const row = params.by_row.divide(in_image), column = in_image - row * params.by_row.divisor;
  Ring ring(params.stages);
  // Loads the blocks of channels [begin, end) of the sources from the one at `at` on, in the order of their sums.
  auto const load = [&](int at, int begin, int end, int pixels, auto const &load_pixels) {
    int block = begin;  // of a source
    while (block >= blocks_of(p.C[plan.source[at]])) block -= blocks_of(p.C[plan.source[at++]]);
    CUTE_NO_UNROLL
    for (int k = begin; k < end; ++k) {
      int const source = plan.source[at], channel = block * kChannelBlock;
      auto &stage = shared.stages[ring.stage];
      uint64_t *const full =
          open_stage(shared.full, shared.empty, ring, (Traits::kFilters - box.missing + pixels) * Traits::kPixelBytes);
      load_pixels(&params.x[source], full, stage.x, channel);
      load_filters(params, box.map, plan.first_block[at] * kChannelBlock + channel, filter, full, stage.w);
      ring.advance();
      if (++block == blocks_of(p.C[source])) block = 0, ++at;
    }
  };
  wait_for_previous_kernel();
  load(0, params.k_begin[place.part], params.k_begin[place.part + 1], kPhase,
       [&](CUtensorMap const *map, uint64_t *full, void *to, int channel) {
         SM90_TMA_LOAD_2D::copy(map, full, kEvictNormal, to, channel, first);
       });
  load(plan.enlarged, plan.begin[place.part], plan.begin[place.part + 1], Traits::kPixels,
       [&](CUtensorMap const *map, uint64_t *full, typename Traits::Element *to, int channel) {
         CUTE_UNROLL
         for (int phase = 0; phase < 4; ++phase) {
           SM90_TMA_LOAD_IM2COL_4D::copy(map, full, to + phase * kPhase * Traits::kChannels, channel, 2 * column,
                                         2 * row, image, uint16_t(phase % 2), uint16_t(phase / 2));
         }
       });
}

// As narrow_loop, in phases. A block's part of the sums has k-tiles of both kinds, for a branch around either loop
// would make the compiler wait for every wgmma.
template <class Traits, class Rows>
CUTE_DEVICE void loop_in_phases(float (&acc)[Traits::kN / 2], Ring &ring, typename Traits::SharedStorage &shared,
                                Sm90Params const &params, Release const &release, Rows &rows, int part) {
  constexpr int kValues = Traits::kPhasePixels / 2;
  auto &first = reinterpret_cast<float (&)[kValues]>(acc);
  narrow_loop<Traits, Traits::kPhasePixels>(first, ring, shared, release, rows, params.k_begin[part],
                                            params.k_begin[part + 1]);
  warpgroup_wait<0>();
  release(&shared.empty[ring.previous()]);
  fence_sums(first);
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) {
    CUTE_UNROLL
    for (int phase = 1; phase < 4; ++phase) acc[phase * kValues + i] = first[i];
  }
  narrow_loop<Traits>(acc, ring, shared, release, rows, params.phases.begin[part], params.phases.begin[part + 1], true);
}

// As UnitPlace, of units of 8 neighbouring pixels of the source, kUnits in each phase. There is no shortcut.
template <class Element, int kUnits>
struct PhasePlace {
  using Output = Element;
  Sm90Params const &params;
  Element *y;
  int ld;
  int first, words;  // pixel of the source, of this thread's in unit 0; pairs of filters that exist

  CUTE_DEVICE PhasePlace(Sm90Params const &all, TileFilters const &filters, FilterPair const &pair, int first_)
      : params(all) {
    Sm90Output const &output = params.outputs[filters.output];
    int const lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 16 + lane % 4 * 2;
    y = static_cast<Element *>(output.y) + filters.in_output + column, ld = int(output.ld);
    first = first_ + lane / 4, words = ceil_div(pair.left + lane / 4, 8);
  }
  CUTE_DEVICE void store(uint32_t const (&packed)[2], int unit) const {
    Problem const &p = params.problem;
    int const phase = unit / kUnits, of_source = first + 8 * (unit % kUnits), row = params.by_row.divide(of_source);
    // The rows of all images follow each other, in the source and in the output.
    int const pixel = 2 * of_source + (row + phase / 2) * p.Q + phase % 2;
    bool const exists = 4 * of_source < p.N * p.P * p.Q;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const two = transposed(packed[i]);
      if (exists && i < words) *reinterpret_cast<uint32_t *>(y + int64_t(pixel) * ld + 8 * i) = two;
    }
  }
};

}  // namespace cutefuse::conv
