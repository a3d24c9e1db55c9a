// The second half of split-K: adds the parts that the blocks left in the workspace, always in the same order.
#include "quant_concat_conv/epilogue.cuh"

namespace cutefuse::quant_concat_conv {

namespace {

__global__ void __launch_bounds__(kFinishThreads) quant_concat_conv_finish(Params const __grid_constant__ params) {
  Problem const &p = params.problem;
  int const groups = ceil_div(stored_channels(p), kFinishChannels);
  int64_t const item = int64_t(blockIdx.x) * kFinishThreads + threadIdx.x, m = item / groups;
  int64_t const pixels = int64_t(p.N) * p.P * p.Q;
  int const k0 = int(item % groups) * kFinishChannels;
  if (m >= pixels) return;
  auto y = cute::make_tensor<float>(cute::Int<kFinishChannels>{});
  cute::clear(y);
  for (int part = 0; part < params.splits && k0 < p.K; ++part) {
    float4 const *const from =
        reinterpret_cast<float4 const *>(params.partials + (part * pixels + m) * split_ld(p) + k0);
    CUTE_UNROLL
    for (int v = 0; v < kFinishChannels; v += 4) {
      float4 const x = __ldcg(from + v / 4);
      y(v) += x.x, y(v + 1) += x.y, y(v + 2) += x.z, y(v + 3) += x.w;
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kFinishChannels; ++i) {
    int const k = min(k0 + i, p.K - 1);
    y(i) = fmaf(y(i), __ldg(params.w_scale + k), __ldg(params.b + k));
  }
  conv::activate(y, p);
  with_output_type(p, [&](auto type) {
    using Output = decltype(type);
    Output *const to = output_at<Output>(params, m, k0);
    float const inverse = 1.f / p.output_scale;
    int const end = stored_channels(p);
    CUTE_UNROLL
    for (int i = 0; i < kFinishChannels; ++i) {  // pad lanes are zeros
      if (k0 + i < end) to[i] = k0 + i < p.K ? output_of<Output>(y(i), inverse) : Output(0);
    }
  });
}

}  // namespace

Kernel finish_kernel() { return {reinterpret_cast<void const *>(&quant_concat_conv_finish), kFinishThreads, 0}; }

}  // namespace cutefuse::quant_concat_conv
