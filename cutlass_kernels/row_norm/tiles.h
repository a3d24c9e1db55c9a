// The table of forward tiles and the kernels behind it: one row serves dispatch, TensorRT's tactics and the tests.
#pragma once

#include "architecture.h"
#include "problem.h"

namespace cutefuse::row_norm {

enum class Scope { kWarp, kBlock, kCluster, kShared, kStream };

// Ids are permanent: engines store them. A retired tile's id is never used again: kRetired. `vectors`: 16-byte vectors
// of a row that one thread keeps in registers.
struct Tile {
  int id;
  char const *name;
  std::uint32_t needs;
  Scope scope;
  int vectors;
};

inline constexpr Tile kTiles[] = {
    {1, "warp_v1", kNoFeature, Scope::kWarp, 1},  // several rows per block, shuffles only
    {2, "warp_v2", kNoFeature, Scope::kWarp, 2},
    {3, "warp_v4", kNoFeature, Scope::kWarp, 4},
    {4, "block_v1", kNoFeature, Scope::kBlock, 1},  // one row per block
    {5, "block_v2", kNoFeature, Scope::kBlock, 2},
    {6, "block_v4", kNoFeature, Scope::kBlock, 4},
    {11, "stream", kNoFeature, Scope::kStream, 1},  // one row per block, read twice: rows that fit nowhere else
    {12, "shared", kClusters, Scope::kShared, 1},   // one row per block or cluster, in shared memory
    {13, "cluster_v8", kClusters, Scope::kCluster, kClusterVectors},  // one row per cluster: 16-bit rows that fill it
};

// An engine may ask for a tile that left the table. These were other tiles for clusters.
constexpr Retired kRetired[] = {{7, 12}, {8, 12}, {9, 12}, {10, 12}};

// In the order of Scope.
constexpr char const *kScopeNames[] = {"warp", "block", "cluster", "shared", "stream"};

constexpr Config config_of(Tile const &tile) {
  char const *const kind = kScopeNames[static_cast<int>(tile.scope)];
  return {tile.id, tile.name, kind, kFloatTypes, tile.needs};
}
inline constexpr auto kConfigTable = configs_of(kTiles);

// The kernels, one translation unit per element type. `pipelined`: backward for the rows that the pipelined kernel
// takes; otherwise for any row, with one more launch for dgamma and dbeta.
struct BackwardKernels {
  void const *rows, *columns, *sums;
};
struct Kernels {
  void const *(*forward)(Tile const &tile, ForwardParams const &params) = nullptr;
  BackwardKernels (*backward)(BackwardParams const &params, bool pipelined) = nullptr;
};

}  // namespace cutefuse::row_norm
