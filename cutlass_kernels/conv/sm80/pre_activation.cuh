// Scale, shift and ReLU of the input channels, in registers between ldmatrix and mma. The padding is of the activated
// tensor: a pixel outside of the image stays zero.
#pragma once

#include "conv/pre_activation.cuh"
#include "conv/sm80/copy.cuh"

namespace cutefuse::conv {

// Kernels that multiply sources as they are: nothing to do.
template <class Traits, bool = Traits::kPreActivated>
struct PreActivation {
  __device__ __forceinline__ PreActivation(Params const &, Place const &, KBlock<Traits::kK> const &) {}
  __device__ __forceinline__ void advance() {}
  __device__ __forceinline__ void fetch(int, int) {}
  template <class Fragment>
  __device__ __forceinline__ void apply(Fragment &&, int) const {}
};

// Walks the k-tiles in the order in which they are read. A lane's four registers of a fragment are two rows of each of
// two words of channels, so that it needs two words of scales and two of shifts for an mma step.
template <class Traits>
struct PreActivation<Traits, true> {
  using Element = typename Traits::Element;
  static constexpr int kSteps = Traits::kSteps, kWord = 4 / Traits::kBytes;  // channels of a register
  static constexpr int kRows = Traits::kM / (Traits::kTile.warps_m * 16);    // of the fragment
  static_assert(!Traits::kSharesTaps && !Traits::kTile.upsamples && !Traits::kScaled);
  Params const &params;
  int source, left;  // of the k-tile: its source, and the channels that the source has left
  int at = 0;        // of the k-tile: its first channel, counted through the concatenation
  int last = 0;      // first channel of the last word; k-tiles past the end, which are read ahead too, read that word
  int r = 0, s = 0;
  int channels[2];             // of a lane's words, inside a step
  uint32_t outside[kRows][2];  // bit r: filter row r falls outside of the image; bit 16 + s: filter column s does
  uint32_t scale[kSteps][2], shift[kSteps][2], tap_bits[kSteps];

  __device__ __forceinline__ PreActivation(Params const &all, Place const &place, KBlock<Traits::kK> const &first)
      : params(all), source(first.source), left(first.left) {
    Problem const &p = params.problem;
    for (int i = 0; i < p.sources; ++i) {
      last += p.C[i];
      if (i <= source) at = last - left;
    }
    last -= kWord;
    auto const thread_mma = typename Traits::Mma{}.get_slice(place.thread);
    Tensor tXcX = thread_mma.partition_A(make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kK>>{}));
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) channels[half] = get<1>(tXcX(2 * half * kWord, 0, 0));
    if (params.pointwise) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const m = place.m0 + get<0>(tXcX(half * kWord, i, 0));
        outside[i][half] = taps_outside(m < p.N * p.P * p.Q ? m : 0);
      }
    }
  }

  __device__ __forceinline__ uint32_t taps_outside(int m) const {
    Problem const &p = params.problem;
    Pixel const pixel = pixel_of(p, params.by_image, params.by_row, m);
    uint32_t bits = 0;
    CUTE_NO_UNROLL
    for (int i = 0; i < p.R; ++i) bits |= uint32_t(unsigned(pixel.h0 + i * p.dilation_h) >= unsigned(p.H)) << i;
    CUTE_NO_UNROLL
    for (int i = 0; i < p.S; ++i) {
      bits |= uint32_t(unsigned(pixel.w0 + i * p.dilation_w) >= unsigned(p.W)) << (kMaxTaps + i);
    }
    return bits;
  }

  // To the next k-tile.
  __device__ __forceinline__ void advance() {
    Problem const &p = params.problem;
    if (++s < p.S) return;
    s = 0;
    if (++r < p.R) return;
    r = 0;
    int const step = min(Traits::kK, left);
    at += step, left -= step;
    if (left == 0 && source + 1 < p.sources) left = p.C[++source];
  }

  // The constants of mma step `step`, into `slot`.
  __device__ __forceinline__ void fetch(int step, int slot) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const channel = min(at + step * Traits::kMmaK + channels[half], last);
      scale[slot][half] = word_at(params.pre_scale, channel), shift[slot][half] = word_at(params.pre_shift, channel);
    }
    tap_bits[slot] = params.pointwise ? 0 : 1u << r | 1u << (kMaxTaps + s);
  }

  __device__ __forceinline__ static uint32_t word_at(void const *vector, int channel) {
    return __ldg(reinterpret_cast<uint32_t const *>(static_cast<Element const *>(vector) + channel));
  }

  // rX: (MMA,MMA_M) of the step in `slot`.
  template <class Fragment>
  __device__ __forceinline__ void apply(Fragment &&rX, int slot) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Tensor x = recast<uint32_t>(rX(_, i));
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) x(j) = pre_activate<Element>(x(j), scale[slot][j / 2], shift[slot][j / 2]);
    }
    if (tap_bits[slot] == 0) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Tensor x = recast<uint32_t>(rX(_, i));
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) x(j) = (outside[i][j % 2] & tap_bits[slot]) == 0 ? x(j) : 0;
    }
  }
};

}  // namespace cutefuse::conv
