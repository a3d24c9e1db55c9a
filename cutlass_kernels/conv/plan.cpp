#include "conv/plan.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "architecture.h"
#include "conv/sm90/cost.h"

// Declares the translation units of kernels that CMake lists.
#define CUTEFUSE_KERNELS(stem, type, group, Element) \
  namespace cutefuse::stem {                         \
  extern Op const op;                                \
  conv::Find find_##type##_##group;                  \
  }
#include "conv_kernels.inc"
#undef CUTEFUSE_KERNELS

namespace cutefuse::conv {
namespace {

struct State {
  Params params;
  Launch main, finish;
};
static_assert(sizeof(State) <= sizeof(Plan::state));

// The translation unit of an operator's kernels of a number type; null in a library without it.
Find *find_kernels([[maybe_unused]] Op const &op, [[maybe_unused]] Type type, [[maybe_unused]] Group group) {
#define CUTEFUSE_KERNELS(stem, number, part, Element) \
  if (&op == &stem::op && type == Type::number && group == Group::part) return stem::find_##number##_##part;
#include "conv_kernels.inc"
#undef CUTEFUSE_KERNELS
  return nullptr;
}

bool is_sized(Problem const &p) { return p.N > 0 && p.P > 0 && p.Q > 0; }

// All but the addresses.
Params make_params(Problem const &p) {
  Params params{};
  params.problem = p;
  params.splits = 1;
  params.columns = static_cast<int>(packed_columns(p));
  for (int i = 0; i < p.sources; ++i) params.upsample_multiplier[i] = upsample_multiplier(p.upsample[i]);
  params.set_steps();
  return params;
}

// In the order of an op_type's inputs: sources, packed filter, its scales if it is of an 8-bit type, bias, residual,
// scales and shifts of a pre-activation. Then the outputs.
void set_addresses(Params &params, Operands const &operands) {
  Problem const &p = params.problem;
  void const *const *next = operands.inputs;
  for (int i = 0; i < p.sources; ++i) {
    params.x[i] = static_cast<char const *>(*next++) + std::int64_t(p.start[i]) * size_of(p.type);
  }
  params.w = *next++;
  if (size_of(p.type) == 1) params.w_scale = static_cast<float const *>(*next++);
  params.b = static_cast<float const *>(*next++);
  if (p.residual != Residual::kNone) {
    params.z = static_cast<char const *>(*next++) + std::int64_t(p.residual_start) * size_of(p.type);
  }
  if (p.pre_activated) params.pre_scale = next[0], params.pre_shift = next[1];
  params.y = operands.outputs[0];
  for (int j = 0; j < p.outputs; ++j) params.ys[j] = output_of(p, operands, j);
  params.partials = static_cast<float *>(operands.workspace);
}

// The main kernel and, where the reduction is divided, the one that adds the parts.
char const *plan_sm80(Op const &op, Tile const &tile, Call const &call, Problem const &p, Find *find, Plan &plan) {
  State state{make_params(p), {}, {}};
  Params &params = state.params;
  for (int i = 0; i < p.sources; ++i) params.k_blocks += ceil_div(p.C[i], tile.k);
  params.splits = splits_of(tile, p, Target(call));
  if (tile.has_cut()) params.cut = cut_of(tile, p, Target(call).sm_count);
  std::int64_t const groups = ceil_div(stored_channels(p), kFinishChannels);
  std::int64_t const finished = std::int64_t(p.N) * p.P * p.Q * groups;
  state.main.blocks = tile.has_cut() ? params.cut.blocks(p.N) : output_tiles(tile, p) * params.splits;
  state.finish.blocks = (finished + kFinishThreads - 1) / kFinishThreads;
  state.main.early = starts_early(tile, p, Target(call));
  state.finish.early = can_start_early(call.sm);
  plan.splits = params.splits, plan.launches = params.splits > 1 ? 2 : 1;
  plan.workspace_bytes = split_bytes(p, params.splits);
  if (find != nullptr && plan.device >= 0) {
    Kernels const kernels = find(tile.id);
    state.main.kernel = kernels.main, state.finish.kernel = kernels.finish;
    if (tile.has_cut()) state.main.kernel.shared_bytes = params.cut.shared_bytes;
  }
  char const *why = prepare(state.main, plan.device >= 0);
  if (why == nullptr && plan.launches > 1) why = prepare(state.finish, plan.device >= 0);
  if (why != nullptr) return refused(op, tile.id, why);
  std::memcpy(plan.state, &state, sizeof(state));
  return nullptr;
}

char const *launch_sm80(Op const &op, Plan const &plan, Operands const &operands) {
  State state;
  std::memcpy(&state, plan.state, sizeof(state));
  set_addresses(state.params, operands);
  char const *why = start(state.main, &state.params, operands.stream);
  if (why == nullptr && plan.launches > 1) why = start(state.finish, &state.params, operands.stream);
  return why == nullptr ? nullptr : refused(op, plan.config, why);
}

}  // namespace

char const *reject(Family const &family, Call const &call) {
  Problem p;
  return problem_of(family, call, &p);
}

std::int64_t workspace_bytes(Family const &family, Call const &call) {
  Problem p;
  if (problem_of(family, call, &p) != nullptr) return -1;
  if (call.sm == 0 && is_sized(p)) {
    // A compiler without a GPU times no tiles: the one that is asked for or ranked first will run.
    std::int32_t id = asked_tile(family.op, call.attrs);
    if (id == 0) configs(family, call, &id, 1);
    Tile const *const tile = find_id(family.tiles, id);
    return tile == nullptr ? 0 : split_bytes(p, splits_of(*tile, p, Target(call)));
  }
  Problem wide = p;
  wide.Q = -1;  // of any width, and below on any device: the bytes must do for larger images and other GPUs too
  std::int64_t bytes = 0;
  for (Tile const &tile : family.tiles) {
    if (runs(tile, wide, 0)) bytes = std::max(bytes, workspace_bound(tile, p, Target(call)));
  }
  return bytes;
}

// The Ampere tiles come after Hopper's on Hopper, except for enlarged sources, which TMA repeats slowly, for float32,
// whose Hopper tiles are for large images, for spread outputs, which have no small ones, and for few channels; and
// before them where the device is not known.
std::int32_t configs(Family const &family, Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(family, call, &p) != nullptr) return 0;
  struct Candidate {
    std::int32_t id;
    bool later;  // ranked after all without this flag
    double cost;
  };
  std::vector<Candidate> legal;
  bool const sized = is_sized(p);
  bool const on_hopper = call.sm != 0 && offers(call.sm, kWgmma);
  bool const lacks_tiles = is_upsampled(p) || p.type == Type::kFloat32 || p.spread > 1;
  bool const hopper_first = on_hopper && !(sized && lacks_tiles);
  Target const target(call);
  for (Tile const &tile : family.tiles) {
    if (!runs(tile, p, call.sm)) continue;
    legal.push_back(
        {tile.id, hopper_first && !tile.few_channels && !tile.has_cut(), sized ? sm80_us(tile, p, target) : 0});
  }
  for (Sm90Tile const &tile : family.sm90_tiles) {
    if (!offers(call.sm, kWgmma) || !sm90_can_run(tile, p)) continue;
    legal.push_back({tile.id, !on_hopper, sized ? sm90_us(tile, p, target.sm_count) : 0});
  }
  std::stable_sort(legal.begin(), legal.end(), [](Candidate const &a, Candidate const &b) {
    return a.later != b.later ? b.later : a.cost < b.cost;
  });
  int const count = std::min(int(legal.size()), int(capacity));
  std::transform(legal.begin(), legal.begin() + count, ids, [](Candidate const &tile) { return tile.id; });
  return count;
}

