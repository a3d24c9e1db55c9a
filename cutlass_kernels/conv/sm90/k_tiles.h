// How a tile cuts a problem's reduction into k-tiles. Host code, shared by the model of time and the plan.
#pragma once

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// Small tiles of 8-bit sources join what would fill only half of a k-tile, of the last sources that have at most half
// of its channels: two taps or, under one tap, two of these sources. The last of an odd number is left alone.
constexpr int joined_channels(Sm90Tile const &tile) { return k_channels(tile) / 2; }
inline bool joins_taps(Sm90Tile const &tile, Problem const &p) {
  return tile.schedule == Sm90Schedule::kSmall && tile.pairs && p.R * p.S > 1;
}
inline bool joins_8bit_sources(Sm90Tile const &tile, Problem const &p) {
  return tile.schedule == Sm90Schedule::kSmall && tile.pairs && p.R * p.S == 1;
}
// The first source that is joined.
inline int joined_from(Sm90Tile const &tile, Problem const &p) {
  auto const narrow = [&](int source) { return source >= 0 && p.C[source] <= joined_channels(tile); };
  int from = p.sources;
  if (joins_taps(tile, p) || joins_8bit_sources(tile, p)) {
    while (narrow(from - 1)) --from;
  }
  bool const alone = joins_8bit_sources(tile, p) && from + 1 == p.sources;
  return alone ? p.sources : from;
}

// The source whose last block is joined as a source of its own (divided_problem): the last one of more than one block,
// if no second block goes with that block. -1 if there is none.
inline int divided_source(Sm90Tile const &tile, Problem const &p) {
  int last = p.sources - 1;
  while (last > 0 && blocks_of(p.C[last]) == 1) --last;
  bool const lone = blocks_of(p.C[last]) % 2 == 1 && blocks_of(p.C[last]) > 1;
  return joins_taps(tile, p) && lone && p.sources < kMaxSources ? last : -1;
}

// The problem as the tile computes it. The last block of one source may be a source of its own, of the same tensor and
// scale: then it can be joined.
inline Problem divided_problem(Sm90Tile const &tile, Problem p) {
  int const source = divided_source(tile, p);
  if (source < 0) return p;
  int const before = (blocks_of(p.C[source]) - 1) * kChannelBlock;
  for (int i = p.sources++; i > source; --i) {
    p.C[i] = p.C[i - 1], p.start[i] = p.start[i - 1], p.ldx[i] = p.ldx[i - 1];
    p.upsample[i] = p.upsample[i - 1], p.scale[i] = p.scale[i - 1];
  }
  p.C[source] = before, p.C[source + 1] -= before, p.start[source + 1] += before;
  return p;
}

// Whether a k-tile is a row of taps (small_patch.cuh).
constexpr bool takes_rows(Sm90Tile const &tile) { return tile.halo && tile.schedule == Sm90Schedule::kSmall; }

inline int k_tiles(Sm90Tile const &tile, Problem const &p) {
  if (takes_rows(tile)) return k_tiles<kChannelBlock>(p) / p.S;
  int const tiles = k_channels(tile) == kChannelBlock ? k_tiles<kChannelBlock>(p) : k_tiles<2 * kChannelBlock>(p);
  int const taps = p.R * p.S, joined = p.sources - joined_from(tile, p);
  return tiles - (joins_taps(tile, p) ? joined * (taps / 2) : joined / 2 * taps);
}

// The last block of packed filters, if the tile loads two of each tap and no second one follows; else -1.
inline int lone_block(Sm90Tile const &tile, Problem const &p) {
  int blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += blocks_of(p.C[i]);
  bool const odd = blocks_of(p.C[p.sources - 1]) % 2 == 1;
  return tile.pairs && p.R * p.S > 1 && odd && joined_from(tile, p) == p.sources && blocks < 1 << 15 ? blocks - 1 : -1;
}

}  // namespace cutefuse::conv
