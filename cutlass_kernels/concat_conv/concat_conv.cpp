// Host side of ConcatConv: what is legal, which tile to try first, and which kernel a plan takes. No CUDA header.
#include <algorithm>
#include <array>

#include "concat_conv/tiles.h"
#include "concat_conv/variants.h"
#include "conv/plan.h"
#include "conv/sm90/plan.h"

namespace cutefuse::concat_conv {

extern Op const op;

namespace {

constexpr int kAllTiles = kTileCount + kSm90TileCount;
constexpr std::uint32_t kHalfTypes = bit_of(Type::kFloat16) | bit_of(Type::kBFloat16);

std::array<Config, kAllTiles> const kConfigTable = [] {
  std::array<Config, kAllTiles> table{};
  for (int i = 0; i < kTileCount; ++i) {
    Tile const &tile = kTiles[i];
    char const *const kind = tile.upsamples ? "enlarged" : tile.halo_rows > 0 ? "taps" : "plain";
    table[i] = {tile.id, tile.min_sm, tile.name, kind, tile.type_bytes == 2 ? kHalfTypes : bit_of(Type::kFloat32)};
  }
  for (int i = 0; i < kSm90TileCount; ++i) {
    Sm90Tile const &tile = kSm90Tiles[i];
    char const *const kind = tile.schedule == Sm90Schedule::kRows       ? "rows"
                             : tile.halo                                ? "halo"
                             : tile.schedule == Sm90Schedule::kPingPong ? "pingpong"
                                                                        : "im2col";
    table[kTileCount + i] = {tile.id, 90, tile.name, kind, kHalfTypes};
  }
  return table;
}();

char const *check_outputs(Checks const &checks) {
  Problem &p = checks.p;
  AttrValue const &given = checks.call.attrs[kOutputChannels];
  int const vector = 16 / size_of(p.type);
  std::int64_t sum = 0;
  bool legal = given.count == p.outputs;
  for (int j = 0; legal && j < p.outputs; ++j) {
    std::int64_t const channels = p.outputs == 1 && given.ints[j] == 0 ? p.K : given.ints[j];
    legal = channels >= 1 && channels <= p.K - sum && (j + 1 == p.outputs || channels % vector == 0);
    p.ranges[j].first = static_cast<int>(sum);
    sum += legal ? channels : 0;
    p.ranges[j].last = static_cast<int>(sum);
  }
  if (!legal || sum != p.K) {
    return sentence(
        "concat_conv: output_channels has %d values, the first %lld, for %d outputs of %d channels; write one for each "
        "that add up, all but the last multiples of %d",
        given.count, (long long)given.ints[0], p.outputs, p.K, vector);
  }
  for (int j = 0; j < p.outputs; ++j) {
    OutputRange &range = p.ranges[j];
    int const channels = range.last - range.first;
    if (char const *reason = checks.pixels("output", checks.call.outputs[j], p.type, channels, &range.ld))
      return reason;
  }
  p.ldy = p.ranges[0].ld;
  if (p.residual == Residual::kNone) return nullptr;
  return checks.pixels("residual", checks.call.inputs[p.sources + 2], p.type, p.K, &p.ldz);
}

// channel_starts and upsample: one value for each source of a view, the default otherwise.
char const *check_views(Checks const &checks) {
  Problem &p = checks.p;
  bool const view = kVariantTable[checks.call.variant].facts.view;
  for (int const attr : {kChannelStarts, kUpsample}) {
    AttrValue const &given = checks.call.attrs[attr];
    std::int64_t const neutral = attr == kUpsample, most = attr == kUpsample ? kMaxUpsample : kInt32Max / 2;
    bool const is_default = given.count == 1 && given.ints[0] == neutral;
    if (!is_default && (!view || given.count != p.sources)) {
      return sentence("concat_conv: attribute %s has %d values, the first %lld, for %d sources; %s",
                      kAttrSpecs[attr].name, given.count, (long long)given.ints[0], p.sources,
                      view ? "write one for each" : "only CuteView op_types take other values than the default");
    }
    for (int i = 0; i < p.sources; ++i) {
      std::int64_t const value = is_default ? neutral : given.ints[i];
      if (value < neutral || value > most) {
        return sentence("concat_conv: %s[%d] is %lld, %lld to %lld are allowed", kAttrSpecs[attr].name, i,
                        (long long)value, (long long)neutral, (long long)most);
      }
      (attr == kUpsample ? p.upsample : p.start)[i] = static_cast<int>(value);
    }
  }
  for (int i = 0; i < p.sources; ++i) {
    if (std::int64_t(p.start[i]) * size_of(p.type) % 16 == 0) continue;
    return sentence("concat_conv: source %d starts at channel %d; a range must start at a multiple of %d %s channels",
                    i, p.start[i], 16 / size_of(p.type), name_of(p.type));
  }
  return nullptr;
}

char const *problem_of(Call const &call, Problem *problem) {
  Problem &p = *problem = Problem{};
  Checks const checks{op, call, p};
  checks.read_op_type();
  p.type = p.output_type = call.inputs[0].type;
  p.layout = Layout::kChannelsLast;
  if ((bit_of(p.type) & kFloatTypes) == 0) {
    return sentence("concat_conv: %s is not supported; use float32, float16 or bfloat16", name_of(p.type));
  }
  if (char const *reason = checks.geometry()) return reason;
  if (char const *reason = checks.activation(kAlpha)) return reason;
  if (char const *reason = check_views(checks)) return reason;
  if (char const *reason = checks.sources()) return reason;
  if (char const *reason = checks.size()) return reason;
  if (char const *reason = checks.filter()) return reason;
  if (char const *reason = checks.vector("bias", call.inputs[p.sources + 1])) return reason;
  return check_outputs(checks);
}

char const *reject(Call const &call) {
  Problem problem;
  return problem_of(call, &problem);
}

std::int64_t workspace_bytes(Call const &call) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return -1;
  std::int64_t bytes = 0;
  for (Tile const &tile : kTiles) {
    if (tile.type_bytes == size_of(p.type)) bytes = std::max(bytes, workspace_bound(tile, p, Target(call)));
  }
  return bytes;
}

// The largest copy of at most 16 bytes that divides every source's pixels and channels; 16 where pixels are whole
// vectors, since a tail of channels is then masked.
int copy_bytes(Problem const &p) {
  std::int64_t strides = 16, sizes = 16;
  for (int i = 0; i < p.sources; ++i) {
    strides |= p.ldx[i] * size_of(p.type), sizes |= (p.ldx[i] | p.C[i]) * size_of(p.type);
  }
  return strides % 16 == 0 ? 16 : int(sizes & -sizes);
}

// The taps of a filter row can share pixels that are adjacent, where one stage holds all that a tile reads of them.
bool shares_taps(Tile const &tile, Problem const &p) {
  if (p.S != kRowTaps || p.stride_w != 1) return false;
  int const image_rows = p.Q > 0 ? (tile.m + p.Q - 2) / p.Q + 1 : 1;
  return image_rows * halo_of(p) <= tile.halo_rows;
}

// What of a problem a tile of its type cannot run; null: nothing.
char const *obstacle_of(Tile const &tile, Problem const &p, int sm) {
  if (tile.shared_bytes() > shared_limit(sm)) return "stages larger than the shared memory";
  if (!tile.any_channels && !whole_vectors(p)) return "channels that are no multiples of a vector";
  if (tile.halo_rows > 0 && !shares_taps(tile, p)) return "filter rows that share too few pixels";
  if (tile.upsamples != is_upsampled(p)) return tile.upsamples ? "sources of full size" : "enlarged sources";
  bool const fits = tile.copy_bytes <= copy_bytes(p) && (tile.copy_bytes == 16) == (copy_bytes(p) == 16);
  return fits ? nullptr : "pixels of this stride";
}

bool runs(Tile const &tile, Problem const &p, int sm) {
  return (sm == 0 || sm >= tile.min_sm) && tile.type_bytes == size_of(p.type) && obstacle_of(tile, p, sm) == nullptr;
}

// The Ampere tiles come after Hopper's on Hopper, and before them where the device is not known.
std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return 0;
  Candidate legal[kAllTiles];
  int count = 0;
  bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
  Target const target(call);
  for (Tile const &tile : kTiles) {
    if (runs(tile, p, call.sm)) legal[count++] = {tile.id, call.sm == 90, sized ? cost_us(tile, p, target) : 0};
  }
  for (Sm90Tile const &tile : kSm90Tiles) {
    if (!(call.sm == 0 || (call.sm == 90 && builds_for("90a"))) || !sm90_can_run(tile, p)) continue;
    legal[count++] = {tile.id, call.sm != 90, sized ? sm90_cost(tile, p, target.sm_count) : 0};
  }
  return ranked(legal, count, ids, capacity);
}

