// The table of tiles: one row serves dispatch, TensorRT's tactics, tests, benchmarks and the cost model.
#pragma once

#include "conv/params.h"

namespace cutefuse::concat_conv {

using namespace conv;

// Ids are permanent: engines store them. A retired tile's id is never used again: kRetired.
inline constexpr Tile kTiles[] = {
    // id, name, min_sm, bytes, m, n, k, stages, warps m, n, blocks, any channels, upsamples, bytes copied at once,
    // ns per channel, us per block, halo rows, sums, pre-activates
    {1, "sm80_128x128x32_s4", 80, 2, 128, 128, 32, 4, 2, 2, 2, false, false, 16, 13.1, 4.25},
    {4, "sm80_128x64x64_s3", 80, 2, 128, 64, 64, 3, 2, 2, 2, true, false, 16, 8.8, 3.25, 0, Sums::kNone, true},
    {5, "sm80_64x64x64_s4", 80, 2, 64, 64, 64, 4, 2, 2, 3, true, false, 16, 4.8, 2.25, 0, Sums::kNone, true},
    {6, "sm80_128x32x64_s3", 80, 2, 128, 32, 64, 3, 4, 1, 3, false, false, 16, 5.0, 2.5},
    {8, "sm80_128x16x64_s3", 80, 2, 128, 16, 64, 3, 4, 1, 3, true, false, 16, 3.8, 2.0},
    {10, "sm80_128x128x64_w4_s3", 80, 2, 128, 128, 64, 3, 2, 2, 2, false, false, 16, 12.8, 4.5},
    {13, "sm80_128x256x64_s3", 80, 2, 128, 256, 64, 3, 2, 4, 1, false, false, 16, 18.1, 8.5},
    {14, "sm80_taps_256x128x64_s3", 80, 2, 256, 128, 64, 3, 4, 2, 1, false, false, 16, 16.6, 9.75, 32},
    {15, "sm80_taps_256x64x64_s3", 80, 2, 256, 64, 64, 3, 4, 1, 2, false, false, 16, 11.1, 8.0, 32},
    {18, "sm80_64x128x32_s4", 80, 2, 64, 128, 32, 4, 2, 2, 3, true, false, 16, 9.2, 2.5},
    {21, "sm80_tf32_128x128x16_s4", 80, 4, 128, 128, 16, 4, 2, 2, 2, false, false, 16, 30.3, 6.5},
    {22, "sm80_tf32_128x64x32_s3", 80, 4, 128, 64, 32, 3, 2, 2, 2, true, false, 16, 21, 4.5, 0, Sums::kNone, true},
    {23, "sm80_tf32_64x64x32_s4", 80, 4, 64, 64, 32, 4, 2, 2, 2, true, false, 16, 11.5, 2.25, 0, Sums::kNone, true},
    {24, "sm80_tf32_128x32x32_s4", 80, 4, 128, 32, 32, 4, 4, 1, 2, false, false, 16, 12.7, 3.25},
    {25, "sm80_tf32_256x64x16_s4", 80, 4, 256, 64, 16, 4, 4, 1, 2, false, false, 16, 36.4, 7.5},
    {31, "sm80_up_128x128x32_s4", 80, 2, 128, 128, 32, 4, 2, 2, 2, false, true, 16, 11.75, 5.0},
    {33, "sm80_up_64x64x64_s4", 80, 2, 64, 64, 64, 4, 2, 2, 3, true, true, 16, 4.65, 2.75},
    {34, "sm80_up_tf32_64x64x32_s4", 80, 4, 64, 64, 32, 4, 2, 2, 2, true, true, 16, 12.4, 3.0},
    {35, "sm80_any_tf32_64x64x32_s4", 80, 4, 64, 64, 32, 4, 2, 2, 2, true, false, 4, 14.5, 3.25},
    {36, "sm80_up_any_tf32_64x64x32_s4", 80, 4, 64, 64, 32, 4, 2, 2, 2, true, true, 4, 15.5, 3.25},
    {37, "sm80_up_256x64x32_s4", 80, 2, 256, 64, 32, 4, 4, 1, 2, false, true, 16, 13.95, 5.5},
    {38, "sm80_up_tf32_128x128x16_s4", 80, 4, 128, 128, 16, 4, 2, 2, 2, false, true, 16, 31.3, 9.5},
    {39, "sm80_up_tf32_256x64x16_s4", 80, 4, 256, 64, 16, 4, 4, 1, 2, false, true, 16, 34.6, 10.5},
    {40, "sm80_any_tf32_64x128x32_s3", 80, 4, 64, 128, 32, 3, 2, 2, 3, true, false, 4, 20.9, 3.5},
    {41, "sm80_even_tf32_128x64x32_s3", 80, 4, 128, 64, 32, 3, 2, 2, 2, true, false, 8, 17.85, 5.75},
};

// An engine may ask for a tile that left the table: its heir is the tile that is fastest on its shapes.
constexpr Retired kRetired[] = {{2, 13},    {3, 4},     {7, 10},    {9, 24},    {11, 13},   {32, 33},  {101, 113},
                                {103, 113}, {104, 113}, {106, 105}, {107, 105}, {123, 122}, {125, 124}};

// Pixels of 16-bit types are whole vectors.
constexpr bool copies_whole_pieces() {
  for (Tile const &tile : kTiles) {
    bool const small = tile.type_bytes == 4 && (tile.copy_bytes == 4 || tile.copy_bytes == 8);
    if (!small && tile.copy_bytes != 16) return false;
  }
  return true;
}
static_assert(copies_whole_pieces());

}  // namespace cutefuse::concat_conv
