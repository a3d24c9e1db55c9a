// The problem of the int8 ConcatConv: ConcatConv's geometry and index arithmetic, a scale for every source, and two
// memory layouts.
#pragma once

#include "conv/problem.h"

namespace cutefuse::quant_concat_conv {

using conv::Activation;
using conv::ceil_div;
using conv::Divider;
using conv::kActivationNames;
using conv::kActivations;
using conv::kChannelBlock;
using conv::kMaxSources;

constexpr int kVector = 16;           // channels of one 16-byte copy
constexpr int kLayoutBlock = 32;      // channels of one block of Layout::kBlocks32
constexpr int kMaxProduct = 1 << 14;  // |x * w| of two int8

// y[n,k,p,q] = act(b[k] + w_scale[k] * sum_i scale[i] * sum_{c,r,s} x_i[n,c,h,w] * w[k,c,r,s]). The inner sums are
// exact integers; the outer one is float32, so that each source keeps a scale of its own. int8 outputs are y /
// output_scale, rounded to nearest even and saturated. `type` is that of the sources, int8.
struct Problem : conv::Problem {
  float scale[kMaxSources];
  float output_scale;
  Type output_type;
  Layout layout;  // of all sources, and of an int8 output
};

// Where element (n, c, h, w) of an int8 tensor lies: n * image + (h * W + w) * pixel + c / 32 * block + c % 32.
struct Strides {
  std::int64_t image, block;
  int pixel;
};

CUTEFUSE_HOST_DEVICE Strides strides_of(Layout layout, std::int64_t ld, int channels, std::int64_t pixels) {
  if (layout == Layout::kChannelsLast) return {pixels * ld, kLayoutBlock, static_cast<int>(ld)};
  return {ceil_div(channels, kLayoutBlock) * pixels * kLayoutBlock, pixels * kLayoutBlock, kLayoutBlock};
}

// Of source i.
CUTEFUSE_HOST_DEVICE Strides strides_of(Problem const &p, int i) {
  return strides_of(p.layout, p.ldx[i], p.C[i], std::int64_t(p.H) * p.W);
}

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
