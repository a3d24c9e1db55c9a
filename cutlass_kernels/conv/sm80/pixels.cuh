// Pixels of one filter tap, plain or enlarged: their places, and one thread's walk over the reduction's k-tiles.
#pragma once

#include "conv/sm80/copy.cuh"

namespace cutefuse::conv {

// The input pixels under the kRowsX GEMM rows that one thread copies.
template <class Traits>
struct SourceRows {
  static constexpr int kRows = Traits::kRowsX;
  static constexpr bool kUpsamples = Traits::kTile.upsamples;
  // Registers keep image, row and column of enlarged pixels for up to four rows. Those of eight rows would spill, so
  // only the column is kept, and image and row are computed again for every filter row.
  static constexpr bool kKeeps = kUpsamples && kRows <= 4;
  // Linear index of the pixel under tap (0,0), maybe in the padding. Upsampled: its image where kKeeps, else its
  // column.
  int pixel[kRows];
  uint32_t outside[kRows];  // bit r: filter row r falls outside the image; bit 16 + s: filter column s does
  static_assert(2 * kMaxTaps <= 32);
  int corner[kKeeps ? kRows : 1];         // h0 and w0 in the enlarged image, 16 bits each
  int row_start[kUpsamples ? kRows : 1];  // linear index of the source row under the tap's
  int first, tap_w = 0;                   // output pixel of row 0; column of the present tap, in enlarged pixels
  uint32_t multiplier;

  // Row i is output pixel first + i * kRowsPerPass.
  __device__ __forceinline__ SourceRows(Params const &params, int first_) : first(first_) {
    Problem const &p = params.problem;
    int const pixels = p.N * p.P * p.Q;
    if (!kUpsamples && params.pointwise) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        pixel[i] = first + i * Traits::kRowsPerPass;
        outside[i] = pixel[i] < pixels ? 0 : ~0u;
      }
      return;
    }
    int h0[kRows], w0[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const m = first + i * Traits::kRowsPerPass;
      Pixel const at = pixel_of(p, params.by_image, params.by_row, m < pixels ? m : 0);
      pixel[i] = kKeeps ? at.n : kUpsamples ? at.w0 : (at.n * p.H + at.h0) * p.W + at.w0;
      if constexpr (kKeeps) corner[i] = int(unsigned(at.h0) << 16 | (unsigned(at.w0) & 0xffffu));
      outside[i] = m < pixels ? 0 : ~0u;
      h0[i] = at.h0, w0[i] = at.w0;
    }
    CUTE_NO_UNROLL
    for (int r = 0; r < p.R; ++r) {  // short code, since it runs once: most of its cost is fetching it
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        outside[i] |= uint32_t(unsigned(h0[i]) >= unsigned(p.H)) << r, h0[i] += p.dilation_h;
      }
    }
    CUTE_NO_UNROLL
    for (int s = 0; s < p.S; ++s) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        outside[i] |= uint32_t(unsigned(w0[i]) >= unsigned(p.W)) << (kMaxTaps + s), w0[i] += p.dilation_w;
      }
    }
  }

  // Starts filter row r of an enlarged source: it divides the enlarged row here, not at every tap.
  __device__ __forceinline__ void enter_row(Params const &params, int r) {
    Problem const &p = params.problem;
    int const H = source_coordinate(p.H, multiplier), W = source_coordinate(p.W, multiplier);  // of the source
    auto const start = [&](int n, int h0) {
      return (n * H + source_coordinate(h0 + r * p.dilation_h, multiplier)) * W;
    };
    tap_w = 0;
    if constexpr (kKeeps) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_start[i] = start(pixel[i], corner[i] >> 16);
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // here the compiler takes more registers, and would spill `first`
      Place const place = Place::of<Traits>(params);
      int m = place.m0 + place.thread / Traits::kChunks;
#else
      int m = first;
#endif
      asm volatile("" : "+r"(m));  // else the compiler divides before the main loop and keeps the results
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Pixel const at = pixel_of(p, params.by_image, params.by_row, m + i * Traits::kRowsPerPass);
        row_start[i] = start(at.n, at.h0);
      }
    }
  }

  // Linear index in the source of the pixel under tap (0,0) or, if it is enlarged, under the present tap. Without
  // meaning where the tap is outside of the image.
  __device__ __forceinline__ int at(int i) const {
    if constexpr (!kUpsamples) return pixel[i];
    int column = pixel[i];
    if constexpr (kKeeps) column = int16_t(corner[i]);
    return row_start[i] + source_coordinate(column + tap_w, multiplier);
  }
};

