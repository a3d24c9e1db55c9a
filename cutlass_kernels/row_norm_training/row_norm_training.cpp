// RMSNorm and LayerNorm as training needs them: forward that saves its statistics, and backward. Absent operands are
// vectors without elements, so two op_types serve every combination. No plugin registers them: the PyTorch operators
// are their only user. The kernels are those of row_norm.
#include <array>

#include "row_norm/tiles.h"

namespace cutefuse::row_norm_training {

extern Op const op;

namespace {

using namespace row_norm;

constexpr char const *kName = "row_norm_training";
constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5},
                                   {"layer", AttrKind::kInts, 1, 1, 0, 0.0}};  // 1: LayerNorm, 0: RMSNorm

enum VariantIndex { kForward, kBackward };
constexpr Variant kVariantTable[] = {
    {"CuteRowNormForward", 4, 4, {Kind::kNorm}},           // x, residual, gamma, beta -> y, sum, mean, rstd
    {"CuteRowNormBackward", 6, 3, {Kind::kNormBackward}},  // dy, dsum, x, gamma, mean, rstd -> dx, dgamma, dbeta
};

std::array<Config, kTileCount> const kConfigTable = config_table();

bool absent(Tensor const &t) { return t.rank == 1 && t.dims[0] == 0; }

// Optional operands of the types and sizes that the activation asks for.
char const *check_optional(char const *what, Tensor const &given, Tensor const &x) {
  return absent(given) ? nullptr : check_like(kName, what, given, x);
}
char const *check_statistics(char const *what, Tensor const &given, Problem const &p) {
  return absent(given) ? nullptr : check_vector(kName, what, given, p.rows, Type::kFloat32);
}
char const *check_parameters(Tensor const &gamma, Tensor const &beta, Problem *p) {
  p->param_type = absent(gamma) ? absent(beta) ? p->type : beta.type : gamma.type;
  p->affine = !absent(gamma) && (!p->layer || !absent(beta));
  if (!p->layer && !absent(beta)) return sentence("%s: RMSNorm has no beta; pass an empty vector", kName);
  if (!absent(gamma)) {
    if (char const *reason = check_parameter(kName, "gamma", gamma, p)) return reason;
  }
  return absent(beta) ? nullptr : check_parameter(kName, "beta", beta, p);
}

char const *forward_problem(Call const &call, Problem *p) {
  Tensor const &x = call.inputs[0], &residual = call.inputs[1];
  p->residual = !absent(residual);
  if (p->residual == absent(call.outputs[1])) {
    return sentence("%s: the sum is an output exactly when there is a residual; pass both or neither", kName);
  }
  if (char const *reason = read_activation(kName, x, p)) return reason;
  if (char const *reason = check_optional("the residual", residual, x)) return reason;
  if (char const *reason = check_parameters(call.inputs[2], call.inputs[3], p)) return reason;
  if (char const *reason = check_like(kName, "the output", call.outputs[0], x)) return reason;
  if (char const *reason = check_optional("the sum", call.outputs[1], x)) return reason;
  if (char const *reason = check_statistics("mean", call.outputs[2], *p)) return reason;
  return check_statistics("rstd", call.outputs[3], *p);
}

char const *backward_problem(Call const &call, Problem *p) {
  Tensor const &x = call.inputs[2], &gamma = call.inputs[3], &dgamma = call.outputs[1], &dbeta = call.outputs[2];
  p->residual = !absent(call.inputs[1]);
  if (char const *reason = read_activation(kName, x, p)) return reason;
  if (char const *reason = check_like(kName, "dy", call.inputs[0], x)) return reason;
  if (char const *reason = check_optional("dsum", call.inputs[1], x)) return reason;
  if (char const *reason = check_parameters(absent(gamma) ? dgamma : gamma, dbeta, p)) return reason;
  if (!absent(dgamma)) {
    if (char const *reason = check_parameter(kName, "dgamma", dgamma, p)) return reason;
  }
  if (absent(call.inputs[4]) == p->layer && p->rows != 0) {
    return sentence("%s: LayerNorm's backward takes the saved mean and RMSNorm's takes none", kName);
  }
  if (char const *reason = check_statistics("mean", call.inputs[4], *p)) return reason;
  if (char const *reason = check_vector(kName, "rstd", call.inputs[5], p->rows, Type::kFloat32)) return reason;
  return check_like(kName, "dx", call.outputs[0], x);
}

char const *problem_of(Call const &call, Problem *p) {
  p->epsilon = call.attrs[0].floats[0];
  p->layer = call.attrs[1].ints[0] != 0;
  if (char const *reason = check_epsilon(kName, p->epsilon)) return reason;
  return call.variant == kForward ? forward_problem(call, p) : backward_problem(call, p);
}

char const *reject(Call const &call) {
  Problem problem{};
  return problem_of(call, &problem);
}

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem problem{};
  if (call.variant != kForward || problem_of(call, &problem) != nullptr) return 0;
  return forward_configs(problem, call.sm, call.sm_count, ids, capacity);
}

// The index of a tensor in its list, unless it is absent.
std::int8_t slot_of(Tensor const *list, int index) { return absent(list[index]) ? -1 : std::int8_t(index); }

BackwardSlots backward_slots(Call const &call) {
  BackwardSlots slots{};
  slots.dy = 0, slots.dsum = slot_of(call.inputs, 1), slots.x = 2, slots.gamma = slot_of(call.inputs, 3);
  slots.mean = slot_of(call.inputs, 4), slots.rstd = 5;
  slots.dx = 0, slots.dgamma = slot_of(call.outputs, 1), slots.dbeta = slot_of(call.outputs, 2);
  return slots;
}

std::int64_t workspace_bytes(Call const &call) {
  Problem problem{};
  if (call.variant == kForward || problem_of(call, &problem) != nullptr) return 0;
  return backward_bytes(problem, backward_slots(call), call);
}

char const *plan(Call const &call, Plan &plan) {
  Problem problem{};
  if (char const *reason = problem_of(call, &problem)) return reason;
  if (call.variant == kBackward) return plan_backward(op, problem, backward_slots(call), call, plan);
  ForwardSlots slots{};
  slots.x = slots.y = 0;
  slots.residual = slot_of(call.inputs, 1), slots.gamma = slot_of(call.inputs, 2), slots.beta = slot_of(call.inputs, 3);
  slots.sum = slot_of(call.outputs, 1), slots.mean = slot_of(call.outputs, 2), slots.rstd = slot_of(call.outputs, 3);
  return plan_forward(op, problem, slots, call, plan);
}

char const *launch(Plan const &plan, Operands const &operands) {
  return plan.variant == kBackward ? launch_backward(op, plan, operands) : launch_forward(op, plan, operands);
}

}  // namespace

Op const op = {"row_norm_training",
               {kVariantTable, 2},
               {kAttrSpecs, 2},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               plan,
               launch};

}  // namespace cutefuse::row_norm_training
