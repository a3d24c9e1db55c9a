// From the sums of sources that have scales to the outputs: earlier sources' sums, filter scale, bias, activation, and
// the output's type and layout.
#pragma once

#include "conv/sm80/store.cuh"

namespace cutefuse::conv {

// float -> output; 8-bit ones are rounded to nearest even and saturated.
template <class Output>
__device__ __forceinline__ Output output_of(float y, float inverse_scale) {
  if constexpr (std::is_same_v<Output, int8_t>) {
    return Output(max(-128, min(127, __float2int_rn(y * inverse_scale))));
  } else if constexpr (sizeof(Output) == 1) {
    return Output(y * inverse_scale);
  } else {
    return Output(y);
  }
}

// Where channel k of output pixel m lies; k is the first of a vector, so that the vector stays in one block.
template <class Output>
__device__ __forceinline__ Output *output_at(Params const &params, int64_t m, int k) {
  Problem const &p = params.problem;
  Output *const y = static_cast<Output *>(params.y);
  if (sizeof(Output) > 1 || p.layout == cutefuse::Layout::kChannelsLast) return y + m * p.ldy + k;
  Strides const at = strides_of(p.layout, p.ldy, p.K, int64_t(p.P) * p.Q);
  int const n = params.by_image.divide(int(m));
  return y + n * at.image + (m - int64_t(n) * params.by_image.divisor) * at.pixel + k / kLayoutBlock * at.block +
         k % kLayoutBlock;
}

// Calls body(Output{}) with the C++ type of the output, which is a float or the sources' Element.
template <class Element, class Body>
__device__ __forceinline__ void with_output_type(Problem const &p, Body const &body) {
  switch (p.output_type) {
    case Type::kFloat32:
      return body(float{});
    case Type::kFloat16:
      return body(cutlass::half_t{});
    case Type::kBFloat16:
      return body(cutlass::bfloat16_t{});
    default:
      return body(Element{});
  }
}

// The scales of the block's filters, at the end of shared memory, followed by their biases.
template <class Traits>
__device__ __forceinline__ float *filter_scales(unsigned char *shared) {
  return reinterpret_cast<float *>(shared + Traits::kTile.shared_bytes()) - 2 * Traits::kN;
}

// Starts copying both; they arrive with the first stage.
template <class Traits>
__device__ __forceinline__ void load_scales_and_biases(Params const &params, Place const &place,
                                                       unsigned char *shared) {
  for (int n = place.thread; n < Traits::kN; n += Traits::kThreads) {
    int const k = place.n0 + n;
    bool const exists = k < params.problem.K;
    float *const to = filter_scales<Traits>(shared) + n;
    g2s_word(to, params.w_scale + (exists ? k : 0), exists);
    g2s_word(to + Traits::kN, params.b + (exists ? k : 0), exists);
  }
}

// Float32 sums of earlier sources in shared memory, as [four accumulators][thread]: neighbouring threads touch
// neighbouring banks.
template <class Traits>
__device__ __forceinline__ float4 *kept_sums(Params const &params, unsigned char *shared) {
  return reinterpret_cast<float4 *>(shared + Traits::kTile.stages_bytes()) + Place::of<Traits>(params).thread;
}

// The sums of earlier sources, where each has a scale: at a source's end its own sums, times that scale, are added to
// the float32 ones, in registers or in shared memory as the tile says.
template <class Traits, class Acc>
struct SourceSums {
  static constexpr Sums kKept = Traits::kTile.sums;
  decltype(make_tensor<float>(shape(Acc{}))) sum;  // with Sums::kRegisters it lives beside acc in the main loop
  bool first = true;                               // nothing is in shared memory yet

  __device__ __forceinline__ void start(Params const &params, Place const &place, Acc &acc) {
    if constexpr (Traits::kScaled) {
      clear(acc);
    } else {
      start_at_bias<Traits>(params, place, acc);
    }
    if constexpr (kKept == Sums::kRegisters) clear(sum);
  }

