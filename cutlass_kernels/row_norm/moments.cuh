// Moments of the values of a row, and their merging: over the lanes of a warp, the warps of a block, the blocks of a
// cluster, in one exchange for both norms.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

// Count, mean and sum of squared deviations from it; RMSNorm fills the squares alone, and they are of the values. The
// mean is the sum `mean + rest`: float32 rows far from zero would show the rounding of a single one.
struct Moments {
  float count = 0.f, mean = 0.f, rest = 0.f, squares = 0.f;
};

// What threads collect about a centre close to their mean: sums of deviations and of their squares.
template <bool kLayer>
struct Deviations {
  float centre = 0.f, sum = 0.f, squares = 0.f;

  CUTE_DEVICE void add(float value) {
    float const centred = kLayer ? value - centre : value;
    if (kLayer) sum += centred;
    squares += centred * centred;
  }
  CUTE_DEVICE Moments moments(float count) const {
    if (!kLayer) return {0.f, 0.f, 0.f, squares};
    float const rest = count > 0.f ? __fdividef(sum, count) : 0.f;
    return {count, centre, rest, squares - sum * rest};
  }
};

// Merges what `lanes` neighbouring lanes have, a power of two; all get the same bits. Two passes: the mean first, then
// deviations from it, so that nothing cancels, and what rounding took from the mean is in `rest`.
template <bool kLayer, int kParts>
CUTE_DEVICE Moments merge_lanes(Moments const (&part)[kParts], int lanes) {
  Moments all;
  if constexpr (!kLayer) {
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) all.squares += part[i].squares;
    for (int offset = 1; offset < lanes; offset *= 2) all.squares += __shfl_xor_sync(0xffffffffu, all.squares, offset);
    return all;
  }
  float sum = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kParts; ++i) all.count += part[i].count, sum += part[i].count * part[i].mean;
  for (int offset = 1; offset < lanes; offset *= 2) {
    all.count += __shfl_xor_sync(0xffffffffu, all.count, offset);
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  float const inverse = all.count > 0.f ? __fdividef(1.f, all.count) : 0.f;
  all.mean = __fmul_rn(sum, inverse);  // not contracted with the subtraction: `rest` is of the rounded product
  float deviations = 0.f;
  CUTE_UNROLL
  for (int i = 0; i < kParts; ++i) {
    float const delta = part[i].mean - all.mean + part[i].rest, weighted = part[i].count * delta;
    deviations += weighted;
    all.squares += part[i].squares + weighted * delta;
  }
  for (int offset = 1; offset < lanes; offset *= 2) {
    deviations += __shfl_xor_sync(0xffffffffu, deviations, offset);
    all.squares += __shfl_xor_sync(0xffffffffu, all.squares, offset);
  }
  all.rest = deviations * inverse;
  all.squares -= deviations * all.rest;
  return all;
}

// The same where every lane has equally many values, by Chan's form of Welford's update: half of the shuffles. The rest
// of the mean is lost, which a 16-bit result does not show.
CUTE_DEVICE void merge_equal(Moments &mine, int lanes) {
  for (int offset = 1; offset < lanes; offset *= 2) {
    float const mean = __shfl_xor_sync(0xffffffffu, mine.mean, offset);
    float const squares = __shfl_xor_sync(0xffffffffu, mine.squares, offset), delta = mean - mine.mean;
    mine.squares = mine.squares + squares + delta * delta * (0.5f * mine.count);
    mine.mean = 0.5f * (mine.mean + mean);
    mine.count *= 2.f;
  }
}

// Where the warps of a row leave their moments; `arrived` counts what came from other blocks of a cluster.
template <int kWarps>
struct MomentSlots {
  float squares[kWarps], mean[kWarps], rest[kWarps], count[kWarps];
  uint64_t arrived;
};

// The moments of a row that `lanes` lanes of a warp share (kWarp), or all warps of a block. kEqual: every thread has as
// many values as the others, and threads are a power of two.
template <bool kWarp, bool kLayer, bool kEqual, int kWarps>
CUTE_DEVICE Moments merge_row(Moments mine, int lanes, MomentSlots<kWarps> &slots) {
  auto const merge = [&](int count) {
    if constexpr (kLayer && kEqual) return merge_equal(mine, count);
    Moments const part[1] = {mine};
    mine = merge_lanes<kLayer>(part, count);
  };
  if (kLayer && kEqual) mine.mean += mine.rest, mine.rest = 0.f;
  if constexpr (kWarp) {
    merge(lanes);
    return mine;
  }
  merge(32);
  if (lanes <= 32) return mine;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = lanes / 32;
  if (lane == 0) {
    slots.squares[warp] = mine.squares;
    if (kLayer) slots.mean[warp] = mine.mean;
    if (kLayer && !kEqual) slots.rest[warp] = mine.rest, slots.count[warp] = mine.count;
  }
  __syncthreads();
  int const width = kEqual ? warps : 1 << (32 - __clz(warps - 1)), from = lane & (width - 1);
  bool const there = kEqual || from < warps;
  mine.squares = there ? slots.squares[from] : 0.f;
  if (kLayer) mine.mean = there ? slots.mean[from] : 0.f;
  if (kLayer && !kEqual) mine.rest = there ? slots.rest[from] : 0.f, mine.count = there ? slots.count[from] : 0.f;
  merge(width);
  return mine;
}

// The mean of a row and what its deviations are multiplied with.
struct Statistics {
  float mean, rest, rstd;
};

template <class Element>
CUTE_DEVICE Statistics statistics_of(ForwardParams const &p, Moments const &of) {
  float const rstd = rsqrtf(of.squares * p.inverse + p.problem.epsilon);
  if (sizeof(Element) == 4) return {of.mean, of.rest, rstd};
  return {of.mean + of.rest, 0.f, rstd};  // a 16-bit result does not see the rest of the rounding
}

CUTE_DEVICE void save_statistics(ForwardParams const &p, int64_t row, Statistics const &of) {
  if (p.mean != nullptr) p.mean[row] = of.mean + of.rest;
  if (p.rstd != nullptr) p.rstd[row] = of.rstd;
}

// (x - mean) * rstd * gamma + beta.
template <bool kLayer, class Numbers, class Gamma, class Beta>
CUTE_DEVICE Numbers normalise(Numbers rY, Statistics const &of, Gamma const &gamma, Beta const &beta) {
  Numbers const rG = gamma.values();
  CUTE_UNROLL
  for (int j = 0; j < rY.size(); ++j) {
    if (kLayer) rY[j] -= of.mean;
    if (kLayer && rY.size() == 4) rY[j] -= of.rest;  // float32
    rY[j] = rY[j] * of.rstd * rG[j];
  }
  if constexpr (kLayer) {
    Numbers const rB = beta.values();
    CUTE_UNROLL
    for (int j = 0; j < rY.size(); ++j) rY[j] += rB[j];
  }
  return rY;
}

}  // namespace cutefuse::row_norm
