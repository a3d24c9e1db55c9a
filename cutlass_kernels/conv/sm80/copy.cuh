// How the Ampere path reaches global memory on the way in: cp.async, the pixels that a thread's rows stand for, and the
// walk over the reduction.
#pragma once

#include "conv/sm80/traits.cuh"

namespace cutefuse::conv {

// Copies 16 bytes past L1, of which `bytes` are read and the rest becomes zero: halo, channel tails and rows past the
// end. Through L1 (.ca) the taps of a filter find each other's pixels, but every chunk passes L1's banks twice.
__device__ __forceinline__ void g2s(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

// The same where the 16 bytes are all there or none of them: `mask` has a bit set, or none. The test stands here, since
// the compiler would first shift the bit to where it stands for 16.
__device__ __forceinline__ void g2s_if(void *shared, void const *global, uint32_t mask) {
  asm volatile(
      "{.reg .pred p; .reg .b32 n; setp.ne.u32 p, %2, 0; selp.b32 n, 16, 0, p;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;}" ::"r"(cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(mask));
}

__device__ __forceinline__ void g2s_unless(void *shared, void const *global, uint32_t mask) {
  asm volatile(
      "{.reg .pred p; .reg .b32 n; setp.eq.u32 p, %2, 0; selp.b32 n, 16, 0, p;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;}" ::"r"(cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(mask));
}

// base + index * stride in one instruction: left to itself, the compiler regroups sums of such products into longer
// ones.
__device__ __forceinline__ char const *address_of(char const *base, int index, int stride) {
  char const *at;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(index), "r"(stride), "l"(base));
  return at;
}

// The same 16 bytes by four copies, for pixels that start at any multiple of 4 bytes.
__device__ __forceinline__ void g2s_by_element(void *shared, void const *global, int bytes) {
  CUTE_UNROLL
  for (int at = 0; at < 16; at += 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cast_smem_ptr_to_uint(shared) + at),
                 "l"(static_cast<char const *>(global) + at), "r"(bytes > at ? 4 : 0));
  }
}

// The same 16 bytes in pieces of 16, 8 or, if `kSmallest` is 4, of 4 bytes, as `piece` says. Of every piece all bytes
// exist or none, the first `bytes` of the chunk. No branch: it would stand between the mma.
template <int kSmallest>
__device__ __forceinline__ void g2s_pieces(void *shared, void const *global, int bytes, int piece) {
  uint32_t const to = cast_smem_ptr_to_uint(shared);
  asm volatile(
      "{.reg .pred p, q, w, h; .reg .b32 a, b, c;\n"
      "setp.gt.s32 p, %2, 0; setp.gt.s32 q, %2, 8; setp.eq.s32 w, %3, 16; setp.eq.s32 h, %3, 8;\n"
      "selp.b32 a, 16, 0, p; selp.b32 b, 8, 0, p; selp.b32 c, 8, 0, q;\n"
      "@w cp.async.cg.shared.global.L2::128B [%0], [%1], 16, a;\n"
      "@h cp.async.ca.shared.global [%0], [%1], 8, b;\n"
      "@h cp.async.ca.shared.global [%0+8], [%1+8], 8, c;}" ::"r"(to),
      "l"(global), "r"(bytes), "r"(piece));
  if constexpr (kSmallest == 4) {
    CUTE_UNROLL
    for (int at = 0; at < 16; at += 4) {
      asm volatile(
          "{.reg .pred p, s; .reg .b32 n; setp.eq.s32 s, %3, 4; setp.gt.s32 p, %2, 0; selp.b32 n, 4, 0, p;\n"
          "@s cp.async.ca.shared.global [%0], [%1], 4, n;}" ::"r"(to + at),
          "l"(static_cast<char const *>(global) + at), "r"(bytes - at), "r"(piece));
    }
  }
}

// Where a block and a thread work. Read anew by every call: behind the main loop a second one costs less than registers
// kept through it.
struct Place {
  int thread, split, m0, n0;

  template <class Traits, class Params>
  __device__ __forceinline__ static Place of(Params const &params) {
    int thread, block;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    // Filter tiles are fastest, so that the blocks which read the same pixels run together.
    int const tiles_n = ceil_div(params.problem.K, Traits::kN);
    int const split = params.splits > 1 ? block % params.splits : 0;
    int const output_tile = params.splits > 1 ? block / params.splits : block;
    return {thread, split, output_tile / tiles_n * Traits::kM, output_tile % tiles_n * Traits::kN};
  }
};

// A filter tap: its row, and its distance from tap (0,0) in input pixels.
struct Tap {
  int r = 0, h = 0, w = 0;
  uint32_t bits = 1u | 1u << kMaxTaps;  // those of SourceRows::outside that must be clear

