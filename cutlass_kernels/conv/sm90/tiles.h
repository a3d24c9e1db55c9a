// A row of an operator's table of Hopper tiles: how it is made, how its shared memory is divided, and which problems it
// can express. Host code without CUDA headers, shared by the choice of tiles and the kernels.
#pragma once

#include <numeric>

#include "architecture.h"
#include "conv/params.h"

namespace cutefuse::conv {

enum class Sm90Schedule {
  kCooperative,  // two warpgroups on one tile: of 64 filters of a patch they split the pixels, of 128 the filters
  kPingPong,     // each warpgroup has tiles of its own: one multiplies while the other stores
  // Likewise with four warpgroups of 64 filters each: of 128 filters two share a tile. For outputs that take longer to
  // be finished and stored than to be multiplied.
  kFour,
  // small.cuh: small blocks, of which several share a multiprocessor; those of a cluster may divide the reduction
  kSmall,
};

// A block computes tiles of `filters` x (pixels_a x pixels_b) outputs with two consumer warpgroups, or four (kFour);
// blocks of small tiles have one for every 64 filters.
struct Sm90Tile {
  int id;
  char const *name;
  bool halo;  // pixels are a patch
  int filters;
  int pixels_a, pixels_b;  // im2col: 1 x pixels in the order (n,p,q); halo: a patch, 8 or 16 along `a`
  int cluster_f;           // blocks with different filters that share their pixels by multicast
  Sm90Schedule schedule;
  int type_bytes;      // a TypeSize
  bool pre_activates;  // has a second kernel, for pre-activated sources
  bool plain;          // has a kernel for other sources
  bool pairs;          // a k-tile is two blocks of channels, of 8-bit sources
  bool pixel_rows;     // pixels are wgmma's rows, and filters its columns: pixel_rows.cuh, of patches patch_rows.cuh
  bool enlarges;       // small: takes sources of which some are enlarged by two, and no others
  int beside;          // halo: 2 if two neighbouring pixels share wgmma's 64 rows (beside.cuh); else 1
  constexpr int pixels() const { return pixels_a * pixels_b; }
  constexpr int pixels_per_warpgroup() const {
    return filters == 64 && schedule == Sm90Schedule::kCooperative ? pixels() / 2 : pixels();
  }
  // Of a small tile: wgmma's rows, 64 of each warpgroup, and its width.
  constexpr int rows() const { return pixel_rows ? pixels() : filters; }
  constexpr int width() const { return pixel_rows ? filters : pixels(); }
};

// ---- rows of the operators' tables ----------------------------------------------------------------------------------

struct PatchSize {
  int a, b;
};

// Two warpgroups on one tile, whose pixels im2col loads.
constexpr Sm90Tile im2col_tile(int id, char const *name, TypeSize type, int filters, int pixels, unsigned options = 0) {
  Sm90Tile tile{};
  tile.id = id, tile.name = name, tile.type_bytes = type;
  tile.filters = filters, tile.pixels_a = 1, tile.pixels_b = pixels;
  tile.schedule = Sm90Schedule::kCooperative, tile.beside = 1;
  tile.cluster_f = (options & kMulticastPixels) != 0 ? 2 : 1;
  tile.pairs = (options & kBlockPairs) != 0;
  tile.plain = (options & kOnlyPreActivated) == 0;
  tile.pre_activates = (options & (kAlsoPreActivated | kOnlyPreActivated)) != 0;
  return tile;
}

// One warpgroup multiplies while the other stores.
constexpr Sm90Tile pingpong_tile(int id, char const *name, TypeSize type, int filters, int pixels,
                                 unsigned options = 0) {
  Sm90Tile tile = im2col_tile(id, name, type, filters, pixels, options);
  tile.schedule = Sm90Schedule::kPingPong;
  return tile;
}

// Four warpgroups take turns, alone or in pairs.
constexpr Sm90Tile four_tile(int id, char const *name, TypeSize type, int filters, int pixels) {
  Sm90Tile tile = im2col_tile(id, name, type, filters, pixels);
  tile.schedule = Sm90Schedule::kFour;
  return tile;
}

// The pixels are a patch of an image.
constexpr Sm90Tile halo_tile(int id, char const *name, TypeSize type, int filters, PatchSize pixels,
                             unsigned options = 0) {
  Sm90Tile tile = im2col_tile(id, name, type, filters, 0, options);
  tile.halo = true, tile.pixels_a = pixels.a, tile.pixels_b = pixels.b;
  return tile;
}

// A patch for few filters: 32, of two pixels beside each other.
constexpr Sm90Tile beside_tile(int id, char const *name, PatchSize pixels) {
  Sm90Tile tile = halo_tile(id, name, k16Bit, 32, pixels);
  tile.beside = 2;
  return tile;
}

// A tile of small.cuh.
constexpr Sm90Tile small_tile(int id, char const *name, TypeSize type, int filters, int pixels, unsigned options = 0) {
  Sm90Tile tile = im2col_tile(id, name, type, filters, pixels, options);
  tile.schedule = Sm90Schedule::kSmall, tile.pairs = type == k8Bit;
  return tile;
}

// Likewise, whose pixels are a patch (small_patch.cuh).
constexpr Sm90Tile small_patch_tile(int id, char const *name, TypeSize type, int filters, PatchSize pixels) {
  Sm90Tile tile = halo_tile(id, name, type, filters, pixels);
  tile.schedule = Sm90Schedule::kSmall;
  return tile;
}

// Pixels are rows and filters columns, of which there may be any multiple of 8.
constexpr Sm90Tile by_pixel_rows(Sm90Tile tile) {
  tile.pixel_rows = true;
  return tile;
}

// A tile of phases.cuh: four times as many outputs as pixels of an enlarged source.
constexpr Sm90Tile enlarging_tile(int id, char const *name, int pixels) {
  Sm90Tile tile = small_tile(id, name, k16Bit, 64, pixels);
  tile.enlarges = true;
  return tile;
}

// ---- what follows from a row ----------------------------------------------------------------------------------------

// The tile as it computes sources that are pre-activated, or that are not. A small tile that activates them is its own
// mirror image, whose pixels are wgmma's rows (activated_rows.cuh): 64x32 has 32 filters and 64 pixels.
constexpr Sm90Tile form_of(Sm90Tile tile, bool pre_activated) {
  if (!pre_activated || tile.schedule != Sm90Schedule::kSmall) return tile;
  int const filters = tile.filters;
  tile.filters = tile.pixels_b, tile.pixels_b = filters, tile.pixel_rows = true;
  return tile;
}

// A patch for few filters as wgmma multiplies it: 64 filters by as many columns as there are pairs of pixels.
constexpr Sm90Tile as_multiplied(Sm90Tile tile) {
  tile.filters *= tile.beside, tile.pixels_a /= tile.beside, tile.beside = 1;
  return tile;
}

// Pixels of one TMA store. 200 = 5 x 40: nets on 640 x 640 images have 25 * 2^n pixels.
constexpr int sm90_store_rows(int pixels_per_warpgroup) {
  int const rows = pixels_per_warpgroup;
  return rows % 64 == 0 ? 64 : rows % 40 == 0 ? 40 : rows % 104 == 0 ? 104 : rows;
}

// Whether warpgroups have tiles of their own.
constexpr bool takes_turns(Sm90Tile const &tile) {
  return tile.schedule == Sm90Schedule::kPingPong || tile.schedule == Sm90Schedule::kFour;
}

constexpr Config config_of(Sm90Tile const &tile) {
  char const *const kind = tile.halo                               ? "halo"
                           : takes_turns(tile)                     ? "pingpong"
                           : tile.schedule == Sm90Schedule::kSmall ? "small"
                                                                   : "im2col";
  std::uint32_t const types = tile.type_bytes == 1   ? kQuantisedTypes
                              : tile.type_bytes == 2 ? kHalfTypes
                                                     : bit_of(Type::kFloat32);
  return {tile.id, tile.name, kind, types, kWgmma};
}

constexpr Group group_of(Sm90Tile const &tile) {
  return tile.schedule == Sm90Schedule::kSmall ? Group::kSmall : Group::kHopper;
}

// Whether the tile adds a residual, which the Hopper path calls a shortcut. A ring that warpgroups read in turn has no
// slots for it. Small tiles for enlarged sources would spill, and so would wide tiles whose pixels are rows.
constexpr int kWidestWithShortcut = 160;
constexpr bool adds_shortcut(Sm90Tile const &tile) {
  return !takes_turns(tile) && !tile.enlarges && !(tile.pixel_rows && tile.filters > kWidestWithShortcut);
}

// Channels of a k-tile of filters. TMA takes as long over rows of 64 bytes as over rows of 128, and a patch's tap takes
// some 300 clocks however few its products are. So tiles exist that load two neighbouring blocks of 8-bit sources at a
// time; small ones, which wait for TMA most, always do. Where a source has an odd number of blocks the second one of
// the last two is missing and takes as long as the others.
constexpr int k_channels(Sm90Tile const &tile) { return tile.pairs ? 2 * kChannelBlock : kChannelBlock; }

// Whether filters are loaded in their order for 8-bit outputs too. Otherwise of each 16 the even ones come first, so
// that a thread has neighbours, and stores four bytes at once instead of twice two. Small tiles of few pixels, more
// than half of whose rows are filters, would wait for these loads.
constexpr bool loads_in_order(bool small, int pixels) { return small && pixels < 64; }

// How a patch with its halo lies in shared memory: rows of `pitch` pixels, `rows` of them, then the next stage. It
// serves size_a / tile_a x size_b / tile_b tiles of an image.
struct HaloPlan {
  bool swapped;        // `a`, the axis along which 8 pixels make a core matrix, is H instead of W
  int size_a, size_b;  // output pixels of an image
  int tile_a, tile_b;  // output pixels of a tile
  int pitch, rows;     // of a patch with its halo; under a stride of 2, of one parity's
  int step_r, step_s;  // pixels of the patch from one filter row or column to the next
  int beside, part;    // of pairs of pixels (beside.cuh): 2, and pixels from the first part of a patch to the second
  int stage_bytes, halo_stages, filter_stages;  // filter_stages: where pixels are rows all taps of all channels
};

HaloPlan halo_plan(Problem const &p, Sm90Tile const &tile);
inline HaloPlan plan_of(Sm90Tile const &tile, Problem const &p) { return tile.halo ? halo_plan(p, tile) : HaloPlan{}; }

constexpr int kMaxSplits = 8;  // blocks of a portable cluster

// ---- small tiles ---------------------------------------------------------------------------------------------------

constexpr int kSmallSharedBytes = 228 * 1024;  // of a multiprocessor, which keeps 1 KB of it for each block

constexpr int kSmallRowBytes = 128;  // of a pixel or filter in one k-tile

// Room for units, 8 columns of all rows, in shared memory: a block receives each unit that it finishes from every block
// of its cluster.
constexpr int small_parts(int width) { return width / 8 + 2; }
constexpr int small_parts(Sm90Tile const &tile) { return small_parts(tile.width()); }

// Stages of a ring at most, most of a reduction at once; and at least, since fewer cannot hide the latency of the
// loads.
constexpr int kSmallStages = 16;
constexpr int small_least_stages(Sm90Tile const &tile) { return tile.halo ? 2 : 4; }

// Blocks that may share a multiprocessor: as many as its registers hold. 8-bit tiles keep two sums.
constexpr int small_blocks(int rows, int width, int type_bytes) {
  return rows > 64 || width > (type_bytes == 1 ? 112 : 128) ? 1 : width > 64 ? 2 : 3;
}
constexpr int small_blocks(Sm90Tile const &tile) { return small_blocks(tile.rows(), tile.width(), tile.type_bytes); }

constexpr int kSmallHeadBytes = 1024;                  // barriers and biases, before the stages
constexpr int kSmallPatches = 2, kSmallPatchTaps = 3;  // patches in shared memory at most, and taps of a stage
constexpr int small_stage_bytes(Sm90Tile const &tile) {
  return (tile.halo ? kSmallPatchTaps * tile.filters : tile.filters + tile.pixels()) * kSmallRowBytes;
}
constexpr int small_parts_bytes(Sm90Tile const &tile) {
  return small_parts(tile) * tile.rows() * 8 * int(sizeof(float));
}

// Channels whose scale and shift a block has room for.
constexpr int kMaxActivated = 4096;
inline int activated_channels(Problem const &p) {
  return p.pre_activated ? std::accumulate(p.C, p.C + p.sources, 0) : 0;
}
// Of scales and shifts. The last block of channels is read whole, even if fewer exist.
inline int small_vectors_bytes(Sm90Tile const &tile, Problem const &p) {
  return p.pre_activated ? (2 * activated_channels(p) + kChannelBlock) * tile.type_bytes : 0;
}

// Bytes of a block with a ring of so many stages. Behind them lie patches, the parts of a divided reduction, and then
// the scales and shifts.
inline int small_shared_bytes(Sm90Tile const &tile, HaloPlan const &plan, Problem const &p, bool divided, int stages) {
  return kSmallHeadBytes + stages * small_stage_bytes(tile) + plan.halo_stages * plan.stage_bytes +
         (divided ? small_parts_bytes(tile) : 0) + small_vectors_bytes(tile, p);
}

// Stages of each of `blocks` blocks on a multiprocessor, which keeps 1 KB for each.
inline int small_stages(Sm90Tile const &tile, HaloPlan const &plan, Problem const &p, bool divided, int blocks) {
  int const left = kSmallSharedBytes / blocks - 1024 - small_shared_bytes(tile, plan, p, divided, 0);
  int const fit = left / small_stage_bytes(tile);
  return fit < kSmallStages ? fit : kSmallStages;
}

// ---- shared memory of the halo path -------------------------------------------------------------------------------

// Input channels of one halo stage: half a channel block where a whole one would leave no room for a second stage, and
// for float32, of which half a block is already the widest row that TMA swizzles; two where a k-tile is two.
constexpr int halo_channels(int filters, int pixels, int type_bytes, bool pairs) {
  bool const wide = filters == 64 && pixels > 256 && type_bytes > 1;
  return pairs ? 2 * kChannelBlock : type_bytes == 4 || wide ? kChannelBlock / 2 : kChannelBlock;
}
constexpr int halo_channels(Sm90Tile const &row) {
  if (row.pixel_rows) return kChannelBlock / 2;  // few filters mostly belong to few channels
  Sm90Tile const tile = as_multiplied(row);
  return halo_channels(tile.filters, tile.pixels(), tile.type_bytes, tile.pairs);
}

// A block's 227 KB of shared memory less its barriers and alignment.
constexpr int kHaloSharedBytes = 226 * 1024;
constexpr int kStagedRowBytes = 128;  // 64 filters of 16 bits: an output pixel where it is staged for the stores

// Whether each of the two warpgroups multiplies a whole patch, with half of the channels.
constexpr bool halves_channels(int filters, int pixels_a) { return filters * pixels_a == 64 * 8; }
constexpr bool halves_channels(Sm90Tile const &tile) {
  return tile.halo && tile.schedule == Sm90Schedule::kCooperative && halves_channels(tile.filters, tile.pixels_a);
}

// Bytes for halo stages and filter stages together, beside the staged outputs (none of float32) and the sums that are
// exchanged where channels are halved.
constexpr int halo_region_bytes(int filters, int pixels_a, int pixels_b, int type_bytes) {
  int const staged = type_bytes == 4 ? 0 : filters / 64 * pixels_a * pixels_b * kStagedRowBytes;
  int const exchanged = halves_channels(filters, pixels_a) ? filters * pixels_a * pixels_b * int(sizeof(float)) : 0;
  return kHaloSharedBytes - staged - exchanged;
}

constexpr int kHaloMaxStages = 4, kFilterMaxStages = 12, kFilterMinStages = 3;

// Patches whose pixels are rows (patch_rows.cuh): how many blocks share a multiprocessor at most, as many as its
// registers hold; a block's barriers, and its shared memory.
constexpr int most_rows_blocks(int filters) { return filters == 16 ? 4 : 3; }
constexpr int kRowsHeadBytes = 1024;
constexpr bool keeps_filters(Sm90Tile const &tile) { return tile.halo && tile.pixel_rows; }
inline int rows_shared_bytes(Sm90Tile const &tile, HaloPlan const &plan) {
  return kRowsHeadBytes + plan.halo_stages * plan.stage_bytes +
         plan.filter_stages * tile.filters * halo_channels(tile) * tile.type_bytes;
}
inline int rows_blocks(Sm90Tile const &tile, HaloPlan const &plan) {
  int const fit = kSmallSharedBytes / (rows_shared_bytes(tile, plan) + 1024);
  return fit < most_rows_blocks(tile.filters) ? fit : most_rows_blocks(tile.filters);
}

// ---- outputs --------------------------------------------------------------------------------------------------------

inline OutputRange output_range(Problem const &p, int i) {
  return p.outputs > 1 ? p.ranges[i] : OutputRange{0, p.K, p.ldy};
}

// Where each output begins among the rows of all tiles of filters, and how many tiles that makes: a tile's every 64
// filters belong to one output, and outputs that end elsewhere have tiles of their own.
inline int output_rows(Sm90Tile const &tile, Problem const &p, int (&first)[kMaxOutputs]) {
  bool whole = true;
  int const together = tile.pixel_rows ? tile.filters : 64;
  for (int i = 0; i < p.outputs; ++i) whole = whole && output_range(p, i).first % together == 0;
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

// Every output pixel reads the source pixel of the same index, and no other: the pixels are a plain matrix.
constexpr bool is_pointwise(Problem const &p) {
  return p.R * p.S == 1 && p.stride_h * p.stride_w == 1 && p.pad_top + p.pad_left + p.pad_bottom + p.pad_right == 0;
}

// TMA starts at multiples of 16 bytes and moves from pixel to pixel by such. Only float32 and dense pixels have others.
inline bool has_strides_for_tma(Problem const &p) {
  for (int i = 0; i < p.sources; ++i) {
    if ((p.ldx[i] | p.start[i]) * size_of(p.type) % 16 != 0) return false;
  }
  bool const loads_residual = p.residual != Residual::kNone && p.type != Type::kFloat32;
  return !loads_residual || (p.ldz | p.residual_start) * size_of(p.type) % 16 == 0;
}

// The part of a problem that a tile of its type cannot run, worded to follow "cannot run"; null: it runs all. Mostly
// what TMA's tensor maps cannot express. No answer depends on N, H and W up to the sizes that 32-bit indices allow, so
// that one tactic serves a dynamic shape.
char const *sm90_obstacle(Sm90Tile const &tile, Problem const &p);
bool sm90_can_run(Sm90Tile const &tile, Problem const &p);

}  // namespace cutefuse::conv
