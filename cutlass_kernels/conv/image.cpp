#include <algorithm>
#include <cmath>

#include "conv/cuts.h"

namespace cutefuse::conv {
namespace {

constexpr int kMostChannels = 32, kMostOfImage = 8;  // of pixels; of the image of a network
constexpr int kMostShared = 80 << 10;                // of a block: two fit where a multiprocessor has the most
constexpr int kWidth = 32;                           // outputs of a row that a warp computes at a time: a part
constexpr int kMostAcross = 5, kMostRounds = 4;      // parts of a block in a row; parts of each of its warps

// How long a launch takes, about, in the time that a part takes a warp alone. Copying takes as long as one part. Where
// the instructions of many warps compete on an H200's 132 multiprocessors, both take longer.
double length(Tile const &tile, BlockCut const &cut, std::int64_t blocks) {
  int const parts = cut.width / kWidth * cut.height;
  double const on_sm = double(blocks) / 132, warps = on_sm * tile.warps_m;
  double const waves = std::max(1.0, on_sm / tile.blocks_per_sm);
  return std::max(1.0, 0.05 * warps) + std::max(ceil_div(parts, tile.warps_m) * waves, 0.09 * on_sm * parts);
}

}  // namespace

BlockCut image_cut(Tile const &tile, Problem const &p) {
  int const P = p.P > 0 ? p.P : 1, Q = p.Q > 0 ? p.Q : kWidth;  // a size that is not known stands in no way
  int const parts = ceil_div(Q, kWidth);
  BlockCut cut{};
  while (4 << cut.shift < p.C[0]) ++cut.shift;
  cut.steps = ceil_div(p.R * p.S << cut.shift, 4);
  cut.filters = ceil_div(std::min(p.K, BlockCut::kMostFilters), tile.n) * tile.n;
  cut.filter_tiles = ceil_div(p.K, cut.filters);
  cut.ld = int(p.ranges[0].ld), cut.stored = owns_pad_lanes(p, p.ranges[0]) ? cut.ld : p.K;
  BlockCut best = cut;
  double shortest = 0;
  for (int across = parts; across >= ceil_div(parts, kMostAcross); --across) {
    cut.width = ceil_div(parts, across) * kWidth, cut.across = ceil_div(Q, cut.width);
    for (cut.height = 1; cut.height <= std::min(P, kMostRounds * tile.warps_m * kWidth / cut.width); ++cut.height) {
      cut.down = ceil_div(P, cut.height);
      std::int64_t const rows = std::int64_t(cut.height - 1) * p.stride_h + std::int64_t(p.R - 1) * p.dilation_h + 1;
      std::int64_t const reach = std::int64_t(cut.width - 1) * p.stride_w + std::int64_t(p.S - 1) * p.dilation_w + 1;
      // Pixels of one unit may be copied in fours, from the last multiple of four in front of the first on.
      std::int64_t const span = cut.shift == 0 ? (reach + 6) / 4 * 4 : cut.shift == 1 ? reach : (reach + 7) / 8 * 8;
      if (std::max({rows, span, rows * span}) * BlockCut::kUnitBytes > kMostShared) break;
      cut.rows = int(rows), cut.span = int(span) << cut.shift;
      cut.columns_bytes = (8 * p.stride_w << cut.shift) * BlockCut::kUnitBytes;
      cut.shared_bytes = cut.pixels_bytes() + cut.filters_bytes() + BlockCut::kMostFilters * 4 + (cut.steps + 1) * 16;
      if (cut.shared_bytes > kMostShared) break;
      double const now = length(tile, cut, cut.blocks(p.N));
      if (best.height == 0 || now < shortest) best = cut, shortest = now;
    }
  }
  return best;
}

char const *obstacle_to_image(Tile const &tile, Problem const &p) {
  if (p.sources > 1 || p.outputs > 1 || p.residual != Residual::kNone) return "several sources, outputs or a residual";
  if (p.C[0] > (is_image(p) ? kMostOfImage : kMostChannels)) return "this many channels";
  return image_cut(tile, p).height > 0 ? nullptr : "filters or strides this large";
}

double image_us(Tile const &tile, Problem const &p, int sm_count) {
  constexpr double kCopyUs = 1.12, kCopyNsOfByte = 0.028;  // of the first pixels and filters; of each block's pixels
  constexpr double kActivationUs = 2.7;  // of 16 filters by exponentials, whose latency the other warps hide
  constexpr double kApartNs = 42;        // longer a step takes whose pixels are a line of shared memory apart, or more
  constexpr double kAloneStepUs = 0.157, kAloneUs = 0.73;  // of a warp's filters, where no other is in its way
  constexpr int kSchedulers = 4;                           // of a multiprocessor
  // Copying filters has no term of its own: kCopyUs holds it, the same for all sizes.
  BlockCut const cut = image_cut(tile, p);
  Activation const kind = p.activation;
  bool const clamps = kind == Activation::kNone || kind == Activation::kRelu || kind == Activation::kClip;
  double const activation_us = clamps ? 0 : cut.filters / 16 * kActivationUs / (tile.blocks_per_sm * tile.warps_m);
  bool const apart = BlockCut::kUnitBytes * p.stride_w << cut.shift >= 128;
  int const passes = cut.filters / tile.n;
  double const step_us = (cut.filters * tile.channel_ns + (apart ? passes * kApartNs : 0)) * 1e-3;
  double const part_us = cut.steps * step_us + tile.block_us + activation_us;
  std::int64_t const blocks = cut.blocks(p.N);
  int const parts = cut.height * cut.width / kWidth;
  double const on_sm = std::max(1.0, double(blocks) / sm_count);
  double const waves = std::max(1.0, on_sm / tile.blocks_per_sm);
  double const alone_us = passes * (cut.steps * kAloneStepUs + kAloneUs);
  return kCopyUs + on_sm * cut.pixels_bytes() * kCopyNsOfByte * 1e-3 +
         std::max(double(blocks) * parts / (kSchedulers * sm_count) * part_us,
                  waves * ceil_div(parts, tile.warps_m) * alone_us);
}

}  // namespace cutefuse::conv
