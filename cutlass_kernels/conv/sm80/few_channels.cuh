// Pixels of few channels, such as those of an image: a k-tile is as many taps as it has 16-byte chunks, a chunk for
// each tap, where pixels.cuh would load a k-tile of mostly absent channels for every tap.
#pragma once

#include "conv/sm80/pixels.cuh"

namespace cutefuse::conv {

// One thread's share of the k-tiles: the chunk of one tap, of kRowsX pixels and kRowsW filters. Its interface is that
// of TapLoader.
template <class Traits>
struct FewChannelsLoader {
  static constexpr int kBytes = Traits::kBytes, kRowsX = Traits::kRowsX, kTaps = Traits::kChunks;  // of a k-tile
  static constexpr int kGroups = 1, kParts = Traits::kSteps, kMostCopies = kRowsX + Traits::kRowsW;
  static_assert(!Traits::kTile.upsamples && !Traits::kScaled);
  Params const &params;
  SourceRows<Traits> rows;
  FilterRows<Traits> filters;
  int tap;             // of this thread's chunk
  char const *from_x;  // pixel 0 of the source, moved by the tap
  int const pixel_bytes, bytes, piece;
  uint32_t tap_bits;  // the bits of rows.outside that must be clear for this tap
  uint32_t closed;    // all ones where there is no such tap, else zeros

  template <class Block>
  __device__ __forceinline__ FewChannelsLoader(Params const &all, Place const &place, Block const &, int, int)
      : params(all),
        rows(all, place.m0 + place.thread / Traits::kChunks),
        filters(all, place, 0),
        tap(place.thread % Traits::kChunks),
        pixel_bytes(int(all.problem.ldx[0] * kBytes)),
        bytes(all.problem.C[0] * kBytes),
        piece(piece_of(all.problem, 0, pixel_bytes, kBytes)) {
    filters.from += tap * (kChannelBlock - Traits::kVector) * kBytes;  // from the chunk's place to the tap's
    enter_tap();
  }

  __device__ __forceinline__ void enter_tap() {
    Problem const &p = params.problem;
    int const r = tap / p.S, s = tap - r * p.S;
    closed = tap < params.taps ? 0u : ~0u;
    tap_bits = 1u << (r & (kMaxTaps - 1)) | 1u << (kMaxTaps + s);
    from_x = address_of(static_cast<char const *>(params.x[0]), r * p.dilation_h * p.W + s * p.dilation_w, pixel_bytes);
  }

  __device__ __forceinline__ void advance() {
    tap += kTaps, filters.from += kTaps * FilterRows<Traits>::kTapBytes;
    enter_tap();
  }

  static __host__ __device__ constexpr int copies(int) { return kMostCopies; }

  template <class ToX, class ToW>
  __device__ __forceinline__ void copy(int, int i, int stage, ToX const &to_x, ToW const &to_w) const {
    if (i < kRowsX) {
      bool const exists = ((rows.outside[i] & tap_bits) | closed) == 0;
      void *const to = &to_x(0, i, 0, stage);
      char const *const from = address_of(from_x, rows.at(i), pixel_bytes);
      if constexpr (Traits::kTile.copy_bytes < 16) {
        g2s_pieces<Traits::kTile.copy_bytes>(to, from, exists ? bytes : 0, piece);
      } else {
        g2s(to, from, exists ? bytes : 0);
      }
    } else {
      filters.copy(params, i - kRowsX, 0, filters.absent | closed, to_w(_, _, _, stage));
    }
  }
};

}  // namespace cutefuse::conv
