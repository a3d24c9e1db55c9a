// The row norms of ONNX models. No CUDA header.
#include "row_norm/tiles.h"

namespace cutefuse::row_norm {

extern Op const op;

namespace {

constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5}};

constexpr Facts norm(bool layer, Residual residual) {
  return {Kind::kNorm, 0, Activation::kNone, residual, false, false, false, layer};
}
constexpr Variant kVariantTable[] = {
    {"CuteRMSNorm", 2, 1, norm(false, Residual::kNone)},        // x, gamma -> y
    {"CuteAddRMSNorm", 3, 2, norm(false, Residual::kBefore)},   // x, residual, gamma -> y, sum
    {"CuteLayerNorm", 3, 1, norm(true, Residual::kNone)},       // x, gamma, beta -> y
    {"CuteAddLayerNorm", 4, 2, norm(true, Residual::kBefore)},  // x, residual, gamma, beta -> y, sum
};

ForwardSlots slots_of(Call const &call) {
  Facts const &facts = kVariantTable[call.variant].facts;
  ForwardSlots slots{};
  slots.x = slots.y = 0;
  slots.gamma = 1;
  if (facts.residual != Residual::kNone) slots.residual = slots.sum = 1, slots.gamma = 2;
  slots.layer = facts.layer;
  if (slots.layer) slots.beta = slots.gamma + 1;
  return slots;
}

char const *reject(Call const &call) {
  Problem problem{};
  return forward_problem(op, call, slots_of(call), &problem);
}
std::int64_t workspace_bytes(Call const &) { return 0; }
std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  return forward_configs(op, call, slots_of(call), ids, capacity);
}
char const *obstacle(Call const &call, std::int32_t) { return forward_obstacle(call, slots_of(call)); }
char const *plan(Call const &call, Plan &plan) { return plan_forward(op, call, slots_of(call), plan); }
char const *launch(Plan const &plan, Operands const &operands) { return launch_forward(op, plan, operands); }

}  // namespace

Op const op = {"row_norm",      kVariantTable, kAttrSpecs, kConfigTable, kRetired, reject,
               workspace_bytes, configs,       obstacle,   plan,         launch};

}  // namespace cutefuse::row_norm
