// The parameters of a launch of the convolution kernels, and a row of the Ampere path's table of tiles.
#pragma once

#include "architecture.h"
#include "conv/problem.h"
#include "device.h"

namespace cutefuse::conv {

constexpr int kRowTaps = 3;     // filter columns that tiles with shared taps take
constexpr int kInt8Pitch = 80;  // bytes between pixels whose taps are shared: ldmatrix then touches every bank once

struct Params {
  Problem problem;
  void const *x[kMaxSources];  // at each source's first channel
  void const *w;
  float const *w_scale;  // of int8 filters
  float const *b;
  void const *pre_scale, *pre_shift;        // of every channel of the concatenation, null without a pre-activation
  void const *z;                            // residual, null without one
  void *y;                                  // the first output
  void *ys[kMaxOutputs];                    // every output
  Divider by_image, by_row, by_padded_row;  // P*Q; Q; Q and the pixels that a filter row reaches beyond it
  std::uint32_t upsample_multiplier[kMaxSources];
  int columns;      // of the packed filter
  int k_blocks;     // channel blocks of the reduction; set by the launcher, whose tile counts them
  int splits;       // of the reduction; > 1 needs partials
  float *partials;  // [splits][N*P*Q][split_ld]

  // The strides of the copies; they follow from the problem.
  int taps;                  // R * S
  int row_step, block_step;  // input pixels from a filter row's end to the next one's start; back from the last row's
  int side_by_side;  // 1 under a 1x1 filter whose channel blocks lie side by side: all of a source's are one run of
                     // k-tiles
  bool pointwise;    // output pixel m reads pixel m of every source, and no other

