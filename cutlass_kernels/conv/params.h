// What a launch hands to the float kernels, and a row of the Ampere path's table of tiles.
#pragma once

#include "conv/problem.h"

namespace cutefuse::conv {

struct Params {
  Problem problem;
  void const *x[kMaxSources];  // at each source's first channel
  void const *w;
  float const *b;
  void const *z;             // residual, null without one
  void *y;                   // the first output
  void *ys[kMaxOutputs];     // every output
  Divider by_image, by_row;  // P*Q and Q
  std::uint32_t upsample_multiplier[kMaxSources];
  int columns;      // of the packed filter
  int k_blocks;     // channel blocks of the reduction; set by the launcher, whose tile counts them
  int splits;       // of the reduction; > 1 needs partials
  float *partials;  // [splits][N*P*Q][split_ld]
  bool pointwise;   // pixel m of the output lies over pixel m of every source, and over no other
};

// Pixels that the taps of a filter row reach beyond those under its first one.
CUTEFUSE_HOST_DEVICE int halo_of(Problem const &p) { return (p.S - 1) * p.dilation_w; }

// Sums of one pixel that a split leaves in the workspace.
CUTEFUSE_HOST_DEVICE int split_ld(Problem const &p) { return ceil_div(p.K, 8) * 8; }

struct Tile {
  int id;
  char const *name;
  int min_sm;
  int type_bytes;  // 2: float16 and bfloat16; 4: float32 (TF32 tensor cores)
  int m, n, k, stages, warps_m, warps_n, blocks_per_sm;
  bool any_channels;  // also takes sources whose channels are no whole number of 16-byte vectors, and pays for it
  bool upsamples;     // for enlarged sources, and for these alone: a division for every pixel it copies
  // The smallest piece that it copies of a pixel. 16, or for pixels that are no whole number of vectors, and for these
  // alone, 8 or 4; every source is copied in the largest pieces that its pixels and channels allow.
  int copy_bytes;
  // The cost model: one block alone on a multiprocessor takes this long for every channel of the reduction, and at its
  // start and end. Fitted on an H200 to 21 shapes (docs/measured.md), for float32 and the forms to 34
  // (docs/measured_ampere.md).
  double channel_ns, block_us;
  int halo_rows = 0;  // > 0: the taps of a filter row share their pixels, of which a stage holds up to m + halo_rows
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int shared_bytes() const {
    // Where taps share pixels there are two stages of those, and 8 bytes on where each of them lies.
    int const x_bytes = halo_rows > 0 ? (m + halo_rows) * (2 * k * type_bytes + 8) : m * k * stages * type_bytes;
    int const mainloop = x_bytes + n * k * stages * type_bytes;
    int const epilogue = m * n * type_bytes;
    return mainloop > epilogue ? mainloop : epilogue;
  }
};

// A kernel's launcher; null when done, else one sentence.
using Launch = char const *(int tile_id, Params const &params, void *stream);

}  // namespace cutefuse::conv
