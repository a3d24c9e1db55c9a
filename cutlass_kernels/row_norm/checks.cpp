// The requirements of the row norms' operators on their tensors. No CUDA header.
#include <algorithm>
#include <cmath>

#include "row_norm/problem.h"

namespace cutefuse::row_norm {

namespace {

// The checks of the tensors of a call, one after another. `reason` is null, or the sentence of the first check that
// failed; later ones are then skipped. A null tensor is absent, and passes.
struct Checks {
  char const *op;   // begins the sentences
  Tensor const &x;  // what is normalised
  Problem &p;
  char const *reason = nullptr;

  // Fills epsilon, type, rows and columns (-1 where unknown).
  void activation(float epsilon) {
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

  // The shape and type of x.
  void like(char const *what, Tensor const *given) {
    if (reason != nullptr || given == nullptr) return;
    if (given->type != x.type || given->layout != x.layout || given->ld != 0 || given->rank != x.rank) {
      reason = sentence("%s: %s is %s of rank %d, the input is %s of rank %d; both must agree, insert a Cast or Expand",
                        op, what, name_of(given->type), given->rank, name_of(x.type), x.rank);
    }
    for (int i = 0; reason == nullptr && i < x.rank; ++i) {
      if (given->dims[i] < 0 || x.dims[i] < 0 || given->dims[i] == x.dims[i]) continue;
      reason = sentence(
          "%s: dimension %d of %s is %lld, that of the input is %lld; sizes must agree, broadcasting is not done", op,
          i, what, (long long)given->dims[i], (long long)x.dims[i]);
    }
  }

  // A dense vector of `size` elements.
  void vector(char const *what, Tensor const *given, std::int64_t size, Type type) {
    if (reason != nullptr || given == nullptr) return;
    bool const same = given->dims[0] == size || given->dims[0] < 0 || size < 0;
    bool const dense = given->layout == Layout::kLinear && given->ld == 0;
    if (given->type == type && dense && given->rank == 1 && same) return;
    reason = sentence("%s: %s is %s of rank %d and %lld elements, a %s vector of %lld is needed", op, what,
                      name_of(given->type), given->rank, (long long)(given->rank > 0 ? given->dims[0] : 1),
                      name_of(type), (long long)size);
  }

  // A vector as long as a row, of param_type, which is the activation's type or float32.
  void parameter(char const *what, Tensor const *given) {
    if (reason != nullptr || given == nullptr) return;
    if (given->type != p.type && given->type != Type::kFloat32) {
      reason = sentence("%s: %s is %s beside a %s input; use %s or float32", op, what, name_of(given->type),
                        name_of(p.type), name_of(p.type));
    }
    vector(what, given, p.columns, p.param_type);
    if (p.columns < 0) p.columns = given->dims[0];
  }

  // gamma and beta; fills param_type and affine.
  void parameters(Tensor const *gamma, Tensor const *beta) {
    p.param_type = gamma != nullptr ? gamma->type : beta != nullptr ? beta->type : p.type;
    p.affine = gamma != nullptr && (!p.layer || beta != nullptr);
    if (reason == nullptr && !p.layer && beta != nullptr)
      reason = sentence("%s: RMSNorm has no beta; pass an empty vector", op);
    parameter("gamma", gamma);
    parameter("beta", beta);
  }
};

}  // namespace

Slots slots_of(Family const &family, Call const &call) {
  Slots slots{};
  Variant const &variant = family.op.variants[call.variant];
  slots.backward = variant.facts.kind == Kind::kNormBackward;
  slots.layer = family.absent ? call.attrs[1].ints[0] != 0 : variant.facts.layer;
  std::fill(slots.at, slots.at + kOperands, std::int8_t(-1));
  for (int i = 0; i < call.num_inputs + call.num_outputs; ++i) {
    Operand const operand = family.forms[call.variant].operands[i];
    bool const needed =
        operand == kX || operand == kY || operand == kDy || operand == kDx || (operand == kRstd && slots.backward);
    Tensor const &t = tensor_of(call, i);
    bool const empty = family.absent && !needed && t.rank == 1 && t.dims[0] == 0;
    slots.at[operand] = std::int8_t(empty ? -1 : i);
  }
  return slots;
}

char const *problem_of(Family const &family, Call const &call, Slots const &slots, Problem *p) {
  auto const at = [&](Operand operand) { return slots.has(operand) ? &tensor_of(call, slots.at[operand]) : nullptr; };
  char const *const name = family.op.name;
  Checks check{name, *at(kX), *p};
  p->layer = slots.layer, p->residual = slots.has(kResidual) || slots.has(kDsum);
  if (slots.has(kResidual) != slots.has(kSum)) {
    check.reason = sentence("%s: the sum is an output exactly when there is a residual; pass both or neither", name);
  }
  check.activation(call.attrs[0].floats[0]);
  check.like("the residual", at(kResidual));
  check.like("dy", at(kDy));
  check.like("dsum", at(kDsum));
  check.parameters(slots.has(kGamma) ? at(kGamma) : at(kDgamma), slots.backward ? at(kDbeta) : at(kBeta));
  check.parameter("dgamma", at(kDgamma));
  if (check.reason == nullptr && slots.backward && slots.has(kMean) != p->layer && p->rows != 0) {
    check.reason = sentence("%s: LayerNorm's backward takes the saved mean and RMSNorm's takes none", name);
  }
  check.like("the output", at(kY));
  check.like("the sum", at(kSum));
  check.vector("mean", at(kMean), p->rows, Type::kFloat32);
  check.vector("rstd", at(kRstd), p->rows, Type::kFloat32);
  check.like("dx", at(kDx));
  return check.reason;
}

}  // namespace cutefuse::row_norm
