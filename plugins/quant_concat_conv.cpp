// The TensorRT side of the int8 and float8 ConcatConv: sources in kHWC16 or, int8 alone, kCHW32; the packed filter, its
// scales and the bias as plain inputs; and an output that has the sources' type and format or is float channels-last.
#include "conv_shapes.h"

namespace cutefuse::quant_concat_conv {

extern Op const op;

namespace {

Port port(Variant const &variant, std::int32_t pos) {
  std::int32_t const filter = variant.facts.sources;
  if (pos < filter) return {TypeRule::kQuantised, Layout::kChannelsLast, true};
  if (pos == filter) return {TypeRule::kQuantised, Layout::kLinear};
  if (pos < variant.inputs) return {TypeRule::kFloat32, Layout::kLinear};
  return variant.facts.quantised_output ? Port{TypeRule::kQuantised, Layout::kChannelsLast, true}
                                        : Port{TypeRule::kNamed, Layout::kChannelsLast};
}

char const *shapes(ShapeCall const &call) { return conv_shapes(call); }

// `output_type` is ONNX's number of a type; the operator refuses all but these three.
Type named_type(AttrCall const &call) {
  std::int64_t const number = call.ints("output_type")[0];
  return number == 10 ? Type::kFloat16 : number == 16 ? Type::kBFloat16 : Type::kFloat32;
}

}  // namespace

extern PluginRules const plugin = {&op, port, shapes, named_type};

}  // namespace cutefuse::quant_concat_conv
