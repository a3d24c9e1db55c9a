// Moments of the values of a row, and their merging: over the lanes of a warp, the warps of a block, the blocks of a
// cluster, in one exchange for both norms.
#pragma once

#include "row.cuh"

namespace cutefuse::row_norm {

// Count, mean and sum of squared deviations from the mean. RMSNorm fills in `squares` alone, with the squares of the
// values. The mean is `mean + rest`: in float32 rows far from zero, the rounding of a single number would show.
struct Moments {
  float count = 0.f, mean = 0.f, rest = 0.f, squares = 0.f;
};

// Sums of deviations from a centre close to the mean, and of their squares, as a thread collects them.
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

// The moments of a thread that has the vectors first, first + stride, ... of the row. kEqual: the row has all of them.
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
  all.mean = __fmul_rn(
      sum, inverse);  // __fmul_rn is not contracted with the subtraction: `rest` belongs to the rounded product
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

// merge_row over the blocks of a cluster; its warps' moments arrive in every block by st.async.
template <bool kLayer, bool kEqual, int kWarps>
CUTE_DEVICE Moments merge_cluster(Moments mine, int cluster, MomentSlots<kWarps> &slots) {
  static_assert(kWarps <= 64, "a lane takes two warps at most");
  constexpr bool kChan = kLayer && kEqual;
  int const warps = blockDim.x / 32, lane = threadIdx.x % 32, all = warps * cluster;
  int const to = int(cute::block_rank_in_cluster()) * warps + threadIdx.x / 32;
  if constexpr (kChan) {
    mine.mean += mine.rest, mine.rest = 0.f;
    merge_equal(mine, 32);
  } else {
    Moments const own[1] = {mine};
    mine = merge_lanes<kLayer>(own, 32);
  }
  if (lane < cluster) {
    store_remote(&slots.squares[to], &slots.arrived, lane, mine.squares);
    if (kLayer) store_remote(&slots.mean[to], &slots.arrived, lane, mine.mean);
    if (kLayer && !kEqual) {
      store_remote(&slots.rest[to], &slots.arrived, lane, mine.rest);
      store_remote(&slots.count[to], &slots.arrived, lane, mine.count);
    }
  }
  constexpr int kNumbers = !kLayer ? 1 : kEqual ? 2 : 4;
  if (threadIdx.x == 0) cute::set_barrier_transaction_bytes(slots.arrived, all * kNumbers * int(sizeof(float)));
  wait_for_remote(slots.arrived, 0);
  if constexpr (kChan) {
    int const lanes = min(all, 32), from = lane & (lanes - 1);
    mine.squares = slots.squares[from], mine.mean = slots.mean[from];
    if (all > 32) add_equal(mine, slots.mean[from + 32], slots.squares[from + 32]);
    merge_equal(mine, lanes);
    return mine;
  }
  Moments part[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const from = lane + 32 * i;
    if (from >= all) continue;
    part[i].squares = slots.squares[from];
    if (kLayer) part[i].mean = slots.mean[from], part[i].rest = slots.rest[from], part[i].count = slots.count[from];
  }
  return merge_lanes<kLayer>(part, 32);
}

// The mean of a row and the factor of its deviations.
struct Statistics {
  float mean, rest, rstd;
};

template <class Element>
CUTE_DEVICE Statistics statistics_of(ForwardParams const &p, Moments const &of) {
  float const rstd = rsqrtf(of.squares * p.inverse + p.problem.epsilon);
  if (sizeof(Element) == 4) return {of.mean, of.rest, rstd};
  return {of.mean + of.rest, 0.f, rstd};  // a separate rest is too small to change a 16-bit result
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
