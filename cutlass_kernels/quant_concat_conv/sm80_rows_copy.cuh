// How the kernel over filter rows reaches global memory: one thread's share of a stage's pixels and filters.
#pragma once

#include "quant_concat_conv/sm80_copy.cuh"

namespace cutefuse::quant_concat_conv {

// The pixels of a stage: those of the block's outputs, image row after image row, each with the two beyond its end.
struct RowWalk {
  int first_row, first_column;  // of the block's first output; rows are counted through all images

  __device__ __forceinline__ RowWalk(Params const &params, int m0) {
    first_row = params.by_row.divide(m0), first_column = m0 - first_row * params.problem.Q;
  }
  // Pixel of the stage under tap 0 of the block's output m.
  __device__ __forceinline__ int of_output(Params const &params, int m) const {
    return m + (kRowTaps - 1) * params.by_row.divide(first_column + m);
  }
};

// As g2s_unless, by shared address; nothing at all unless `some`.
__device__ __forceinline__ void g2s_unless_at(uint32_t to, char const *from, uint32_t mask, int some) {
  asm volatile(
      "{.reg .pred p, q; .reg .b32 n; setp.eq.u32 p, %2, 0; selp.b32 n, 16, 0, p; setp.ne.s32 q, %3, 0;\n"
      "@q cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;}" ::"r"(to),
      "l"(from), "r"(mask), "r"(some));
}

// Column chunk `column` of the stage's pixels and filters. A stage past the last is copied as zeros.
template <class Traits>
struct RowLoader {
  static constexpr int kK = Traits::kK, kRowsX = Traits::kRowsX, kRowsW = Traits::kRowsW;
  static constexpr int kCopies = kRowsX + kRowsW * kRowTaps;
  Params const &params;
  KBlock<kK> block;
  int const column;
  int blocks_left, rows_left;
  char const *from_x, *from_w;
  int pixel_bytes;
  int pixel[kRowsX];         // under filter row 0
  uint32_t outside[kRowsX];  // bit r: filter row r falls outside the image; bit kMaxTaps: the column does
  uint32_t tap_bits, closed, filters = 0;
  int in_last_pass;

  // The stage's pixels, by all threads into a table that takes a stage's room: each is looked up by the four threads
  // that copy it.
  __device__ __forceinline__ static void list_pixels(Params const &params, Place const &place, int2 *table) {
    Problem const &p = params.problem;
    RowWalk const walk(params, place.m0);
    int const used = walk.of_output(params, Traits::kM - 1) + kRowTaps, padded_row = p.Q + kRowTaps - 1;
    CUTE_NO_UNROLL
    for (int j = place.thread; j < Traits::kPixels; j += Traits::kThreads) {
      int const column = walk.first_column + j, down = params.by_padded_row.divide(column);
      int const image_row = walk.first_row + down;
      bool const exists = j < used && image_row < p.N * p.P;
      int const n = exists ? params.by_image.divide(image_row * p.Q) : 0;
      int const h = (image_row - n * p.P) * p.stride_h - p.pad_top, w = column - down * padded_row - p.pad_left;
      uint32_t outside = uint32_t(unsigned(w) >= unsigned(p.W)) << kMaxTaps;
      CUTE_NO_UNROLL
      for (int r = 0; r < p.R; ++r) outside |= uint32_t(unsigned(h + r * p.dilation_h) >= unsigned(p.H)) << r;
      table[j] = make_int2((n * p.H + h) * p.W + w, exists ? int(outside) : -1);
    }
  }

