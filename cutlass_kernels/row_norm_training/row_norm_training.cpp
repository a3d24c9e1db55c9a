// RMSNorm and LayerNorm as training needs them: forward that saves its statistics, and backward. Absent operands are
// vectors without elements, so two op_types serve every combination. No plugin registers them: the PyTorch operators
// are their only user. The kernels are those of row_norm.
#include "row_norm/tiles.h"

namespace cutefuse::row_norm_training {

extern Op const op;

namespace {

using namespace row_norm;

constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5},
                                   {"layer", AttrKind::kInts, 1, 1, 0, 0.0}};  // 1: LayerNorm, 0: RMSNorm

enum VariantIndex { kForward, kBackward };
constexpr Variant kVariantTable[] = {
    {"CuteRowNormForward", 4, 4, {Kind::kNorm}},           // x, residual, gamma, beta -> y, sum, mean, rstd
    {"CuteRowNormBackward", 6, 3, {Kind::kNormBackward}},  // dy, dsum, x, gamma, mean, rstd -> dx, dgamma, dbeta
};

// The index of a tensor in its list; -1 where it is a vector without elements.
std::int8_t slot_of(Tensor const *list, int index) {
  return list[index].rank == 1 && list[index].dims[0] == 0 ? -1 : std::int8_t(index);
}

ForwardSlots forward_slots(Call const &call) {
  ForwardSlots slots{};
  slots.x = slots.y = 0;
  slots.residual = slot_of(call.inputs, 1), slots.gamma = slot_of(call.inputs, 2), slots.beta = slot_of(call.inputs, 3);
  slots.sum = slot_of(call.outputs, 1), slots.mean = slot_of(call.outputs, 2), slots.rstd = slot_of(call.outputs, 3);
  slots.layer = call.attrs[1].ints[0] != 0;
  return slots;
}

BackwardSlots backward_slots(Call const &call) {
  BackwardSlots slots{};
  slots.dy = 0, slots.dsum = slot_of(call.inputs, 1), slots.x = 2, slots.gamma = slot_of(call.inputs, 3);
  slots.mean = slot_of(call.inputs, 4), slots.rstd = 5;
  slots.dx = 0, slots.dgamma = slot_of(call.outputs, 1), slots.dbeta = slot_of(call.outputs, 2);
  return slots;
}

char const *backward_problem(Call const &call, Problem *p) {
  BackwardSlots const slots = backward_slots(call);
  auto const in = [&](std::int8_t slot) { return slot < 0 ? nullptr : &call.inputs[slot]; };
  auto const out = [&](std::int8_t slot) { return slot < 0 ? nullptr : &call.outputs[slot]; };
  p->layer = call.attrs[1].ints[0] != 0, p->residual = slots.dsum >= 0;
  Checks check{op.name, call.inputs[slots.x], *p};
  check.activation(call.attrs[0].floats[0]);
  check.like("dy", in(slots.dy));
  check.like("dsum", in(slots.dsum));
  check.parameters(slots.gamma < 0 ? out(slots.dgamma) : in(slots.gamma), out(slots.dbeta));
  check.parameter("dgamma", out(slots.dgamma));
  if (check.reason == nullptr && (slots.mean >= 0) != p->layer && p->rows != 0) {
    check.reason = sentence("%s: LayerNorm's backward takes the saved mean and RMSNorm's takes none", op.name);
  }
  check.vector("mean", in(slots.mean), p->rows, Type::kFloat32);
  check.vector("rstd", in(slots.rstd), p->rows, Type::kFloat32);
  check.like("dx", out(slots.dx));
  return check.reason;
}

char const *reject(Call const &call) {
  Problem p{};
  return call.variant == kForward ? forward_problem(op, call, forward_slots(call), &p) : backward_problem(call, &p);
}

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  return call.variant == kForward ? forward_configs(op, call, forward_slots(call), ids, capacity) : 0;
}

char const *obstacle(Call const &call, std::int32_t) {
  return call.variant == kForward ? forward_obstacle(call, forward_slots(call))
                                  : "a backward pass, which has no tiles,";
}

std::int64_t workspace_bytes(Call const &call) {
  Problem problem{};
  if (call.variant == kForward || backward_problem(call, &problem) != nullptr) return 0;
  return backward_bytes(problem, backward_slots(call), call);
}

char const *plan(Call const &call, Plan &plan) {
  if (call.variant == kForward) return plan_forward(op, call, forward_slots(call), plan);
  Problem problem{};
  if (char const *reason = backward_problem(call, &problem)) return reason;
  return plan_backward(op, problem, backward_slots(call), call, plan);
}

char const *launch(Plan const &plan, Operands const &operands) {
  return plan.variant == kBackward ? launch_backward(op, plan, operands) : launch_forward(op, plan, operands);
}

}  // namespace

Op const op = {"row_norm_training", kVariantTable, kAttrSpecs, kConfigTable, kRetired, reject,
               workspace_bytes,     configs,       obstacle,   plan,         launch};

}  // namespace cutefuse::row_norm_training