  __device__ __forceinline__ void drain(Params const &params, unsigned char *shared, int source, Acc &acc) {
    float const scale = params.problem.scale[source];
    if constexpr (kKept == Sums::kRegisters) {
      CUTE_UNROLL
      for (int i = 0; i < size(acc); ++i) sum(i) = fmaf(float(acc(i)), scale, sum(i)), acc(i) = 0;
    } else if constexpr (kKept == Sums::kShared) {
      float4 *const at = kept_sums<Traits>(params, shared);
      CUTE_UNROLL
      for (int i = 0; i < size(acc); i += 4) {
        float4 x = first ? float4{} : at[i / 4 * Traits::kThreads];
        x.x = fmaf(float(acc(i)), scale, x.x), x.y = fmaf(float(acc(i + 1)), scale, x.y);
        x.z = fmaf(float(acc(i + 2)), scale, x.z), x.w = fmaf(float(acc(i + 3)), scale, x.w);
        at[i / 4 * Traits::kThreads] = x;
      }
      clear(acc);
      first = false;
    }
  }

  // drain() after the last source: adds up all sums in registers.
  __device__ __forceinline__ void drain_last(Params const &params, unsigned char *shared, int source, Acc const &acc) {
    if constexpr (kKept == Sums::kNone) return;
    float const scale = params.problem.scale[source];
    float4 const *const at = kept_sums<Traits>(params, shared);
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 4) {
      float4 const x = kKept == Sums::kShared && !first ? at[i / 4 * Traits::kThreads] : float4{};
      float const before[4] = {x.x, x.y, x.z, x.w};
      CUTE_UNROLL
      for (int v = i; v < i + 4; ++v) {
        sum(v) = fmaf(float(acc(v)), scale, kKept == Sums::kRegisters ? sum(v) : before[v - i]);
      }
    }
  }
};

constexpr int kFinished = 4;  // channels of a pixel
template <class T>
using Finished = Channels<T, kFinished>;

// Rounds neighbouring channels to the output's type. ReLU, Clip and none are done here, since rounding is monotonic.
template <class Output, bool = sizeof(Output) == 1>
struct Round {
  Clamp<Output> clamp;
  __device__ __forceinline__ explicit Round(Problem const &p) : clamp(p) {}
  template <class Y>
  __device__ __forceinline__ Finished<Output> operator()(Y const &y) const {
    Pair<Output> const a = clamp(y(0), y(1)), b = clamp(y(2), y(3));
    return {a.v[0], a.v[1], b.v[0], b.v[1]};
  }
};

template <class Output>
struct Round<Output, true> {
  Round<float> round;
  float inverse_scale;
  __device__ __forceinline__ explicit Round(Problem const &p) : round(p), inverse_scale(1.f / p.output_scale) {}
  template <class Y>
  __device__ __forceinline__ Finished<Output> operator()(Y const &y) const {
    Finished<float> const x = round(y);
    Finished<Output> z;
    CUTE_UNROLL
    for (int v = 0; v < kFinished; ++v) z.v[v] = output_of<Output>(x.v[v], inverse_scale);
    return z;
  }
};

// Keeps the channels that exist, and makes pad lanes zeros.
template <class Output>
struct Lanes {
  static constexpr int kWords = kFinished * sizeof(Output) / 4;
  uint32_t mask[kWords] = {};
  __device__ __forceinline__ explicit Lanes(int exist) {
    CUTE_UNROLL
    for (int byte = 0; byte < 4 * kWords; ++byte) {
      mask[byte / 4] |= byte / int(sizeof(Output)) < exist ? 0xffu << byte % 4 * 8 : 0;
    }
  }
  __device__ __forceinline__ Finished<Output> keep(Finished<Output> x) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t *>(&x)[i] &= mask[i];
    return x;
  }
};

