// Walks over the k-tiles of a reduction, in the order that producers and consumers share.
#pragma once

#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// The k-tile `k` of the reduction.
CUTE_DEVICE KCursor cursor_at(Sm90Params const &params, int k) {
  KCursor cursor;
  if (k == 0) return cursor;
  Problem const &p = params.problem;
  cursor.column = int64_t(k) * kChannelBlock;
  cursor.block = params.by_taps.divide(k);
  int const tap = k - cursor.block * params.by_taps.divisor;
  cursor.r = params.by_s.divide(tap), cursor.s = tap - cursor.r * p.S;
  while (cursor.source + 1 < p.sources && cursor.block >= blocks_of(p.C[cursor.source])) {
    cursor.block -= blocks_of(p.C[cursor.source++]);
  }
  return cursor;
}

// What a consumer needs to know about a k-tile: its number of wgmma steps, of kStep channels each.
template <int kStep>
struct KSteps {
  int source, channel, taps_left;
  CUTE_DEVICE KSteps(Problem const &p, KCursor const &at)
      : source(at.source), channel(at.channel()), taps_left(p.R * p.S - at.r * p.S - at.s) {}
  CUTE_DEVICE int steps(Problem const &p) const {
    int const left = p.C[source] - channel;
    return left >= kChannelBlock ? kChannelBlock / kStep : ceil_div(left, kStep);
  }
  CUTE_DEVICE void advance(Problem const &p) {
    if (--taps_left > 0) return;
    taps_left = p.R * p.S;
    channel += kChannelBlock;
    if (channel >= p.C[source]) channel = 0, ++source;
  }
};

template <class Traits>
using Steps = KSteps<kStepBytes / int(sizeof(typename Traits::Element))>;

}  // namespace cutefuse::conv
