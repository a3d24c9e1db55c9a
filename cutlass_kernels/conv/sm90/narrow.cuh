// The main loop of small tiles. wgmma takes at least 60 clocks a step for 64 rows from shared memory, as long as for a
// width of 120, and half as long for rows in registers. But it takes those only as it multiplies, so that a warp cannot
// read the next k-tile's ahead: from shared memory all widths are faster. Pixels that are activated on their way pass
// through registers (activated_rows.cuh).
#pragma once

#include "conv/sm90/im2col.cuh"

namespace cutefuse::conv {

// Operands as they lie in a stage: filters as rows and pixels as columns or, kPixelRows, the other way round. A
// warpgroup's rows begin at row `first` of the tile. The pixels of a joined k-tile lie in two halves.
template <class Traits>
struct PlainRows {
  using Stage = typename Traits::Stage;
  int first;
  FilterRows<Traits> filters;
  StageRows<Traits, Traits::kPixels> pixels{false};

  CUTE_DEVICE PlainRows(Sm90Params const &params, int first_) : first(first_), filters(filter_rows<Traits>(params)) {}
  CUTE_DEVICE uint64_t pixels_at(Stage const &stage, int from, int i) const {
    if constexpr (Traits::kPairs) return pixels.operand_at(stage.x, from, i);
    auto const *const x = stage.x + from * Traits::kChannels;
    return further(operand(x, 8 * Traits::kPixelBytes, Traits::kSwizzle), i * kStepBytes);
  }
  // Of step `i` of a k-tile.
  CUTE_DEVICE uint64_t rows_at(Stage const &stage, int i) const {
    return Traits::kPixelRows ? pixels_at(stage, first, i) : filters.operand_at(stage.w, first, i);
  }
  CUTE_DEVICE uint64_t columns_at(Stage const &stage, int i) const {
    return Traits::kPixelRows ? filters.operand_at(stage.w, 0, i) : pixels_at(stage, 0, i);
  }
};

// As main_loop: issues the k-tiles [k_begin, k_end) of one tile, of which the last is still running when it returns.
// The channels that a source's last block lacks are zeros in both operands; a branch around them would cost more than
// they do. begun: the sums go on from what acc holds.
template <class Traits, int kN = Traits::kN, class Rows>
CUTE_DEVICE void narrow_loop(typename Traits::Sum (&acc)[kN / 2], Ring &ring, typename Traits::SharedStorage &shared,
                             Release const &release, Rows &rows, int k_begin, int k_end,
                             bool begun = Traits::kPreActivated) {
  using Element = typename Traits::Element;
  auto scale = begun ? SM90::GMMA::ScaleOut::One : SM90::GMMA::ScaleOut::Zero;  // the first step may overwrite acc
  int running = 0;  // the stage of the k-tile that was issued last
  // Waits for the next k-tile and issues it; returns the stage of the one before.
  auto const next = [&](uint32_t (&a)[Traits::kSteps][4]) {
    if constexpr (Traits::kPreActivated) rows.read_vectors();
    TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
    auto &stage = shared.stages[ring.stage];
    if constexpr (Traits::kPreActivated) rows.read(a, stage.x);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSteps; ++i) {
      if constexpr (Traits::kPreActivated) {
        uint64_t const b = FilterRows<Traits>(false).operand_at(stage.w, 0, i);
        wgmma<Element>(acc, scale, a[i][0], a[i][1], a[i][2], a[i][3], b);
      } else {
        uint64_t const b = rows.columns_at(stage, i);
        wgmma<Element>(acc, scale, rows.rows_at(stage, i), b);
      }
      scale = SM90::GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    if constexpr (Traits::kPreActivated) rows.advance();
    int const before = running;
    running = ring.stage;
    ring.advance();
    return before;
  };
  auto const next_and_free = [&](uint32_t (&a)[Traits::kSteps][4]) {
    int const before = next(a);
    warpgroup_wait<1>();
    release(&shared.empty[before]);
  };
  uint32_t operands[2][Traits::kSteps][4];  // of activated rows
  next(operands[0]);
  int k = k_begin + 1;
  if constexpr (Traits::kPreActivated) {
    CUTE_NO_UNROLL
    for (; k + 1 < k_end; k += 2) {
      next_and_free(operands[1]);
      next_and_free(operands[0]);
    }
  }
  // Once at most, with activated rows.
  CUTE_NO_UNROLL
  for (; k < k_end; ++k) next_and_free(operands[1]);
}

// Multiplies half of the next k-tile, one of two joined sources, and waits for the sums.
template <class Traits, class Rows>
CUTE_DEVICE void multiply_half(typename Traits::Sum (&acc)[1][Traits::kN / 2], Ring &ring,
                               typename Traits::SharedStorage &shared, Release const &release, Rows const &rows,
                               int half) {
  constexpr int kHalf = Traits::kSteps / 2;
  auto scale = SM90::GMMA::ScaleOut::Zero;
  TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
  auto &stage = shared.stages[ring.stage];
  warpgroup_arrive();
  CUTE_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    uint64_t const a = further(rows.rows_at(stage, i), half * 64);
    uint64_t const b = further(rows.columns_at(stage, i), half * 64 * Traits::kPixels);
    wgmma<typename Traits::Element>(acc[0], scale, a, b);
    scale = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  if (half == 1) ring.advance();
  warpgroup_wait<0>();
  if (half == 1) release(&shared.empty[ring.previous()]);
  fence_sums(acc);
}

// narrow_loop and finish_loop over the k-tiles [k_begin, k_end), which may begin and end within sources. Where the next
// source has another scale, or is the first joined one, the accumulators are drained into `sums`, the scaled sums of
// all sources. Two loops, since most launches need only the first, and one for all sources is slower.
template <class Traits>
CUTE_DEVICE void narrow_loop_and_drain(float (&sums)[Traits::kN / 2], Ring &ring,
                                       typename Traits::SharedStorage &shared, Sm90Params const &params,
                                       Release const &release, int row_w, int k_begin, int k_end) {
  Problem const &p = params.problem;
  int const taps = params.by_taps.divisor, whole = params.joined.from;
  for_each_value(sums, [](float &sum) { sum = 0.f; });
  PlainRows<Traits> rows(params, row_w);
  int begin = k_begin, end = 0;
  auto const drains_after = [&](int source) { return (params.drains_after >> source & 1) != 0; };
  auto const add_up = [&](int source) {
    int const last = cute::min(end, k_end);
    if (begin >= last) return;
    typename Traits::Sum acc[1][Traits::kN / 2];
    narrow_loop<Traits>(acc[0], ring, shared, release, rows, begin, last);
    finish_loop<Traits>(acc, ring, shared, release);
    drain(acc[0], p.scale[source], sums);
    begin = last;
  };
  CUTE_NO_UNROLL
  for (int source = 0; source < whole; ++source) {
    end += ceil_div(p.C[source], Traits::kChannels) * taps;
    if (drains_after(source) || source + 1 == whole) add_up(source);
  }
  // Two taps, or two sources, in a k-tile.
  rows.pixels = StageRows<Traits, Traits::kPixels>(true);
  CUTE_NO_UNROLL
  for (int source = whole; source < p.sources; ++source) {
    int const half = (source - whole) % 2, first = source - half;
    end += taps > 1 ? ceil_div(taps, 2) : 1 - half;
    if (taps == 1 && first + 1 < p.sources && drains_after(first)) {  // each has a scale of its own
      if (end > k_begin && end <= k_end) {
        typename Traits::Sum acc[1][Traits::kN / 2];
        multiply_half<Traits>(acc, ring, shared, release, rows, half);
        drain(acc[0], p.scale[source], sums);
      }
      begin = cute::max(k_begin, end);
    } else if (drains_after(source)) {
      add_up(source);
    }
  }
}

}  // namespace cutefuse::conv