// The outputs of the block from its sums, integers or float32 ones times `unit`. They pass through shared memory, which
// is free again: all copies have arrived and all warps have read them. The rest is a short loop: code that runs once
// costs more to fetch than to execute, and unrolled over a thread's sums it took a quarter of a short block's time.
template <class Traits, class Sum>
__device__ __forceinline__ void store_scaled(Params const &params, unsigned char *shared, float unit, Sum const &sum) {
  using Word = typename Sum::value_type;
  constexpr int kM = Traits::kM, kN = Traits::kN, kRowWords = Traits::kTile.row_bytes_y() / 4;
  constexpr int kVectors = kN / kFinished, kRowsY = Traits::kThreads / kVectors;
  static_assert(Traits::kThreads % kVectors == 0 && kM % kRowsY == 0);
  Problem const &p = params.problem;
  Place const out = Place::of<Traits>(params);
  Word *const staged = reinterpret_cast<Word *>(shared);
  Tensor tYcY = coordinates<Traits>(out.thread);
  CUTE_UNROLL
  for (int i = 0; i < size(sum); i += 2) {
    pair_at(staged + get<0>(tYcY(i)) * kRowWords + get<1>(tYcY(i))) = {sum(i), sum(i + 1)};
  }
  __syncthreads();

  int const row = out.thread / kVectors, n = out.thread % kVectors * kFinished, k = out.n0 + n;
  int const first = out.m0 + row, rows_left = p.N * p.P * p.Q - first, exist = p.K - k;
  Finished<Word> const *const from = reinterpret_cast<Finished<Word> const *>(staged + row * kRowWords + n);
  if (params.splits > 1) {  // conv_finish adds the sums: [split][pixel][channel]
    if (k >= split_ld(p)) return;
    float *const to = params.partials + (int64_t(out.split) * (p.N * p.P * p.Q) + first) * split_ld(p) + k;
#pragma unroll 4
    for (int i = 0; i < kM; i += kRowsY) {
      Finished<Word> const x = from[i * kRowWords / kFinished];
      float4 const y = {float(x.v[0]) * unit, float(x.v[1]) * unit, float(x.v[2]) * unit, float(x.v[3]) * unit};
      if (i < rows_left) __stcg(reinterpret_cast<float4 *>(to + int64_t(i) * split_ld(p)), y);
    }
    return;
  }
  if (k >= stored_channels(p)) return;
  Finished<float> scale = *reinterpret_cast<Finished<float> const *>(filter_scales<Traits>(shared) + n);
  Finished<float> const bias = *reinterpret_cast<Finished<float> const *>(filter_scales<Traits>(shared) + kN + n);
  CUTE_UNROLL
  for (int v = 0; v < kFinished; ++v) scale.v[v] *= unit;
  bool const rounding_clamps = Clamp<float>(p).is_all;
  with_output_type<typename Traits::Element>(p, [&](auto type) {
    using Output = decltype(type);
    constexpr int kBatch = 4;  // rows at once: as many as hide the latency of an exponential
    static_assert(kM % (kBatch * kRowsY) == 0);
    Round<Output> const round(p);
    Lanes<Output> const lanes(exist);
    bool const linear = sizeof(Output) > 1 || p.layout == cutefuse::Layout::kChannelsLast;
    int const stored = stored_channels(p) - k;  // pad lanes included
    bool const whole = stored >= kFinished && p.ldy % kFinished == 0;
    Output *to = linear ? static_cast<Output *>(params.y) + first * p.ldy + k : nullptr;
    CUTE_NO_UNROLL
    for (int i = 0; i < kM; i += kBatch * kRowsY) {
      Tensor y = make_tensor<float>(Shape<Int<kFinished>, Int<kBatch>>{});
      CUTE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        Finished<Word> const x = from[(i + j * kRowsY) * kRowWords / kFinished];
        CUTE_UNROLL
        for (int v = 0; v < kFinished; ++v) y(v, j) = fmaf(float(x.v[v]), scale.v[v], bias.v[v]);
      }
      if (!rounding_clamps) activate(y, p);
      CUTE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        Finished<Output> const z = lanes.keep(round(y(_, j)));
        Output *const at = linear ? to + j * kRowsY * p.ldy : output_at<Output>(params, first + i + j * kRowsY, k);
        if (i + j * kRowsY >= rows_left) continue;
        if (whole) {
          *reinterpret_cast<Finished<Output> *>(at) = z;
        } else {
          CUTE_UNROLL
          for (int v = 0; v < kFinished; ++v) {
            if (v < stored) at[v] = z.v[v];
          }
        }
      }
      to += kBatch * kRowsY * p.ldy;
    }
  });
}

}  // namespace cutefuse::conv
