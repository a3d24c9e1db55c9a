// How the Ampere path stores the sums of a tile that started at the bias: residual, activation, and the place of a
// vector of output channels; or, as one of several splits, into the workspace.
#pragma once

#include "conv/epilogue.cuh"
#include "conv/sm80/copy.cuh"
#include "conv/sm80/teams.cuh"

namespace cutefuse::conv {

// Neighbouring channels of one pixel that one thread holds or finishes at a time.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Channels {
  T v[kCount];
};
template <class T>
using Pair = Channels<T, 2>;

template <class Output>
__device__ __forceinline__ Pair<Output> &pair_at(Output *at) {
  return *reinterpret_cast<Pair<Output> *>(at);
}

// Clamps both to lo <= x <= hi; a NaN is propagated.
template <class Output>
__device__ __forceinline__ Pair<Output> clamp_nan(Pair<Output> x, Pair<Output> lo, Pair<Output> hi) {
  if constexpr (sizeof(Output) == 4) {
    return {min_nan(max_nan(x.v[0], lo.v[0]), hi.v[0]), min_nan(max_nan(x.v[1], lo.v[1]), hi.v[1])};
  } else {
    using Two = std::conditional_t<std::is_same_v<Output, cutlass::half_t>, __half2, __nv_bfloat162>;
    auto const two = [](Pair<Output> const &pair) { return reinterpret_cast<Two const &>(pair); };
    Two y = __hmin2_nan(__hmax2_nan(two(x), two(lo)), two(hi));
    return reinterpret_cast<Pair<Output> &>(y);
  }
}

// Rounds two sums to the output's type. ReLU, Clip and none are done here, two at a time: rounding is monotonic, so it
// may precede them. The other activations, and those before a residual, work on the sums.
template <class Output>
struct Clamp {
  Pair<Output> lo, hi;
  bool is_all;

  __device__ __forceinline__ explicit Clamp(Problem const &p) {
    Activation const kind = p.activation;
    bool const clips = kind == Activation::kClip, is_relu = kind == Activation::kRelu;
    is_all = (clips || is_relu || kind == Activation::kNone) && p.residual != Residual::kAfter;
    float const infinity = __int_as_float(0x7f800000);
    Output const low = Output(!is_all ? -infinity : clips ? p.lo : is_relu ? 0.f : -infinity);
    Output const high = Output(is_all && clips ? p.hi : infinity);
    lo = {low, low}, hi = {high, high};
  }

  __device__ __forceinline__ Pair<Output> operator()(float a, float b) const {
    return clamp_nan(Pair<Output>{Output(a), Output(b)}, lo, hi);
  }
};

// Where channel k of the K goes: the output that holds it, which may be a range of wider pixels.
template <class Output>
struct Target {
  static constexpr int kVector = 16 / sizeof(Output);
  Output *y;  // this channel at pixel 0
  int64_t ld;
  int channels;        // of the output, from this one on
  bool whole, padded;  // the 16-byte vector from here on may be written at once; it holds pad lanes, which become zeros

  __device__ __forceinline__ Target(Params const &params, int k) {
    Problem const &p = params.problem;
    int j = 0;
    while (j + 1 < p.outputs && k >= p.ranges[j].last) ++j;
    OutputRange const &range = p.ranges[j];
    int const at = k - range.first, width = range.last - range.first;
    y = static_cast<Output *>(params.ys[j]) + at;
    ld = range.ld, channels = range.last - k;
    // Pixels of float32 and dense ones have no pad lanes; those of others are written where they hold no other
    // channels.
    padded = channels < kVector;
    whole =
        padded ? sizeof(Output) == 2 && !p.dense && ld == ceil_div(width, kVector) * kVector : (ld | at) % kVector == 0;
  }
};

