// The op_types of ConcatConv and the attributes that all of them carry. Host code.
#pragma once

#include <array>

#include "conv/problem.h"

namespace cutefuse::concat_conv {

using namespace conv;

// 64 plain ones, 312 with a residual or several outputs, and 376 of both kinds with views.
constexpr int kVariants = 752;

// An index means the same op_type for ever: engines hold names, callers of the C interface hold indices.
extern std::array<Variant, kVariants> const kVariantTable;

enum Attr {
  kChannels,
  kKernelShape,
  kStrides,
  kPads,
  kDilations,
  kPackedSizes,
  kAlpha,
  kLo,
  kHi,
  kChannelStarts,
  kUpsample,
  kOutputChannels,
  kAttrs
};

constexpr AttrSpec kAttrSpecs[kAttrs] = {
    {"channels", AttrKind::kInts, 1, kMaxSources, 0, 0.0},
    {"kernel_shape", AttrKind::kInts, 2, 2, 0, 0.0},
    {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
    {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
    {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
    {"packed_sizes", AttrKind::kInts, 1, kMaxSources, 0,
     0.0},                                                // filter columns per source; the function body splits by it
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},          // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},  // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
    {"channel_starts", AttrKind::kInts, 1, kMaxSources, 1, 0.0},  // View: first channel of each source in its tensor
    {"upsample", AttrKind::kInts, 1, kMaxSources, 1, 1.0},        // View: nearest enlargement of each source
    {"output_channels", AttrKind::kInts, 1, kMaxOutputs, 1, 0.0}  // x<m>: channels of each output
};

// Fills *problem from the call, or returns why the operator refuses it. Sizes that are -1 in the call stay -1.
char const *problem_of(Call const &call, Problem *problem);

}  // namespace cutefuse::concat_conv
