#include "conv/plan.h"

#include <cstring>
#include <initializer_list>

namespace cutefuse::conv {
namespace {

struct State {
  Params params;
  Launch main, finish;
};
static_assert(sizeof(State) <= sizeof(Plan::state));

}  // namespace

std::uint32_t all_operands(Call const &call) { return (1u << (call.num_inputs + call.num_outputs)) - 1; }

Params make_params(Problem const &p) {
  Params params{};
  params.problem = p;
  params.splits = 1;
  params.columns = static_cast<int>(packed_columns(p));
  for (int i = 0; i < p.sources; ++i) params.upsample_multiplier[i] = upsample_multiplier(p.upsample[i]);
  params.set_steps();
  return params;
}

void set_addresses(Params &params, Operands const &operands) {
  Problem const &p = params.problem;
  void const *const *next = operands.inputs;
  for (int i = 0; i < p.sources; ++i) {
    params.x[i] = static_cast<char const *>(*next++) + std::int64_t(p.start[i]) * size_of(p.type);
  }
  params.w = *next++;
  if (p.type == Type::kInt8) params.w_scale = static_cast<float const *>(*next++);
  params.b = static_cast<float const *>(*next++);
  if (p.residual != Residual::kNone) params.z = *next;
  params.y = operands.outputs[0];
  for (int j = 0; j < p.outputs; ++j) params.ys[j] = operands.outputs[j];
  params.partials = static_cast<float *>(operands.workspace);
}

char const *refused(Op const &op, std::int32_t tile, char const *why) {
  char const *name = "of none";
  for (Config const &config : op.configs_table) name = config.id == tile ? config.name : name;
  return sentence("%s: tile %s could not be launched (%s); check that the library was built for this GPU", op.name,
                  name, why);
}

char const *plan_sm80(Op const &op, Tile const &tile, Call const &call, Problem const &p, Find *find, Plan &plan) {
  State state{make_params(p), {}, {}};
  Params &params = state.params;
  for (int i = 0; i < p.sources; ++i) params.k_blocks += ceil_div(p.C[i], tile.k);
  params.splits = splits_of(tile, p, Target(call));
  std::int64_t const groups = ceil_div(stored_channels(p), kFinishChannels);
  std::int64_t const finished = std::int64_t(p.N) * p.P * p.Q * groups;
  state.main.blocks = output_tiles(tile, p) * params.splits;
  state.finish.blocks = (finished + kFinishThreads - 1) / kFinishThreads;
  plan.splits = params.splits, plan.launches = params.splits > 1 ? 2 : 1;
  plan.workspace_bytes = split_bytes(p, params.splits);
  plan.operands = all_operands(call);
  if (find != nullptr && plan.device >= 0) {
    Kernels const kernels = find(tile.id);
    state.main.kernel = kernels.main, state.finish.kernel = kernels.finish;
  }
  for (Launch const *launch : {&state.main, &state.finish}) {
    if (launch == &state.finish && plan.launches == 1) continue;
    if (char const *why = prepare(*launch, plan.device >= 0)) return refused(op, tile.id, why);
  }
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

}  // namespace cutefuse::conv
