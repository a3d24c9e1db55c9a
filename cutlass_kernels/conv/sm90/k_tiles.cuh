// Walks over the k-tiles of a reduction, in the order that producers and consumers share, and loads them.
#pragma once

#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// The k-tile `k` of the reduction.
CUTE_DEVICE KCursor cursor_at(Sm90Params const &params, int k) {
  Problem const &p = params.problem;
  KCursor cursor(p);
  if (k == 0) return cursor;
  cursor.column = int64_t(k) * kChannelBlock;
  int block = params.by_taps.divide(k);
  int const tap = k - block * params.by_taps.divisor;
  cursor.r = params.by_s.divide(tap), cursor.s = tap - cursor.r * p.S, cursor.taps_left -= tap;
  while (cursor.source + 1 < p.sources && block >= blocks_of(cursor.channels)) {
    block -= blocks_of(cursor.channels), cursor.channels = p.C[++cursor.source];
  }
  cursor.first = block * kChannelBlock;
  return cursor;
}

// Walks the reduction in k-tiles of two neighbouring blocks of a source, as KCursor does in those of one. The second
// block may not exist: its pixels are zeros then, and its filters any others of the same output.
struct PairCursor {
  int source, block, r, s;  // block: the first of the two
  int packed;               // the same block among those of the packed filters
  int blocks;               // of the source
  int taps_left;            // as in KCursor

  CUTE_DEVICE PairCursor(Sm90Params const &params, PartStart const &start)
      : source(start.source), block(start.block), r(start.r), s(start.s), packed(start.packed) {
    Problem const &p = params.problem;
    blocks = blocks_of(p.C[source]), taps_left = params.by_taps.divisor - r * p.S - s;
  }
  CUTE_DEVICE int channel() const { return block * kChannelBlock; }
  CUTE_DEVICE void advance(Problem const &p) {
    if (--taps_left > 0) return advance_tap(p);
    r = s = 0, taps_left = p.R * p.S;
    packed += cute::min(blocks - block, 2);
    block += 2;
    if (block < blocks) return;
    block = 0;
    if (++source < p.sources) blocks = blocks_of(p.C[source]);
  }
  CUTE_DEVICE void advance_tap(Problem const &p) {
    if (++s == p.S) s = 0, ++r;
  }
};

// Loads this block's share of a k-tile of pixels into `to`, here and in the blocks that share them.
template <class Traits, class Cursor>
CUTE_DEVICE void load_pixels(Sm90Params const &params, Cursor const &at, int first_pixel, Pixel const &pixel,
                             uint64_t *full, void *to, ClusterPlace const &place) {
  CUtensorMap const *const map = &params.x[at.source];
  bool const multicast = Traits::kSharesPixels && place.cluster_f > 1;
  Problem const &p = params.problem;
  if (params.pointwise) {
    if (multicast) {
      SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, uint16_t((1 << place.cluster_f) - 1), kEvictNormal, to, at.channel(),
                                       first_pixel);
    } else {
      SM90_TMA_LOAD_2D::copy(map, full, kEvictNormal, to, at.channel(), first_pixel);
    }
    return;
  }
  uint16_t const w = uint16_t(at.s * p.dilation_w), h = uint16_t(at.r * p.dilation_h);
  if (multicast) {
    SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(map, full, uint16_t((1 << place.cluster_f) - 1), to, at.channel(), pixel.w0,
                                            pixel.h0, pixel.n, w, h);
  } else {
    SM90_TMA_LOAD_IM2COL_4D::copy(map, full, to, at.channel(), pixel.w0, pixel.h0, pixel.n, w, h);
  }
}

// As load_filters, of two blocks from `block` on: the map is that of encode_filter_pairs. `column` is one of a block.
// Through that of two taps (encode_maps) they are taps, `block` being the first of them. kInOrder: see
// loads_in_order().
template <bool kInOrder>
CUTE_DEVICE void load_filter_pair(Sm90Params const &params, CUtensorMap const *w, int column, int block, int filter,
                                  uint64_t *full, void *to) {
  if (!kInOrder && size_of(params.problem.output_type) == 1) {
    SM90_TMA_LOAD_5D::copy(w, full, kEvictLast, to, column, 0, 0, filter / 16, block);
  } else {
    SM90_TMA_LOAD_3D::copy(w, full, kEvictLast, to, column, filter, block);
  }
}

// kLone: looks whether the block is params.lone_block.
template <bool kInOrder, bool kLone>
CUTE_DEVICE void load_filter_pair(Sm90Params const &params, CUtensorMap const *w, PairCursor const &at, int filter,
                                  uint64_t *full, void *to) {
  int const taps = params.by_taps.divisor, tap = at.r * params.problem.S + at.s;
  if (kLone && at.packed == params.lone_block) {
    load_filter_pair<kInOrder>(params, &params.w_second, 0, at.packed * taps + tap, filter, full, to);
  } else {  // with one tap the two blocks are columns of one
    int const column = (taps == 1 ? at.packed : tap) * kChannelBlock;
    load_filter_pair<kInOrder>(params, w, column, taps == 1 ? 0 : at.packed, filter, full, to);
  }
}

// What a consumer of a large tile needs to know about a k-tile, from the first one on: its number of wgmma steps.
template <class Traits>
struct Steps {
  static constexpr int kChannels = Traits::kChannels, kStep = kStepBytes / int(sizeof(typename Traits::Element));
  int source = 0, channel = 0, taps_left;
  CUTE_DEVICE explicit Steps(Problem const &p) : taps_left(p.R * p.S) {}
  CUTE_DEVICE int steps(Problem const &p) const {
    int const left = p.C[source] - channel;
    return left >= kChannels ? kChannels / kStep : ceil_div(left, kStep);
  }
  CUTE_DEVICE void advance(Problem const &p) {
    if (--taps_left > 0) return;
    taps_left = p.R * p.S;
    channel += kChannels;
    if (channel >= p.C[source]) channel = 0, ++source;
  }
};

// Waits for the steps that still run, and frees their stage.
template <class Traits>
CUTE_DEVICE void finish_loop(typename Traits::Sum (&acc)[Traits::kRowTiles][Traits::kN / 2], Ring const &ring,
                             typename Traits::SharedStorage &shared, Release const &release) {
  warpgroup_wait<0>();
  release(&shared.empty[ring.previous()]);
  fence_sums(acc);
}

}  // namespace cutefuse::conv
