// The parameter block of the Hopper kernels. Needs CUDA's headers, for its tensor maps.
#pragma once

#include <cuda.h>

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

constexpr int kStoreColumns = 64;  // filters of a warpgroup, one staging row

// One output: filters [first, last) of the packed matrix, from first_row on among the rows of all tiles.
struct Sm90Output {
  int first_row, first, last;
  std::int64_t ld;
  void *y;  // where threads store instead of TMA: float32, and small tiles
};

// A factor of sums: of float32, and of integers as whole + fraction / 2^32, whose product takes two instructions where
// the way through float32 takes as long as five.
struct Rescale {
  float factor;
  int whole, fraction;
};

// The same of a raised sum, which is kRaise higher (scales.cuh): sum * factor + term, rounded once.
struct RaisedRescale {
  float factor, term;
};
constexpr int kRaise = 3 << 22;  // 1.5 * 2^23

// How small tiles walk over sources of which some are enlarged by two (phases.cuh): those come first.
struct PhasePlan {
  std::uint8_t source[kMaxSources];        // in the order of their sums
  std::uint16_t first_block[kMaxSources];  // of channels, of each among those of the packed filters
  std::uint16_t begin[kMaxSplits + 1];     // as k_begin, of the k-tiles of full size; k_begin are the enlarged ones
  std::uint8_t enlarged;                   // sources
};

// What small tiles of 8-bit sources join (joined_from): of the last sources two, or two taps, share a k-tile.
struct JoinPlan {
  int from;   // the first such source
  int begin;  // its first k-tile, or that of the lone block
};

// Where a part of a reduction begins: its tap, and its block of channels among those of its source and of the packed
// filters. To look it up would take divisions, for which the first load would wait.
struct alignas(8) PartStart {
  std::uint8_t source, r, s;
  std::uint16_t block, packed;
};

// The lines of 64 bytes that a block reads first follow the maps, as in Problem.
struct alignas(128) Sm90Params {
  CUtensorMap x[kMaxSources];    // (C,pixel) or im2col or halo box of each source; enlarged, a row of a halo box
  CUtensorMap w;                 // (column,filter)
  CUtensorMap out[kMaxOutputs];  // (filter,pixel), for halo tiles (filter,a,b,n)
  CUtensorMap z;                 // the shortcut: axes as `out`, other boxes
  std::uint8_t cluster_f;
  std::uint8_t stages;           // of a small tile's ring
  std::uint8_t missing_filters;  // that the last tile of filters lacks
  bool holds_next;               // a small tile's next launch starts no earlier than this one works
  int splits;
  int cluster_tiles;  // tiles of one block of a cluster
  int last_f;         // the tile of filters that w_second loads, or -1
  int last_pixel;     // where the last tile of pixels may begin at most
  // A division costs some hundred clocks, and a kernel's start waits for a dozen of them.
  Divider by_f;                 // clusters side by side along the filters
  int k_begin[kMaxSplits + 1];  // the part of a cluster's i-th block ends where the next one's begins
  Divider by_image, by_row;     // P*Q and Q
  Divider by_taps, by_s;        // R*S and S
  JoinPlan joined;
  PartStart starts[kMaxSplits];  // of pre-activated or 8-bit sources on small tiles
  int k_tiles;
  std::uint32_t drains_after;         // bit i: after source i what has been added up is drained
  bool pointwise, raised;             // raised: sums of int8 (scales.cuh)
  std::int16_t lone_block;            // see lone_block()
  float inverse_output_scale;         // of 8-bit outputs
  float const *b, *w_scale;           // w_scale: of 8-bit filters
  void const *pre_scale, *pre_shift;  // of every channel of the concatenation
  PhasePlan phases;
  Sm90Output outputs[kMaxOutputs];  // in the order of their tiles; those that do not exist start at row kInt32Max
  Problem problem;
  int first_channel[kMaxSources];   // of each source, in the concatenation
  int activated_begin[kMaxSplits];  // channels of it that the i-th part of a small tile's reduction activates
  int activated_end[kMaxSplits];
  void const *shortcut;                        // address of float32's shortcut; float32 uses neither z nor out
  void const *sources[kMaxSources], *filters;  // addresses, for the sums that threads add up (beside.cuh)
  HaloPlan halo;
  int tiles_f, tiles_a, tiles_b;   // tiles of all outputs; im2col: tiles_b = 1
  Divider by_a, by_b;              // tiles_a, tiles_b
  Divider by_factor[kMaxSources];  // of each source's enlargement
  Rescale rescale[kMaxSources];    // of 8-bit sources: what the sums before each are multiplied by
  // The filters of two joined taps, (column,filter,tap). Elsewhere as `w`, with as many rows as the last tile of
  // filters has.
  CUtensorMap w_second;
  RaisedRescale raised_rescale[kMaxSources];  // as rescale, if the sums are raised

  CUTEFUSE_HOST_DEVICE int tiles_x() const { return tiles_a * tiles_b * (halo.pitch > 0 ? problem.N : 1); }
};

}  // namespace cutefuse::conv
