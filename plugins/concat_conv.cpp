// The TensorRT side of ConcatConv: sources, residual and outputs channels-last, the packed filter and the bias as plain
// inputs, and so a pre-activation's scale and shift.
#include "concat_conv/attributes.h"
#include "conv_shapes.h"

namespace cutefuse::concat_conv {

extern Op const op;

namespace {

Port port(Variant const &variant, std::int32_t pos) {
  std::int32_t const filter = variant.facts.sources, bias = filter + 1;
  if (pos == filter) return {TypeRule::kActivation, Layout::kLinear};
  if (pos == bias) return {TypeRule::kFloat32, Layout::kLinear};
  bool const vector = variant.facts.pre_activated && (pos == bias + 1 || pos == bias + 2);  // its scale and shift
  if (vector) return {TypeRule::kActivation, Layout::kLinear};
  bool const planes = variant.facts.image && pos < filter;
  return {TypeRule::kActivation, planes ? Layout::kLinear : Layout::kChannelsLast};
}

char const *shapes(ShapeCall const &call) {
  if (char const *reason = conv_shapes(call, call.ints("upsample")[0])) return reason;
  std::int32_t const outputs = call.variant.outputs, given = call.attrs[kOutputChannels].count;
  if (given != outputs) {
    return sentence("concat_conv: output_channels has %d values for %d outputs; write one for each", given, outputs);
  }
  for (std::int32_t j = 0; outputs > 1 && j < outputs; ++j) {
    call.out_dim(j, 1) = call.builder.constant(call.ints("output_channels")[j]);
  }
  return nullptr;
}

}  // namespace

extern PluginRules const plugin = {&op, port, shapes};

}  // namespace cutefuse::concat_conv
