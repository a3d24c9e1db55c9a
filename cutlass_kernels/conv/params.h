// The parameters of the Ampere path's kernels, and how the host finds a kernel of either path.
#pragma once

#include "conv/problem.h"
#include "device.h"

namespace cutefuse::conv {

// What a block of an image tile (image.cpp) or of a depthwise tile (depthwise.cpp) computes, and its shared memory:
// pixels, filters, biases, offsets.
struct BlockCut {
  int shift;          // 1 << shift units of 4 channels in a pixel
  int steps;          // of an image tile's reduction, four units each
  int filters;        // of a block: in whole groups of 16, or depthwise as many as its pixels have channels
  int filter_tiles;   // blocks with the same pixels
  int height, width;  // outputs of a block
  int across, down;   // blocks of an image
  int rows, span;     // of pixels under them; units of a row
  int columns_bytes;  // of an image tile: between pixels under outputs 8 columns apart
  int ld, stored;     // channels of an output's pixel, and those to write: all that exist, and pad lanes
  int shared_bytes;
  // Of a depthwise tile: from a row and column of a block's pixels and outputs to its next ones in the image; where
  // that is the dilation, its outputs are of one residue class, and taps are neighbours. How many classes there are.
  int step_h = 1, step_w = 1, classes = 1;
  int dilation_h, dilation_w;  // between taps, in a block's pixels
  static constexpr int kUnitBytes = 8, kMostFilters = 64;

  // Where an image tile keeps the byte of its pixels at `at`: neighbouring lanes read pixels of 32 or 64 bytes, one or
  // two apart, which would share banks. Rows of such pixels are whole eights.
  CUTEFUSE_HOST_DEVICE std::uint32_t swizzled(std::uint32_t at) const {
    return at ^ (at >> 2 & (shift < 2 ? 0u : shift == 2 ? 32u : 96u));
  }
  CUTEFUSE_HOST_DEVICE int pixels_bytes() const { return (rows * span * kUnitBytes + 15) / 16 * 16; }
  CUTEFUSE_HOST_DEVICE int filters_bytes() const { return steps * 4 * filters * kUnitBytes; }
  std::int64_t blocks(int images) const { return std::int64_t(images) * classes * down * across * filter_tiles; }
};

struct Params {
  Problem problem;
  void const *x[kMaxSources];  // at each source's first channel
  void const *w;
  float const *w_scale;  // of 8-bit filters
  float const *b;
  void const *pre_scale, *pre_shift;        // of every channel of the concatenation, null without a pre-activation
  void const *z;                            // residual, null without one
  void *y;                                  // the first output
  void *ys[kMaxOutputs];                    // every output
  Divider by_image, by_row, by_padded_row;  // P*Q; Q; Q and the pixels that a filter row reaches beyond it
  std::uint32_t upsample_multiplier[kMaxSources];
  int columns;      // of the packed filter
  int k_blocks;     // channel blocks of the reduction; set by plan_sm80, whose tile counts them
  int splits;       // of the reduction; > 1 needs partials
  float *partials;  // [splits][N*P*Q][split_ld]

  // The strides of the copies; they follow from the problem.
  int taps;          // R * S
  int row_step;      // input pixels from a filter row's end to the next row's start
  int block_step;    // input pixels from the last filter row's end back to the first row's start
  int side_by_side;  // 1 under a 1x1 filter over channels-last pixels: a source's channel blocks follow each other in
                     // memory, so that its k-tiles are one run
  bool pointwise;    // output pixel m reads pixel m of every source, and no other

  BlockCut cut;  // of image tiles and depthwise ones

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
  bool const blocks = size_of(p.output_type) == 1 && p.layout != Layout::kChannelsLast;
  int const step = p.dense ? 1 : blocks ? kLayoutBlock : int(padded_channels(p.output_type, 1));
  return ceil_div(p.K, step) * step;
}

// The number types of a tile: int8 or float8; float16 and bfloat16; float32, multiplied as TF32. The value is
// Tile::type_bytes.
enum TypeSize { k8Bit = 1, k16Bit = 2, k32Bit = 4 };

// What tiles of one size differ in, for the rows of the operators' tables.
enum TileOption : unsigned {
  kAnyChannels = 1 << 0,        // Ampere: Tile::any_channels
  kEnlargedSources = 1 << 1,    // Ampere: Tile::upsamples
  kCopies4Bytes = 1 << 2,       // Ampere: Tile::copy_bytes, which are 16 without these two
  kCopiesElements = 1 << 12,    // Ampere: down to a single element of 8 or 16 bits
  kSharedTaps = 1 << 4,         // Ampere: Tile::halo_rows
  kSumsInRegisters = 1 << 5,    // Ampere: Tile::sums
  kSumsInShared = 1 << 6,       // Ampere
  kAlsoPreActivated = 1 << 7,   // pre_activates of both
  kBlockPairs = 1 << 8,         // Hopper: Sm90Tile::pairs
  kFewChannels = 1 << 10,       // Ampere: Tile::few_channels
  kImage = 1 << 13,             // Ampere: Tile::image
  kDepthwise = 1 << 14,         // Ampere: Tile::depthwise
  kOnlyPreActivated = 1 << 11,  // Hopper: pre_activates, not plain
  kMulticastPixels = 1 << 9,    // Hopper: two blocks with different filters share their pixels
};

// Which kernels share a translation unit, one for each number type, so that they compile in parallel.
enum class Group {
  kPlain,               // Ampere: every tap loads its own pixels
  kTaps,                // Ampere: the taps of a filter row share their pixels
  kEnlarged,            // Ampere: enlarged sources
  kPieces,              // Ampere: copies of fewer than 16 bytes, for pixels of any stride
  kImage,               // Ampere: images, copied once for all taps
  kDepthwise,           // Ampere: depthwise convolutions
  kSums,                // Ampere: kPlain with float32 sums of earlier sources
  kTapsSums,            // Ampere: kTaps with float32 sums of earlier sources
  kHopper,              // Hopper: all tiles but the small ones
  kSmall,               // Hopper: small tiles
  kPreActivated,        // Ampere: a second kernel of the tiles that take pre-activated sources
  kHopperPreActivated,  // Hopper: likewise
};

// A tile's kernel, and the one that adds the parts of a reduction that was divided through the workspace. Hopper's
// tiles have no such kernel: the blocks of a cluster add their parts.
struct Kernels {
  Kernel main, finish;
};
// Finds a tile's kernels in one translation unit; they are empty where it does not hold them.
using Find = Kernels(int tile_id);

constexpr int kFinishThreads = 128;
constexpr int kFinishChannels = 8;  // of one pixel, which one thread of conv_finish finishes

}  // namespace cutefuse::conv
