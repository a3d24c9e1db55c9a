// The second half of split-K: adds the parts that the blocks left in the workspace, always in the same order, and
// finishes the outputs. This is a kernel of its own, since adding in the last block to arrive needs more registers than
// the main loop leaves.
#pragma once

#include "conv/sm80/store_scaled.cuh"
#include "dependent_launch.cuh"

namespace cutefuse::conv {

// Output: the type of a float operator's output; kScaled: the problem names the type instead.
template <class Output, bool kScaled>
__global__ void __launch_bounds__(kFinishThreads) conv_finish(Params const __grid_constant__ params) {
  Problem const &p = params.problem;
  int const groups = ceil_div(stored_channels(p), kFinishChannels);
  int64_t const item = int64_t(blockIdx.x) * kFinishThreads + threadIdx.x;
  int64_t const pixels = int64_t(p.N) * p.P * p.Q, m = item / groups;
  int const k = int(item % groups) * kFinishChannels;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (m >= pixels) return;

  float4 const *const from = reinterpret_cast<float4 const *>(params.partials + m * split_ld(p) + k);
  int64_t const part_vectors = pixels * split_ld(p) / 4;
  auto sum = cute::make_tensor<float>(cute::Int<kFinishChannels>{});
  cute::clear(sum);
  for (int part = 0; part < params.splits && k < p.K; ++part) {
    CUTE_UNROLL
    for (int v = 0; v < kFinishChannels / 4; ++v) {
      float4 const x = __ldcg(from + part * part_vectors + v);
      sum(4 * v) += x.x, sum(4 * v + 1) += x.y, sum(4 * v + 2) += x.z, sum(4 * v + 3) += x.w;
    }
  }
  if constexpr (kScaled) {
    CUTE_UNROLL
    for (int i = 0; i < kFinishChannels; ++i) {
      int const at = min(k + i, p.K - 1);
      sum(i) = fmaf(sum(i), __ldg(params.w_scale + at), __ldg(params.b + at));
    }
    activate(sum, p);
    with_output_type<Output>(p, [&](auto type) {
      using To = decltype(type);
      To *const to = output_at<To>(params, m, k);
      float const inverse = 1.f / p.output_scale;
      int const end = stored_channels(p);
      CUTE_UNROLL
      for (int i = 0; i < kFinishChannels; ++i) {  // pad lanes are zeros
        if (k + i < end) to[i] = k + i < p.K ? output_of<To>(sum(i), inverse) : To(0);
      }
    });
  } else {
    auto const add_residual = [&] {
      Output const *const z = static_cast<Output const *>(params.z) + m * p.ldz + k;
      CUTE_UNROLL
      for (int i = 0; i < kFinishChannels; ++i) sum(i) += k + i < p.K ? float(z[i]) : 0.f;
    };
    if (p.residual == Residual::kBefore) add_residual();
    activate(sum, p);
    if (p.residual == Residual::kAfter) add_residual();
    alignas(16) Output y[kFinishChannels];
    CUTE_UNROLL
    for (int i = 0; i < kFinishChannels; ++i) y[i] = k + i < p.K ? Output(sum(i)) : Output(0);  // pad lanes are zeros
    constexpr int kVector = 16 / sizeof(Output);
    int64_t const pixel = p.spread > 1 ? spread_pixel(p, params.by_row, int(m)) : m;
    CUTE_UNROLL
    for (int i = 0; i < kFinishChannels; i += kVector) {
      if (k + i >= p.K) continue;
      Target<Output> const target(params, k + i);
      if (target.whole) {
        *reinterpret_cast<uint4 *>(target.y + pixel * target.ld) = *reinterpret_cast<uint4 const *>(&y[i]);
        continue;
      }
      CUTE_UNROLL
      for (int v = i; v < i + kVector; ++v) {
        if (k + v >= p.K) continue;
        Target<Output> const one(params, k + v);
        one.y[pixel * one.ld] = y[v];
      }
    }
  }
}

}  // namespace cutefuse::conv