  __device__ __forceinline__ RowLoader(Params const &all, Place const &place, int2 const *table, KBlock<kK> const &at,
                                       int skipped, int blocks)
      : params(all), block(at), column(place.thread % Traits::kChunks * kVector), blocks_left(blocks) {
    Problem const &p = params.problem;
    int const row = place.n0 + place.thread / Traits::kChunks;
    from_w =
        reinterpret_cast<char const *>(params.w) + int64_t(row) * params.columns + skipped * params.taps * kK + column;
    CUTE_UNROLL
    for (int i = 0; i < kRowsW; ++i) filters |= uint32_t(row + i * Traits::kRowsPerPass < p.K) << i;
    CUTE_UNROLL
    for (int i = 0; i < kRowsX; ++i) {
      int const j = place.thread / Traits::kChunks + i * Traits::kRowsPerPass;
      int2 const found = table[min(j, Traits::kPixels - 1)];
      pixel[i] = found.x, outside[i] = found.y;
    }
    in_last_pass = place.thread / Traits::kChunks + (kRowsX - 1) * Traits::kRowsPerPass < Traits::kPixels;
    enter_source(1);
  }

  // Images of kCHW32 lie all the source's blocks apart; `before`: those that `pixel` reckons with.
  __device__ __forceinline__ void enter_source(int before) {
    Problem const &p = params.problem;
    Strides const to = strides_of(p, block.source);
    int const chunk = (p.C[block.source] - block.left + column) / kVector;
    from_x = reinterpret_cast<char const *>(params.x[block.source]) + chunk / 2 * to.block + chunk % 2 * kVector;
    pixel_bytes = to.pixel;
    if (p.layout == cutefuse::Layout::kBlocks32) {
      int const apart = (ceil_div(p.C[block.source], kLayoutBlock) - before) * (p.H * p.W);
      Place const place = Place::of<Traits>(params);
      RowWalk const walk(params, place.m0);
      CUTE_UNROLL
      for (int i = 0; i < kRowsX; ++i) {
        int const j = place.thread / Traits::kChunks + i * Traits::kRowsPerPass;
        int const image_row = walk.first_row + params.by_padded_row.divide(walk.first_column + j);
        pixel[i] += image_row < p.N * p.P ? params.by_image.divide(image_row * p.Q) * apart : 0;
      }
    }
    enter_block();
  }

  __device__ __forceinline__ void enter_block() {
    closed = column < block.left ? 0u : ~0u;
    tap_bits = 1u | 1u << kMaxTaps, rows_left = params.problem.R;
    --blocks_left;
  }

  __device__ __forceinline__ void advance() {
    Problem const &p = params.problem;
    from_w += kRowTaps * kK;
    from_x = conv::address_of(from_x, params.row_step + kRowTaps, pixel_bytes);
    tap_bits += tap_bits & 0xffffu;
    if (--rows_left > 0) return;
    from_x += kK / kLayoutBlock * strides_of(p, block.source).block - int64_t(params.block_step) * pixel_bytes;
    int const before = ceil_div(p.C[block.source], kLayoutBlock);
    bool const changed = block.advance(p);
    if (blocks_left <= 0) {
      closed = ~0u, filters = 0, rows_left = 1 << 30;
    } else if (changed) {
      enter_source(before);
    } else {
      enter_block();
    }
  }

  // Issues copy `i` of kCopies: the pixels first, then the filters, whose taps lie side by side.
  template <class ToW>
  __device__ __forceinline__ void copy(int i, uint32_t to_x, ToW const &to_w, int stage) const {
    if (i < kRowsX) {
      uint32_t const to = to_x + stage * Traits::kStageX + i * Traits::kRowsPerPass * kRowPitch;
      uint32_t const skip = (outside[i] & tap_bits) | closed;
      char const *const from = conv::address_of(from_x, pixel[i], pixel_bytes);
      if (Traits::kPixels % Traits::kRowsPerPass == 0 || i < kRowsX - 1) {
        g2s_unless_at(to, from, skip, 1);
      } else {
        g2s_unless_at(to, from, skip, in_last_pass);
      }
    } else {
      int const j = (i - kRowsX) / kRowTaps, tap = (i - kRowsX) % kRowTaps;
      conv::g2s_if(&to_w(0, j, 0, stage * kRowTaps + tap),
                   conv::address_of(from_w, j * Traits::kRowsPerPass, params.columns) + tap * kK, filters & 1u << j);
    }
  }
};

}  // namespace cutefuse::quant_concat_conv
