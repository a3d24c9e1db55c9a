#include "expr.h"

#include <algorithm>
#include <limits>

namespace cutefuse::host {

using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;

namespace {

std::optional<std::int64_t> apply(DimensionOperation op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case DimensionOperation::kSUM:
      return a + b;
    case DimensionOperation::kPROD:
      return a * b;
    case DimensionOperation::kMAX:
      return std::max(a, b);
    case DimensionOperation::kMIN:
      return std::min(a, b);
    case DimensionOperation::kSUB:
      return a - b;
    case DimensionOperation::kEQUAL:
      return a == b;
    case DimensionOperation::kLESS:
      return a < b;
    case DimensionOperation::kFLOOR_DIV:
    case DimensionOperation::kCEIL_DIV: {
      if (b == 0) return std::nullopt;
      bool const inexact = a % b != 0, negative = (a < 0) != (b < 0);
      bool const floor = op == DimensionOperation::kFLOOR_DIV;
      return a / b + (inexact && floor && negative ? -1 : inexact && !floor && !negative ? 1 : 0);
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::int64_t> Expression::evaluate(Sizes const &inputs) const {
  switch (kind) {
    case Kind::kConstant:
      return value;
    case Kind::kInput:
      return inputs[static_cast<std::size_t>(value)].d[axis];
    case Kind::kSizeTensor:
      return second->evaluate(inputs);
    case Kind::kOperation:
      break;
  }
  auto const a = first->evaluate(inputs), b = second->evaluate(inputs);
  return a && b ? apply(op, *a, *b) : std::nullopt;
}

std::string Expression::text() const {
  switch (kind) {
    case Kind::kConstant:
      return std::to_string(value);
    case Kind::kInput:
      return "in" + std::to_string(value) + "[" + std::to_string(axis) + "]";
    case Kind::kSizeTensor:
      return "size_of_out" + std::to_string(value);
    case Kind::kOperation:
      break;
  }
  std::string const a = first->text(), b = second->text();
  switch (op) {
    case DimensionOperation::kSUM:
      return "(" + a + " + " + b + ")";
    case DimensionOperation::kSUB:
      return "(" + a + " - " + b + ")";
    case DimensionOperation::kPROD:
      return "(" + a + " * " + b + ")";
    case DimensionOperation::kMAX:
      return "max(" + a + ", " + b + ")";
    case DimensionOperation::kMIN:
      return "min(" + a + ", " + b + ")";
    case DimensionOperation::kEQUAL:
      return "(" + a + " == " + b + ")";
    case DimensionOperation::kLESS:
      return "(" + a + " < " + b + ")";
    case DimensionOperation::kFLOOR_DIV:
      return "floor(" + a + " / " + b + ")";
    case DimensionOperation::kCEIL_DIV:
      return "ceil(" + a + " / " + b + ")";
  }
  return "?";
}

std::int64_t Expression::getConstantValue() const {
  return kind == Kind::kConstant ? value : std::numeric_limits<std::int64_t>::min();
}

Expression *ExprBuilder::make() {
  made_.push_back(std::make_unique<Expression>());
  return made_.back().get();
}

IDimensionExpr const *ExprBuilder::constant(std::int64_t value) {
  Expression *made = make();
  made->value = value;
  return made;
}

IDimensionExpr const *ExprBuilder::input(std::int32_t tensor, std::int32_t axis, std::int64_t size) {
  if (size >= 0) return constant(size);
  Expression *made = make();
  made->kind = Expression::Kind::kInput;
  made->value = tensor;
  made->axis = axis;
  return made;
}

Expression const *ExprBuilder::find(IDimensionExpr const *pointer) const {
  for (auto const &made : made_) {
    if (static_cast<IDimensionExpr const *>(made.get()) == pointer) return made.get();
  }
  return nullptr;
}

IDimensionExpr const *ExprBuilder::operation(DimensionOperation op, IDimensionExpr const &first,
                                             IDimensionExpr const &second) {
  Expression const *a = find(&first), *b = find(&second);
  if (a == nullptr || b == nullptr) {
    misuse_.push_back("an operand of operation() was not made by this expression builder");
    return nullptr;
  }
  if (static_cast<std::int32_t>(op) < 0 || op > DimensionOperation::kCEIL_DIV) {
    misuse_.push_back("operation() was asked for the unknown operation " + std::to_string(static_cast<int>(op)));
    return nullptr;
  }
  if (a->kind == Expression::Kind::kConstant && b->kind == Expression::Kind::kConstant) {
    if (auto const folded = apply(op, a->value, b->value)) return constant(*folded);
    misuse_.push_back("a size is divided by the constant 0");
  }
  Expression *made = make();
  made->kind = Expression::Kind::kOperation;
  made->op = op;
  made->first = a;
  made->second = b;
  return made;
}

IDimensionExpr const *ExprBuilder::declareSizeTensor(std::int32_t output, IDimensionExpr const &opt,
                                                     IDimensionExpr const &upper) {
  Expression const *a = find(&opt), *b = find(&upper);
  if (a == nullptr || b == nullptr) {
    misuse_.push_back("a bound of declareSizeTensor() was not made by this expression builder");
    return nullptr;
  }
  Expression *made = make();
  made->kind = Expression::Kind::kSizeTensor;
  made->value = output;
  made->first = a;
  made->second = b;
  return made;
}

}  // namespace cutefuse::host
