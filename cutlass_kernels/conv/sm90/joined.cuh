// K-tiles of two 8-bit sources of at most 64 channels each (JoinPlan), half a k-tile; under several taps, of two taps
// of such a source. They follow those of whole blocks. In a stage all rows of the first source or tap come before those
// of the second, 64 bytes each, of pixels as well as of filters; but filters of two sources are whole rows.
#pragma once

#include "conv/sm90/k_tiles.cuh"

namespace cutefuse::conv {

// The first k-tile of a part of the reduction, which is `k`.
template <class Traits>
CUTE_DEVICE auto part_cursor(Sm90Params const &params, int part, int k) {
  if constexpr (Traits::kPreActivated && Traits::kSmall) {
    Problem const &p = params.problem;
    PartStart const start = params.starts[part];
    int const tap = start.r * p.S + start.s;
    KCursor cursor(p);
    cursor.source = start.source, cursor.first = start.block * kChannelBlock, cursor.r = start.r, cursor.s = start.s;
    cursor.channels = p.C[start.source], cursor.taps_left -= tap;
    cursor.column = (start.packed * params.by_taps.divisor + tap) * kChannelBlock;
    return cursor;
  } else if constexpr (Traits::kPairs) {
    return PairCursor(params, Traits::kSmall ? params.starts[part] : PartStart{});
  } else {
    return cursor_at(params, k);
  }
}

// Loads the k-tile at `cursor`, of a source and the next one, kSources, or of a tap and the next one, and advances to
// the next two. Pixels of one that does not exist are zeros, as all beyond the channels. Or loads a tap of the lone
// block. Else as `load` of fill_ring.
template <class Traits, bool kSources>
CUTE_DEVICE void load_joined(typename Traits::SharedStorage &shared, Sm90Params const &params, PairCursor &cursor,
                             Ring &ring, int filter, int first, Pixel const &pixel, ClusterPlace const &place) {
  Problem const &p = params.problem;
  auto &stage = shared.stages[ring.stage];
  uint64_t *const full = open_stage(shared.full, shared.empty, ring, Traits::kStageBytes);
  if (ring.stage == 0) wait_for_previous_kernel();
  load_pixels<Traits>(params, cursor, first, pixel, full, stage.x, place);
  if constexpr (kSources) {
    load_filter_pair<Traits::kInOrder>(params, &params.w, cursor.packed * kChannelBlock, 0, filter, full, stage.w);
  } else {
    int const taps = params.by_taps.divisor, unit = cursor.packed * taps + taps - cursor.taps_left;
    load_filter_pair<Traits::kInOrder>(params, &params.w_second, 0, unit, filter, full, stage.w);
  }
  if (kSources || params.joined.from < p.sources) {
    if (kSources ? cursor.source + 1 == p.sources : cursor.taps_left == 1) {
      cursor.block = 1;
    } else if constexpr (kSources) {
      cursor.advance(p);
    } else {
      cursor.advance_tap(p), --cursor.taps_left;
    }
    load_pixels<Traits>(params, cursor, first, pixel, full, stage.x + Traits::kPixels * kChannelBlock, place);
    cursor.block = 0;
  }
  cursor.advance(p);
  ring.advance();
}

}  // namespace cutefuse::conv