// Calls f(row, n) for each pixel of the tile that exists and the column n of this thread: neighbouring lanes have
// neighbouring channels, which may lie anywhere.
template <class Traits, int kAtOnce, class F>
__device__ __forceinline__ void each_of_column(Params const &params, Place const &place, F const &f) {
  constexpr int kN = Traits::kN, kRows = Traits::kThreads / kN;
  static_assert(Traits::kThreads % kN == 0 && Traits::kM % kRows == 0);
  int const n = place.thread % kN, first = place.thread / kN;
  int const rows = min(Traits::kM, params.problem.N * params.problem.P * params.problem.Q - place.m0);
#pragma unroll kAtOnce
  for (int row = first; row < rows; row += kRows) f(row, n);
}

// Fetches the residual of a block's outputs into the place where they will be staged, and waits for it.
template <class Traits, class Staging>
__device__ __forceinline__ void load_residual(Params const &params, Staging const &sY, Place const &place) {
  Problem const &p = params.problem;
  using Output = typename Traits::Output;
  Output const *const z = static_cast<Output const *>(params.z);
  if ((p.ldz | p.residual_start) % Traits::kVector == 0) {
    int const n = place.thread % Traits::kChunksY * Traits::kVector, k = place.n0 + n;
#pragma unroll 4
    for (int i = 0; i < Traits::kM; i += Traits::kRowsY) {
      int const row = i + place.thread / Traits::kChunksY, m = place.m0 + row;
      bool const exists = m < p.N * p.P * p.Q && k < p.K;
      g2s(&sY(row, n), z + (exists ? m * p.ldz + k : 0), exists ? 16 : 0);
    }
  } else {
    constexpr int kAtOnce = sizeof(Output) == 4 ? 1 : 4;  // what cp.async copies needs no register to arrive in
    each_of_column<Traits, kAtOnce>(params, place, [&](int row, int n) {
      bool const exists = place.n0 + n < p.K;
      Output const *const from = z + (exists ? (place.m0 + row) * p.ldz + place.n0 + n : 0);
      if constexpr (sizeof(Output) == 4) {
        g2s_word(&sY(row, n), from, exists);
      } else {
        sY(row, n) = exists ? *from : Output(0);
      }
    });
  }
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();
}

// Which (m,n) of the tile each of a thread's sums is: (MMA,MMA_M,MMA_N).
template <class Traits>
__device__ __forceinline__ auto coordinates(int thread) {
  auto const thread_mma = typename Traits::Mma{}.get_slice(thread);
  return thread_mma.partition_C(make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kN>>{}));
}

// The sums start at the bias, whose loads overlap those of the first tiles; of several splits, only the first adds it,
// and of two teams the first.
template <class Traits, class Acc>
__device__ __forceinline__ void start_at_bias(Params const &params, Place const &place, Acc &acc) {
  Problem const &p = params.problem;
  Tensor tYcY = coordinates<Traits>(place.thread);
  bool const adds = place.split == 0 && is_first_team<Traits>(place.thread);
  CUTE_UNROLL
  for (int j = 0; j < size<2>(acc); ++j) {
    int const k = place.n0 + get<1>(tYcY(0, 0, j));  // this thread holds channels k and k + 1
    float const bias[2] = {adds && k < p.K ? __ldg(params.b + k) : 0.f,
                           adds && k + 1 < p.K ? __ldg(params.b + k + 1) : 0.f};
    CUTE_UNROLL
    for (int i = 0; i < size(acc(_, _, 0)); ++i) acc(_, _, j)(i) = bias[i % 2];
  }
}

