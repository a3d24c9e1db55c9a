// How the Ampere path leaves: where a vector of output channels goes, and how a residual comes in.
#pragma once

#include "sm80_copy.cuh"

namespace cutefuse::concat_conv {

// The output, or range of a wider tensor, that holds the 16-byte vector of channels from k on.
template <class Output>
struct Target {
  static constexpr int kVector = 16 / sizeof(Output);
  Output *y;  // these channels at pixel 0
  int64_t ld;
  int channels;  // of the vector, that exist
  bool whole;

  __device__ __forceinline__ Target(Params const &params, int k) {
    Problem const &p = params.problem;
    int j = 0;
    while (j + 1 < p.outputs && k >= p.ranges[j].last) ++j;
    OutputRange const &range = p.ranges[j];
    y = static_cast<Output *>(params.ys[j]) + (k - range.first);
    ld = range.ld, channels = range.last - k;
    // float32 pixels have any stride and no pad lanes; those of 16-bit types are written where they are nobody else's.
    whole = channels >= kVector ? ld % kVector == 0 : sizeof(Output) == 2 && owns_pad_lanes(p.type, range);
  }

  __device__ __forceinline__ void store(int64_t m, Output const *from) const {
    Output *const to = y + m * ld;
    if (whole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<uint4 const *>(from);
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
      g2s_filter(&sY(row, n), from, left > 0 ? 16 : 0);
    } else {
      g2s_by_element(&sY(row, n), from, left > 0 ? left * int(sizeof(Output)) : 0);
    }
  }
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace cutefuse::concat_conv
