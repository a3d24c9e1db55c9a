// From a judged problem to a launch of a Hopper kernel.
#include "conv/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if CUTEFUSE_WITH_CUDA
#include "conv/sm90/cost.h"
#include "conv/sm90/k_tiles.h"
#include "conv/sm90/tensor_maps.h"
#endif

namespace cutefuse::conv {

#if CUTEFUSE_WITH_CUDA
namespace {

// ---- parameters -----------------------------------------------------------------------------------------------------

Rescale make_rescale(Problem const &p, int source) {
  double const factor = size_of(p.type) == 1 ? rescale(p, source) : 1.0, whole = std::floor(factor + 0.5);
  Rescale by{};
  by.factor = float(factor), by.whole = int(std::min(whole, double(kInt32Max)));
  by.fraction = int(std::floor((factor - whole) * 4294967296.0));
  return by;
}

// The factor has so few bits that the term is exact: sums, which are at most 2^22, are off by one at most.
RaisedRescale make_raised_rescale(Problem const &p, int source) {
  double const factor = rescale(p, source);
  int const last_bit = std::max(std::ilogb(factor) - 21, -22);
  double const rounded = std::ldexp(std::nearbyint(std::ldexp(factor, -last_bit)), last_bit);
  return {float(rounded), float(kRaise * (1.0 - rounded))};
}

JoinPlan plan_joined(Sm90Tile const &tile, Problem const &p) {
  JoinPlan joined{joined_from(tile, p), 0};
  for (int i = 0; i < joined.from; ++i) joined.begin += ceil_div(p.C[i], k_channels(tile)) * p.R * p.S;
  return joined;
}

// Where k-tile `k` of a small tile of 8-bit sources lies, of two blocks of channels, of two taps or of two sources.
PartStart pair_start_of(Sm90Params const &params, int k) {
  Problem const &p = params.problem;
  int const taps = p.R * p.S;
  auto const k_tiles = [&](int i) {
    int const joined = i - params.joined.from;
    return joined < 0 ? ceil_div(blocks_of(p.C[i]), 2) * taps : taps > 1 ? ceil_div(taps, 2) : 1 - joined % 2;
  };
  int source = 0, packed = 0;
  for (; k >= k_tiles(source); ++source) k -= k_tiles(source), packed += blocks_of(p.C[source]);
  bool const joined = source >= params.joined.from;
  int const block = joined ? 0 : k / taps * 2, tap = joined ? 2 * k : k % taps;
  return {std::uint8_t(source), std::uint8_t(tap / p.S), std::uint8_t(tap % p.S), std::uint16_t(block),
          std::uint16_t(packed + block)};
}

// Where k-tile `k` lies, of one block of channels.
PartStart start_of(Sm90Params const &params, int k) {
  Problem const &p = params.problem;
  int const tap = k % (p.R * p.S), packed = k / (p.R * p.S);
  int block = packed, source = 0;
  for (; block >= blocks_of(p.C[source]); ++source) block -= blocks_of(p.C[source]);
  return {std::uint8_t(source), std::uint8_t(tap / p.S), std::uint8_t(tap % p.S), std::uint16_t(block),
          std::uint16_t(packed)};
}

// The channel of the concatenation behind the last one of such a k-tile.
int end_of(Sm90Params const &params, PartStart const &at) {
  int const *const C = params.problem.C;
  int const first = params.first_channel[at.source];
  return first + std::min(C[at.source], (at.block + 1) * kChannelBlock);
}

// The last tiles of filters and of pixels, which lack some. Patches keep their places, and a tile with a shortcut is
// computed once, since its output might be the same memory. Patches for few filters look for NaNs among all their sums.
void plan_last_tiles(Sm90Params &k, Sm90Tile const &tile) {
  Problem const &p = k.problem;
  int const phases = tile.enlarges ? 4 : 1, run = tile.pixels() / phases, pixels = p.N * p.P * p.Q / phases;
  bool const moves = !tile.halo && p.residual == Residual::kNone && pixels >= run;
  k.last_pixel = moves ? pixels - run : int(kInt32Max);
  Sm90Output const &last = k.outputs[p.outputs - 1];
  int const missing = last.first + k.tiles_f * tile.filters - last.first_row - p.K;
  bool const halves = tile.pairs && p.R * p.S > 1;  // then the second half of a stage follows a whole first one
  bool const loads = tile.beside == 1 && missing > 0 && !halves && k.joined.from == p.sources;
  k.last_f = loads ? k.tiles_f - 1 : -1, k.missing_filters = std::uint8_t(loads ? missing : 0);
}

// Divides the k-tiles of both kinds, so that each part of a sum has some of either.
void plan_phases(Sm90Params &k) {
  Problem const &p = k.problem;
  int count = 0, k_tiles[2] = {};  // of sources of full size, of enlarged ones
  for (bool const enlarged : {true, false}) {
    int blocks = 0;
    for (int i = 0; i < p.sources; ++i) {
      if ((p.upsample[i] > 1) == enlarged) {
        k.phases.source[count] = std::uint8_t(i), k.phases.first_block[count++] = std::uint16_t(blocks);
        k_tiles[enlarged] += blocks_of(p.C[i]), k.phases.enlarged += enlarged;
      }
      blocks += blocks_of(p.C[i]);
    }
  }
  for (int i = 0; i <= k.splits; ++i) {
    k.k_begin[i] = k_tiles[1] * i / k.splits, k.phases.begin[i] = std::uint16_t(k_tiles[0] * i / k.splits);
  }
}

Sm90Params make_sm90_params(Sm90Tile const &tile, Problem const &p, int splits) {
  Sm90Params k{};
  k.problem = p;
  k.halo = plan_of(tile, p);
  int rows[kMaxOutputs];
  k.tiles_f = output_rows(tile, p, rows);
  for (int i = 0; i < kMaxOutputs; ++i) {
    OutputRange const range = i < p.outputs ? output_range(p, i) : OutputRange{};
    k.outputs[i] = {i < p.outputs ? rows[i] : int(kInt32Max), range.first, range.last, range.ld, nullptr};
  }
  k.tiles_a = tile.halo ? ceil_div(k.halo.size_a, k.halo.tile_a) : ceil_div(p.N * p.P * p.Q, tile.pixels());
  k.tiles_b = tile.halo ? ceil_div(k.halo.size_b, k.halo.tile_b) : 1;
  k.cluster_f = std::uint8_t(tile.cluster_f), k.splits = splits;
  k.cluster_tiles = ceil_div(k.tiles_f, k.cluster_f) * k.tiles_x();
  k.k_tiles = k_tiles(tile, p);
  for (int i = 0; i <= splits; ++i) k.k_begin[i] = k.k_tiles * i / splits;
  for (int i = 1; i < p.sources; ++i) k.first_channel[i] = k.first_channel[i - 1] + p.C[i - 1];
  k.joined = plan_joined(tile, p), k.lone_block = std::int16_t(lone_block(tile, p));
  for (int i = 0; i < splits && p.pre_activated && tile.pixel_rows; ++i) {
    k.starts[i] = start_of(k, k.k_begin[i]);
    k.activated_begin[i] = k.first_channel[k.starts[i].source] + k.starts[i].block * kChannelBlock;
    k.activated_end[i] = end_of(k, start_of(k, k.k_begin[i + 1] - 1));
  }
  for (int i = 0; i < splits && takes_rows(tile); ++i) k.starts[i] = start_of(k, k.k_begin[i] * kSmallPatchTaps);
  bool const small_pairs = tile.schedule == Sm90Schedule::kSmall && tile.pairs;
  if (small_pairs && k.lone_block >= 0) k.joined.begin -= p.R * p.S;
  for (int i = 0; i < splits && small_pairs; ++i) k.starts[i] = pair_start_of(k, k.k_begin[i]);
  plan_last_tiles(k, tile);
  k.by_f = Divider(ceil_div(k.tiles_f, k.cluster_f)), k.by_a = Divider(k.tiles_a), k.by_b = Divider(k.tiles_b);
  k.by_image = Divider(p.P * p.Q), k.by_row = Divider(p.Q);
  if (tile.enlarges) {  // by pixels of an enlarged source
    k.by_image = Divider(p.P * p.Q / 4), k.by_row = Divider(p.Q / 2);
    plan_phases(k);
  }
  k.by_taps = Divider(p.R * p.S), k.by_s = Divider(p.S);
  k.pointwise = is_pointwise(p);
  for (int i = 0; i < p.sources; ++i) k.by_factor[i] = Divider(p.upsample[i]);
  k.drains_after = drains_after(p);
  // What came before a k-tile of two sources that are drained one by one is drained before it.
  for (int i = k.joined.from + 2; i + 1 < p.sources && joins_8bit_sources(tile, p); i += 2) {
    k.drains_after |= (k.drains_after >> i & 1) << (i - 1);
  }
  k.raised = p.small_sums && !drains_once(p);
  for (int i = 0; i < p.sources; ++i) k.rescale[i] = make_rescale(p, i);
  for (int i = 0; i < p.sources && k.raised; ++i) k.raised_rescale[i] = make_raised_rescale(p, i);
  k.inverse_output_scale = size_of(p.output_type) == 1 ? 1.f / p.output_scale : 1.f;
  return k;
}

// How many clusters run at once: CUDA says it of those with two blocks at least.
void find_room(Sm90Tile const &tile, HaloPlan const &plan, Problem const &p, Kernel kernel, int sm_count, Room &room) {
  bool const small = tile.schedule == Sm90Schedule::kSmall;
  for (int blocks = 1; blocks <= (small ? small_blocks(tile) : 1); ++blocks) {
    room[blocks][1] = blocks * sm_count;
    if (small) {
      int const stages = small_stages(tile, plan, p, true, blocks);
      kernel.shared_bytes = small_shared_bytes(tile, plan, p, true, stages);
    }
    for (int i = 2; i <= kMaxSplits && small; ++i) {
      room[blocks][i] = clusters_at_once(kernel, i);
    }
  }
}

struct Sm90State {
  Sm90Params params;
  Launch launch;
  int divided_source;  // the next one has the same tensor; or -1
};
static_assert(sizeof(Sm90State) <= sizeof(Plan::state));

}  // namespace

char const *plan_sm90(Op const &op, Sm90Tile const &row, Call const &call, Problem const &problem, Find *find,
                      Plan &plan) {
  plan.launches = 1;
  if (find == nullptr || plan.device < 0) return nullptr;
  Sm90Tile const tile = form_of(row, problem.pre_activated);
  Problem const p = divided_problem(tile, problem);
  Sm90State state{};
  state.divided_source = divided_source(tile, problem);
  Launch &launch = state.launch;
  Kernel kernel = find(tile.id).main;
  // The most that a launch of the kernel may take.
  if (tile.schedule == Sm90Schedule::kSmall || keeps_filters(tile)) kernel.shared_bytes = kSmallSharedBytes - 1024;
  launch.kernel = kernel, launch.early = true;
  if (char const *why = prepare(launch, true)) return refused(op, tile.id, why);
  Room room{};
  find_room(tile, plan_of(tile, p), p, kernel, call.sm_count, room);
  int const splits = sm90_splits(tile, p, call.sm_count, room);
  state.params = make_sm90_params(tile, p, splits);
  Sm90Params &k = state.params;
  if (tile.schedule == Sm90Schedule::kSmall) {
    SmallLaunch const small = small_launch(tile, p, splits, room);
    k.stages = std::uint8_t(small.stages);
    k.holds_next = 3 * k.cluster_tiles <= small.at_once;  // the next two launches would both start early
    launch.kernel.shared_bytes = small_shared_bytes(tile, k.halo, p, splits > 1, k.stages);
  }
  int blocks = 1;  // on a multiprocessor
  if (keeps_filters(tile)) {
    blocks = rows_blocks(tile, k.halo), launch.kernel.shared_bytes = rows_shared_bytes(tile, k.halo);
  }
  launch.cluster = k.cluster_f * k.splits;
  // Blocks that do not divide the reduction take tiles in turn, as many as run at once.
  bool const persistent = tile.schedule != Sm90Schedule::kSmall;
  int const at_once = std::max(1, call.sm_count * blocks / launch.cluster);
  launch.blocks = std::int64_t(persistent ? std::min(k.cluster_tiles, at_once) : k.cluster_tiles) * launch.cluster;
  if (CUresult const result = encode_maps(state.params, tile)) {
    return sentence("%s: tile %s needs tensor maps that the driver refused (error %d); use another tile", op.name,
                    tile.name, int(result));
  }
  plan.splits = k.splits;
  std::memcpy(plan.state, &state, sizeof(state));
  return nullptr;
}

char const *launch_sm90(Op const &op, Plan const &plan, Operands const &operands) {
  Sm90State state;
  std::memcpy(&state, plan.state, sizeof(state));
  Sm90Params &k = state.params;
  Problem const &p = k.problem;
  bool refuses = false;
  auto const point = [&](CUtensorMap &map, void const *data) { refuses = refuses || !point_map(map, data); };
  void const *const *next = operands.inputs;
  for (int i = 0; i < p.sources; ++i) {
    k.sources[i] = static_cast<char const *>(*next) + std::int64_t(p.start[i]) * size_of(p.type);
    point(k.x[i], k.sources[i]);
    if (i != state.divided_source) ++next;
  }
  k.filters = *next;
  if (k.joined.from < p.sources || k.lone_block >= 0 || k.last_f >= 0) point(k.w_second, *next);
  point(k.w, *next++);
  if (size_of(p.type) == 1) k.w_scale = static_cast<float const *>(*next++);
  k.b = static_cast<float const *>(*next++);
  bool const direct = p.type == Type::kFloat32;  // outputs and shortcut have no maps
  if (p.residual != Residual::kNone) {
    k.shortcut = static_cast<char const *>(*next++) + std::int64_t(p.residual_start) * size_of(p.type);
    if (!direct) point(k.z, k.shortcut);
  }
  if (p.pre_activated) k.pre_scale = next[0], k.pre_shift = next[1];
  for (int i = 0; i < p.outputs; ++i) {
    char *const y = output_of(p, operands, i);
    k.outputs[i].y = y;
    for (int pixel = 0; pixel < std::max(k.halo.beside, 1) && !direct; ++pixel) {
      point(k.out[i + pixel], y + pixel * p.ldy * size_of(p.output_type));
    }
  }
  char const *const why = refuses ? "the driver refused an address for TMA" : start(state.launch, &k, operands.stream);
  return why == nullptr ? nullptr : refused(op, plan.config, why);
}

#else

char const *plan_sm90(Op const &, Sm90Tile const &, Call const &, Problem const &, Find *, Plan &plan) {
  plan.launches = 1;
  return nullptr;
}

char const *launch_sm90(Op const &op, Plan const &plan, Operands const &) {
  return refused(op, plan.config, start({}, nullptr, nullptr));
}

#endif

}  // namespace cutefuse::conv
