// Moments of the values of a row, and their merging: over the lanes of a warp, the warps of a block, the blocks of a
// cluster, in one exchange for both norms.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

// Count, mean and sum of squared deviations from it; RMSNorm fills the squares alone, which are those of the values.
// The mean is the sum `mean + rest`: float32 rows far from zero would show the rounding of a single one.
struct Moments {
  float squares = 0.f, mean = 0.f, rest = 0.f, count = 0.f;
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
    if (!kLayer) return {squares};
    float const rest = count > 0.f ? __fdividef(sum, count) : 0.f;
    return {squares - sum * rest, centre, rest, count};
  }
};

// The values of a thread are its vectors first, first + stride, ... of the row. kEqual: it has all of them.
template <bool kLayer, bool kEqual, class Element, int kVectors, bool kShifted, bool kPacked>
CUTE_DEVICE Moments moments_of(ForwardParams const &p, Row<Element, kShifted> const &row, int first, int stride,
                               Fragment<Element, kVectors, kPacked> &rX) {
  constexpr int kVec = kVector<Element>;
  Deviations<kLayer> of;
  int count = kVectors * kVec;
  if constexpr (kLayer) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Values<Element> const values = rX[i];
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) sum += values[j];
    }
    of.centre = sum * (1.f / (kVectors * kVec));
    if constexpr (!kEqual) {
      count = 0;
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) count += row.elements(i * stride + first);
      of.centre = count > 0 ? __fdividef(sum, float(count)) : 0.f;
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    int const v = i * stride + first;
    if (kLayer && !kEqual && !row.touches(v)) continue;  // zeros, which are not the mean
    if (kVectors == 4) rX.forget(i, p.zero);
    Values<Element> const values = rX[i];
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) {
      if (!kLayer || kEqual || row.has(v, j)) of.add(values[j]);
    }
  }
  return of.moments(float(count));
}

// The moments of a thread that has kCount whole vectors; vector(i) gives the values of one. In one pass: the mean of
// the first vector is close enough to the thread's for its squares not to cancel.
template <bool kLayer, int kCount, class Get>
CUTE_DEVICE Moments moments_of_vectors(Get const &vector) {
  Deviations<kLayer> of;
  constexpr int kVec = decltype(vector(0))::kElements;
  if constexpr (kLayer) {
    auto const values = vector(0);
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) of.centre += values[j];
    of.centre *= 1.f / kVec;
  }
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    auto const values = vector(i);
    CUTE_UNROLL
    for (int j = 0; j < kVec; ++j) of.add(values[j]);
  }
  return of.moments(float(kCount * kVec));
}

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

// Adds moments of equally many values, by Chan's form of Welford's update. The rest of the mean is lost, which is too
// small to change a 16-bit result.
CUTE_DEVICE void add_equal(Moments &mine, float mean, float squares) {
  float const delta = mean - mine.mean;
  mine.squares = mine.squares + squares + delta * delta * (0.5f * mine.count);
  mine.mean = 0.5f * (mine.mean + mean);
  mine.count *= 2.f;
}

// merge_lanes where every lane has equally many values: half of the shuffles.
CUTE_DEVICE void merge_equal(Moments &mine, int lanes) {
  for (int offset = 1; offset < lanes; offset *= 2) {
    float const mean = __shfl_xor_sync(0xffffffffu, mine.mean, offset);
    add_equal(mine, mean, __shfl_xor_sync(0xffffffffu, mine.squares, offset));
  }
}

// Squares, mean, rest and count of each warp of a row.
template <int kWarps>
using MomentSlots = Slots<kWarps, 4, 1>;

// The moments of a row that `lanes` lanes of a warp share (kWarp), or `lanes` threads in each of `cluster` blocks.
// kEqual: every thread has as many values as the others, and threads are a power of two.
template <bool kWarp, bool kLayer, bool kEqual, int kWarps>
CUTE_DEVICE Moments merge_row(Moments mine, int lanes, int cluster, MomentSlots<kWarps> &slots) {
  static_assert(kWarps <= 64, "a lane takes two warps at most");
  constexpr bool kChan = kLayer && kEqual;
  constexpr int kNumbers = !kLayer ? 1 : kEqual ? 2 : 4, kParts = kWarps > 32 ? 2 : 1;
  auto const merge = [&](int count) {
    if constexpr (kChan) return merge_equal(mine, count);
    Moments const part[1] = {mine};
    mine = merge_lanes<kLayer>(part, count);
  };
  if (kChan) mine.mean += mine.rest, mine.rest = 0.f;
  if constexpr (kWarp) {
    merge(lanes);
    return mine;
  }
  merge(32);
  if (lanes <= 32) return mine;
  cutlass::Array<float, kNumbers> numbers;
  numbers[0] = mine.squares;
  if constexpr (kLayer) numbers[1] = mine.mean;
  if constexpr (kLayer && !kEqual) numbers[2] = mine.rest, numbers[3] = mine.count;
  Team const team{lanes / 32, cluster, 0};
  slots.exchange(numbers, team, 0, 0, [] { __syncthreads(); });
  int const all = team.all(), width = kEqual ? min(all, 32) : lanes_of(all), from = threadIdx.x & (width - 1);
  auto const read = [&](Moments &to, int i) {
    auto const &values = slots.values[0];
    to.squares = values[0][i];
    if (kLayer) to.mean = values[1][i];
    if (kLayer && !kEqual) to.rest = values[2][i], to.count = values[3][i];
  };
  if constexpr (kChan) {
    read(mine, from);
    if (kParts == 2 && all > 32) add_equal(mine, slots.values[0][1][from + 32], slots.values[0][0][from + 32]);
    merge_equal(mine, width);
    return mine;
  }
  Moments part[kParts];
  CUTE_UNROLL
  for (int i = 0; i < kParts; ++i) {
    if ((kEqual && i == 0) || from + 32 * i < all) read(part[i], from + 32 * i);
  }
  return merge_lanes<kLayer>(part, width);
}

// The mean of a row and the factor of its deviations.
struct Statistics {
  float mean, rest, rstd;
};

template <class Element>
CUTE_DEVICE Statistics statistics_of(ForwardParams const &p, Moments const &of) {
  float const rstd = rsqrtf(of.squares * p.inverse + p.problem.epsilon);
  if (sizeof(Element) == 4) return {of.mean, of.rest, rstd};
  return {of.mean + of.rest, 0.f, rstd};  // too small to change a 16-bit result
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
