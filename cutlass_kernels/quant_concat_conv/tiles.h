// The table of tiles: one row serves dispatch, TensorRT's tactics, tests, benchmarks and the cost model.
#pragma once

#include "conv/params.h"
#include "quant_concat_conv/problem.h"

namespace cutefuse::quant_concat_conv {

constexpr int kHaloRows = 16;  // pixels of a stage beyond those under one tap: two for every image row that it touches

// Ids are for ever: an engine stores them. A retired tile's id is never used again: kRetired.
constexpr Tile kTiles[] = {
    // id, name, min_sm, bytes, m, n, k, stages, warps m, n, blocks, any channels, upsamples, bytes copied at once,
    // ns per channel, us per block, halo rows, sums
    {1, "s8_128x128_s4", 80, 1, 128, 128, 64, 4, 2, 2, 2, false, false, 16, 435 / 64., 4.0, 0, Sums::kNone},
    {12, "s8_drain_128x64_s4", 80, 1, 128, 64, 64, 4, 2, 2, 2, false, false, 16, 260 / 64., 4.0, 0, Sums::kRegisters},
    {13, "s8_drain_64x64_s5", 80, 1, 64, 64, 64, 5, 2, 2, 3, false, false, 16, 210 / 64., 2.5, 0, Sums::kRegisters},
    {14, "s8_drain_128x128_w4_s3", 80, 1, 128, 128, 64, 3, 2, 2, 2, false, false, 16, 450 / 64., 5.75, 0,
     Sums::kShared},
    {15, "s8_rows_128x128_s3", 80, 1, 128, 128, 64, 3, 2, 2, 2, false, false, 16, 330 / 64., 5.5, kHaloRows,
     Sums::kNone},
    {16, "s8_rows_256x64_s3", 80, 1, 256, 64, 64, 3, 4, 1, 2, false, false, 16, 380 / 64., 3.75, kHaloRows,
     Sums::kNone},
    {17, "s8_128x64_s4", 80, 1, 128, 64, 64, 4, 2, 2, 3, false, false, 16, 300 / 64., 3.0, 0, Sums::kNone},
    {18, "s8_drain_rows_256x128_s2", 80, 1, 256, 128, 64, 2, 4, 2, 1, false, false, 16, 650 / 64., 5.5, kHaloRows,
     Sums::kShared},
    {19, "s8_drain_rows_128x64_s3", 80, 1, 128, 64, 64, 3, 2, 2, 2, false, false, 16, 235 / 64., 2.75, kHaloRows,
     Sums::kRegisters},
};
// An engine may ask for a tile that left the table: the heir is the one that won its shapes.
constexpr Retired kRetired[] = {{2, 17}, {3, 17}, {11, 14}};

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
