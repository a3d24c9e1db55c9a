// The attributes that all op_types of ConcatConv carry. Host code.
#pragma once

#include <array>

#include "conv/checks.h"

namespace cutefuse::concat_conv {

using namespace conv;

enum { kAlpha = kConvAttrs, kLo, kHi, kChannelStarts, kUpsample, kOutputChannels, kResidualStart, kOwnAttrs };

constexpr std::array<AttrSpec, kOwnAttrs + 2> kAttrSpecs = conv_attributes({
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},          // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},  // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
    {"channel_starts", AttrKind::kInts, 1, kMaxSources, 1, 0.0},   // View: first channel of each source in its tensor
    {"upsample", AttrKind::kInts, 1, kMaxSources, 1, 1.0},         // View: nearest enlargement of each source
    {"output_channels", AttrKind::kInts, 1, kMaxOutputs, 1, 0.0},  // x<m>: channels of each output
    {"residual_start", AttrKind::kInts, 1, 1, 1, 0.0},             // View: first channel of the residual in its tensor
});

}  // namespace cutefuse::concat_conv
