// The output sizes of a convolution's node.
#pragma once

#include "fused_plugin.h"

namespace cutefuse {

// Writes N, K, P and Q of every output: K as the packed filter has it, P = floor((H * upsample + pads - dilation *
// (R - 1) - 1) / stride) + 1, and Q alike; spread ones s^2 times fewer K and s times P and Q. Null when done, else one
// sentence.
inline char const *conv_shapes(ShapeCall const &call, std::int64_t upsample = 1) {
  std::int32_t const filter = call.variant.facts.sources;
  for (std::int32_t i = 0; i <= filter; ++i) {
    std::int32_t const rank = i < filter ? 4 : 2;
    if (call.inputs[i].nbDims == rank) continue;
    return sentence("%s: input %d has rank %d, it must have %d; only 2-D convolutions can be fused", call.op.name, i,
                    call.inputs[i].nbDims, rank);
  }
  std::int64_t const spread = call.variant.facts.spread;
  std::int64_t const *const strides = call.ints("strides"), *const pads = call.ints("pads");
  if (strides[0] < 1 || strides[1] < 1) return sentence("%s: strides must be at least 1", call.op.name);
  for (std::int32_t j = 0; j < call.variant.outputs; ++j) {
    call.outputs[j].nbDims = 4;
    // A depthwise filter has a column for each channel, and spread outputs s^2 filters.
    call.out_dim(j, 0) = call.inputs[0].d[0];
    Expr const filters(call.builder, call.inputs[filter].d[call.variant.facts.depthwise ? 1 : 0]);
    call.out_dim(j, 1) = (spread == 1 ? filters : filters.floor_div(spread * spread)).get();
    for (int axis = 0; axis < 2; ++axis) {
      std::int64_t const extent = call.ints("dilations")[axis] * (call.ints("kernel_shape")[axis] - 1) + 1;
      Expr const size = upsample == 1 ? call.dim(0, 2 + axis) : call.dim(0, 2 + axis) * upsample;
      Expr const positions = (size + (pads[axis] + pads[axis + 2] - extent)).floor_div(strides[axis]) + 1;
      call.out_dim(j, 2 + axis) = (spread == 1 ? positions : positions * spread).get();
    }
  }
  return nullptr;
}

}  // namespace cutefuse
