// The table of tiles: one row serves dispatch, TensorRT's tactics, tests, benchmarks and the cost model.
#pragma once

#include "quant_concat_conv/problem.h"

namespace cutefuse::quant_concat_conv {

constexpr int kRowTaps = 3;    // of the filters that a tile over rows takes
constexpr int kHaloRows = 16;  // pixels of a stage beyond those under one tap: two for every image row that it touches
constexpr int kRowPitch = 80;  // bytes from pixel to pixel: ldmatrix then touches every bank once

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
  Divider by_padded_row;    // Q + kRowTaps - 1: a row of a stage

  void set_steps() {
    Problem const &p = problem;
    bool const one_tap = p.R * p.S == 1, side_by_side = p.layout == Layout::kChannelsLast;
    taps = p.R * p.S;
    row_step = one_tap ? 0 : p.dilation_h * p.W - p.S * p.dilation_w;
    block_step = one_tap ? 0 : p.R * p.dilation_h * p.W;
    run_step = one_tap && side_by_side ? kChannelBlock : 0;
    step_bits = one_tap ? 0 : ~0u << conv::kMaxTaps;
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

// Ids are for ever: an engine stores them. A retired tile's id (2, 3, 11) is never used again.
struct Tile {
  int id;
  char const *name;
  int m, n, stages, warps_m, warps_n, blocks_per_sm;
  Sums sums;
  bool rows;  // a stage is not one tap of 64 channels but a filter row of them, over pixels that are copied once
  // The cost model: one block alone on a multiprocessor takes this long for every 64 channels of the reduction, and at
  // its start and end. Fitted to an H200 (docs/measured_int8.md).
  double block_ns, block_us;
  static constexpr bool upsamples = false;  // asked by the float kernel's SourceRows
  constexpr bool drains() const { return sums != Sums::kNone; }
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int stages_bytes() const {
    int const row_bytes = (m + kHaloRows) * kRowPitch + n * kRowTaps * kChannelBlock;
    return stages * (rows ? row_bytes : (m + n) * kChannelBlock);
  }
  constexpr int row_bytes_y() const { return n * 4 + 32; }  // of sums on their way out; 32: rows in other banks
  constexpr int shared_bytes() const {
    int const mainloop = stages_bytes() + (sums == Sums::kShared ? m * n * 4 : 0), epilogue = m * row_bytes_y();
    return (mainloop > epilogue ? mainloop : epilogue) + 2 * n * 4;  // w_scale and b
  }
};

constexpr Tile kTiles[] = {
    // id, name, m, n, stages, warps m, n, blocks, sums, rows, ns per channel block, us per block
    {1, "s8_128x128_s4", 128, 128, 4, 2, 2, 2, Sums::kNone, false, 435, 4.0},
    {12, "s8_drain_128x64_s4", 128, 64, 4, 2, 2, 2, Sums::kRegisters, false, 260, 4.0},
    {13, "s8_drain_64x64_s5", 64, 64, 5, 2, 2, 3, Sums::kRegisters, false, 210, 2.5},
    {14, "s8_drain_128x128_w4_s3", 128, 128, 3, 2, 2, 2, Sums::kShared, false, 450, 5.75},
    {15, "s8_rows_128x128_s3", 128, 128, 3, 2, 2, 2, Sums::kNone, true, 330, 5.5},
    {16, "s8_rows_256x64_s3", 256, 64, 3, 4, 1, 2, Sums::kNone, true, 380, 3.75},
    {17, "s8_128x64_s4", 128, 64, 4, 2, 2, 3, Sums::kNone, false, 300, 3.0},
    {18, "s8_drain_rows_256x128_s2", 256, 128, 2, 4, 2, 1, Sums::kShared, true, 650, 5.5},
    {19, "s8_drain_rows_128x64_s3", 128, 64, 3, 2, 2, 2, Sums::kRegisters, true, 235, 2.75},
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr Tile const *find_tile(int id) {
  for (Tile const &tile : kTiles) {
    if (tile.id == id) return &tile;
  }
  return nullptr;
}

// Largest |sum of products| of a source; beyond 2^31 - 1 the integers could overflow.
constexpr std::int64_t largest_sum(Problem const &p, int source) {
  return std::int64_t(p.C[source]) * p.R * p.S * kMaxProduct;
}

int all_blocks(Problem const &p);  // channel blocks of all sources

// Parts into which the reduction is cut when the tiles leave half of the multiprocessors idle; each keeps four k-tiles.
// One block on a multiprocessor is nearly as fast as two, so multiprocessors are counted, as in the float operator.
int splits_of(Tile const &tile, Problem const &p, int sm_count);

// Whether a tile can run the problem on images wide enough for it; and whether these are: a row of outputs in a tile
// over rows takes two more pixels of its stage.
bool runs(Tile const &tile, Problem const &p, int sm);
bool fits(Tile const &tile, Problem const &p);

// Predicted time of a tile in microseconds; blocks that share a multiprocessor hide each other's latencies.
double cost(Tile const &tile, Problem const &p, int sm, int sm_count);

// Launchers, one translation unit each so that they compile in parallel; null when done, else one sentence.
char const *launch_one_scale(int tile_id, Params const &params, void *stream);
char const *launch_drain(int tile_id, Params const &params, void *stream);
char const *launch_rows(int tile_id, Params const &params, void *stream);
char const *launch_rows_drain(int tile_id, Params const &params, void *stream);
char const *launch_finish(Params const &params, void *stream);  // adds the splits

}  // namespace cutefuse::quant_concat_conv
