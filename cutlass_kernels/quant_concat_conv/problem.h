// The problem of the int8 ConcatConv: ConcatConv's geometry and index arithmetic, a scale for every source, and two
// memory layouts.
#pragma once

#include "conv/problem.h"

namespace cutefuse::quant_concat_conv {

using namespace conv;

constexpr int kVector = 16;           // channels of one 16-byte copy
constexpr int kMaxProduct = 1 << 14;  // |x * w| of two int8

// Channels of the output that exist in memory, pad lanes included.
CUTEFUSE_HOST_DEVICE int stored_channels(Problem const &p) {
  int const step = p.output_type != Type::kInt8        ? size_of(p.output_type) == 2 ? 8 : 1
                   : p.layout == Layout::kChannelsLast ? kVector
                                                       : kLayoutBlock;
  return ceil_div(p.K, step) * step;
}

// Fills *problem from the call, or returns why the operator refuses it. Sizes that are -1 in the call stay -1.
char const *problem_of(Call const &call, Problem *problem);

}  // namespace cutefuse::quant_concat_conv
