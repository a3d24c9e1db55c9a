// The TensorRT side of ConcatConv: sources, residual and outputs channels-last, the packed filter and the bias as plain
// inputs, and so a pre-activation's scale and shift.
#include "concat_conv/attributes.h"
#include "fused_plugin.h"

namespace cutefuse::concat_conv {

extern Op const op;

namespace {

Port port(Variant const &variant, std::int32_t pos) {
  std::int32_t const filter = variant.facts.sources, bias = filter + 1;
  if (pos == filter) return {TypeRule::kActivation, Layout::kLinear};
  if (pos == bias) return {TypeRule::kFloat32, Layout::kLinear};
  bool const vector = variant.facts.pre_activated && (pos == bias + 1 || pos == bias + 2);  // its scale and shift
  if (vector) return {TypeRule::kActivation, Layout::kLinear};
  return {TypeRule::kActivation, Layout::kChannelsLast};
}

// P = floor((H * upsample + pads - dilation * (R - 1) - 1) / stride) + 1, and Q alike
Expr output_size(ShapeCall const &call, int axis) {
  std::int64_t const pad = call.ints("pads")[axis] + call.ints("pads")[axis + 2];
  std::int64_t const reach = call.ints("dilations")[axis] * (call.ints("kernel_shape")[axis] - 1) + 1;
  return (call.dim(0, 2 + axis) * call.ints("upsample")[0] + (pad - reach)).floor_div(call.ints("strides")[axis]) + 1;
}

char const *shapes(ShapeCall const &call) {
  std::int32_t const filter = call.variant.facts.sources;
  for (std::int32_t i = 0; i <= filter; ++i) {
    std::int32_t const rank = i < filter ? 4 : 2;
    if (call.inputs[i].nbDims != rank) {
      return sentence("concat_conv: input %d has rank %d, it must have %d; only 2-D convolutions can be fused", i,
                      call.inputs[i].nbDims, rank);
    }
  }
  if (call.attrs[kOutputChannels].count != call.variant.outputs) {
    return sentence("concat_conv: output_channels has %d values for %d outputs; write one for each",
                    call.attrs[kOutputChannels].count, call.variant.outputs);
  }
  if (call.ints("strides")[0] < 1 || call.ints("strides")[1] < 1) return "concat_conv: strides must be at least 1";
  for (std::int32_t j = 0; j < call.variant.outputs; ++j) {
    nvinfer1::DimsExprs &y = call.outputs[j];
    y.nbDims = 4;
    call.out_dim(j, 0) = call.inputs[0].d[0];
    call.out_dim(j, 1) =
        call.variant.outputs == 1 ? call.inputs[filter].d[0] : call.builder.constant(call.ints("output_channels")[j]);
    call.out_dim(j, 2) = output_size(call, 0).get();
    call.out_dim(j, 3) = output_size(call, 1).get();
  }
  return nullptr;
}

}  // namespace

extern PluginRules const plugin;
PluginRules const plugin = {&op, port, shapes};

}  // namespace cutefuse::concat_conv