  __device__ __forceinline__ void next_row(Problem const &p) {
    ++r, h += p.dilation_h, w = 0, bits = 1u << r | 1u << kMaxTaps;
  }
};

// The input pixels under the kRowsX GEMM rows that one thread copies.
template <class Traits>
struct SourceRows {
  static constexpr int kRows = Traits::kRowsX;
  static constexpr bool kUpsamples = Traits::kTile.upsamples;
  int pixel[kRows];  // linear index of the pixel under tap (0,0), maybe in the halo; upsampled: index of its image
  uint32_t outside[kRows];  // bit r: filter row r falls outside the image; bit 16 + s: filter column s does
  static_assert(2 * kMaxTaps <= 32);
  int corner[kUpsamples ? kRows : 1];     // h0 and w0 in the enlarged image, 16 bits each
  int row_start[kUpsamples ? kRows : 1];  // linear index of the source row under the tap's
  int H, W;                               // of the source, before it is enlarged
  uint32_t multiplier;

  // Row i stands for output pixel first + i * kRowsPerPass. The int8 operator has Params of its own.
  template <class AnyParams>
  __device__ __forceinline__ void set(AnyParams const &params, int first) {
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
      pixel[i] = kUpsamples ? at.n : (at.n * p.H + at.h0) * p.W + at.w0;
      if constexpr (kUpsamples) corner[i] = int(unsigned(at.h0) << 16 | (unsigned(at.w0) & 0xffffu));
      outside[i] = m < pixels ? 0 : ~0u;
      h0[i] = at.h0, w0[i] = at.w0;
    }
    CUTE_NO_UNROLL
    for (int r = 0; r < p.R; ++r) {  // short code, run once: fetching instructions is what it costs
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

  __device__ __forceinline__ void enter_source(Params const &params, int source) {
    if constexpr (kUpsamples) {
      multiplier = params.upsample_multiplier[source];
      H = source_coordinate(params.problem.H, multiplier), W = source_coordinate(params.problem.W, multiplier);
    }
  }

  // Once for a filter row and not at every tap: the division of the enlarged row.
  __device__ __forceinline__ void enter_row(Tap const &tap) {
    if constexpr (kUpsamples) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        row_start[i] = (pixel[i] * H + source_coordinate((corner[i] >> 16) + tap.h, multiplier)) * W;
      }
    }
  }

  // Linear index in the source, of the pixel under tap (0,0) unless upsampled; without meaning where the tap is
  // outside.
  __device__ __forceinline__ int at(int i, Tap const &tap) const {
    if constexpr (!kUpsamples) return pixel[i];
    return row_start[i] + source_coordinate(int(int16_t(corner[i])) + tap.w, multiplier);
  }
};

// One thread's share of the k-tiles, in the order of the reduction: a column chunk of kRowsX pixels and kRowsW filters.
// A copy is a multiply-add and a test of bits, and the step to the next k-tile is three adds for as long as a run
// lasts: the columns of a filter row, or the whole channel blocks of a source under a 1x1 filter. So there is hardly a
// branch, and all this can stand between the mma instructions. A k-tile past the last is copied as zeros.
template <class Traits>
struct Loader {
  using Element = typename Traits::Element;
  static constexpr int kK = Traits::kK, kVector = Traits::kVector, kRowsX = Traits::kRowsX, kRowsW = Traits::kRowsW;
  static constexpr int kCopies = kRowsX + kRowsW, kBytes = sizeof(Element);
  static constexpr bool kUpsamples = Traits::kTile.upsamples;
  static_assert(kRowsW <= 32);
  Params const &params;
  SourceRows<Traits> rows;
  KBlock<kK> block;
  Tap tap;
  int const taps, column;  // column: of the k-tile, that this thread copies
  int blocks_left;         // behind this run
  int run;                 // k-tiles left of it
  char const *from_x;      // these channels of the source's pixel 0, moved by the tap unless upsampled
  char const *from_w;
  int ld_bytes, bytes;  // of a pixel; of the chunk, that exist
  int piece = 16;       // bytes that are copied at once
  int step_x;           // from one k-tile of a run to the next
  int const step_w;
  uint32_t const step_bits;
  uint32_t closed;   // all ones where the chunk has no channels, else zeros
  uint32_t filters;  // bit i: filter row i exists

