// The Hopper tiles of ConcatConv: their table, their shared memory, and which problems they can express.
// Host code without CUDA headers, shared by the choice of tiles and the kernels.
#pragma once

#include "architecture.h"
#include "conv/params.h"

namespace cutefuse::conv {

enum class Sm90Schedule {
  kCooperative,  // two warpgroups on one tile; with 64 filters they split the pixels, with 128 the filters
  kSplit,        // likewise, and the blocks of a cluster divide the reduction among them
  kPingPong,     // each warpgroup has tiles of its own: one multiplies while the other stores
  kSmall,        // small.cuh: kSplit by small blocks, of which several share a multiprocessor
  kRows,         // rows.cuh: kSplit, and the pixels are whole rows of an image with their halo
};

// A block computes tiles of `filters` x (pixels_a x pixels_b) outputs with two consumer warpgroups.
struct Sm90Tile {
  int id;
  char const *name;
  bool halo;  // halo.cuh or rows.cuh; otherwise im2col.cuh
  int filters;
  int pixels_a, pixels_b;  // im2col and rows: 1 x pixels in the order (n,p,q); halo: a patch, 8 or 16 along `a`
  int cluster_f;           // blocks with different filters that share their pixels by multicast
  Sm90Schedule schedule;
  int type_bytes = 2;   // 1: int8 and float8; 4: float32, multiplied as tf32
  bool drains = false;  // keeps float32 sums beside those of the tensor cores, for sources with scales of their own
  bool pre_activates = false;  // has a second kernel, for pre-activated sources
  int blocks = 3;              // of a small tile that share a multiprocessor, at most
  constexpr int pixels() const { return pixels_a * pixels_b; }
  constexpr int pixels_per_warpgroup() const {
    bool const whole = schedule == Sm90Schedule::kPingPong || schedule == Sm90Schedule::kSmall;
    return filters == 64 && !whole ? pixels() / 2 : pixels();
  }
};

// Pixels of one TMA store. 200 = 5 x 40: nets on 640 x 640 images have 25 * 2^n pixels.
constexpr int sm90_store_rows(int pixels_per_warpgroup) {
  return pixels_per_warpgroup % 64 == 0 ? 64 : pixels_per_warpgroup % 40 == 0 ? 40 : pixels_per_warpgroup;
}

// Ids are permanent, as in kTiles.
inline constexpr Sm90Tile kSm90Tiles[] = {
    // id, name, halo, filters, pixels a, b, cluster f, schedule, type bytes, drains, pre-activates, blocks
    {102, "sm90_128x256_f2", false, 128, 1, 256, 2, Sm90Schedule::kCooperative},
    {105, "sm90_128x128", false, 128, 1, 128, 1, Sm90Schedule::kCooperative, 2, false, true},
    {108, "sm90_128x128_split", false, 128, 1, 128, 1, Sm90Schedule::kSplit, 2, false, true},
    {109, "sm90_128x64", false, 128, 1, 64, 1, Sm90Schedule::kCooperative, 2, false, true},
    {110, "sm90_64x256", false, 64, 1, 256, 1, Sm90Schedule::kCooperative},
    {113, "sm90_128x200", false, 128, 1, 200, 1, Sm90Schedule::kCooperative, 2, false, true},
    {121, "sm90_halo_64x16x32", true, 64, 16, 32, 1, Sm90Schedule::kCooperative},
    {122, "sm90_halo_128x8x32", true, 128, 8, 32, 1, Sm90Schedule::kCooperative},
    {124, "sm90_halo_128x8x16", true, 128, 8, 16, 1, Sm90Schedule::kCooperative},
    {126, "sm90_halo_128x8x15", true, 128, 8, 15, 1, Sm90Schedule::kCooperative},
    {127, "sm90_halo_tf32_64x16x32", true, 64, 16, 32, 1, Sm90Schedule::kCooperative, 4},
    {128, "sm90_halo_tf32_128x8x16", true, 128, 8, 16, 1, Sm90Schedule::kCooperative, 4},
    {131, "sm90_pp_128x104", false, 128, 1, 104, 1, Sm90Schedule::kPingPong, 2, false, true},
    {132, "sm90_pp_128x160", false, 128, 1, 160, 1, Sm90Schedule::kPingPong, 2, false, true},
    {133, "sm90_pp_128x192", false, 128, 1, 192, 1, Sm90Schedule::kPingPong},
    {134, "sm90_pp_64x256", false, 64, 1, 256, 1, Sm90Schedule::kPingPong},
    {141, "sm90_rows_64x224_split", true, 64, 1, 224, 1, Sm90Schedule::kRows},
    {142, "sm90_rows_64x192_split", true, 64, 1, 192, 1, Sm90Schedule::kRows},
    {151, "sm90_small_64x16", false, 64, 1, 16, 1, Sm90Schedule::kSmall, 2, false, true},
    {152, "sm90_small_64x32", false, 64, 1, 32, 1, Sm90Schedule::kSmall, 2, false, true},
    {153, "sm90_small_64x40", false, 64, 1, 40, 1, Sm90Schedule::kSmall, 2, false, true},
    {154, "sm90_small_64x64", false, 64, 1, 64, 1, Sm90Schedule::kSmall, 2, false, false, 1},
    {155, "sm90_small_64x80", false, 64, 1, 80, 1, Sm90Schedule::kSmall},
    {156, "sm90_small_128x64", false, 128, 1, 64, 1, Sm90Schedule::kSmall},
    {157, "sm90_small_128x80", false, 128, 1, 80, 1, Sm90Schedule::kSmall},
    {158, "sm90_small_64x104", false, 64, 1, 104, 1, Sm90Schedule::kSmall, 2, false, false, 1},
    {159, "sm90_small_64x32_deep", false, 64, 1, 32, 1, Sm90Schedule::kSmall, 2, false, false, 1},
};

constexpr Config config_of(Sm90Tile const &tile) {
  char const *const kind = tile.schedule == Sm90Schedule::kRows       ? "rows"
                           : tile.halo                                ? "halo"
                           : tile.schedule == Sm90Schedule::kPingPong ? "pingpong"
                           : tile.schedule == Sm90Schedule::kSmall    ? "small"
                                                                      : "im2col";
  std::uint32_t const halves = bit_of(Type::kFloat16) | bit_of(Type::kBFloat16);
  std::uint32_t const bytes = bit_of(Type::kInt8) | bit_of(Type::kFloat8);
  std::uint32_t const types = tile.type_bytes == 1 ? bytes : tile.type_bytes == 2 ? halves : bit_of(Type::kFloat32);
  return {tile.id, 90, tile.name, kind, types, kWgmma};
}

constexpr Group group_of(Sm90Tile const &tile) {
  return tile.schedule == Sm90Schedule::kSmall ? Group::kSmall : Group::kHopper;
}

// A ring that two warpgroups read in turn has no slots for a shortcut, and small tiles have no room to stage one.
constexpr bool adds_shortcut(Sm90Tile const &tile) {
  return tile.schedule != Sm90Schedule::kPingPong && tile.schedule != Sm90Schedule::kSmall;
}

constexpr int kMaxSplits = 8;  // blocks of a portable cluster

constexpr bool divides_reduction(Sm90Tile const &tile) {
  return tile.schedule == Sm90Schedule::kSplit || tile.schedule == Sm90Schedule::kSmall ||
         tile.schedule == Sm90Schedule::kRows;
}

// ---- small tiles ---------------------------------------------------------------------------------------------------

constexpr int kSmallSharedBytes = 228 * 1024;  // of a multiprocessor, which keeps 1 KB of it for each block

// Units of 8 pixels in shared memory: from each block of a cluster as many as this block finishes.
constexpr int small_parts(int pixels) { return pixels / 8 + 2; }

// Blocks on a multiprocessor, and the stages of each.
struct SmallRoom {
  int blocks, stages;
};

// As many blocks, up to `most`, as have four stages each: fewer cannot hide the latency of the loads. A block that is
// alone has a ring for most of its sum. `vector_bytes` of a stage hold the scales and shifts of pre-activated sources.
constexpr SmallRoom small_room(int filters, int pixels, int most, int vector_bytes = 0) {
  SmallRoom room{};
  for (room.blocks = most; room.blocks > 0; --room.blocks) {
    int const bytes = kSmallSharedBytes / room.blocks - 1024 - 256 - small_parts(pixels) * filters * 32;
    room.stages = bytes / ((filters + pixels) * kChannelBlock * 2 + vector_bytes);
    if (room.stages >= 4) break;
  }
  int const enough = most == 1 ? 16 : 8;
  room.stages = room.stages < enough ? room.stages : enough;
  return room;
}
constexpr SmallRoom small_room(Sm90Tile const &tile) { return small_room(tile.filters, tile.pixels(), tile.blocks); }

// ---- shared memory of the halo path -------------------------------------------------------------------------------

// Input channels of one halo stage: half a block where a whole one would leave no room for a second stage, and of
// float32, of which that is as wide a row as TMA swizzles.
constexpr int halo_channels(int filters, int type_bytes) {
  return type_bytes == 4 || (filters == 64 && type_bytes > 1) ? kChannelBlock / 2 : kChannelBlock;
}
constexpr int halo_channels(Sm90Tile const &tile) {
  return tile.schedule == Sm90Schedule::kRows ? kChannelBlock : halo_channels(tile.filters, tile.type_bytes);
}

// Halo stages and filter stages together: 226 KB less the staged outputs, which float32 has not.
constexpr int halo_region_bytes(int pixels_b, int type_bytes) {
  return 226 * 1024 - (type_bytes == 4 ? 0 : 2 * 8 * pixels_b * 128);
}

// The rows' kernel keeps room for the other blocks' parts of the sums that its block finishes: 8 KB for 16 pixels of
// each warpgroup and for each other block, at most 10 of them with 7 such pairs and up to 8 blocks.
constexpr int kRowsPartBytes = 8 * 1024, kRowsParts = 10;
constexpr int kRowsRegionBytes = 226 * 1024 - kRowsParts * kRowsPartBytes - 2 * 2 * 16 * 128;
constexpr int rows_stage_pixels(int shortcut_bytes) {  // two stages beside four filters
  return (kRowsRegionBytes - 4 * 8 * 1024 - shortcut_bytes) / 2 / 1024 * 8;
}
constexpr int kHaloMaxStages = 4, kFilterMaxStages = 12, kFilterMinStages = 3;

// How a patch with its halo lies in shared memory: rows of `pitch` pixels, `rows` of them, then the next stage. It
// serves size_a / tile_a x size_b / tile_b tiles of an image.
struct HaloPlan {
  bool swapped;  // `a`, the axis along which 8 pixels make a core matrix, is H instead of W
  int size_a, size_b, tile_a, tile_b, pitch, rows, step_r, step_s, stage_bytes, halo_stages, filter_stages;
  int shortcut_at;  // tiles of rows: byte of the stages where the shortcut begins, behind the sums that are exchanged
};

HaloPlan halo_plan(Problem const &p, Sm90Tile const &tile);

// ---- outputs --------------------------------------------------------------------------------------------------------

inline OutputRange output_range(Problem const &p, int i) {
  return p.outputs > 1 ? p.ranges[i] : OutputRange{0, p.K, p.ldy};
}

// Where each output begins among the rows of all tiles of filters, and how many tiles that makes: a tile's every 64
// filters belong to one output, and outputs that end elsewhere have tiles of their own.
inline int output_rows(Sm90Tile const &tile, Problem const &p, int (&first)[kMaxOutputs]) {
  bool whole = true;
  for (int i = 0; i < p.outputs; ++i) whole = whole && output_range(p, i).first % 64 == 0;
  int rows = 0;
  for (int i = 0; i < p.outputs; ++i) {
    OutputRange const range = output_range(p, i);
    first[i] = rows;
    rows += whole ? range.last - range.first : ceil_div(range.last - range.first, tile.filters) * tile.filters;
  }
  return ceil_div(rows, tile.filters);
}

inline int filter_tiles(Sm90Tile const &tile, Problem const &p) {
  int first[kMaxOutputs];
  return output_rows(tile, p, first);
}

// ---- legality -------------------------------------------------------------------------------------------------------

// A plain matrix of pixels: every tap reads its own pixel.
constexpr bool is_pointwise(Problem const &p) {
  return p.R * p.S == 1 && p.stride_h * p.stride_w == 1 && p.pad_top + p.pad_left + p.pad_bottom + p.pad_right == 0;
}

// TMA moves from pixel to pixel by multiples of 16 bytes. Only float32 has others.
inline bool has_strides_for_tma(Problem const &p) {
  for (int i = 0; i < p.sources; ++i) {
    if (p.ldx[i] * size_of(p.type) % 16 != 0) return false;
  }
  return true;
}

// What TMA's tensor maps can express; true for every size of N, H and W, so that one tactic serves a dynamic shape.
bool sm90_can_run(Sm90Tile const &tile, Problem const &p);

}  // namespace cutefuse::conv
