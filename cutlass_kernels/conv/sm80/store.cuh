// How the Ampere path leaves: where a vector of output channels goes, and how a residual comes in.
#pragma once

#include "conv/sm80/copy.cuh"

namespace cutefuse::conv {

// Two neighbouring channels of one pixel, as one thread holds them.
template <class Output>
struct alignas(2 * sizeof(Output)) Pair {
  Output v[2];
};

template <class Output>
__device__ __forceinline__ Pair<Output> &pair_at(Output *at) {
  return *reinterpret_cast<Pair<Output> *>(at);
}

// lo <= x <= hi for both; a NaN is handed on.
template <class Output>
__device__ __forceinline__ Pair<Output> clamp_nan(Pair<Output> x, Pair<Output> lo, Pair<Output> hi) {
  if constexpr (sizeof(Output) == 4) {
    return {min_nan(max_nan(x.v[0], lo.v[0]), hi.v[0]), min_nan(max_nan(x.v[1], lo.v[1]), hi.v[1])};
  } else {
    auto const bits = [](Pair<Output> const &pair) { return reinterpret_cast<uint32_t const &>(pair); };
    uint32_t y;
    if constexpr (std::is_same_v<Output, cutlass::half_t>) {
      asm("{.reg .b32 t; max.NaN.f16x2 t, %1, %2; min.NaN.f16x2 %0, t, %3;}"
          : "=r"(y)
          : "r"(bits(x)), "r"(bits(lo)), "r"(bits(hi)));
    } else {
      asm("{.reg .b32 t; max.NaN.bf16x2 t, %1, %2; min.NaN.bf16x2 %0, t, %3;}"
          : "=r"(y)
          : "r"(bits(x)), "r"(bits(lo)), "r"(bits(hi)));
    }
    return reinterpret_cast<Pair<Output> &>(y);
  }
}

// Rounds two sums to the output's type. ReLU, Clip and none are done here, two at a time: rounding is monotonic, so it
// may come before them. The other activations, and those in front of a residual, are left to the sums.
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

// The output, or range of a wider tensor, that holds the 16-byte vector of channels from k on.
template <class Output>
struct Target {
  static constexpr int kVector = 16 / sizeof(Output);
  Output *y;  // these channels at pixel 0
  int64_t ld;
  int channels;        // of the vector, that exist
  bool whole, padded;  // the vector may be written at once; and holds pad lanes, which then become zeros

  __device__ __forceinline__ Target(Params const &params, int k) {
    Problem const &p = params.problem;
    int j = 0;
    while (j + 1 < p.outputs && k >= p.ranges[j].last) ++j;
    OutputRange const &range = p.ranges[j];
    y = static_cast<Output *>(params.ys[j]) + (k - range.first);
    ld = range.ld, channels = range.last - k;
    // float32 pixels have any stride and no pad lanes; those of 16-bit types are written where they are nobody else's.
    padded = channels < kVector;
    whole =
        padded ? sizeof(Output) == 2 && ld == ceil_div(range.last - range.first, kVector) * kVector : ld % kVector == 0;
  }

  __device__ __forceinline__ void store(int64_t m, Output const *from) const {
    Output *const to = y + m * ld;
    if (whole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<uint4 const *>(from);
    } else if (sizeof(Output) == 4 && ld % 2 == 0) {
      for (int v = 0; v < kVector && v < channels; v += 2) {
        if (v + 1 < channels) {
          *reinterpret_cast<uint2 *>(to + v) = *reinterpret_cast<uint2 const *>(from + v);
        } else {
          to[v] = from[v];
        }
      }
    } else {
      for (int v = 0; v < kVector && v < channels; ++v) to[v] = from[v];
    }
  }
};

// Fetches the residual of a block's outputs into the place where they will be staged, and waits for it.
template <class Traits, class Staging>
__device__ __forceinline__ void load_residual(Params const &params, Staging const &sY, int m0, int n0) {
  Problem const &p = params.problem;
  using Output = typename Traits::Output;
  int const n = threadIdx.x % Traits::kChunksY * Traits::kVector, k = n0 + n;
  bool const whole = p.ldz % Traits::kVector == 0;
  CUTE_UNROLL
  for (int i = 0; i < Traits::kM; i += Traits::kRowsY) {
    int const row = i + threadIdx.x / Traits::kChunksY, m = m0 + row;
    int const left = m < p.N * p.P * p.Q ? p.K - k : 0;
    Output const *const from = static_cast<Output const *>(params.z) + (left > 0 ? m * p.ldz + k : 0);
    if (whole) {
      g2s(&sY(row, n), from, left > 0 ? 16 : 0);
    } else {
      g2s_by_element(&sY(row, n), from, left > 0 ? left * int(sizeof(Output)) : 0);
    }
  }
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace cutefuse::conv
