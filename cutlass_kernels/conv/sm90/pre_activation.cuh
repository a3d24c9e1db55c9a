// Scale, shift and ReLU of the input channels on Hopper: the consumers rewrite a stage's pixels in shared memory, where
// wgmma reads them, while the tensor cores work on the stage before. The padding is of the activated tensor: a pixel
// outside of the image stays zero.
#pragma once

#include "conv/pre_activation.cuh"
#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// Bytes of scales and shifts that belong to a k-tile.
template <class Traits>
CUTE_DEVICE int vector_bytes(Problem const &p, KCursor const &at) {
  if constexpr (!Traits::kPreActivated) return 0;
  return 2 * int(sizeof(typename Traits::Element)) * min(p.C[at.source] - at.channel(), kChannelBlock);
}

// Loads them into `to`, the shifts a block behind the scales.
template <class Traits>
CUTE_DEVICE void load_vectors(Sm90Params const &params, KCursor const &at, uint64_t *full,
                              typename Traits::Element *to) {
  if constexpr (Traits::kPreActivated) {
    using Element = typename Traits::Element;
    int const bytes = vector_bytes<Traits>(params.problem, at) / 2;
    int const channel = params.first_channel[at.source] + at.channel();
    SM90_BULK_COPY_G2S::copy(static_cast<Element const *>(params.pre_scale) + channel, full, to, bytes);
    SM90_BULK_COPY_G2S::copy(static_cast<Element const *>(params.pre_shift) + channel, full, to + kChannelBlock, bytes);
  }
}

// Of tiles for sources that are multiplied as they are.
template <class Traits, bool = Traits::kPreActivated>
struct PreActivation {
  CUTE_DEVICE PreActivation(Sm90Params const &, int, int, int) {}
  template <class Steps>
  CUTE_DEVICE void apply(typename Traits::SharedStorage &, Ring const &, Sm90Params const &, Steps const &) const {}
};

// One thread's share of a tile: a 16-byte chunk of every kRowsPerPass-th pixel that its warpgroup reads, or, where both
// read the same pixels, that both do.
template <class Traits>
struct PreActivation<Traits, true> {
  using Element = typename Traits::Element;
  static constexpr bool kTogether = Traits::kReaders == kConsumers && Traits::kPixelGroups == 1;
  static constexpr int kThreads = kTogether ? 128 * kConsumers : 128, kVector = 16 / int(sizeof(Element));
  static constexpr int kChunks = kChannelBlock / kVector, kRowsPerPass = kThreads / kChunks;
  static constexpr int kRows = Traits::kN, kPasses = ceil_div(kRows, kRowsPerPass);
  static_assert(kRowsPerPass % 8 == 0 && kRows % 8 == 0);
  int thread, first_row, barrier;
  int corner[kPasses];  // row and column of the pixel under tap (0,0), 16 bits each; unless the filter is pointwise

  // The tile's outputs start at `first`, its pixels in a stage at row `first_row_x`.
  CUTE_DEVICE PreActivation(Sm90Params const &params, int first, int first_row_x, int consumer)
      : thread(threadIdx.x % kThreads),
        first_row(first_row_x + thread / kChunks),
        barrier(2 * kConsumers + (kTogether ? 0 : consumer)) {
    if (params.pointwise) return;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const m = first + thread / kChunks + i * kRowsPerPass;
      Pixel const at = pixel_of(params.problem, params.by_image, params.by_row, m);
      corner[i] = int(unsigned(at.h0) << 16 | (unsigned(at.w0) & 0xffffu));
    }
  }

  // Waits for the stage of the k-tile `at`, and returns when it is ready for wgmma.
  template <class Steps>
  CUTE_DEVICE void apply(typename Traits::SharedStorage &shared, Ring const &ring, Sm90Params const &params,
                         Steps const &at) const {
    Problem const &p = params.problem;
    int const chunk = (thread % kChunks) ^ (first_row % 8);  // SWIZZLE_128B
    TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
    if (chunk * kVector < p.C[at.source] - at.channel) {  // the others are zeros
      auto const *const vectors = reinterpret_cast<uint4 const *>(shared.vectors[ring.stage]);
      uint4 const scale = vectors[chunk], shift = vectors[kChunks + chunk];
      auto *const x = reinterpret_cast<uint4 *>(shared.x[ring.stage]) + first_row * kChunks + thread % kChunks;
      int h = 0, w = 0;
      if (!params.pointwise) {
        int const tap = p.R * p.S - at.taps_left, r = params.by_s.divide(tap);
        h = r * p.dilation_h, w = (tap - r * p.S) * p.dilation_w;
      }
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        bool const exists = kRows % kRowsPerPass == 0 || thread / kChunks + i * kRowsPerPass < kRows;
        bool const inside = params.pointwise || (unsigned((corner[i] >> 16) + h) < unsigned(p.H) &&
                                                 unsigned(int16_t(corner[i]) + w) < unsigned(p.W));
        if (!exists || !inside) continue;
        uint4 &pixels = x[i * kRowsPerPass * kChunks];
        pixels = {pre_activate<Element>(pixels.x, scale.x, shift.x), pre_activate<Element>(pixels.y, scale.y, shift.y),
                  pre_activate<Element>(pixels.z, scale.z, shift.z), pre_activate<Element>(pixels.w, scale.w, shift.w)};
      }
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kThreads, barrier);
  }
};

}  // namespace cutefuse::conv
