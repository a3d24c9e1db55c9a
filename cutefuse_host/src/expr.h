// The expression builder that getOutputShapes sees: it folds constants as TensorRT does, keeps every expression to
// evaluate it for any input sizes later, and prints it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensorrt_abi.h"

namespace cutefuse::host {

using Sizes = std::vector<nvinfer1::Dims>;  // of every input

class Expression final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  enum class Kind { kConstant, kInput, kSizeTensor, kOperation };

  Expression() { mImpl = this; }
  ~Expression() noexcept override = default;

  Kind kind = Kind::kConstant;
  std::int64_t value = 0;              // kConstant; kInput: the tensor; kSizeTensor: the output
  std::int32_t axis = 0;               // kInput
  nvinfer1::DimensionOperation op{};   // kOperation
  Expression const *first = nullptr;   // kOperation; kSizeTensor: the optimum
  Expression const *second = nullptr;  // kOperation; kSizeTensor: the upper bound

  // Nothing when a division by zero is met. A size tensor counts as its upper bound.
  std::optional<std::int64_t> evaluate(Sizes const &inputs) const;
  std::string text() const;

 private:
  bool isConstant() const override { return kind == Kind::kConstant; }
  std::int64_t getConstantValue() const override;
  bool isSizeTensor() const override { return kind == Kind::kSizeTensor; }
};

class ExprBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  ExprBuilder() { mImpl = this; }
  ~ExprBuilder() noexcept override = default;

  nvinfer1::IDimensionExpr const *constant(std::int64_t value) override;
  // The size of an input along an axis: a constant when it is not negative.
  nvinfer1::IDimensionExpr const *input(std::int32_t tensor, std::int32_t axis, std::int64_t size);

  // The object behind a pointer that a plugin returned, or null when this builder did not make it.
  Expression const *find(nvinfer1::IDimensionExpr const *pointer) const;
  std::vector<std::string> const &misuse() const { return misuse_; }

 private:
  nvinfer1::IDimensionExpr const *operation(nvinfer1::DimensionOperation op, nvinfer1::IDimensionExpr const &first,
                                            nvinfer1::IDimensionExpr const &second) override;
  nvinfer1::IDimensionExpr const *declareSizeTensor(std::int32_t output, nvinfer1::IDimensionExpr const &opt,
                                                    nvinfer1::IDimensionExpr const &upper) override;
  Expression *make();

  std::vector<std::unique_ptr<Expression>> made_;
  std::vector<std::string> misuse_;
};

}  // namespace cutefuse::host
