// A row of an operator's table of Ampere tiles, and the function that makes one. Host code, which the kernels read too.
#pragma once

#include "architecture.h"
#include "conv/params.h"

namespace cutefuse::conv {

constexpr int kRowTaps = 3;     // filter columns that tiles with shared taps take
constexpr int kInt8Pitch = 80;  // bytes between int8 pixels with shared taps: ldmatrix then touches every bank once

// Pixels that a stage holds beyond those under one tap, where the taps of a filter row share them: two for each of the
// image rows that a tile may touch. 8-bit tiles may touch 8 rows, larger types 16.
constexpr int halo_rows_of(int type_bytes) { return type_bytes == 1 ? 16 : 32; }

// Where a tile keeps the float32 sums of earlier sources while it adds up the products of the present source.
enum class Sums {
  kNone,       // nowhere: all sources must have one scale
  kRegisters,  // which halves the warp tile
  kShared,     // in shared memory, at the price of a pass over it at each source's end
};

struct Tile {
  int id;
  char const *name;
  int type_bytes;  // a TypeSize
  int m, n, k, stages, warps_m, warps_n, teams, blocks_per_sm;
  bool any_channels;  // also takes sources whose channels are no whole number of 16-byte vectors; slower for it
  bool upsamples;     // takes enlarged sources, and no others: it divides for every pixel that it copies
  // The smallest piece of a pixel that it copies: 16 bytes, or 4, or one element. Tiles with smaller pieces take
  // only pixels that are no whole number of vectors, and copy each source in the largest pieces that its pixels and
  // channels allow.
  int copy_bytes;
  // The cost model: the time that a block takes alone on a multiprocessor, for every channel of the reduction, and for
  // its start and end. Fitted on an H200 to the shapes of benchmarks/conv_shapes.json. Of image tiles, a warp's time
  // for 32 outputs (image.cpp).
  double channel_ns, block_us;
  int halo_rows;  // > 0: the taps of a filter row share their pixels, and a stage holds up to m + halo_rows of them
  Sums sums;
  bool pre_activates;  // has a second kernel, for pre-activated sources
  bool float8;         // multiplies float8, and nothing else
  bool few_channels;   // takes one source of at most a vector of channels alone: a k-tile is as many taps as vectors
  bool depthwise;      // takes depthwise convolutions alone (depthwise.cuh)
  bool image;          // takes a source of at most 32 channels alone, in pixels of any stride (image.cuh)
  constexpr bool takes(Type type) const { return type_bytes == size_of(type) && float8 == (type == Type::kFloat8); }
  constexpr std::uint32_t needs() const { return float8 ? kFloat8Mma : kNoFeature; }
  constexpr bool has_cut() const { return image || depthwise; }  // its blocks are cut for each problem
  constexpr bool drains() const { return sums != Sums::kNone; }
  constexpr Group group() const {
    if (image) return Group::kImage;
    if (depthwise) return Group::kDepthwise;
    if (copy_bytes < 16) return Group::kPieces;
    if (upsamples) return Group::kEnlarged;
    if (halo_rows > 0) return drains() ? Group::kTapsSums : Group::kTaps;
    return drains() ? Group::kSums : Group::kPlain;
  }
  constexpr int threads() const { return warps_m * warps_n * teams * 32; }
  // Bytes of a pixel's sums or outputs in shared memory. 8-bit tiles keep 32-bit sums there, with 32 bytes between
  // pixels so that rows touch different banks.
  constexpr int row_bytes_y() const { return type_bytes == 1 ? n * 4 + 32 : n * type_bytes; }
  constexpr int stages_bytes() const {
    if (halo_rows == 0) return (m + n) * k * type_bytes * stages;
    // 8-bit: a stage holds the pixels of a filter row and the filters of its taps. Otherwise there are two stages of
    // pixels, and a stage of filters for each tap.
    return type_bytes == 1 ? ((m + halo_rows) * kInt8Pitch + n * k * kRowTaps) * stages
                           : ((m + halo_rows) * 2 + n * stages) * k * type_bytes;
  }
  constexpr int shared_bytes() const {
    int const mainloop = stages_bytes() + (sums == Sums::kShared ? m * n * 4 : 0), epilogue = m * row_bytes_y();
    int const scales_and_biases = type_bytes == 1 ? 8 * n : 0;  // two float32 for each filter
    return (mainloop > epilogue ? mainloop : epilogue) + scales_and_biases;
  }
};

struct TileSize {
  int m, n, k, stages;
};

struct TileWarps {
  int m, n;
  int teams = 1;  // 2: two sets of such warps, each with the whole tile, take the mma steps in turn
};

struct TileCost {
  double channel_ns, block_us;
};

constexpr Tile make_tile(int id, char const *name, TypeSize type, TileSize size, TileWarps warps, int blocks_per_sm,
                         TileCost cost, unsigned options = 0) {
  auto const has = [&](TileOption option) { return (options & option) != 0; };
  Tile tile{};
  tile.id = id, tile.name = name, tile.type_bytes = type;
  tile.m = size.m, tile.n = size.n, tile.k = size.k, tile.stages = size.stages;
  tile.warps_m = warps.m, tile.warps_n = warps.n, tile.teams = warps.teams, tile.blocks_per_sm = blocks_per_sm;
  tile.any_channels = has(kAnyChannels), tile.upsamples = has(kEnlargedSources);
  tile.copy_bytes = has(kCopiesElements) ? type : has(kCopies4Bytes) ? 4 : 16;
  tile.channel_ns = cost.channel_ns, tile.block_us = cost.block_us;
  tile.halo_rows = has(kSharedTaps) ? halo_rows_of(type) : 0;
  tile.sums = has(kSumsInRegisters) ? Sums::kRegisters : has(kSumsInShared) ? Sums::kShared : Sums::kNone;
  tile.pre_activates = has(kAlsoPreActivated);
  tile.few_channels = has(kFewChannels), tile.image = has(kImage), tile.depthwise = has(kDepthwise);
  return tile;
}

constexpr Config config_of(Tile const &tile) {
  bool const bytes = tile.type_bytes == 1;
  char const *const kind = tile.upsamples ? "enlarged" : tile.halo_rows == 0 ? "plain" : bytes ? "rows" : "taps";
  std::uint32_t types = 0;
  for (Type type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16, Type::kInt8, Type::kFloat8}) {
    types |= tile.takes(type) ? bit_of(type) : 0;
  }
  return {tile.id, tile.name, kind, types, tile.needs()};
}

}  // namespace cutefuse::conv
