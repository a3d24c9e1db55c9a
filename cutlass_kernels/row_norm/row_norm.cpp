// Host side of the row norms: what is legal. No CUDA header.
#include <array>
#include <cmath>

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

std::array<Config, kTileCount> const kConfigTable = config_table();

char const *problem_of(Call const &call, Problem *problem) {
  constexpr char const *kName = "row_norm";
  Problem &p = *problem;
  Facts const &facts = kVariantTable[call.variant].facts;
  p.layer = facts.layer, p.residual = facts.residual != Residual::kNone;
  p.epsilon = call.attrs[0].floats[0];
  if (char const *reason = check_epsilon(kName, p.epsilon)) return reason;
  Tensor const &x = call.inputs[0];
  if (char const *reason = read_activation(kName, x, &p)) return reason;
  int const gamma = p.residual ? 2 : 1;
  if (p.residual) {
    if (char const *reason = check_like(kName, "the residual", call.inputs[1], x)) return reason;
    if (char const *reason = check_like(kName, "the sum", call.outputs[1], x)) return reason;
  }
  p.param_type = call.inputs[gamma].type;
  p.affine = true;
  if (char const *reason = check_parameter(kName, "gamma", call.inputs[gamma], &p)) return reason;
  if (p.layer) {
    if (char const *reason = check_parameter(kName, "beta", call.inputs[gamma + 1], &p)) return reason;
  }
  return check_like(kName, "the output", call.outputs[0], x);
}

char const *reject(Call const &call) {
  Problem problem{};
  return problem_of(call, &problem);
}

std::int64_t workspace_bytes(Call const &) { return 0; }

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem problem{};
  if (problem_of(call, &problem) != nullptr) return 0;
  return forward_configs(problem, call.sm, call.sm_count, ids, capacity);
}

ForwardSlots slots_of(Call const &call) {
  Facts const &facts = kVariantTable[call.variant].facts;
  ForwardSlots slots{};
  slots.x = slots.y = 0;
  slots.gamma = 1;
  if (facts.residual != Residual::kNone) slots.residual = slots.sum = 1, slots.gamma = 2;
  if (facts.layer) slots.beta = slots.gamma + 1;
  return slots;
}

char const *plan(Call const &call, Plan &plan) {
  Problem problem{};
  if (char const *reason = problem_of(call, &problem)) return reason;
  return plan_forward(op, problem, slots_of(call), call, plan);
}

char const *launch(Plan const &plan, Operands const &operands) { return launch_forward(op, plan, operands); }

}  // namespace

std::array<Config, kTileCount> config_table() {
  std::array<Config, kTileCount> table{};
  for (int i = 0; i < kTileCount; ++i) {
    Tile const &tile = kTiles[i];
    table[i] = {tile.id, tile.min_sm, tile.name, kScopeNames[static_cast<int>(tile.scope)], kFloatTypes};
  }
  return table;
}

char const *read_activation(char const *op, Tensor const &x, Problem *problem) {
  Problem &p = *problem;
  p.type = x.type;
  if (x.type != Type::kFloat32 && x.type != Type::kFloat16 && x.type != Type::kBFloat16) {
    return sentence("%s: %s is not supported; use float32, float16 or bfloat16", op, name_of(x.type));
  }
  if (x.rank < 1) return sentence("%s: the input is a scalar; it needs a last dimension to normalise over", op);
  if (x.layout != Layout::kLinear || x.ld != 0) {
    return sentence("%s: the input must be row-major without gaps; make it contiguous", op);
  }
  p.columns = x.dims[x.rank - 1];
  if (p.columns == 0 || p.columns > kMaxColumns) {
    return sentence("%s: the last dimension is %lld, 1 to %lld are allowed", op, (long long)p.columns,
                    (long long)kMaxColumns);
  }
  p.rows = 1;
  for (int i = 0; i + 1 < x.rank; ++i) {
    if (x.dims[i] < 0 || p.rows < 0) {
      p.rows = -1;
    } else if (x.dims[i] != 0 && p.rows > INT64_MAX / kMaxColumns / 4 / x.dims[i]) {
      return sentence("%s: the input has more than 2^63 bytes; split it", op);
    } else {
      p.rows *= x.dims[i];
    }
  }
  return nullptr;
}

char const *check_like(char const *op, char const *what, Tensor const &given, Tensor const &x) {
  if (given.type != x.type || given.layout != x.layout || given.ld != 0 || given.rank != x.rank) {
    return sentence("%s: %s is %s of rank %d, the input is %s of rank %d; both must agree, insert a Cast or Expand", op,
                    what, name_of(given.type), given.rank, name_of(x.type), x.rank);
  }
  for (int i = 0; i < x.rank; ++i) {
    if (given.dims[i] >= 0 && x.dims[i] >= 0 && given.dims[i] != x.dims[i]) {
      return sentence(
          "%s: dimension %d of %s is %lld, that of the input is %lld; sizes must agree, broadcasting is "
          "not done",
          op, i, what, (long long)given.dims[i], (long long)x.dims[i]);
    }
  }
  return nullptr;
}

char const *check_vector(char const *op, char const *what, Tensor const &given, std::int64_t size, Type type) {
  bool const same = given.dims[0] == size || given.dims[0] < 0 || size < 0;
  if (given.type == type && given.layout == Layout::kLinear && given.ld == 0 && given.rank == 1 && same) return nullptr;
  return sentence("%s: %s is %s of rank %d and %lld elements, a %s vector of %lld is needed", op, what,
                  name_of(given.type), given.rank, (long long)(given.rank > 0 ? given.dims[0] : 1), name_of(type),
                  (long long)size);
}

char const *check_parameter(char const *op, char const *what, Tensor const &given, Problem *problem) {
  Problem &p = *problem;
  if (given.type != p.type && given.type != Type::kFloat32) {
    return sentence("%s: %s is %s beside a %s input; use %s or float32", op, what, name_of(given.type), name_of(p.type),
                    name_of(p.type));
  }
  if (char const *reason = check_vector(op, what, given, p.columns, p.param_type)) return reason;
  if (p.columns < 0) p.columns = given.dims[0];
  return nullptr;
}

char const *check_epsilon(char const *op, float epsilon) {
  if (epsilon >= 0.f && std::isfinite(epsilon)) return nullptr;
  return sentence("%s: epsilon is %g, it must be finite and not negative", op, double(epsilon));
}

Op const op = {"row_norm",
               {kVariantTable, 4},
               {kAttrSpecs, 1},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               plan,
               launch};

}  // namespace cutefuse::row_norm
