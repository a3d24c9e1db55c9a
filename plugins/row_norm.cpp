// The TensorRT side of the row norms: rows as they lie in memory, gamma and beta in their own type, outputs like x.
#include "fused_plugin.h"

namespace cutefuse::row_norm {

extern Op const op;

namespace {

Port port(Variant const &variant, std::int32_t pos) {
  std::int32_t const activations = variant.outputs;  // x and, with a second output, the residual
  bool const parameter = pos >= activations && pos < variant.inputs;
  return {parameter ? TypeRule::kActivationOrFloat32 : TypeRule::kActivation, Layout::kLinear};
}

char const *shapes(ShapeCall const &call) {
  for (std::int32_t i = call.variant.outputs; i < call.variant.inputs; ++i) {
    if (call.inputs[i].nbDims != 1) {
      return sentence("row_norm: input %d has rank %d; gamma and beta are vectors as long as the last dimension", i,
                      call.inputs[i].nbDims);
    }
  }
  for (std::int32_t i = 0; i < call.variant.outputs; ++i) call.outputs[i] = call.inputs[0];
  return nullptr;
}

}  // namespace

extern PluginRules const plugin = {&op, port, shapes};

}  // namespace cutefuse::row_norm
