// The op_types of ConcatConv and the attributes that all of them carry. Host code.
#pragma once

#include <array>

#include "conv/checks.h"

namespace cutefuse::concat_conv {

using namespace conv;

// 64 plain ones, 312 with a residual or several outputs, and 376 of both kinds with views.
constexpr int kVariants = 752;

// An index means the same op_type for ever: engines hold names, callers of the C interface hold indices.
extern std::array<Variant, kVariants> const kVariantTable;

enum { kAlpha = kConvAttrs, kLo, kHi, kChannelStarts, kUpsample, kOutputChannels, kAttrs };

constexpr std::array<AttrSpec, kAttrs> kAttrSpecs = conv_attributes({
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},          // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},  // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
    {"channel_starts", AttrKind::kInts, 1, kMaxSources, 1, 0.0},   // View: first channel of each source in its tensor
    {"upsample", AttrKind::kInts, 1, kMaxSources, 1, 1.0},         // View: nearest enlargement of each source
    {"output_channels", AttrKind::kInts, 1, kMaxOutputs, 1, 0.0},  // x<m>: channels of each output
});

}  // namespace cutefuse::concat_conv
