// The tables of tiles, Ampere's and Hopper's. One row serves dispatch, TensorRT's tactics, tests, benchmarks and the
// cost model.
#pragma once

#include "conv/sm80/tiles.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::concat_conv {

using namespace conv;

// Ids are permanent: engines store them. A retired tile's id is never used again: kRetired.
inline constexpr Tile kTiles[] = {
    // id, name, type, {m, n, k, stages}, {warps along m, n, teams of them}, most blocks on a multiprocessor,
    // {ns per channel, us per block}, options
    make_tile(1, "sm80_128x128x32_s4", k16Bit, {128, 128, 32, 4}, {2, 2}, 2, {13.1, 4.25}),
    make_tile(4, "sm80_128x64x64_s3", k16Bit, {128, 64, 64, 3}, {2, 2}, 2, {8.8, 3.25},
              kAnyChannels | kAlsoPreActivated),
    make_tile(6, "sm80_128x32x64_s3", k16Bit, {128, 32, 64, 3}, {4, 1}, 3, {5.0, 2.5}),
    make_tile(8, "sm80_128x16x64_s3", k16Bit, {128, 16, 64, 3}, {4, 1}, 3, {3.8, 2.0}, kAnyChannels),
    make_tile(15, "sm80_taps_256x64x64_s3", k16Bit, {256, 64, 64, 3}, {4, 1}, 2, {11.1, 8.0}, kSharedTaps),
    make_tile(19, "sm80_few_64x64x64_s3", k16Bit, {64, 64, 64, 3}, {2, 2}, 3, {10.5, 0.9}, kAnyChannels | kFewChannels),
    make_tile(50, "sm80_image_16", k16Bit, {128, 16, 64, 2}, {4, 1}, 8, {3.53, 0.148}, kImage),
    make_tile(53, "sm80_image_32", k16Bit, {128, 32, 64, 2}, {4, 1}, 5, {2.51, 0.208}, kImage),
    make_tile(51, "sm80_image_64", k16Bit, {256, 64, 64, 2}, {8, 1}, 2, {1.47, 0.616}, kImage),
    make_tile(52, "sm80_depthwise", k16Bit, {128, 16, 64, 2}, {4, 1}, 4, {0, 0}, kDepthwise),
    make_tile(42, "sm80_32x64x64_w8_s4", k16Bit, {32, 64, 64, 4}, {1, 4, 2}, 2, {3.8, 1.25}, kAlsoPreActivated),
    make_tile(43, "sm80_128x64x64_w8_s3", k16Bit, {128, 64, 64, 3}, {2, 2, 2}, 1, {6.4, 2.5}, kAlsoPreActivated),
    make_tile(47, "sm80_any_64x64x64_s4", k16Bit, {64, 64, 64, 4}, {2, 2}, 3, {9.0, 2.5},
              kAnyChannels | kCopiesElements),
    make_tile(48, "sm80_any_few_64x64x64_s3", k16Bit, {64, 64, 64, 3}, {2, 2}, 3, {13.5, 0.9},
              kAnyChannels | kFewChannels | kCopiesElements),
    make_tile(49, "sm80_up_any_64x64x64_s4", k16Bit, {64, 64, 64, 4}, {2, 2}, 3, {9.0, 3.0},
              kAnyChannels | kEnlargedSources | kCopiesElements),
    make_tile(21, "sm80_tf32_128x128x16_s4", k32Bit, {128, 128, 16, 4}, {2, 2}, 2, {30.3, 6.5}),
    make_tile(23, "sm80_tf32_64x64x32_s4", k32Bit, {64, 64, 32, 4}, {2, 2}, 2, {11.5, 2.25},
              kAnyChannels | kAlsoPreActivated),
    make_tile(24, "sm80_tf32_128x32x32_s4", k32Bit, {128, 32, 32, 4}, {4, 1}, 2, {12.7, 3.25}),
    make_tile(44, "sm80_tf32_32x64x32_w8_s4", k32Bit, {32, 64, 32, 4}, {1, 4, 2}, 2, {7.5, 1.5}, kAnyChannels),
    make_tile(45, "sm80_tf32_128x64x32_w8_s3", k32Bit, {128, 64, 32, 3}, {2, 2, 2}, 1, {15.5, 3.5}, kAnyChannels),
    make_tile(31, "sm80_up_128x128x32_s4", k16Bit, {128, 128, 32, 4}, {2, 2}, 2, {11.75, 5.0}, kEnlargedSources),
    make_tile(33, "sm80_up_64x64x64_s4", k16Bit, {64, 64, 64, 4}, {2, 2}, 3, {4.65, 2.75},
              kAnyChannels | kEnlargedSources),
    make_tile(34, "sm80_up_tf32_64x64x32_s4", k32Bit, {64, 64, 32, 4}, {2, 2}, 2, {12.4, 3.0},
              kAnyChannels | kEnlargedSources),
    make_tile(35, "sm80_any_tf32_64x64x32_s4", k32Bit, {64, 64, 32, 4}, {2, 2}, 2, {14.5, 3.25},
              kAnyChannels | kCopies4Bytes),
    make_tile(36, "sm80_up_any_tf32_64x64x32_s4", k32Bit, {64, 64, 32, 4}, {2, 2}, 2, {15.5, 3.25},
              kAnyChannels | kEnlargedSources | kCopies4Bytes),
    make_tile(40, "sm80_any_tf32_64x128x32_s3", k32Bit, {64, 128, 32, 3}, {2, 2}, 3, {20.9, 3.5},
              kAnyChannels | kCopies4Bytes),
};

