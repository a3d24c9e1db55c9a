// The requirements of the row norms' operators on their tensors. No CUDA header.
#include <cmath>

#include "row_norm/problem.h"

namespace cutefuse::row_norm {

void Checks::activation(float epsilon) {
  if (reason != nullptr) return;
  p.epsilon = epsilon, p.type = x.type, p.rows = 1;
  p.columns = x.rank > 0 ? x.dims[x.rank - 1] : 0;
  if (!(epsilon >= 0.f && std::isfinite(epsilon))) {
    reason = sentence("%s: epsilon is %g, it must be finite and not negative", op, double(epsilon));
  } else if (x.type != Type::kFloat32 && x.type != Type::kFloat16 && x.type != Type::kBFloat16) {
    reason = sentence("%s: %s is not supported; use float32, float16 or bfloat16", op, name_of(x.type));
  } else if (x.rank < 1) {
    reason = sentence("%s: the input is a scalar; it needs a last dimension to normalise over", op);
  } else if (x.layout != Layout::kLinear || x.ld != 0) {
    reason = sentence("%s: the input must be row-major without gaps; make it contiguous", op);
  } else if (p.columns == 0 || p.columns > kMaxColumns) {
    reason = sentence("%s: the last dimension is %lld, 1 to %lld are allowed", op, (long long)p.columns,
                      (long long)kMaxColumns);
  }
  for (int i = 0; reason == nullptr && i + 1 < x.rank; ++i) {
    if (x.dims[i] < 0 || p.rows < 0) {
      p.rows = -1;
    } else if (x.dims[i] != 0 && p.rows > INT64_MAX / kMaxColumns / 4 / x.dims[i]) {
      reason = sentence("%s: the input has more than 2^63 bytes; split it", op);
    } else {
      p.rows *= x.dims[i];
    }
  }
}

void Checks::like(char const *what, Tensor const *given) {
  if (reason != nullptr || given == nullptr) return;
  if (given->type != x.type || given->layout != x.layout || given->ld != 0 || given->rank != x.rank) {
    reason = sentence("%s: %s is %s of rank %d, the input is %s of rank %d; both must agree, insert a Cast or Expand",
                      op, what, name_of(given->type), given->rank, name_of(x.type), x.rank);
  }
  for (int i = 0; reason == nullptr && i < x.rank; ++i) {
    if (given->dims[i] < 0 || x.dims[i] < 0 || given->dims[i] == x.dims[i]) continue;
    reason = sentence(
        "%s: dimension %d of %s is %lld, that of the input is %lld; sizes must agree, broadcasting is not done", op, i,
        what, (long long)given->dims[i], (long long)x.dims[i]);
  }
}

void Checks::vector(char const *what, Tensor const *given, std::int64_t size, Type type) {
  if (reason != nullptr || given == nullptr) return;
  bool const same = given->dims[0] == size || given->dims[0] < 0 || size < 0;
  bool const dense = given->layout == Layout::kLinear && given->ld == 0;
  if (given->type == type && dense && given->rank == 1 && same) return;
  reason = sentence("%s: %s is %s of rank %d and %lld elements, a %s vector of %lld is needed", op, what,
                    name_of(given->type), given->rank, (long long)(given->rank > 0 ? given->dims[0] : 1), name_of(type),
                    (long long)size);
}

void Checks::parameter(char const *what, Tensor const *given) {
  if (reason != nullptr || given == nullptr) return;
  if (given->type != p.type && given->type != Type::kFloat32) {
    reason = sentence("%s: %s is %s beside a %s input; use %s or float32", op, what, name_of(given->type),
                      name_of(p.type), name_of(p.type));
  }
  vector(what, given, p.columns, p.param_type);
  if (p.columns < 0) p.columns = given->dims[0];
}

void Checks::parameters(Tensor const *gamma, Tensor const *beta) {
  p.param_type = gamma != nullptr ? gamma->type : beta != nullptr ? beta->type : p.type;
  p.affine = gamma != nullptr && (!p.layer || beta != nullptr);
  if (reason == nullptr && !p.layer && beta != nullptr)
    reason = sentence("%s: RMSNorm has no beta; pass an empty vector", op);
  parameter("gamma", gamma);
  parameter("beta", beta);
}

char const *forward_problem(Op const &op, Call const &call, ForwardSlots const &slots, Problem *p) {
  auto const in = [&](std::int8_t slot) { return slot < 0 ? nullptr : &call.inputs[slot]; };
  auto const out = [&](std::int8_t slot) { return slot < 0 ? nullptr : &call.outputs[slot]; };
  p->layer = slots.layer, p->residual = slots.residual >= 0;
  Checks check{op.name, call.inputs[slots.x], *p};
  if (p->residual != (slots.sum >= 0)) {
    check.reason = sentence("%s: the sum is an output exactly when there is a residual; pass both or neither", op.name);
  }
  check.activation(call.attrs[0].floats[0]);
  check.like("the residual", in(slots.residual));
  check.parameters(in(slots.gamma), in(slots.beta));
  check.like("the output", out(slots.y));
  check.like("the sum", out(slots.sum));
  check.vector("mean", out(slots.mean), p->rows, Type::kFloat32);
  check.vector("rstd", out(slots.rstd), p->rows, Type::kFloat32);
  return check.reason;
}

}  // namespace cutefuse::row_norm
