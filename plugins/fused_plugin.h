// Every method of TensorRT's V3 plugin interface, written once. An operator's plugin is a PluginRules: which type and
// layout each tensor may have, and its output shapes; names, attributes, legality, tactics and plans come from its Op.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "op.h"
#include "tensorrt_abi.h"

namespace cutefuse {

constexpr char const *kPluginVersion = "1";
constexpr char const *kPluginNamespace = "cutefuse";

// The activation type of a node is that of its first input, of an image's that of its filter: float32, float16 or
// bfloat16. kQuantised: int8 or float8, as the first input. kNamed: the type that PluginRules::named_type reads from
// the attributes.
enum class TypeRule { kActivation, kFloat32, kActivationOrFloat32, kQuantised, kNamed };

// kChannelsLast means TensorRT's kHWC8 for 16-bit types, kHWC for float32, and kHWC16 for int8 and float8, which
// TensorRT knows from 10.16 on. `or_blocks`: int8 tensors of a node may instead all be kCHW32, which every version
// knows. Of a node whose attribute `layout` is 1, such tensors are NHWC in kLINEAR instead, and have these dimensions.
struct Port {
  TypeRule type;
  Layout layout;
  bool or_blocks = false;
};

// Where an axis of logical NCHW dims stands in the tensors of a node: NCHW, or NHWC where its layout is 1.
inline constexpr std::int32_t kAxes[2][4] = {{0, 1, 2, 3}, {0, 3, 1, 2}};

// A size of a tensor as TensorRT's expression, constant or not.
class Expr {
 public:
  Expr(nvinfer1::IExprBuilder &builder, nvinfer1::IDimensionExpr const *value) : builder_(&builder), value_(value) {}
  nvinfer1::IDimensionExpr const *get() const { return value_; }
  Expr operator+(std::int64_t b) const { return apply(nvinfer1::DimensionOperation::kSUM, b); }
  Expr operator-(std::int64_t b) const { return apply(nvinfer1::DimensionOperation::kSUB, b); }
  Expr operator*(std::int64_t b) const { return apply(nvinfer1::DimensionOperation::kPROD, b); }
  Expr floor_div(std::int64_t b) const { return apply(nvinfer1::DimensionOperation::kFLOOR_DIV, b); }

 private:
  Expr apply(nvinfer1::DimensionOperation operation, std::int64_t b) const {
    nvinfer1::IDimensionExpr const *second = builder_->constant(b);
    return {*builder_, value_ && second ? builder_->operation(operation, *value_, *second) : nullptr};
  }
  nvinfer1::IExprBuilder *builder_;
  nvinfer1::IDimensionExpr const *value_;
};

// As fields of plugins have it.
inline nvinfer1::PluginFieldType field_type(AttrSpec const &spec) {
  return spec.kind == AttrKind::kInts ? nvinfer1::PluginFieldType::kINT32 : nvinfer1::PluginFieldType::kFLOAT32;
}

struct AttrCall {
  Op const &op;
  AttrValue const *attrs;                                 // in the order of Op::attrs
  std::int64_t const *ints(char const *attribute) const;  // throws std::out_of_range for a name not in Op::attrs
  // Where the axes N, C, H and W of this node's activations stand.
  std::int32_t const *axes() const;
};

struct ShapeCall : AttrCall {
  Variant const &variant;
  nvinfer1::DimsExprs const *inputs;
  nvinfer1::DimsExprs *outputs;
  nvinfer1::IExprBuilder &builder;
  // `axis` counts N, C, H, W.
  Expr dim(std::int32_t input, std::int32_t axis) const {
    return {builder, inputs[input].d[(variant.facts.image ? kAxes[0] : axes())[axis]]};
  }
  nvinfer1::IDimensionExpr const *&out_dim(std::int32_t output, std::int32_t axis) const {
    return outputs[output].d[axes()[axis]];
  }
};

struct PluginRules {
  Op const *op;
  // Type and layout that tensor `pos` may have; inputs are numbered first, then outputs.
  Port (*port)(Variant const &variant, std::int32_t pos);
  // Writes every output's dimensions. Null when done, else one sentence.
  char const *(*shapes)(ShapeCall const &call);
  Type (*named_type)(AttrCall const &call) = nullptr;  // of ports with TypeRule::kNamed
};

// A node's attributes: parsed from plugin fields, kept in the order of Op::attrs, serialised under the same names.
class Attributes {
 public:
  // Null when every field is known, typed and counted as Op::attrs says, else one sentence.
  char const *parse(Op const &op, nvinfer1::PluginFieldCollection const &fields);
  // Both point into this object.
  std::vector<AttrValue> view(Op const &op) const;
  std::vector<nvinfer1::PluginField> serialise(Op const &op) const;
  std::string text(Op const &op) const;

 private:
  struct Values {
    std::vector<std::int64_t> ints;
    std::vector<std::int32_t> ints32;  // the type that the ONNX parser and the serialised engine use
    std::vector<float> floats;
    std::int32_t count() const { return static_cast<std::int32_t>(ints.size() + floats.size()); }  // one is empty
  };
  std::vector<Values> values_;
};

// Makes the plugins of one op_type, that is of one variant of one operator.
class FusedCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  FusedCreator(PluginRules const &rules, std::int32_t variant);
  nvinfer1::IPluginV3 *createPlugin(char const *name, nvinfer1::PluginFieldCollection const *fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  nvinfer1::PluginFieldCollection const *getFieldNames() noexcept override { return &collection_; }
  char const *getPluginName() const noexcept override;
  char const *getPluginVersion() const noexcept override { return kPluginVersion; }
  char const *getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  PluginRules const &rules_;
  std::int32_t variant_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

// Prints `cutefuse: <who>: <text>` as one line on stderr. The logger of TensorRT is never called: its layout differs
// between TensorRT 10 and 11.
void report(char const *who, char const *text) noexcept;

}  // namespace cutefuse
