#include <algorithm>
#include <cmath>

#include "conv/cuts.h"

namespace cutefuse::conv {
namespace {

constexpr int kMostShared = 96 << 10;  // of a block: every GPU has as much
constexpr int kMostShift = 4;          // 64 channels of a block: whole lines of 128 bytes
constexpr int kMostRounds = 4;         // of a block's threads, kDepthwiseColumns outputs each

// Instructions of a thread in a round. Rows of 3, 5 or 7 neighbouring taps have code of their own (depthwise.cuh).
int instructions(Problem const &p, BlockCut const &cut) {
  Activation const kind = p.activation;
  bool const clamps = kind == Activation::kNone || kind == Activation::kRelu || kind == Activation::kClip;
  bool const unrolled =
      cut.dilation_w == 1 && p.stride_w <= 2 && (p.S == 3 || p.S == 5 || (p.S == 7 && p.stride_w == 1));
  int const pixels = unrolled ? (kDepthwiseColumns - 1) * p.stride_w + p.S : 2 * kDepthwiseColumns * p.S;
  return p.R * (p.S * (4 * kDepthwiseColumns + 5) + 5 * pixels + 15) + (clamps ? 217 : 345);
}

// Microseconds of a launch: in waves, each as long as a block takes, or longer where instructions and copies of many
// blocks compete. Blocks that start early crowd onto the multiprocessors that are free first, as many as fit.
// calibration/depthwise.py fits the constants.
double length_us(Problem const &p, BlockCut const &cut, std::int64_t blocks, int sm_count) {
  constexpr double kStartUs = 0.204, kBlockUs = 1.274, kCopyNsOfByte = 0.072e-3, kAloneNs = 1.152e-3;
  constexpr double kBytesOfUs = 41.7e3, kHalfLines = 0.687, kSharedNs = 0.179e-3, kTurnUs = 0.274;
  int const items = cut.height * (cut.width / kDepthwiseColumns) << cut.shift;  // of a thread
  int const resident = std::clamp((228 << 10) / (cut.shared_bytes + 3072), 1, kDepthwiseBlocks);
  // Pixels outside of the image are zeros that nobody reads.
  double const bytes = double(std::min(cut.rows, ceil_div(p.H, cut.step_h))) * BlockCut::kUnitBytes *
                       std::min(cut.span, ceil_div(p.W, cut.step_w) << cut.shift);
  double const waves = std::ceil(double(blocks) / (sm_count * resident));
  double const on_sm = std::max(double(std::min<std::int64_t>(resident, blocks)), std::ceil(double(blocks) / sm_count));
  double const alone_us =
      kBlockUs + bytes * kCopyNsOfByte + ceil_div(items, kDepthwiseThreads) * instructions(p, cut) * kAloneNs;
  double const copy_us = bytes / (cut.filters < 32 ? kBytesOfUs * kHalfLines : kBytesOfUs);
  double const turn_us = ceil_div(items, 32) * instructions(p, cut) * kSharedNs + copy_us + kTurnUs;
  return kStartUs + std::max(waves * alone_us, on_sm * turn_us);
}

// The best cut with a step along rows; down columns it is the dilation where it can be, since that never copies more.
BlockCut cut_along(Problem const &p, int step_w, int sm_count) {
  int const P = p.P > 0 ? p.P : 1, Q = p.Q > 0 ? p.Q : kDepthwiseColumns, N = p.N > 0 ? p.N : 1;
  BlockCut cut{}, best{};
  cut.step_h = p.stride_h == 1 ? p.dilation_h : 1, cut.step_w = step_w;
  cut.dilation_h = p.dilation_h / cut.step_h, cut.dilation_w = p.dilation_w / step_w;
  cut.classes = std::min(cut.step_h, P) * std::min(step_w, Q);
  int const outputs_down = ceil_div(P, cut.step_h), outputs_across = ceil_div(Q, step_w);  // of a class
  int const parts = ceil_div(outputs_across, kDepthwiseColumns);
  cut.ld = int(p.ranges[0].ld), cut.stored = owns_pad_lanes(p, p.ranges[0]) ? cut.ld : p.K;
  double shortest = 0;
  int most = 1;
  while (most < kMostShift && 4 << most < p.K) ++most;
  // Fewer than 16 channels, or a quarter of the most, read too few bytes at a time.
  int const fewest = std::max(std::min(most, 2), most - 2);
  for (cut.shift = most; cut.shift >= 1 && (cut.shift >= fewest || best.height == 0); --cut.shift) {
    cut.filters = 4 << cut.shift, cut.filter_tiles = ceil_div(p.K, cut.filters);
    for (int across = 1; across <= parts; across = across < 4 ? across + 1 : across * 2) {
      cut.width = ceil_div(parts, across) * kDepthwiseColumns, cut.across = ceil_div(outputs_across, cut.width);
      int const most_rows = std::max(1, kMostRounds * kDepthwiseThreads * kDepthwiseColumns / (cut.width << cut.shift));
      for (cut.height = 1; cut.height <= std::min(outputs_down, most_rows); ++cut.height) {
        cut.down = ceil_div(outputs_down, cut.height);
        std::int64_t const rows =
            std::int64_t(cut.height - 1) * p.stride_h + std::int64_t(p.R - 1) * cut.dilation_h + 1;
        // An odd number of pixels: lanes of neighbouring rows then touch different banks.
        std::int64_t const span =
            (std::int64_t(cut.width - 1) * p.stride_w + std::int64_t(p.S - 1) * cut.dilation_w + 1) | 1;
        if (std::max({rows, span, rows * span}) * BlockCut::kUnitBytes << cut.shift > kMostShared) break;
        cut.rows = int(rows), cut.span = int(span) << cut.shift;
        cut.shared_bytes = cut.pixels_bytes() + cut.filters * (p.R * p.S * size_of(p.type) + int(sizeof(float)));
        if (cut.shared_bytes > kMostShared) break;
        double const now = length_us(p, cut, cut.blocks(N), sm_count);
        if (best.height == 0 || now < shortest) best = cut, shortest = now;
      }
    }
  }
  return best;
}

}  // namespace

// Neighbouring taps have code of their own, but classes narrower than kDepthwiseColumns leave a thread little to do.
BlockCut depthwise_cut(Problem const &p, int sm_count) {
  BlockCut const whole = cut_along(p, 1, sm_count);
  if (p.stride_w > 1 || p.dilation_w == 1) return whole;
  BlockCut const apart = cut_along(p, p.dilation_w, sm_count);
  auto const us = [&](BlockCut const &cut) { return length_us(p, cut, cut.blocks(std::max(p.N, 1)), sm_count); };
  return whole.height == 0 || us(apart) < us(whole) ? apart : whole;
}

char const *obstacle_to_depthwise(Problem const &p) {
  return depthwise_cut(p, 1).height > 0 ? nullptr : "filters or strides this large";
}

double depthwise_us(Problem const &p, int sm_count) {
  BlockCut const cut = depthwise_cut(p, sm_count);
  return length_us(p, cut, cut.blocks(p.N), sm_count);
}

}  // namespace cutefuse::conv