char const *obstacle(Family const &family, Call const &call, std::int32_t config) {
  Problem p;
  problem_of(family, call, &p);
  if (Tile const *const tile = find_id(family.tiles, config)) return obstacle_of(*tile, p, call.sm);
  if (!offers(call.sm, kWgmma)) return "this call";
  return sm90_obstacle(*find_id(family.sm90_tiles, config), p);
}

double predicted_us(Family const &family, Call const &call) {
  Problem p;
  if (problem_of(family, call, &p) != nullptr) return -1;
  if (p.N == 0) return 0;
  Target const target(call);
  if (Tile const *const tile = find_id(family.tiles, call.config)) return sm80_us(*tile, p, target);
  Sm90Tile const *const tile = find_id(family.sm90_tiles, call.config);
  return tile == nullptr ? -1 : sm90_us(*tile, p, target.sm_count);
}

char const *plan(Family const &family, Call const &call, Plan &plan) {
  Problem p;
  if (char const *reason = problem_of(family, call, &p)) return reason;
  if (p.N == 0) return nullptr;
  Op const &op = family.op;
  plan.operands = (1u << (call.num_inputs + call.num_outputs)) - 1;  // a convolution has none that may be absent
  if (Tile const *const tile = find_id(family.tiles, call.config)) {
    return plan_sm80(op, *tile, call, p,
                     find_kernels(op, p.type, p.pre_activated ? Group::kPreActivated : tile->group()), plan);
  }
  if (Sm90Tile const *const tile = find_id(family.sm90_tiles, call.config)) {
    Group const group = p.pre_activated ? Group::kHopperPreActivated : group_of(*tile);
    return plan_sm90(op, *tile, call, p, find_kernels(op, p.type, group), plan);
  }
  return sentence("%s: no tile runs these sources on compute capability %d.%d; skip this fusion", op.name, call.sm / 10,
                  call.sm % 10);
}

char const *launch(Family const &family, Plan const &plan, Operands const &operands) {
  bool const hopper = find_id(family.sm90_tiles, plan.config) != nullptr;
  return (hopper ? launch_sm90 : launch_sm80)(family.op, plan, operands);
}

char const *refused(Op const &op, std::int32_t tile, char const *why) {
  Config const *const config = find_id(op.configs_table, tile);
  return sentence("%s: tile %s could not be launched (%s); check that the library was built for this GPU", op.name,
                  config != nullptr ? config->name : "of none", why);
}

}  // namespace cutefuse::conv