// One thread's share of the k-tiles, in the order of the reduction: a column chunk of kRowsX pixels and kRowsW filters.
// A run is the columns of a filter row or, under a 1x1 filter, the whole channel blocks of a source. A copy is a
// multiply-add and a test of bits, the step to the next k-tile of a run is three adds, the step to the next filter row
// is done by selects, and only the step to the next channel block is a branch. That is little enough to be issued
// between the mma instructions. A k-tile past the last is copied as zeros.
template <class Traits>
struct TapLoader {
  static constexpr int kK = Traits::kK, kBytes = Traits::kBytes, kRowsX = Traits::kRowsX;
  static constexpr int kGroups = 1, kParts = Traits::kSteps, kMostCopies = kRowsX + Traits::kRowsW;
  static constexpr bool kUpsamples = Traits::kTile.upsamples;
  Params const &params;
  SourceRows<Traits> rows;
  FilterRows<Traits> filters;
  KBlock<kK> block;
  int const column;                    // channel of the k-tile at which this thread's chunk begins
  int blocks_left;                     // after this run
  int run, rows_left;                  // k-tiles left of the run, runs left of the channel block
  char const *from_x;                  // these channels of the source's pixel 0, moved by the tap unless upsampled
  int pixel_bytes, bytes, piece = 16;  // bytes of a pixel; of the chunk, that exist; of one copy
  int step_x;                          // from one k-tile of a run to the next, unless upsampled
  uint32_t tap_bits;                   // the bits of rows.outside that must be clear for this tap
  uint32_t closed;                     // all ones where the chunk has no channels, else zeros

  // The `blocks` channel blocks from `first` on, whose filters start at `first_column` of the packed matrix.
  __device__ __forceinline__ TapLoader(Params const &all, Place const &place, KBlock<kK> const &first, int first_column,
                                       int blocks)
      : params(all),
        rows(all, place.m0 + place.thread / Traits::kChunks),
        filters(all, place, first_column),
        block(first),
        column(place.thread % Traits::kChunks * Traits::kVector),
        blocks_left(blocks) {
    enter_source(1);
  }

  // `before`: channel blocks of the source for which rows.pixel was computed; images of kCHW32 lie that many blocks
  // apart.
  __device__ __forceinline__ void enter_source(int before) {
    Problem const &p = params.problem;
    auto const start = start_of<Traits>(params, block.source, p.C[block.source] - block.left + column);
    from_x = start.from, pixel_bytes = start.pixel_bytes;
    if (Traits::kScaled && p.layout == cutefuse::Layout::kBlocks32) {
      int const now = ceil_div(p.C[block.source], kLayoutBlock);
      Place const place = Place::of<Traits>(params);
      CUTE_UNROLL
      for (int i = 0; i < kRowsX; ++i) {
        int const m = place.m0 + place.thread / Traits::kChunks + i * Traits::kRowsPerPass;
        rows.pixel[i] += image_shift(params, m, now, before);
      }
    }
    if constexpr (kUpsamples) {
      rows.multiplier = params.upsample_multiplier[block.source];
    } else {
      step_x = params.side_by_side ? kK * kBytes : params.taps == 1 ? 0 : p.dilation_w * pixel_bytes;
    }
    if constexpr (Traits::kTile.copy_bytes < 16) piece = piece_of(p, block.source, pixel_bytes, kBytes);
    enter_block();
  }

