// The main loop of small tiles. When wgmma reads its 64 rows from shared memory, it takes at least as long as for a
// width of 120. So a narrower tile reads the rows of a k-tile into registers, while the tensor cores work on the k-tile
// before. The rows are the filters, or pixels that are activated on their way (activated_rows.cuh).
#pragma once

#include "conv/sm90/im2col.cuh"

namespace cutefuse::conv {

// A warp's 16 rows of a k-tile as wgmma's first operand: those of its warpgroup begin at row `first` of `rows`. Each
// has 128 bytes, side by side or, of two blocks, in two halves with all first ones before all second ones.
template <class Traits>
CUTE_DEVICE void read_rows(uint32_t (&a)[Traits::kSteps][4], typename Traits::Element const *rows, int first,
                           bool halves) {
  int const lane = threadIdx.x % 32, row = first + threadIdx.x % 128 / 32 * 16 + lane % 16;
  // Byte of this lane's first chunk, with SWIZZLE_128B or _64B: of the next ones two bits differ.
  int const whole_row = row * 128 + (lane / 16 ^ row % 8) * 16, half_row = row * 64 + (lane / 16 ^ row / 2 % 4) * 16;
  int const begin = halves ? half_row : whole_row, second_half = halves ? Traits::kRows * 64 : 64;
  CUTE_UNROLL
  for (int i = 0; i < Traits::kSteps; ++i) {
    int const at = begin ^ i % 2 * 32 ^ i / 2 * second_half;
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const *>(reinterpret_cast<char const *>(rows) + at), a[i][0],
                            a[i][1], a[i][2], a[i][3]);
  }
}

// The filters as rows: those of a warpgroup begin at row `first` of the tile.
template <class Traits>
struct PlainRows {
  int first;
  bool halves;  // as in read_rows

  CUTE_DEVICE void read(uint32_t (&a)[Traits::kSteps][4], typename Traits::SharedStorage const &shared, int stage) {
    read_rows<Traits>(a, shared.stages[stage].w, first, halves);
  }
};

template <class Op, class Sum, int kRegisters, size_t... I>
CUTE_DEVICE void wgmma(Sum (&acc)[kRegisters], uint32_t const (&a)[4], uint64_t b, SM90::GMMA::ScaleOut scale,
                       std::index_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, acc[I]..., scale);
}

// As main_loop: issues the k-tiles [k_begin, k_end) of one tile, of which the last is still running when it returns.
// The channels that a source's last block lacks are zeros in both operands; a branch around them would cost more than
// they do. begun: the sums go on from what acc holds.
template <class Traits, int kN = Traits::kN, class Rows>
CUTE_DEVICE void narrow_loop(typename Traits::Sum (&acc)[kN / 2], Ring &ring, typename Traits::SharedStorage &shared,
                             Release const &release, Rows &rows, int k_begin, int k_end,
                             bool begun = Traits::kPreActivated) {
  using Element = typename Traits::Element;
  using Step = Shape<_64, Int<kN>, Int<kStepBytes / int(sizeof(Element))>>;
  using Sum = cute::conditional_t<cute::is_same_v<typename Traits::Sum, uint32_t>, int32_t, float>;
  using Op = decltype(SM90::GMMA::rs_op_selector<Element, Element, Sum, Step>());
  auto scale = begun ? SM90::GMMA::ScaleOut::One : SM90::GMMA::ScaleOut::Zero;  // the first step may overwrite acc
  uint32_t operands[2][Traits::kSteps][4];
  int running = 0;  // the stage of the k-tile that was issued last
  // Waits for the next k-tile and issues it; returns the stage of the one before.
  auto const next = [&](uint32_t (&a)[Traits::kSteps][4]) {
    TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
    rows.read(a, shared, ring.stage);
    auto &stage = shared.stages[ring.stage];
    uint64_t const b = operand(Traits::kPreActivated ? stage.w : stage.x, 8 * Traits::kPixelBytes, Traits::kSwizzle);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSteps; ++i) {
      wgmma<Op>(acc, a[i], b + i * kStepBytes / 16, scale, std::make_index_sequence<kN / 2>{});
      scale = SM90::GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
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
  next(operands[0]);
  int k = k_begin + 1;
  CUTE_NO_UNROLL
  for (; k + 1 < k_end; k += 2) {
    next_and_free(operands[1]);
    next_and_free(operands[0]);
  }
  if (k < k_end) next_and_free(operands[1]);
}

// narrow_loop and finish_loop over the k-tiles [k_begin, k_end), which may begin and end within sources. Where the next
// source has another scale the accumulators are drained into `sums`, the scaled sums of all sources.
template <class Traits>
CUTE_DEVICE void narrow_loop_and_drain(float (&sums)[Traits::kN / 2], Ring &ring,
                                       typename Traits::SharedStorage &shared, Sm90Params const &params,
                                       Release const &release, int row_w, int k_begin, int k_end) {
  Problem const &p = params.problem;
  int const taps = params.by_taps.divisor;
  CUTE_UNROLL
  for (int i = 0; i < Traits::kN / 2; ++i) sums[i] = 0.f;
  PlainRows<Traits> rows{row_w, taps > 1};
  int begin = k_begin, end = 0;
  CUTE_NO_UNROLL
  for (int source = 0; source < p.sources; ++source) {
    end += ceil_div(p.C[source], Traits::kChannels) * taps;
    if ((params.drains_after >> source & 1) == 0) continue;
    int const last = cute::min(end, k_end);
    if (begin >= last) continue;
    typename Traits::Sum acc[1][Traits::kN / 2];
    narrow_loop<Traits>(acc[0], ring, shared, release, rows, begin, last);
    finish_loop<Traits>(acc, ring, shared, release);
    drain(acc[0], p.scale[source], sums);
    begin = last;
  }
}

}  // namespace cutefuse::conv
