// The table of tiles: one row serves dispatch, TensorRT's tactics, tests, benchmarks and the cost model.
#pragma once

#include "problem.h"

namespace cutefuse::quant_concat_conv {

struct Params {
  Problem problem;
  std::int8_t const *x[kMaxSources];
  std::int8_t const *w;
  float const *w_scale, *b;
  void *y;
  Divider by_image, by_row;  // P*Q and Q
  int columns;               // of the packed filter
  int k_blocks;              // channel blocks of the reduction
  int splits;                // of the reduction; > 1 needs partials
  float *partials;           // [splits][N*P*Q][split_ld]

  // What the copies step by; follows from the problem.
  int taps;                  // R * S
  int row_step, block_step;  // input pixels from a filter row's end to the next one's start; back from the last row's
  int run_step;             // bytes to the next k-tile under a 1x1 filter where channel blocks lie side by side, else 0
  std::uint32_t step_bits;  // column bits of a tap, which move on with it; none under a 1x1 filter
  bool pointwise;           // pixel m of the output lies over pixel m of every source, and over no other

  void set_steps() {
    Problem const &p = problem;
    bool const one_tap = p.R * p.S == 1, side_by_side = p.layout == Layout::kChannelsLast;
    taps = p.R * p.S;
    row_step = one_tap ? 0 : p.dilation_h * p.W - p.S * p.dilation_w;
    block_step = one_tap ? 0 : p.R * p.dilation_h * p.W;
    run_step = one_tap && side_by_side ? kChannelBlock : 0;
    step_bits = one_tap ? 0 : ~0u << concat_conv::kMaxTaps;
    pointwise = one_tap && side_by_side && p.P == p.H && p.Q == p.W && p.stride_h == 1 && p.stride_w == 1 &&
                p.pad_top == 0 && p.pad_left == 0;
  }
};

// Sums of one pixel that a split leaves in the workspace.
CUTEFUSE_HOST_DEVICE int split_ld(Problem const &p) { return ceil_div(p.K, 8) * 8; }

// Where the float32 sums of earlier sources wait while a source's products are added up as integers. Nowhere: all
// sources must have one scale. In registers they halve the warp tile; in shared memory they cost a pass over it at each
// source's end.
enum class Sums { kNone, kRegisters, kShared };

// Ids are for ever: an engine stores them. A retired tile's id is never used again.
struct Tile {
  int id;
  char const *name;
  int m, n, stages, warps_m, warps_n, blocks_per_sm;
  Sums sums;
  // The cost model: one block alone on a multiprocessor takes this long for every 64 channels of the reduction, and at
  // its start and end. Fitted to an H200 (docs/measured_int8.md).
  double block_ns, block_us;
  static constexpr bool upsamples = false;  // asked by the float kernel's SourceRows
  constexpr bool drains() const { return sums != Sums::kNone; }
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int stages_bytes() const { return (m + n) * kChannelBlock * stages; }
  constexpr int row_bytes_y() const { return n * 2 + 16; }  // float16 staged for 16-byte stores, free of bank conflicts
  constexpr int shared_bytes() const {
    int const mainloop = stages_bytes() + (sums == Sums::kShared ? m * n * 4 : 0), epilogue = m * row_bytes_y();
    return (mainloop > epilogue ? mainloop : epilogue) + 2 * n * 4;  // w_scale and b
  }
};

constexpr Tile kTiles[] = {
    // id, name, m, n, stages, warps m, n, blocks, sums, ns per channel block, us per block
    {1, "s8_128x128_s4", 128, 128, 4, 2, 2, 2, Sums::kNone, 440, 5.5},
    {2, "s8_256x64_s4", 256, 64, 4, 4, 1, 2, Sums::kNone, 540, 5.25},
    {3, "s8_64x64_s5", 64, 64, 5, 2, 2, 4, Sums::kNone, 210, 2.5},
    {11, "s8_drain_128x128_s4", 128, 128, 4, 2, 4, 1, Sums::kRegisters, 360, 5.0},
    {12, "s8_drain_128x64_s4", 128, 64, 4, 2, 2, 2, Sums::kRegisters, 290, 4.0},
    {13, "s8_drain_64x64_s5", 64, 64, 5, 2, 2, 3, Sums::kRegisters, 180, 2.75},
    {14, "s8_drain_128x128_w4_s3", 128, 128, 3, 2, 2, 2, Sums::kShared, 450, 5.5},
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr Tile const *find_tile(int id) {
  for (Tile const &tile : kTiles) {
    if (tile.id == id) return &tile;
  }
  return nullptr;
}

// Launchers, one translation unit each so that they compile in parallel; null when done, else one sentence.
char const *launch_one_scale(int tile_id, Params const &params, void *stream);
char const *launch_drain(int tile_id, Params const &params, void *stream);
char const *launch_finish(Params const &params, void *stream);  // adds the splits

}  // namespace cutefuse::quant_concat_conv
