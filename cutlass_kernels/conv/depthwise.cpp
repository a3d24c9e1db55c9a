#include "conv/depthwise.h"

#include <algorithm>

#include "architecture.h"

namespace cutefuse::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kMostShared = 36 << 10;  // of a tile: three blocks fit with two each where a multiprocessor has the most
constexpr int kMostShift = 4;          // 64 channels of a block: whole lines of 128 bytes
constexpr int kMostRounds = 8;         // outputs of a thread, kDepthwiseColumns at a time

// Microseconds of a launch whose blocks share `sm_count` multiprocessors. A block reads pixels, or computes; other
// blocks of its multiprocessor do the other at the same time.
double length_us(Problem const &p, BlockCut const &cut, std::int64_t blocks, int sm_count) {
  constexpr double kBytesOfUs = 30e3;  // into a multiprocessor, where all of them read
  constexpr double kInstructionNs = 2 / 1.7;
  int const rounds = ceil_div(cut.height * (cut.width / kDepthwiseColumns) << cut.shift, kThreads);
  int const pixels = (kDepthwiseColumns - 1) * p.stride_w + p.S;  // of a filter row
  double const instructions = p.R * (p.S * (4 * kDepthwiseColumns + 1) + 6 * pixels) + 60;
  double const compute_us = rounds * instructions * kInstructionNs * 1e-3;
  double const copy_us = cut.pixels_bytes() / kBytesOfUs;
  double const on_sm = std::max(1.0, double(blocks) / sm_count);
  return 1.5 + on_sm * std::max(compute_us, copy_us) + std::min(compute_us, copy_us);
}

}  // namespace

BlockCut depthwise_cut(Problem const &p) {
  constexpr int kSmCount = 132;  // a cut must not depend on the GPU: workspaces and tests ask for it without one
  int const P = p.P > 0 ? p.P : 1, Q = p.Q > 0 ? p.Q : kDepthwiseColumns, N = p.N > 0 ? p.N : 1;
  int const parts = ceil_div(Q, kDepthwiseColumns);
  BlockCut cut{}, best{};
  cut.ld = int(p.ranges[0].ld), cut.stored = owns_pad_lanes(p, p.ranges[0]) ? cut.ld : p.K;
  double shortest = 0;
  int most = 1;
  while (most < kMostShift && 4 << most < p.K) ++most;
  for (cut.shift = most; cut.shift >= std::max(1, most - 2); --cut.shift) {
    cut.filters = 4 << cut.shift, cut.filter_tiles = ceil_div(p.K, cut.filters);
    for (int across = 1; across <= parts; across = across < 4 ? across + 1 : across * 2) {
      cut.width = ceil_div(parts, across) * kDepthwiseColumns, cut.across = ceil_div(Q, cut.width);
      int const most_rows = std::max(1, kMostRounds * kThreads * kDepthwiseColumns / (cut.width << cut.shift));
      for (cut.height = 1; cut.height <= std::min(P, most_rows); ++cut.height) {
        cut.down = ceil_div(P, cut.height);
        std::int64_t const rows = std::int64_t(cut.height - 1) * p.stride_h + std::int64_t(p.R - 1) * p.dilation_h + 1;
        // An odd number of pixels: lanes of neighbouring rows then touch different banks.
        std::int64_t const span =
            (std::int64_t(cut.width - 1) * p.stride_w + std::int64_t(p.S - 1) * p.dilation_w + 1) | 1;
        if (std::max({rows, span, rows * span}) * BlockCut::kUnitBytes << cut.shift > kMostShared) break;
        cut.rows = int(rows), cut.span = int(span) << cut.shift;
        cut.shared_bytes = cut.pixels_bytes() + cut.filters * (p.R * p.S * size_of(p.type) + int(sizeof(float)));
        if (cut.shared_bytes > kMostShared) break;
        double const now = length_us(p, cut, cut.blocks(N), kSmCount);
        if (best.height == 0 || now < shortest) best = cut, shortest = now;
      }
    }
  }
  return best;
}

std::int64_t depthwise_blocks(Tile const &tile, Target const &target, BlockCut &cut, std::int64_t tiles) {
  int const bytes = cut.shared_bytes + cut.pixels_bytes();
  int const resident = std::clamp((shared_limit(target.sm) + 1024) / (bytes + 1024), 1, tile.blocks_per_sm);
  std::int64_t const slots = std::int64_t(target.sm_count) * resident;
  if (tiles <= slots) return tiles;
  cut.shared_bytes = bytes;
  return cut.filter_tiles * std::max<std::int64_t>(1, slots / cut.filter_tiles);  // a block keeps its channels
}

char const *obstacle_to_depthwise(Problem const &p) {
  return depthwise_cut(p).height > 0 ? nullptr : "filters or strides this large";
}

double depthwise_us(Problem const &p, int sm_count) {
  BlockCut const cut = depthwise_cut(p);
  return length_us(p, cut, cut.blocks(p.N), sm_count);
}

}  // namespace cutefuse::conv
