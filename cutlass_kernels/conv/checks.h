// What every convolution operator accepts: attributes and tensors of a call become a Problem, or one sentence.
#pragma once

#include <array>

#include "conv/problem.h"

namespace cutefuse::conv {

// The attributes that all of them begin with.
enum Attr { kChannels, kKernelShape, kStrides, kPads, kDilations, kPackedSizes, kConvAttrs };

template <std::size_t kOwn>
constexpr std::array<AttrSpec, kConvAttrs + kOwn> conv_attributes(AttrSpec const (&own)[kOwn]) {
  std::array<AttrSpec, kConvAttrs + kOwn> all{{
      {"channels", AttrKind::kInts, 1, kMaxSources, 0, 0.0},
      {"kernel_shape", AttrKind::kInts, 2, 2, 0, 0.0},
      {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
      {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
      {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
      {"packed_sizes", AttrKind::kInts, 1, kMaxSources, 0, 0.0},  // filter columns per source; the body splits by it
  }};
  for (std::size_t i = 0; i < kOwn; ++i) all[kConvAttrs + i] = own[i];
  return all;
}

constexpr std::int64_t kInt32Max = 0x7fffffff;

inline bool known(std::int64_t size) { return size >= 0; }

// Each check reads a part of the call, fills that part of the problem, and returns null or why it is refused. The order
// is that of the list; the problem's type and layout are set before.
struct Checks {
  Op const &op;
  Call const &call;
  Problem &p;

  // Sources, outputs, activation and residual, according to the op_type.
  void read_op_type() const;
  char const *geometry() const;
  // alpha, lo and hi, which follow each other.
  char const *activation(int alpha) const;
  // Channel ranges and enlargements are set before.
  char const *sources() const;
  char const *size() const;
  // The packed filter, whose type is that of the sources.
  char const *filter() const;
  // A float32 value for each filter.
  char const *vector(char const *what, Tensor const &given) const;
  // A tensor like the output or a channel range of it: y, y_j or z.
  char const *pixels(char const *what, Tensor const &given, Type type, int channels, std::int64_t *ld) const;

 private:
  char const *channels(int source) const;
};

}  // namespace cutefuse::conv
