// The table of tiles: one row serves dispatch, TensorRT's tactics, tests, benchmarks and the cost model.
#pragma once

#include "conv/params.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::quant_concat_conv {

using namespace conv;

constexpr int kVector = 16;    // channels of one 16-byte copy
constexpr int kHaloRows = 16;  // pixels of a stage beyond those under one tap: two for every image row that it touches

// Float8's by mma.sync. `channel_ns`: of float16's tile of that size, or half of twice its size, on an H200, where
// mma.sync of float8 is two of float16's behind a conversion of the operands; what that adds was not measured.
constexpr double kFloat8Time = 1.1;
constexpr Tile float8_tile(int id, char const *name, int m, int n, int stages, int warps_m, int warps_n, int blocks,
                           double channel_ns, double block_us) {
  Tile tile{id,      name, 89, 1, m, n, 64, stages, warps_m, warps_n, blocks, true, false, 16, kFloat8Time * channel_ns,
            block_us};
  tile.sums = Sums::kRegisters, tile.float8 = true;
  return tile;
}

// Ids are permanent: engines store them. A retired tile's id is never used again: kRetired.
inline constexpr Tile kTiles[] = {
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
    float8_tile(31, "f8_128x128_w8_s4", 128, 128, 4, 2, 4, 1, 18.1 / 2, 4.5),
    float8_tile(32, "f8_128x64_s4", 128, 64, 4, 2, 2, 2, 8.8, 4.0),
    float8_tile(33, "f8_64x64_s5", 64, 64, 5, 2, 2, 2, 4.8, 2.5),
    float8_tile(34, "f8_128x32_s4", 128, 32, 4, 4, 1, 3, 5.0, 2.5),
};

// Hopper's; their stages hold 64 bytes of a pixel.
inline constexpr Sm90Tile kSm90Tiles[] = {
    // id, name, halo, filters, pixels a, b, cluster f, schedule, bytes, drains
    {201, "s8_sm90_128x256_f2", false, 128, 1, 256, 2, Sm90Schedule::kCooperative, 1},
    {202, "s8_sm90_128x128", false, 128, 1, 128, 1, Sm90Schedule::kCooperative, 1},
    {203, "s8_sm90_pp_128x160", false, 128, 1, 160, 1, Sm90Schedule::kPingPong, 1},
    {204, "s8_sm90_pp_64x256", false, 64, 1, 256, 1, Sm90Schedule::kPingPong, 1},
    {205, "s8_sm90_128x128_split", false, 128, 1, 128, 1, Sm90Schedule::kSplit, 1},
    {211, "s8_sm90_halo_64x16x32", true, 64, 16, 32, 1, Sm90Schedule::kCooperative, 1},
    {212, "s8_sm90_halo_128x8x32", true, 128, 8, 32, 1, Sm90Schedule::kCooperative, 1},
    {213, "s8_sm90_halo_128x8x16", true, 128, 8, 16, 1, Sm90Schedule::kCooperative, 1},
    {221, "s8_sm90_drain_128x128", false, 128, 1, 128, 1, Sm90Schedule::kCooperative, 1, true},
    {222, "s8_sm90_drain_64x256", false, 64, 1, 256, 1, Sm90Schedule::kCooperative, 1, true},
    {223, "s8_sm90_drain_halo_64x16x16", true, 64, 16, 16, 1, Sm90Schedule::kCooperative, 1, true},
    {224, "s8_sm90_drain_halo_128x8x16", true, 128, 8, 16, 1, Sm90Schedule::kCooperative, 1, true},
};

// An engine may ask for a tile that left the table: its heir is the tile that is fastest on its shapes.
constexpr Retired kRetired[] = {{2, 17}, {3, 17}, {11, 14}};

}  // namespace cutefuse::quant_concat_conv