  // The `blocks` channel blocks from `first` on, whose filters start at `first_column` of the packed matrix.
  __device__ __forceinline__ Loader(Params const &all, int thread, int m0, int n0, KBlock<kK> const &first,
                                    int first_column, int blocks)
      : params(all),
        block(first),
        taps(all.problem.R * all.problem.S),
        column(thread % Traits::kChunks * kVector),
        blocks_left(blocks),
        step_w(taps == 1 ? kK * kBytes : kChannelBlock * kBytes),
        step_bits(taps == 1 ? 0 : 0xffff0000u) {
    int const row = thread / Traits::kChunks;
    from_w =
        static_cast<char const *>(params.w) + (int64_t(n0 + row) * params.columns + first_column + column) * kBytes;
    filters = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRowsW; ++i) filters |= uint32_t(n0 + row + i * Traits::kRowsPerPass < params.problem.K) << i;
    rows.set(params, m0 + row);
    enter_source();
  }

  __device__ __forceinline__ void enter_source() {
    int const channel = params.problem.C[block.source] - block.left + column;
    from_x = static_cast<char const *>(params.x[block.source]) + channel * kBytes;
    ld_bytes = int(params.problem.ldx[block.source] * kBytes);
    step_x = taps == 1 ? kK * kBytes : kUpsamples ? 0 : params.problem.dilation_w * ld_bytes;
    rows.enter_source(params, block.source);
    if constexpr (Traits::kTile.copy_bytes < 16) {
      int const sizes = (params.problem.C[block.source] * kBytes) | ld_bytes;
      piece = min(16, sizes & -sizes);
    }
    enter_block();
  }

  // Channels past the source's end read as zero: pad lanes may hold anything, and NaN times zero is NaN.
  __device__ __forceinline__ void enter_block() {
    int const left = block.left - column;
    closed = left > 0 ? 0u : ~0u;
    rows.enter_row(tap);
    bytes = !Traits::kTile.any_channels || left >= kVector ? 16 : left * kBytes;
    run = params.problem.S;
    if (taps == 1) {  // up to the last of the source's whole blocks
      run = max(1, min(block.left / kK, blocks_left));
      blocks_left -= run - 1, block.left -= (run - 1) * kK,
          block.offset = (block.offset + (run - 1) * kK) % kChannelBlock;
    }
    --blocks_left;
  }

  __device__ __forceinline__ void advance() {
    from_x += step_x, from_w += step_w, tap.bits += tap.bits & step_bits;
    if (kUpsamples && taps > 1) tap.w += params.problem.dilation_w;
    if (--run > 0) return;
    Problem const &p = params.problem;
    if (taps == 1) {
      from_w += (kChannelBlock - kK) * kBytes;
    } else {
      tap.next_row(p);
      if (!kUpsamples) from_x += int64_t(p.dilation_h * p.W - p.S * p.dilation_w) * ld_bytes;
      run = p.S;
      if (tap.r < p.R) {
        rows.enter_row(tap);
        return;
      }
      from_x += kK * kBytes - (kUpsamples ? 0 : int64_t(p.R * p.dilation_h * p.W) * ld_bytes);
      tap = Tap{};
    }
    from_w += block.filter_step(taps) * kBytes;
    bool const changed = block.advance(p);
    if (blocks_left <= 0) {
      closed = ~0u, filters = 0;
    } else if (changed) {
      enter_source();
    } else {
      enter_block();
    }
  }

  // Issues copy `i` of kCopies: the pixels first, then the filters.
  template <class ToX, class ToW>
  __device__ __forceinline__ void copy(int i, ToX const &to_x, ToW const &to_w) const {
    if (i < kRowsX) {
      char const *const from = address_of(from_x, rows.at(i, tap), ld_bytes);
      uint32_t const outside = (rows.outside[i] & tap.bits) | closed;
      if constexpr (Traits::kTile.copy_bytes < 16) {
        g2s_pieces<Traits::kTile.copy_bytes>(&to_x(0, i, 0), from, outside == 0 ? bytes : 0, piece);
      } else if constexpr (Traits::kTile.any_channels) {
        g2s(&to_x(0, i, 0), from, outside == 0 ? bytes : 0);
      } else {
        g2s_unless(&to_x(0, i, 0), from, outside);
      }
    } else {
      int const j = i - kRowsX;
      g2s_if(&to_w(0, j, 0), address_of(from_w, j * Traits::kRowsPerPass, params.columns * kBytes), filters & 1u << j);
    }
  }
};

}  // namespace cutefuse::conv
