// The TensorRT side of the int8 and float8 ConcatConv: sources in kHWC16 or, int8 alone, kCHW32; the packed filter, its
// scales and the bias as plain inputs; and an output that has the sources' type and format or is float channels-last.
#include "fused_plugin.h"

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

char const *shapes(ShapeCall const &call) {
  std::int32_t const filter = call.variant.facts.sources;
  for (std::int32_t i = 0; i <= filter; ++i) {
    if (call.inputs[i].nbDims == (i < filter ? 4 : 2)) continue;
    return sentence("quant_concat_conv: input %d has rank %d; sources have rank 4 and the packed filter 2", i,
                    call.inputs[i].nbDims);
  }
  nvinfer1::DimsExprs &y = call.outputs[0];
  y.nbDims = 4;
  call.out_dim(0, 0) = call.inputs[0].d[0], call.out_dim(0, 1) = call.inputs[filter].d[0];
  for (int axis = 0; axis < 2; ++axis) {
    std::int64_t const stride = call.ints("strides")[axis], *const pads = call.ints("pads");
    if (stride < 1) return "quant_concat_conv: strides must be at least 1";
    std::int64_t const extent = call.ints("dilations")[axis] * (call.ints("kernel_shape")[axis] - 1) + 1;
    call.out_dim(0, 2 + axis) =
        ((call.dim(0, 2 + axis) + (pads[axis] + pads[axis + 2] - extent)).floor_div(stride) + 1).get();
  }
  return nullptr;
}

// `output_type` is ONNX's number of a type; the operator refuses all but these three.
Type named_type(AttrCall const &call) {
  std::int64_t const number = call.ints("output_type")[0];
  return number == 10 ? Type::kFloat16 : number == 16 ? Type::kBFloat16 : Type::kFloat32;
}

}  // namespace

extern PluginRules const plugin;
PluginRules const plugin = {&op, port, shapes, named_type};

}  // namespace cutefuse::quant_concat_conv
