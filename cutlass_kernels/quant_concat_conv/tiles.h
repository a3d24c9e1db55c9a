// The tables of tiles, Ampere's and Hopper's. One row serves dispatch, TensorRT's tactics, tests, benchmarks and the
// cost model.
#pragma once

#include "conv/sm80/tiles.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::quant_concat_conv {

using namespace conv;

// A tile of float8, which every GPU from 8.9 on multiplies by mma.sync. Its sums go on in float32 beside those of the
// tensor cores, and it masks tails of channels, whose pad lanes may be NaN.
constexpr Tile float8_tile(int id, char const *name, TileSize size, TileWarps warps, int blocks_per_sm, TileCost cost,
                           unsigned options = 0) {
  // On an H200 mma.sync of float8 is two of float16 behind a conversion of the operands. `cost` is therefore that of
  // the float16 tile of the same size, or half of that of twice the size; what the conversion adds is an estimate.
  constexpr double kConversion = 1.1;
  cost.channel_ns = kConversion * cost.channel_ns;
  Tile tile = make_tile(id, name, k8Bit, size, warps, blocks_per_sm, cost, options | kAnyChannels | kSumsInRegisters);
  tile.float8 = true;
  return tile;
}

// Ids are permanent: engines store them. A retired tile's id is never used again: kRetired.
inline constexpr Tile kTiles[] = {
    // id, name, type, {m, n, k, stages}, {warps along m, n}, most blocks on a multiprocessor,
    // {ns per channel, us per block}, options
    make_tile(1, "s8_128x128_s4", k8Bit, {128, 128, 64, 4}, {2, 2}, 2, {435 / 64., 4.0}),
    make_tile(12, "s8_drain_128x64_s4", k8Bit, {128, 64, 64, 4}, {2, 2}, 2, {260 / 64., 4.0}, kSumsInRegisters),
    make_tile(13, "s8_drain_64x64_s5", k8Bit, {64, 64, 64, 5}, {2, 2}, 3, {210 / 64., 2.5}, kSumsInRegisters),
    make_tile(14, "s8_drain_128x128_w4_s3", k8Bit, {128, 128, 64, 3}, {2, 2}, 2, {450 / 64., 5.75}, kSumsInShared),
    make_tile(16, "s8_rows_256x64_s3", k8Bit, {256, 64, 64, 3}, {4, 1}, 2, {380 / 64., 3.75}, kSharedTaps),
    make_tile(17, "s8_128x64_s4", k8Bit, {128, 64, 64, 4}, {2, 2}, 3, {300 / 64., 3.0}),
    make_tile(18, "s8_drain_rows_256x128_s2", k8Bit, {256, 128, 64, 2}, {4, 2}, 1, {650 / 64., 5.5},
              kSharedTaps | kSumsInShared),
    make_tile(19, "s8_drain_rows_128x64_s3", k8Bit, {128, 64, 64, 3}, {2, 2}, 2, {235 / 64., 2.75},
              kSharedTaps | kSumsInRegisters),
    make_tile(41, "s8_drain_32x64_s6", k8Bit, {32, 64, 64, 6}, {1, 4}, 4, {144 / 64., 1.75}, kSumsInRegisters),
    make_tile(42, "s8_any_64x64_s4", k8Bit, {64, 64, 64, 4}, {2, 2}, 3, {8.0, 2.5},
              kAnyChannels | kSumsInRegisters | kCopiesElements),
    float8_tile(31, "f8_128x128_w8_s4", {128, 128, 64, 4}, {2, 4}, 1, {18.1 / 2, 4.5}),
    float8_tile(32, "f8_128x64_s4", {128, 64, 64, 4}, {2, 2}, 2, {8.8, 4.0}),
    float8_tile(33, "f8_64x64_s5", {64, 64, 64, 5}, {2, 2}, 2, {4.8, 2.5}),
    float8_tile(34, "f8_128x32_s4", {128, 32, 64, 4}, {4, 1}, 3, {5.0, 2.5}),
    float8_tile(35, "f8_any_64x64_s4", {64, 64, 64, 4}, {2, 2}, 2, {10.0, 2.5}, kCopiesElements),
};

inline constexpr Sm90Tile kSm90Tiles[] = {
    // id, name, type, filters, pixels, options
    im2col_tile(201, "s8_sm90_128x256_f2", k8Bit, 128, 256, kMulticastPixels),
    pingpong_tile(204, "s8_sm90_pp_64x256", k8Bit, 64, 256),
    halo_tile(211, "s8_sm90_halo_64x16x32", k8Bit, 64, {16, 32}),
    halo_tile(243, "s8_sm90_pairs_halo_64x16x16", k8Bit, 64, {16, 16}, kBlockPairs),
    // wgmma of int8 is never 200 or 104 pixels wide, as tiles of float16 are.
    im2col_tile(245, "s8_sm90_128x208", k8Bit, 128, 208),
    pingpong_tile(246, "s8_sm90_pp_pairs_128x160", k8Bit, 128, 160, kBlockPairs),
    halo_tile(237, "s8_sm90_pairs_halo_64x16x10", k8Bit, 64, {16, 10}, kBlockPairs),
    small_tile(231, "s8_sm90_small_64x32", k8Bit, 64, 32),
    small_tile(232, "s8_sm90_small_64x64", k8Bit, 64, 64),
    small_tile(233, "s8_sm90_small_64x112", k8Bit, 64, 112),
    small_tile(238, "s8_sm90_small_64x80", k8Bit, 64, 80),
    small_tile(234, "s8_sm90_small_128x80", k8Bit, 128, 80),
};

// An engine may ask for a tile that left the table: its heir is the tile that is fastest on its shapes.
constexpr Retired kRetired[] = {{2, 17},    {3, 17},    {11, 14},   {15, 16},   {202, 246}, {203, 246}, {205, 246},
                                {212, 211}, {213, 243}, {221, 246}, {222, 204}, {223, 243}, {224, 243}, {235, 238},
                                {236, 243}, {239, 238}, {241, 201}, {242, 246}, {244, 243}, {247, 243}};

}  // namespace cutefuse::quant_concat_conv
