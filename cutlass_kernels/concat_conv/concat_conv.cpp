// Host side of ConcatConv: what is legal, which tile to try first, and the dispatch. No CUDA header.
#include <algorithm>
#include <array>
#include <cstring>

#include "concat_conv/tiles.h"
#include "concat_conv/variants.h"
#include "conv/problem.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::concat_conv {
namespace {

constexpr int kAllTiles = kTileCount + kSm90TileCount;

std::array<Config, kAllTiles> const kConfigTable = [] {
  std::array<Config, kAllTiles> table{};
  for (int i = 0; i < kTileCount; ++i) {
    Tile const &tile = kTiles[i];
    char const *const kind = tile.upsamples ? "enlarged" : tile.halo_rows > 0 ? "taps" : "plain";
    std::uint32_t const narrow = bit_of(Type::kFloat16) | bit_of(Type::kBFloat16);
    table[i] = {tile.id, tile.min_sm, tile.name, kind, tile.type_bytes == 2 ? narrow : bit_of(Type::kFloat32)};
  }
  for (int i = 0; i < kSm90TileCount; ++i) {
    Sm90Tile const &tile = kSm90Tiles[i];
    char const *const kind = tile.schedule == Sm90Schedule::kRows       ? "rows"
                             : tile.halo                                ? "halo"
                             : tile.schedule == Sm90Schedule::kPingPong ? "pingpong"
                                                                        : "im2col";
    table[kTileCount + i] = {tile.id, 90, tile.name, kind, bit_of(Type::kFloat16) | bit_of(Type::kBFloat16)};
  }
  return table;
}();

// Dynamic shared memory that one block may ask for, by compute capability (CUDA programming guide, table of limits).
int shared_limit(int sm) {
  if (sm == 86 || sm == 89 || sm >= 120) return 99 * 1024;
  return sm >= 90 || sm == 0 ? 227 * 1024 : 163 * 1024;
}

char const *reject(Call const &call) {
  Problem problem;
  return problem_of(call, &problem);
}

int device_count(Call const &call) { return call.sm_count > 0 ? call.sm_count : call.sm == 90 ? 132 : 108; }

int resident_blocks(Tile const &tile, int sm) {
  return std::max(1, std::min(tile.blocks_per_sm, shared_limit(sm) / tile.shared_bytes()));
}

std::int64_t output_tiles(Tile const &tile, Problem const &p) {
  return (std::int64_t(p.N) * p.P * p.Q + tile.m - 1) / tile.m * ceil_div(p.K, tile.n);
}

// Parts into which the reduction is cut when the tiles leave half of the multiprocessors idle; each keeps four k-tiles.
// One block on a multiprocessor is nearly as fast as two, so more tiles than that gain nothing from a second launch.
int splits_of(Tile const &tile, Problem const &p, int sm, int sm_count) {
  std::int64_t const slots = std::int64_t(sm_count) * resident_blocks(tile, sm), tiles = output_tiles(tile, p);
  if (2 * tiles > sm_count) return 1;
  int blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += ceil_div(p.C[i], tile.k);
  std::int64_t const longest = std::min(blocks, std::max(1, blocks * p.R * p.S / 4));
  return tiles == 0 ? 1
                    : static_cast<int>(std::max<std::int64_t>(1, std::min({slots / tiles, longest, std::int64_t(16)})));
}

// A bound that holds for every larger image too, as TensorRT asks at a profile's corners only: a split launch never has
// more blocks than the device has slots, and an image that needs no split is followed by none that does.
std::int64_t workspace_bytes(Call const &call) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return -1;
  bool const sized = p.N >= 0 && p.P >= 0 && p.Q >= 0;
  std::int64_t bytes = 0;
  for (Tile const &tile : kTiles) {
    if (tile.type_bytes != size_of(p.type)) continue;
    int const sm_count = device_count(call);
    if (sized && splits_of(tile, p, call.sm, sm_count) == 1) continue;
    bytes = std::max(bytes, std::int64_t(sm_count) * resident_blocks(tile, call.sm) * tile.m * tile.n * 4);
  }
  return bytes;
}

