// Pools and linear Resizes of a concatenation as numbers: what the kernel is given. Pure host C++.
#pragma once

#include <cstdint>

#include "divider.h"
#include "op.h"

namespace cutefuse::window {

constexpr int kMaxSources = 8;
constexpr int kVectorBytes = 16;
constexpr int kThreads = 128;
constexpr int kBlocks = 8;          // that share a multiprocessor: 64 registers a thread
constexpr int kColumns = 4;         // of a linear Resize's output that a thread computes
constexpr int kImageThreads = 256;  // of a block that computes means of an image,
constexpr int kMostLogVectors = 3;  // of so many vectors of a pixel,
constexpr int kImageLoads = 4;      // of which a thread loads so many at a time
constexpr int kMaxSide = 1 << 15;   // of an image, a window, its steps and pads: products of two fit into 31 bits

// The order is that of the attribute `mode`.
enum class Mode : std::int32_t { kMax, kMean, kLinear };
constexpr int kModes = 3;

// x is the concatenation of the sources. Pools take the pixels [p*stride_h - pad_top + r*dilation_h] for r < R, and so
// along the other axis, that lie inside of the image:
//   kMax:  their largest, NaN where one of them is NaN; -infinity where there is none
//   kMean: their sum over their number; where pads count, over the number of pixels inside of the image and its pads
// kLinear has no window. Output pixel p lies at h = p*scale_h + offset_h, clamped to the image, between two rows that
// are weighted by their distance.
struct Problem {
  Type type;
  Mode mode;
  int sources, N, H, W, P, Q;
  int vectors[kMaxSources];         // 16-byte vectors of a pixel of each source
  std::int64_t pixel[kMaxSources];  // bytes from pixel to pixel
  std::int64_t output_pixel;
  int R, S, stride_h, stride_w, pad_top, pad_left, pad_bottom, pad_right, dilation_h, dilation_w;
  bool counts_pads;
  float scale_h, scale_w, offset_h, offset_w;
};

inline bool is_whole_image(Problem const &p) {
  bool const pads = p.pad_top + p.pad_left + p.pad_bottom + p.pad_right > 0;
  return p.P == 1 && p.Q == 1 && p.R == p.H && p.S == p.W && p.dilation_h == 1 && p.dilation_w == 1 && !pads;
}

struct Params {
  Problem problem;
  void const *x[kMaxSources];
  void *y;
  int items;                                          // a vector of each group of neighbouring columns
  int log_vectors;                                    // two to this: those of a block that computes means of an image
  Divider by_vectors, by_groups, by_rows, by_shares;  // shares: blocks of an image
};

}  // namespace cutefuse::window