// Residual and activation in registers, r2s into the shared memory that the main loop no longer needs, then 16-byte
// s2g.
template <class Traits, class Acc>
__device__ __forceinline__ void store_tile(Params const &params, Acc &acc, unsigned char *shared) {
  using Output = typename Traits::Output;
  constexpr int kVector = Traits::kVector;
  Problem const &p = params.problem;
  Place const place = Place::of<Traits>(params);
  int const pixels = p.N * p.P * p.Q;
  bool const finishes = is_first_team<Traits>(place.thread);
  if (params.splits > 1) {  // conv_finish adds the sums: [split][pixel][channel]
    Tensor tYcY = coordinates<Traits>(place.thread);
    float *const part = params.partials + int64_t(place.split) * pixels * split_ld(p);
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) {
      int const m = place.m0 + get<0>(tYcY(i)), k = place.n0 + get<1>(tYcY(i));
      if (finishes && m < pixels && k < split_ld(p)) {
        __stcg(reinterpret_cast<float2 *>(part + int64_t(m) * split_ld(p) + k), make_float2(acc(i), acc(i + 1)));
      }
    }
    return;
  }

  Tensor sY = make_tensor(make_smem_ptr(reinterpret_cast<Output *>(shared)), typename Traits::SmemY{});  // (M,N)
  Tensor tYsY = typename Traits::Mma{}.get_slice(place.thread).partition_C(sY);  // (MMA,MMA_M,MMA_N)
  auto const add_residual = [&] {  // each thread reads just the elements that it will overwrite
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) {
      Pair<Output> const z = pair_at(&tYsY(i));
      acc(i) += float(z.v[0]), acc(i + 1) += float(z.v[1]);
    }
  };
  if (p.residual != Residual::kNone) load_residual<Traits>(params, sY, place);
  if (finishes) {
    if (p.residual == Residual::kBefore) add_residual();
    Clamp<Output> const clamp(p);
    if (!clamp.is_all) {
      CUTE_UNROLL
      for (int j = 0; j < size<2>(acc); ++j) activate(acc(_, _, j), p);  // converting all at once needs more registers
    }
    if (p.residual == Residual::kAfter) add_residual();
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) pair_at(&tYsY(i)) = clamp(acc(i), acc(i + 1));
  }
  __syncthreads();

  // Read again for 4-byte outputs, so that nothing below is computed while registers hold the sums; the wide 16-bit
  // tiles would spill by that.
  Place const out = sizeof(Output) == 4 ? Place::of<Traits>(params) : place;
  int const n = out.thread % Traits::kChunksY * kVector, k = out.n0 + n;
  int const first_row = out.thread / Traits::kChunksY, first_m = out.m0 + first_row, rows_left = pixels - first_m;
  if (k < p.K) {
    Target<Output> const target(params, k);
    if (target.whole) {
      CUTE_NO_UNROLL
      for (int i = 0; i < Traits::kM && target.padded; i += Traits::kRowsY) {
        for (int v = target.channels; v < kVector; ++v) sY(i + first_row, n + v) = Output(0);
      }
      auto const row = [&](int i) { return *reinterpret_cast<uint4 *>(&sY(i + first_row, n)); };
      if (sizeof(Output) == 2 && p.spread > 1) {
        CUTE_NO_UNROLL
        for (int i = 0; i < Traits::kM && i < rows_left; i += Traits::kRowsY) {
          int64_t const pixel = spread_pixel(p, params.by_row, first_m + i);
          *reinterpret_cast<uint4 *>(target.y + pixel * target.ld) = row(i);
        }
        return;
      }
      Output *to = target.y + int64_t(first_m) * target.ld;
      constexpr int kRows = Traits::kM / Traits::kRowsY, kAtOnce = kRows > 16 ? 8 : kRows;  // more would need registers
#pragma unroll kAtOnce
      for (int i = 0; i < Traits::kM; i += Traits::kRowsY, to += Traits::kRowsY * target.ld) {
        if (i < rows_left) *reinterpret_cast<uint4 *>(to) = row(i);
      }
    }
  }
  // Channels that no whole vector holds.
  int const alone = out.n0 + out.thread % Traits::kN;
  if (alone >= p.K || Target<Output>(params, alone / kVector * kVector).whole) return;
  Target<Output> const target(params, alone);
  Output *const to = target.y + int64_t(out.m0) * target.ld;
  each_of_column<Traits, 4>(params, out, [&](int row, int column) { to[row * target.ld] = sY(row, column); });
}

}  // namespace cutefuse::conv