bool whole_vectors(Problem const &p) {
  return std::all_of(p.C, p.C + p.sources, [&](int channels) { return channels * size_of(p.type) % 16 == 0; });
}

// Predicted time of a tile in microseconds. Blocks go to the multiprocessors in turn; two or three on one
// multiprocessor hide each other's latencies and take 1.45 and 2.2 times as long as one alone.
double cost(Tile const &tile, Problem const &p, int sm, int sm_count) {
  constexpr double kTogether[] = {0.0, 1.0, 1.45, 2.2};
  int const splits = splits_of(tile, p, sm, sm_count), resident = resident_blocks(tile, sm);
  std::int64_t const blocks = output_tiles(tile, p) * splits, per_sm = (blocks + sm_count - 1) / sm_count;
  int const step = whole_vectors(p) ? 16 : tile.k;  // where tails are masked, one takes about as long as a whole k-tile
  double reduction = 0;                             // channels times taps
  for (int i = 0; i < p.sources; ++i) reduction += double(ceil_div(p.C[i], step)) * step * p.R * p.S / splits;
  double const rounds = double(per_sm / resident) * kTogether[resident] + kTogether[per_sm % resident];
  double const sum_us = splits > 1 ? 3.0 + 0.1 * splits : 0.0;  // a second launch, and its reads
  return rounds * (reduction * tile.channel_ns * 1e-3 + tile.block_us) + sum_us;
}

// The largest copy at most 16 bytes of which every source's pixels and channels are whole numbers; 16 where pixels are
// whole vectors, since a tail of channels is then masked.
int copy_bytes(Problem const &p) {
  std::int64_t strides = 16, sizes = 16;
  for (int i = 0; i < p.sources; ++i) {
    strides |= p.ldx[i] * size_of(p.type), sizes |= (p.ldx[i] | p.C[i]) * size_of(p.type);
  }
  return strides % 16 == 0 ? 16 : int(sizes & -sizes);
}

// The taps of a filter row can share pixels where those lie side by side, and a stage holds what a tile reads of them.
bool shares_taps(Tile const &tile, Problem const &p) {
  if (p.S != 3 || p.stride_w != 1) return false;
  int const image_rows = p.Q > 0 ? (tile.m + p.Q - 2) / p.Q + 1 : 1;
  return image_rows * halo_of(p) <= tile.halo_rows;
}

bool runs(Tile const &tile, Problem const &p, int sm) {
  return (sm == 0 || sm >= tile.min_sm) && tile.type_bytes == size_of(p.type) &&
         tile.shared_bytes() <= shared_limit(sm) && (tile.any_channels || whole_vectors(p)) &&
         (tile.halo_rows == 0 || shares_taps(tile, p)) && tile.upsamples == is_upsampled(p) &&
         tile.copy_bytes <= copy_bytes(p) && (tile.copy_bytes == 16) == (copy_bytes(p) == 16);
}

// Hopper code (sm_90a) runs on compute capability 9.0 alone, where the library was built for it.
bool runs_sm90(int sm) { return sm == 0 || (sm == 90 && std::strstr(CUTEFUSE_ARCHS, "90a") != nullptr); }

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return 0;
  struct Candidate {
    int id;
    bool later;  // the Ampere tiles on Hopper, and the Hopper tiles where the device is not known
    double cost;
  } legal[kAllTiles];
  int count = 0;
  bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
  int const sm_count = device_count(call);
  for (Tile const &tile : kTiles) {
    if (!runs(tile, p, call.sm)) continue;
    legal[count++] = {tile.id, call.sm == 90, sized ? cost(tile, p, call.sm, sm_count) : 0};
  }
  for (Sm90Tile const &tile : kSm90Tiles) {
    if (!runs_sm90(call.sm) || !sm90_can_run(tile, p)) continue;
    legal[count++] = {tile.id, call.sm != 90, sized ? sm90_cost(tile, p, sm_count) : 0};
  }
  std::stable_sort(legal, legal + count, [](Candidate const &a, Candidate const &b) {
    return a.later != b.later ? b.later : a.cost < b.cost;
  });
  count = std::min(count, int(capacity));
  for (int i = 0; i < count; ++i) ids[i] = legal[i].id;
  return count;
}