  void set_steps() {
    Problem const &p = problem;
    taps = p.R * p.S;
    bool const one_tap = taps == 1;
    row_step = one_tap ? 0 : p.dilation_h * p.W - p.S * p.dilation_w;
    block_step = one_tap ? 0 : p.R * p.dilation_h * p.W;
    side_by_side = one_tap && p.layout == Layout::kChannelsLast;
    pointwise = side_by_side && p.P == p.H && p.Q == p.W && p.stride_h == 1 && p.stride_w == 1 && p.pad_top == 0 &&
                p.pad_left == 0;
    by_image = Divider(p.P * p.Q), by_row = Divider(p.Q), by_padded_row = Divider(p.Q + (p.S - 1) * p.dilation_w);
  }
};

// Pixels that the taps of a filter row read beyond those of its first tap.
CUTEFUSE_HOST_DEVICE int halo_of(Problem const &p) { return (p.S - 1) * p.dilation_w; }

// Sums of one pixel that a split leaves in the workspace.
CUTEFUSE_HOST_DEVICE int split_ld(Problem const &p) { return ceil_div(p.K, 8) * 8; }

// Channels of the output that exist in memory, pad lanes included.
CUTEFUSE_HOST_DEVICE int stored_channels(Problem const &p) {
  int const step = size_of(p.output_type) != 1         ? size_of(p.output_type) == 2 ? 8 : 1
                   : p.layout == Layout::kChannelsLast ? 16
                                                       : kLayoutBlock;
  return ceil_div(p.K, step) * step;
}

// Where the float32 sums of earlier sources are kept while a source's products are added up as integers. Nowhere: all
// sources must have one scale. In registers they halve the warp tile; in shared memory they cost a pass over it at each
// source's end.
enum class Sums { kNone, kRegisters, kShared };

// Tiles whose kernels are one translation unit for each number type, so that they compile in parallel: plain ones;
// those whose taps share pixels; for enlarged sources; for pixels of any stride; with sums of earlier sources;
// Hopper's; Hopper's small ones. A second time those that know a pre-activation, with it.
enum class Group {
  kPlain,
  kTaps,
  kEnlarged,
  kPieces,
  kSums,
  kTapsSums,
  kHopper,
  kSmall,
  kPreActivated,
  kHopperPreActivated,
};

// A row of an operator's table of tiles.
struct Tile {
  int id;
  char const *name;
  int min_sm;
  int type_bytes;  // 1: int8, or float8; 2: float16 and bfloat16; 4: float32 (TF32 tensor cores)
  int m, n, k, stages, warps_m, warps_n, blocks_per_sm;
  bool any_channels;  // also takes sources whose channels are no whole number of 16-byte vectors; slower for it
  bool upsamples;     // for enlarged sources, and for these alone: a division for every pixel it copies
  // The smallest piece that it copies of a pixel. 16, or for pixels that are no whole number of vectors, and for these
  // alone, 8 or 4; every source is copied in the largest pieces that its pixels and channels allow.
  int copy_bytes;
  // The cost model: one block alone on a multiprocessor takes this long for every channel of the reduction, and at its
  // start and end. Fitted on an H200 to the shapes of docs/measured.md.
  double channel_ns, block_us;
  int halo_rows = 0;  // > 0: the taps of a filter row share their pixels, of which a stage holds up to m + halo_rows
  Sums sums = Sums::kNone;
  bool pre_activates = false;  // has a second kernel, for pre-activated sources
  bool float8 = false;         // multiplies float8, and nothing else
  constexpr bool takes(Type type) const { return type_bytes == size_of(type) && float8 == (type == Type::kFloat8); }
  constexpr std::uint32_t needs() const { return float8 ? kFloat8Mma : kNoFeature; }
  constexpr bool drains() const { return sums != Sums::kNone; }
  constexpr Group group() const {
    if (copy_bytes < 16) return Group::kPieces;
    if (upsamples) return Group::kEnlarged;
    return halo_rows > 0 ? drains() ? Group::kTapsSums : Group::kTaps : drains() ? Group::kSums : Group::kPlain;
  }
  constexpr int threads() const { return warps_m * warps_n * 32; }
  // Bytes of a pixel's sums or outputs in shared memory; int8 outputs are kept there as 32-bit sums, with 32 bytes
  // between pixels so that rows touch different banks.
  constexpr int row_bytes_y() const { return type_bytes == 1 ? n * 4 + 32 : n * type_bytes; }
  constexpr int stages_bytes() const {
    if (halo_rows == 0) return (m + n) * k * type_bytes * stages;
    // int8: a stage holds a filter row, its pixels and the filters of its taps. Otherwise there are two stages of
    // pixels and a stage of filters for each tap.
    return type_bytes == 1 ? ((m + halo_rows) * kInt8Pitch + n * k * kRowTaps) * stages
                           : ((m + halo_rows) * 2 + n * stages) * k * type_bytes;
  }
  constexpr int shared_bytes() const {
    int const mainloop = stages_bytes() + (sums == Sums::kShared ? m * n * 4 : 0), epilogue = m * row_bytes_y();
    return (mainloop > epilogue ? mainloop : epilogue) + (type_bytes == 1 ? 8 * n : 0);  // w_scale and b of int8
  }
};

constexpr Config config_of(Tile const &tile) {
  bool const bytes = tile.type_bytes == 1;
  char const *const kind = tile.upsamples ? "enlarged" : tile.halo_rows == 0 ? "plain" : bytes ? "rows" : "taps";
  std::uint32_t types = 0;
  for (Type type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16, Type::kInt8, Type::kFloat8}) {
    types |= tile.takes(type) ? bit_of(type) : 0;
  }
  return {tile.id, tile.min_sm, tile.name, kind, types, tile.needs()};
}

// A tile's kernel, and the one that adds the parts of a divided reduction. Without it the tile never divides the
// reduction.
struct Kernels {
  Kernel main, finish;
};
// Finds a tile's kernels in one translation unit.
using Find = Kernels(int tile_id);

constexpr int kFinishThreads = 128;
constexpr int kFinishChannels = 8;  // of one pixel, by one thread

}  // namespace cutefuse::conv