inline constexpr Sm90Tile kSm90Tiles[] = {
    // id, name, type, filters, pixels, options
    im2col_tile(105, "sm90_128x128", k16Bit, 128, 128),
    im2col_tile(113, "sm90_128x200", k16Bit, 128, 200, kAlsoPreActivated),
    halo_tile(121, "sm90_halo_64x16x32", k16Bit, 64, {16, 32}),
    halo_tile(124, "sm90_halo_128x8x16", k16Bit, 128, {8, 16}),
    halo_tile(126, "sm90_halo_128x8x15", k16Bit, 128, {8, 15}),
    halo_tile(129, "sm90_halo_64x8x16", k16Bit, 64, {8, 16}),
    halo_tile(130, "sm90_halo_64x16x16", k16Bit, 64, {16, 16}),
    halo_tile(176, "sm90_halo_64x16x14", k16Bit, 64, {16, 14}),
    halo_tile(127, "sm90_halo_tf32_64x16x32", k32Bit, 64, {16, 32}),
    halo_tile(128, "sm90_halo_tf32_128x8x16", k32Bit, 128, {8, 16}),
    // few filters
    by_pixel_rows(halo_tile(177, "sm90_rows_16x8x32", k16Bit, 16, {8, 32})),
    by_pixel_rows(halo_tile(178, "sm90_rows_16x8x16", k16Bit, 16, {8, 16})),
    by_pixel_rows(halo_tile(179, "sm90_rows_32x8x16", k16Bit, 32, {8, 16})),
    pingpong_tile(131, "sm90_pp_128x104", k16Bit, 128, 104, kAlsoPreActivated),
    pingpong_tile(175, "sm90_pp_128x152", k16Bit, 128, 152),
    four_tile(180, "sm90_four_64x128", k16Bit, 64, 128),
    four_tile(181, "sm90_four_128x112", k16Bit, 128, 112),
    // id, name, pixels for 32 filters
    beside_tile(167, "sm90_two_32x32x24", {32, 24}),
    // id, name, type, filters, pixels, options
    small_tile(152, "sm90_small_64x32", k16Bit, 64, 32, kAlsoPreActivated),
    small_tile(153, "sm90_small_64x40", k16Bit, 64, 40),
    small_tile(154, "sm90_small_64x64", k16Bit, 64, 64, kAlsoPreActivated),
    small_tile(155, "sm90_small_64x80", k16Bit, 64, 80),
    small_tile(156, "sm90_small_128x64", k16Bit, 128, 64),
    small_tile(157, "sm90_small_128x80", k16Bit, 128, 80),
    small_tile(158, "sm90_small_64x104", k16Bit, 64, 104),
    small_patch_tile(182, "sm90_small_64x8x7", k16Bit, 64, {8, 7}),
    small_patch_tile(183, "sm90_small_64x8x8", k16Bit, 64, {8, 8}),
    small_patch_tile(184, "sm90_small_64x8x10", k16Bit, 64, {8, 10}),
    small_patch_tile(185, "sm90_small_64x8x16", k16Bit, 64, {8, 16}),
    // id, name, type, filters, pixels; filters that are no multiple of 64
    by_pixel_rows(small_tile(171, "sm90_small_160x64", k16Bit, 160, 64)),
    by_pixel_rows(small_tile(173, "sm90_small_192x128", k16Bit, 192, 128)),
    by_pixel_rows(pingpong_tile(174, "sm90_pp_160x128", k16Bit, 160, 128)),
    // id, name, outputs of 64 filters
    enlarging_tile(163, "sm90_up_64x64", 64),
    enlarging_tile(165, "sm90_up_64x128", 128),
    enlarging_tile(166, "sm90_up_64x160", 160),
    // id, name, type, filters, pixels, options
    small_tile(160, "sm90_small_64x128", k16Bit, 64, 128, kOnlyPreActivated),
};

// An engine may ask for a tile that left the table: its heir is the tile that is fastest on its shapes.
constexpr Retired kRetired[] = {
    {2, 1},     {3, 4},     {5, 4},     {7, 1},     {9, 24},    {10, 1},    {11, 1},    {13, 1},    {14, 15},
    {18, 4},    {22, 23},   {25, 21},   {32, 33},   {37, 31},   {38, 34},   {39, 34},   {41, 40},   {46, 33},
    {101, 113}, {102, 105}, {103, 113}, {104, 113}, {106, 105}, {107, 105}, {108, 105}, {109, 156}, {110, 113},
    {122, 121}, {123, 121}, {125, 124}, {132, 131}, {133, 113}, {134, 113}, {141, 157}, {142, 157}, {151, 152},
    {159, 152}, {161, 155}, {162, 158}, {164, 165}, {168, 179}, {169, 174}, {170, 158}, {172, 157}};

}  // namespace cutefuse::concat_conv
