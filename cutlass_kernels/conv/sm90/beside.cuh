// Few filters on the patches of halo.cuh. wgmma multiplies 64 rows of filters, of which 32 filters would leave half
// empty. So its rows are the filters of two pixels beside each other along W, and a column of its other operand is such
// a pair of pixels. A pair reads S + 1 columns of the source, each of which is a tap of the rows: where one of the two
// pixels does not read the column, its filters are zeros. With three columns that makes 4 products of 64 rows for two
// pixels instead of 6.
//
// A patch lies in two parts, the first pixels of all pairs and then the second ones, so that the pixels of a tap follow
// each other. Of a source that is enlarged by two both parts are the same, and the patch has one.
#pragma once

#include "conv/sm90/scaled_store.cuh"

namespace cutefuse::conv {

// Where a patch holds the columns that a pair of pixels reads of one source.
struct PairColumns {
  int enlarged, before, part;  // enlarged: 1 or 0; before: 1 if the first column is the second one of its repetition

  CUTE_DEVICE PairColumns(Sm90Params const &params, int source) {
    enlarged = params.problem.upsample[source] - 1;
    before = enlarged & params.problem.pad_left;
    part = params.halo.part;
  }
  // The pixel of the patch for the first pair and column `s`.
  CUTE_DEVICE int pixel(int s) const { return ((before + s) >> 1) + (enlarged || s % 2 == 0 ? 0 : part); }
};

// As FilterPair, of 32 filters, which each pixel of the pair has.
struct BesidePair : FilterPair {
  static constexpr int kColumns = kStoreColumns / 2;
  CUTE_DEVICE BesidePair(Sm90Params const &params, TileFilters const &filters)
      : FilterPair(params, filters, kColumns) {}
};
template <class Traits>
using PatchPair = cute::conditional_t<(Traits::kBeside > 1), BesidePair, Pair<Traits>>;

// Loads a patch of a source whose first pixel is (w,h) of image n; of an enlarged source row by row.
template <class Traits>
CUTE_DEVICE void load_patch_in_parts(Sm90Params const &params, int source, int channel, int w, int h, int n,
                                     uint64_t *full, unsigned char *to) {
  CUtensorMap const *const map = &params.x[source];
  HaloPlan const &plan = params.halo;
  int const row_bytes = plan.pitch * Traits::kPixelBytes;
  bool const enlarged = params.problem.upsample[source] > 1;
  TransactionBarrier::arrive_and_expect_tx(full, (enlarged ? 1 : 2) * plan.rows * row_bytes);
  if (enlarged) {
    for (int row = 0; row < plan.rows; ++row, to += row_bytes) {
      SM90_TMA_LOAD_4D::copy(map, full, kEvictNormal, to, channel, w >> 1, (h + row) >> 1, n);
    }
    return;
  }
  SM90_TMA_LOAD_4D::copy(map, full, kEvictNormal, to, channel, w, h, n);
  SM90_TMA_LOAD_4D::copy(map, full, kEvictNormal, to + plan.part * Traits::kPixelBytes, channel, w + 1, h, n);
}

// Loads what the filters of both pixels have for column `s` of the source. column: of the packed filters, of the first
// tap of the filter's row.
template <class Traits>
CUTE_DEVICE void load_filters_beside(Sm90Params const &params, int column, int s, int filter, uint64_t *full,
                                     unsigned char *to) {
  constexpr int kNone = 1 << 20;  // no filter, but zeros
  CUTE_UNROLL
  for (int pixel = 0; pixel < 2; ++pixel) {
    int const tap = s - pixel;
    bool const reads = tap >= 0 && tap < params.problem.S;
    load_filters(params, &params.w, column + (reads ? tap : 0) * kChannelBlock, reads ? filter : kNone, full,
                 to + pixel * Traits::kFilterBytes / 2);
  }
}

// Loads the shortcut of a warpgroup's pairs, from pixel (w,h) of image n on, to where they are staged. The compiler
// does not know that one thread calls this, and issues each load in a loop over the threads of a warp.
template <class Traits>
CUTE_DEVICE void load_shortcut_in_parts(Sm90Params const &params, int filter, int w, int h, int n, uint64_t *full,
                                        typename Traits::Output *to) {
  CUTE_NO_UNROLL
  for (int i = 0; i < 2 * Traits::kStagings; ++i, to += Traits::kStoreRows * BesidePair::kColumns) {
    SM90_TMA_LOAD_4D::copy(&params.z, full, kEvictNormal, to, filter, w + i % 2, h + i / 2 * (Traits::kStoreRows / 8),
                           n);
  }
}

// ---- NaN ------------------------------------------------------------------------------------------------------------

// Adds up, product by product, what filter `k` makes of the pixels that output (p,q) of image n reads, up to the first
// NaN.
template <class Element>
CUTE_DEVICE float sum_of_output(Sm90Params const &params, int k, int n, int p, int q) {
  Problem const &problem = params.problem;
  int const taps = problem.R * problem.S;
  auto const *filter = static_cast<Element const *>(params.filters) + k * packed_columns(problem);  // a source's part
  float sum = 0.f;
  CUTE_NO_UNROLL
  for (int source = 0; source < problem.sources; ++source) {
    int const C = problem.C[source], halves = problem.upsample[source] - 1;
    CUTE_NO_UNROLL
    for (int tap = 0; tap < taps; ++tap) {
      int const r = tap / problem.S, s = tap - r * problem.S;
      int const h = p - problem.pad_top + r * problem.dilation_h, w = q - problem.pad_left + s;
      if (h < 0 || h >= problem.H || w < 0 || w >= problem.W) continue;
      int64_t const pixel =
          (int64_t(n) * (problem.H >> halves) + (h >> halves)) * (problem.W >> halves) + (w >> halves);
      auto const *const x = static_cast<Element const *>(params.sources[source]) + pixel * problem.ldx[source];
      CUTE_NO_UNROLL
      for (int c = 0; c < C; ++c) {
        int const column = (c / kChannelBlock * taps + tap) * kChannelBlock + c % kChannelBlock;
        sum = fmaf(float(x[c]), float(filter[column]), sum);
        if (sum != sum) return sum;
      }
    }
    filter += blocks_of(C) * taps * kChannelBlock;
  }
  return sum;
}

// A NaN or an infinity times a zero of the other pixel's filters is NaN. So sums that are NaN are added up once more,
// each over the pixels that its output reads. acc(2,2,groups) = (pair,filter,group) of the pairs from (w,h) on.
template <class Element, int kValues>
CUTE_DEVICE void replace_nan(float (&acc)[kValues], Sm90Params const &params, int filter, int w, int h, int n) {
  float zero = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kValues; ++i) zero = fmaf(acc[i], 0.f, zero);
  if (zero == 0.f) return;
  Problem const &p = params.problem;
  int const lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  CUTE_NO_UNROLL
  for (int i = 0; i < kValues; ++i) {
    float value = acc[0];
    if (value != value) {
      int const k = filter + warp % 2 * 16 + lane / 4 + i / 2 % 2 * 8;
      int const q = w + 2 * (lane % 4 * 2 + i % 2) + warp / 2, row = h + i / 4;
      if (k < p.K && q < p.Q && row < p.P) value = sum_of_output<Element>(params, k, n, row, q);
    }
    CUTE_UNROLL
    for (int j = 0; j + 1 < kValues; ++j) acc[j] = acc[j + 1];
    acc[kValues - 1] = value;
  }
}

// ---- stores ---------------------------------------------------------------------------------------------------------

// Stores kStoreRows staged pairs, from pixel (w,h) of image n on: the first pixels and the second ones, each as an
// image of its own.
template <class Traits>
CUTE_DEVICE void store_in_parts(Sm90Params const &params, typename Traits::Output const *from, int filter, int w, int h,
                                int n) {
  SM90_TMA_STORE_4D::copy(&params.out[0], from, filter, w / 2, h, n);
  if (params.problem.Q == 1) return;
  SM90_TMA_STORE_4D::copy(&params.out[1], from + Traits::kStoreRows * BesidePair::kColumns, filter, w / 2, h, n);
}

}  // namespace cutefuse::conv
