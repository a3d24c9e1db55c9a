// RMSNorm and LayerNorm as training needs them: forward that saves its statistics, and backward. Absent operands are
// vectors without elements, so two op_types serve every combination. No plugin registers them: the PyTorch operators
// are their only user. The kernels are those of row_norm.
#include <algorithm>
#include <array>

#include "../row_norm/problem.h"
#include "../row_norm/tiles.h"
#include "device.h"

namespace cutefuse::row_norm_training {
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

void *data_of(Tensor const &t) { return absent(t) ? nullptr : t.data; }

// Everything but pointers. sm_count decides the size of the workspace: ask and run with the same one.
Launch plan(Call const &call, Problem const &problem, BackwardParams *params, std::int32_t *sm) {
  std::int32_t sm_count = call.sm_count;
  *sm = call.sm;
  if (*sm == 0 || sm_count == 0) current_device(sm, &sm_count);
  params->problem = problem;
  return plan_backward(*sm == 0 ? 90 : *sm, sm_count == 0 ? 132 : sm_count, params);
}

std::int64_t workspace_bytes(Call const &call) {
  Problem problem{};
  if (call.variant == kForward || problem_of(call, &problem) != nullptr || problem.rows < 0) return 0;
  if (absent(call.outputs[1]) && absent(call.outputs[2])) return 0;
  BackwardParams params{};
  std::int32_t sm = 0;
  plan(call, problem, &params, &sm);
  return params.parts * problem.columns * 2 * std::int64_t(sizeof(float));
}

char const *forward(Call const &call, Problem const &problem) {
  ForwardParams params{};
  params.problem = problem;
  params.x = call.inputs[0].data;
  params.residual = data_of(call.inputs[1]);
  params.gamma = data_of(call.inputs[2]);
  params.beta = data_of(call.inputs[3]);
  params.y = call.outputs[0].data;
  params.sum = data_of(call.outputs[1]);
  params.mean = static_cast<float *>(data_of(call.outputs[2]));
  params.rstd = static_cast<float *>(data_of(call.outputs[3]));
  void const *pointers[6] = {params.x, params.y};
  int count = 2;
  for (Tensor const *t : {&call.inputs[1], &call.inputs[2], &call.inputs[3], &call.outputs[1]}) {
    if (!absent(*t)) pointers[count++] = t->data;
  }
  if (problem.rows > 0) {
    if (char const *reason = check_pointers(kName, pointers, count)) return reason;
  }
  return run_forward(kName, params, call);
}

char const *backward(Call const &call, Problem const &problem) {
  BackwardParams params{};
  std::int32_t sm = 0;
  if (problem.rows < 0 || problem.columns < 0) return sentence("%s: run needs every size", kName);
  Launch const launch = plan(call, problem, &params, &sm);
  params.dy = call.inputs[0].data;
  params.dsum = data_of(call.inputs[1]);
  params.x = call.inputs[2].data;
  params.gamma = data_of(call.inputs[3]);
  params.mean = static_cast<float const *>(data_of(call.inputs[4]));
  params.rstd = static_cast<float const *>(call.inputs[5].data);
  params.dx = call.outputs[0].data;
  params.dgamma = data_of(call.outputs[1]);
  params.dbeta = data_of(call.outputs[2]);
  bool const sums = params.dgamma != nullptr || params.dbeta != nullptr;
  params.partial = sums ? static_cast<float *>(call.workspace) : nullptr;
  void const *pointers[8];
  int count = 0;
  for (Tensor const *t : {&call.inputs[0], &call.inputs[1], &call.inputs[2], &call.inputs[3], &call.outputs[0]}) {
    if (!absent(*t)) pointers[count++] = t->data;
  }
  if (sums && problem.rows != 0) pointers[count++] = call.workspace;
  if (problem.rows > 0) {
    if (char const *reason = check_pointers(kName, pointers, count)) return reason;
  }
  if (launch.blocks > 0x7fffffff || problem.rows > 0x7fffffff) {
    return sentence("%s: %lld rows are more than one launch takes; split the batch", kName, (long long)problem.rows);
  }
#if CUTEFUSE_WITH_CUDA
  switch (problem.type) {
    case Type::kFloat16:
      return launch_backward_f16(params, launch, sm, call.stream);
    case Type::kBFloat16:
      return launch_backward_bf16(params, launch, sm, call.stream);
    default:
      return launch_backward_f32(params, launch, sm, call.stream);
  }
#else
  return sentence("%s: this library was built without CUDA; install nvcc and build again to run kernels", kName);
#endif
}

char const *run(Call const &call) {
  Problem problem{};
  if (char const *reason = problem_of(call, &problem)) return reason;
  return call.variant == kForward ? forward(call, problem) : backward(call, problem);
}

}  // namespace

extern Op const op;
Op const op = {"row_norm_training",
               {kVariantTable, 2},
               {kAttrSpecs, 2},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               run};

}  // namespace cutefuse::row_norm_training