char const *obstacle(Call const &call, std::int32_t config) {
  Problem p;
  problem_of(call, &p);
  if (Tile const *const tile = find_tile(config)) return obstacle_of(*tile, p, call.sm);
  if (call.sm != 90) return "this call";
  if (is_upsampled(p)) return "enlarged sources";
  return p.residual != Residual::kNone ? "a residual" : "this filter, stride, padding or number of channels";
}

// Which translation unit holds a tile's kernels; null in a library without any.
Find *kernels_of([[maybe_unused]] Tile const &tile, [[maybe_unused]] Type type) {
#if CUTEFUSE_WITH_CUDA
  bool const up = tile.upsamples, taps = tile.halo_rows > 0, half = type == Type::kFloat16;
  if (type == Type::kFloat32) return tile.copy_bytes < 16 ? find_sm80_any_f32 : up ? find_sm80_view_f32 : find_sm80_f32;
  if (up) return half ? find_sm80_view_f16 : find_sm80_view_bf16;
  if (taps) return half ? find_sm80_taps_f16 : find_sm80_taps_bf16;
  return half ? find_sm80_f16 : find_sm80_bf16;
#else
  return nullptr;
#endif
}

Find *sm90_kernels_of([[maybe_unused]] Type type) {
#if CUTEFUSE_WITH_CUDA
  return type == Type::kFloat16 ? find_sm90_f16 : find_sm90_bf16;
#else
  return nullptr;
#endif
}

char const *plan(Call const &call, Plan &plan) {
  Problem p;
  if (char const *reason = problem_of(call, &p)) return reason;
  if (p.N == 0) return nullptr;
  if (Tile const *const tile = find_tile(call.config)) {
    return plan_sm80(op, *tile, call, p, kernels_of(*tile, p.type), plan);
  }
  if (Sm90Tile const *const tile = find_sm90_tile(call.config)) {
    return plan_sm90(op, *tile, call, p, sm90_kernels_of(p.type), plan);
  }
  return sentence("concat_conv: no tile runs these sources on compute capability %d.%d; skip this fusion", call.sm / 10,
                  call.sm % 10);
}

char const *launch(Plan const &plan, Operands const &operands) {
  return find_sm90_tile(plan.config) != nullptr ? launch_sm90(op, plan, operands) : launch_sm80(op, plan, operands);
}

}  // namespace

Op const op = {"concat_conv",
               {kVariantTable.data(), kVariants},
               {kAttrSpecs.data(), kAttrs},
               {kConfigTable.data(), kAllTiles},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               obstacle,
               plan,
               launch};

}  // namespace cutefuse::concat_conv
