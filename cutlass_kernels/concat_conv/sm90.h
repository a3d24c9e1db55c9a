// The Hopper tiles of ConcatConv: their table, which problems they can express, and the model that orders them.
// Host code without CUDA headers, shared by configs() and the launchers.
#pragma once

#include "tiles.h"

namespace cutefuse::concat_conv {

// A block computes `filters` x (pixels_a x pixels_b) outputs with two consumer warpgroups. 64 filters: the warpgroups
// split the pixels; 128 filters: they split the filters.
struct Sm90Tile {
  int id;
  char const *name;
  bool halo;  // sm90_halo.cuh; otherwise sm90_im2col.cuh
  int filters;
  int pixels_a, pixels_b;  // im2col: 1 x pixels in the order (n,p,q); halo: a patch, 8 or 16 pixels along `a`
  int cluster_f;           // blocks with different filters that share their pixels by multicast
  int cluster_x;           // blocks with different pixels that share their filters by multicast
  bool split;              // the blocks of a cluster divide the reduction among them
  int blocks_per_sm;       // 2: while one block stores, the other multiplies
  constexpr int pixels() const { return pixels_a * pixels_b; }
};

// Ids are for ever, as in kTiles.
constexpr Sm90Tile kSm90Tiles[] = {
    // id, name, halo, filters, pixels a, b, cluster f, x, split, blocks
    {101, "sm90_128x256", false, 128, 1, 256, 1, 1, false, 1},
    {102, "sm90_128x256_f2", false, 128, 1, 256, 2, 1, false, 1},
    {103, "sm90_128x256_x2", false, 128, 1, 256, 1, 2, false, 1},
    {104, "sm90_128x192", false, 128, 1, 192, 1, 1, false, 1},
    {105, "sm90_128x128", false, 128, 1, 128, 1, 1, false, 1},
    {106, "sm90_128x128_f2", false, 128, 1, 128, 2, 1, false, 1},
    {107, "sm90_128x128_x2", false, 128, 1, 128, 1, 2, false, 1},
    {108, "sm90_128x128_split", false, 128, 1, 128, 1, 1, true, 1},
    {109, "sm90_128x64", false, 128, 1, 64, 1, 1, false, 1},
    {110, "sm90_64x256", false, 64, 1, 256, 1, 1, false, 1},
    {111, "sm90_128x128_b2", false, 128, 1, 128, 1, 1, false, 2},
    {112, "sm90_64x128_b2", false, 64, 1, 128, 1, 1, false, 2},
    {121, "sm90_halo_64x16x32", true, 64, 16, 32, 1, 1, false, 1},
    {122, "sm90_halo_128x8x32", true, 128, 8, 32, 1, 1, false, 1},
    {123, "sm90_halo_128x8x32_x2", true, 128, 8, 32, 1, 2, false, 1},
    {124, "sm90_halo_128x8x16", true, 128, 8, 16, 1, 1, false, 1},
    {125, "sm90_halo_128x8x16_x2", true, 128, 8, 16, 1, 2, false, 1},
    {126, "sm90_halo_64x16x16_b2", true, 64, 16, 16, 1, 1, false, 2},
    {127, "sm90_halo_128x8x16_b2", true, 128, 8, 16, 1, 1, false, 2},
    {128, "sm90_halo_128x8x16_b2_x2", true, 128, 8, 16, 1, 2, false, 2},
};
constexpr int kSm90TileCount = sizeof(kSm90Tiles) / sizeof(kSm90Tiles[0]);

constexpr Sm90Tile const *find_sm90_tile(int id) {
  for (Sm90Tile const &tile : kSm90Tiles) {
    if (tile.id == id) return &tile;
  }
  return nullptr;
}

// ---- shared memory of the halo path -------------------------------------------------------------------------------

// Input channels of one halo stage: half a block where a whole one would leave no room for a second stage.
constexpr int halo_channels(int filters, int blocks_per_sm) { return filters == 64 || blocks_per_sm == 2 ? 32 : 64; }

constexpr int halo_region_bytes(int blocks_per_sm) { return (blocks_per_sm == 2 ? 95 : 192) * 1024; }  // both rings
constexpr int kHaloMaxStages = 4, kFilterMaxStages = 12, kFilterMinStages = 3;

// How a patch with its halo lies in shared memory: rows of `pitch` pixels, `rows` of them, then the next stage.
struct HaloPlan {
  bool swapped;  // `a`, the axis along which 8 pixels make a core matrix, is H instead of W
  int size_a, size_b, pitch, rows, step_r, step_s, stage_bytes, halo_stages, filter_stages;
};

HaloPlan halo_plan(Problem const &p, Sm90Tile const &tile);

// ---- choice -------------------------------------------------------------------------------------------------------

// A plain matrix of pixels: no tap ever leaves the pixel it belongs to.
constexpr bool is_pointwise(Problem const &p) {
  return p.R * p.S == 1 && p.stride_h * p.stride_w == 1 && p.pad_top + p.pad_left + p.pad_bottom + p.pad_right == 0;
}

// What TMA's tensor maps can express; true for every size of N, H and W, so that one tactic serves a dynamic shape.
bool sm90_can_run(Sm90Tile const &tile, Problem const &p);

// Blocks of a cluster that divide the reduction of one output tile, at most 8, each with 4 k-tiles or more: the number
// that keeps most blocks busy at once when room[i] clusters of i blocks fit on the chip.
int sm90_splits(Sm90Tile const &tile, Problem const &p, int const (&room)[9]);

// Clusters of i blocks, one block a multiprocessor, that run at once on an H200: a cluster must lie in one GPC.
constexpr int kClusterRoom[9] = {0, 132, 66, 43, 32, 24, 21, 16, 15};

// Predicted clocks; every size must be known.
double sm90_cost(Sm90Tile const &tile, Problem const &p, int sm_count);

char const *launch_sm90_f16(int tile_id, Params const &params, void *stream);
char const *launch_sm90_bf16(int tile_id, Params const &params, void *stream);

}  // namespace cutefuse::concat_conv
