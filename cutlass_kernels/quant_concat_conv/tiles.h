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
};

// Sums of one pixel that a split leaves in the workspace.
CUTEFUSE_HOST_DEVICE int split_ld(Problem const &p) { return ceil_div(p.K, 8) * 8; }

// Ids are for ever: an engine stores them. A retired tile's id is never used again.
struct Tile {
  int id;
  char const *name;
  int m, n, stages, warps_m, warps_n, blocks_per_sm;
  // Keeps float32 sums beside the integers, for sources of different scales; the others need one scale for all.
  bool drains;
  // The cost model: one block alone on a multiprocessor takes this long for every 64 channels of the reduction, and at
  // its start and end. Fitted to an H200 (docs/measured_int8.md).
  double block_ns, block_us;
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int row_bytes_y() const { return n * 2 + 16; }  // float16 staged for 16-byte stores, free of bank conflicts
  constexpr int shared_bytes() const {
    int const mainloop = (m + n) * kChannelBlock * stages, epilogue = m * row_bytes_y();
    return (mainloop > epilogue ? mainloop : epilogue) + 2 * n * 4;  // w_scale and b
  }
};

constexpr Tile kTiles[] = {
    // id, name, m, n, stages, warps m, n, blocks, drains, ns per channel block, us per block
    {1, "s8_128x128_s4", 128, 128, 4, 2, 2, 2, false, 430, 6.0},
    {2, "s8_256x64_s4", 256, 64, 4, 4, 1, 2, false, 490, 7.5},
    {3, "s8_64x64_s5", 64, 64, 5, 2, 2, 4, false, 240, 2.25},
    {11, "s8_drain_128x128_s4", 128, 128, 4, 2, 4, 1, true, 380, 5.75},
    {12, "s8_drain_128x64_s4", 128, 64, 4, 2, 2, 2, true, 300, 4.5},
    {13, "s8_drain_64x64_s5", 64, 64, 5, 2, 2, 3, true, 250, 2.25},
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