  // Channels past the source's end read as zero: pad lanes may hold anything, and NaN times zero is NaN.
  __device__ __forceinline__ void enter_block() {
    Problem const &p = params.problem;
    int const left = block.left - column;
    closed = left > 0 ? 0u : ~0u;
    bytes = !Traits::kTile.any_channels || left >= Traits::kVector ? 16 : left * kBytes;
    tap_bits = 1u | 1u << kMaxTaps, rows_left = p.R, run = p.S;
    if constexpr (kUpsamples) rows.enter_row(params, 0);
    if (params.side_by_side) {  // up to the last of the source's whole blocks
      run = max(1, min(block.left / kK, blocks_left));
      int const more = run - 1;
      blocks_left -= more, block.left -= more * kK, block.offset = (block.offset + more * kK) % kChannelBlock;
    }
    --blocks_left;
  }

  __device__ __forceinline__ void advance() {
    Problem const &p = params.problem;
    bool const one_tap = params.taps == 1, row_ends = --run == 0;
    uint32_t const column_bits = one_tap ? 0 : tap_bits & ~0u << kMaxTaps;
    filters.from += one_tap ? kK * kBytes : FilterRows<Traits>::kTapBytes;
    from_x += !kUpsamples ? step_x : one_tap ? kK * kBytes : 0;
    if constexpr (kUpsamples) {  // the next filter row takes a division for every pixel, and so is a branch
      if (!row_ends) {
        rows.tap_w += one_tap ? 0 : p.dilation_w, tap_bits += column_bits;
        return;
      }
    } else {
      from_x = address_of(from_x, row_ends ? params.row_step : 0, pixel_bytes);
    }
    tap_bits = row_ends ? 2 * (tap_bits & 0xffffu) + (1u << kMaxTaps) : tap_bits + column_bits;
    run = row_ends ? p.S : run, rows_left -= row_ends;
    if (kUpsamples && rows_left > 0) rows.enter_row(params, p.R - rows_left);
    if (rows_left > 0) return;
    filters.from += (block.filter_step(params.taps) + (one_tap ? kChannelBlock - kK : 0)) * kBytes;
    if (!params.side_by_side) from_x += block_bytes<Traits>(p, block.source);
    if constexpr (!kUpsamples) from_x -= int64_t(params.block_step) * pixel_bytes;
    int const before = ceil_div(p.C[block.source], kLayoutBlock);
    bool const changed = block.advance(p);
    if (blocks_left <= 0) {
      closed = ~0u, filters.absent = ~0u, rows_left = 1 << 30;
    } else if (changed) {
      enter_source(before);
    } else {
      enter_block();
    }
  }

  // Copies of a k-tile: the pixels first, then the filters.
  static __host__ __device__ constexpr int copies(int) { return kMostCopies; }

  template <class ToX, class ToW>
  __device__ __forceinline__ void copy(int, int i, int stage, ToX const &to_x, ToW const &to_w) const {
    if (i < kRowsX) {
      void *const to = &to_x(0, i, 0, stage);
      char const *const from = address_of(from_x, rows.at(i), pixel_bytes);
      uint32_t const outside = (rows.outside[i] & tap_bits) | closed;
      if constexpr (Traits::kTile.copy_bytes < 16) {
        g2s_pieces<Traits::kTile.copy_bytes>(to, from, outside == 0 ? bytes : 0, piece);
      } else if constexpr (Traits::kTile.any_channels) {
        g2s(to, from, outside == 0 ? bytes : 0);
      } else {
        g2s_unless(to, from, outside);
      }
    } else {
      filters.copy(params, i - kRowsX, 0, filters.absent, to_w(_, _, _, stage));
    }
  }
};

}  // namespace cutefuse::conv