char const *run(Call const &call) {
  Params params{};
  if (char const *reason = problem_of(call, &params.problem)) return reason;
  Problem const &p = params.problem;
  bool const widths = std::all_of(call.inputs, call.inputs + p.sources, [](Tensor const &x) { return x.dims[1] >= 0; });
  if (p.N < 0 || p.P < 0 || p.Q < 0 || !widths) {
    return sentence("concat_conv: run needs every size, one is still dynamic");
  }
  if (p.N == 0 || p.P == 0 || p.Q == 0) return nullptr;
  for (int i = 0; i < call.num_inputs + call.num_outputs; ++i) {
    Tensor const &tensor = i < call.num_inputs ? call.inputs[i] : call.outputs[i - call.num_inputs];
    if (tensor.data == nullptr || reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) {
      return sentence("concat_conv: tensor %d is at address %p; device pointers must be set and aligned to 16 bytes", i,
                      tensor.data);
    }
    if (i < p.sources) {
      params.upsample_multiplier[i] = upsample_multiplier(p.upsample[i]);
      params.x[i] = static_cast<char const *>(tensor.data) + std::int64_t(p.start[i]) * size_of(p.type);
    }
  }
  params.set_steps();
  params.columns = static_cast<int>(packed_columns(p));
  params.w = call.inputs[p.sources].data;
  params.b = static_cast<float const *>(call.inputs[p.sources + 1].data);
  params.z = p.residual != Residual::kNone ? call.inputs[p.sources + 2].data : nullptr;
  params.y = call.outputs[0].data;
  for (int j = 0; j < p.outputs; ++j) params.ys[j] = call.outputs[j].data;
  std::int32_t ids[kAllTiles];
  std::int32_t const count = configs(call, ids, kAllTiles);
  std::int32_t const id = call.config != 0 ? call.config : count > 0 ? ids[0] : 0;
  if (std::find(ids, ids + count, id) == ids + count) {
    return sentence("concat_conv: tile %d cannot run %s on compute capability %d.%d; ask configs() for the legal ones",
                    id, name_of(p.type), call.sm / 10, call.sm % 10);
  }
  params.splits = 1;
  if (Tile const *const tile = find_tile(id); tile != nullptr && call.workspace != nullptr) {
    params.splits = splits_of(*tile, p, call.sm, device_count(call));
    params.partials = static_cast<float *>(call.workspace);
  }
#if CUTEFUSE_WITH_CUDA
  if (find_sm90_tile(id) != nullptr) {
    for (int i = 0; i < p.outputs; ++i) {
      Params part = params;
      part.problem = output_problem(p, i);
      part.w = static_cast<char const *>(params.w) + std::int64_t(p.ranges[i].first) * params.columns * size_of(p.type);
      part.b = params.b + p.ranges[i].first;
      part.y = params.ys[i];
      Launch *const launch = p.type == Type::kFloat16 ? launch_sm90_f16 : launch_sm90_bf16;
      if (char const *reason = launch(id, part, call.stream)) return reason;
    }
    return nullptr;
  }
  Tile const &tile = *find_tile(id);
  bool const up = tile.upsamples, taps = tile.halo_rows > 0;
  Launch *const f16 = up ? launch_sm80_view_f16 : taps ? launch_sm80_taps_f16 : launch_sm80_f16;
  Launch *const bf16 = up ? launch_sm80_view_bf16 : taps ? launch_sm80_taps_bf16 : launch_sm80_bf16;
  Launch *const f32 = tile.copy_bytes < 16 ? launch_sm80_any_f32 : up ? launch_sm80_view_f32 : launch_sm80_f32;
  Launch *const launch = p.type == Type::kFloat16 ? f16 : p.type == Type::kBFloat16 ? bf16 : f32;
  return launch(id, params, call.stream);
#else
  return sentence("concat_conv: this library was built without CUDA; install nvcc and build again to run kernels");
#endif
}

}  // namespace

extern Op const op;
Op const op = {"concat_conv",
               {kVariantTable.data(), kVariants},
               {kAttrSpecs, kAttrs},
               {kConfigTable.data(), kAllTiles},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               run};

}  // namespace cutefuse::concat_conv
