// What every convolution operator accepts: turns the attributes and tensors of a call into a Problem, or says in one
// sentence why it is refused.
#pragma once

#include <array>

#include "conv/sm80/tiles.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// The attributes with which the list of every convolution operator begins; its own follow, then kLayoutAttr and
// kTileAttr.
enum Attr { kChannels, kKernelShape, kStrides, kPads, kDilations, kPackedSizes, kConvAttrs };

template <std::size_t kOwn>
constexpr std::array<AttrSpec, kConvAttrs + kOwn + 2> conv_attributes(AttrSpec const (&own)[kOwn]) {
  std::array<AttrSpec, kConvAttrs + kOwn + 2> all{{
      {"channels", AttrKind::kInts, 1, kMaxSources, 0, 0.0},
      {"kernel_shape", AttrKind::kInts, 2, 2, 0, 0.0},
      {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
      {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
      {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
      {"packed_sizes", AttrKind::kInts, 1, kMaxSources, 0, 0.0},  // filter columns per source; the body splits by it
  }};
  for (std::size_t i = 0; i < kOwn; ++i) all[kConvAttrs + i] = own[i];
  all[kConvAttrs + kOwn] = kLayoutAttr, all.back() = kTileAttr;
  return all;
}

constexpr std::int64_t kInt32Max = 0x7fffffff;

inline bool known(std::int64_t size) { return size >= 0; }

// A call whose problem is being filled in. Each check of an operator reads a part of the call, fills that part of the
// problem, and returns null or why it is refused.
struct Checks {
  Op const &op;
  Call const &call;
  Problem &p;

  // A tensor of the output's pixels: y, y_j or z. `channels` from `start` on are those of the convolution; only a view
  // may have more.
  char const *pixels(char const *what, Tensor const &given, Type type, int channels, std::int64_t *ld, int start = 0,
                     bool view = false) const;
};

// What differs between the convolution operators.
struct Family {
  Op const &op;
  Span<Tile> tiles;                              // the Ampere path's
  Span<Sm90Tile> sm90_tiles;                     // Hopper's
  int alpha;                                     // index of that attribute; lo and hi follow it
  char const *(*check_own)(Checks const &);      // of sources: channel ranges and enlargements, or scales
  char const *(*check_outputs)(Checks const &);  // outputs and residual, checked last
};

// Fills in the problem and returns null, or returns why the call is refused.
char const *problem_of(Family const &family, Call const &call, Problem *problem);

}  // namespace cutefuse::conv
