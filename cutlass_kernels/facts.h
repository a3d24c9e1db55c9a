// What an op_type and a tile are, so that no caller has to parse their names.
#pragma once

#include <cstdint>

namespace cutefuse {

// The order is that of the tables of op_types, and must never change.
enum class Activation : std::int32_t { kNone, kRelu, kLeakyRelu, kClip, kSilu, kHardSwish, kSigmoid, kTanh, kGelu };
constexpr int kActivations = 9;
// How many of them the first op_types had: those with later ones stand behind, so that no index changes.
constexpr int kFirstActivations = 8;
constexpr char const *kActivationNames[kActivations] = {"",          "Relu",    "LeakyRelu", "Clip", "Silu",
                                                        "HardSwish", "Sigmoid", "Tanh",      "Gelu"};

// A tensor z like the output. Convolutions: y = act(conv + b + z), or act(conv + b) + z. Norms: y = norm(x + z).
enum class Residual : std::int32_t { kNone, kBefore, kAfter };

enum class Kind : std::int32_t { kConvolution, kNorm, kNormBackward, kWindow };

struct Facts {
  Kind kind = Kind::kConvolution;
  std::int32_t sources = 0;  // tensors that a convolution or a window concatenates; 0 for a norm
  Activation activation = Activation::kNone;
  Residual residual = Residual::kNone;
  bool view = false;              // a source may be a channel range of a wider tensor and may be enlarged
  bool quantised = false;         // int8 or float8 sources and filter, with scales
  bool quantised_output = false;  // output of the sources' type, with a scale
  bool layer = false;             // LayerNorm, else RMSNorm
  bool pre_activated = false;     // each input channel is scaled and shifted, then ReLU, before the filter sees it
  bool depthwise = false;         // filter k reads channel k of the concatenation and no other
  bool image = false;  // the source is what a network is given: NCHW or channels-last, of the filter's type or float32
  std::int32_t spread = 1;  // the rows and columns of pixels over which the filters of one pixel are spread
};

}  // namespace cutefuse
