// How a block of an image tile or of a depthwise one copies its pixels, in units of 4 channels, 8 bytes, and an image
// tile its filters.
#pragma once

#include "conv/sm80/store.cuh"

namespace cutefuse::conv {

// Copies 4, 8 or 16 bytes; `bytes` of them are read and the rest becomes zero.
template <int kChunk>
__device__ __forceinline__ void g2s_chunk(uint32_t shared, void const *global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kChunk), "r"(bytes));
}

__device__ __forceinline__ uint2 load_unit(uint32_t shared) {
  uint2 unit;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(unit.x), "=r"(unit.y) : "r"(shared));
  return unit;
}

constexpr int kFragmentBytes = 512;  // of 16 filters in a step

// The outputs of a block: a part of some image rows, and some filters.
struct ImageTile {
  int n, row, column, filter;         // the first
  int rows, columns, filters, parts;  // how many exist; 32 columns at a time

  __device__ __forceinline__ ImageTile(Problem const &p, BlockCut const &cut) {
    int const tile = blockIdx.x / cut.filter_tiles, down = tile / cut.across;
    n = down / cut.down;
    filter = (blockIdx.x - tile * cut.filter_tiles) * cut.filters;
    row = (down - n * cut.down) * cut.height, column = (tile - down * cut.across) * cut.width;
    rows = min(cut.height, p.P - row), columns = min(cut.width, p.Q - column), filters = min(cut.filters, p.K - filter);
    parts = ceil_div(columns, 32);
  }
};

// a / b of small numbers.
__device__ __forceinline__ int quotient(int a, int b) { return int(__fdividef(float(a) + 0.5f, float(b))); }

// A thread's place among the chunks of a block's rows of pixels, which all threads copy in turns.
template <int kThreads>
struct RowWalk {
  int row, at;  // chunk of the row
  int const chunks, step_rows, step;

  __device__ __forceinline__ explicit RowWalk(int chunks_of_row)
      : row(quotient(threadIdx.x, chunks_of_row)),
        at(threadIdx.x - row * chunks_of_row),
        chunks(chunks_of_row),
        step_rows(quotient(kThreads, chunks_of_row)),
        step(kThreads - step_rows * chunks_of_row) {}

  __device__ __forceinline__ void advance() {
    at += step, row += step_rows;
    if (at >= chunks) at -= chunks, ++row;
  }
};

// The bits of an element, or of zero without touching memory.
__device__ __forceinline__ uint32_t load_if(bool exists, uint16_t const *x) {
  uint16_t bits;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
               : "=h"(bits)
               : "l"(x), "r"(int(exists)));
  return bits;
}

__device__ __forceinline__ float load_if(bool exists, float const *x) {
  float value;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
               : "=f"(value)
               : "l"(x), "r"(int(exists)));
  return value;
}

// Copies pixels an element at a time: of an image as a network is given it, in planes or pixels of the filter's type or
// of float32, and of sources whose pixels are no whole units. A thread loads several units before it stores one.
template <class Traits, class Given>
__device__ __forceinline__ void copy_elements(Params const &params, ImageTile const &tile, uint32_t shared) {
  using Element = typename Traits::Element;
  constexpr int kUnit = BlockCut::kUnitBytes, kThreads = Traits::kThreads, kAtOnce = 4;
  using Read = std::conditional_t<sizeof(Given) == 4, float, uint16_t>;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = tile.column * p.stride_w - p.pad_left;
  int const pixel = int(p.ldx[0]), pixels = p.H * p.W, plane = pixel == 1 ? pixels : 1;
  int const part = threadIdx.x & ((1 << cut.shift) - 1), channels = p.C[0] - part * 4, total = cut.rows * cut.span;
  auto const *const image = static_cast<Read const *>(params.x[0]) +
                            int64_t(tile.n) * pixels * (pixel == 1 ? p.C[0] : pixel) + int64_t(part * 4) * plane;
  RowWalk<kThreads> walk(cut.span);
  CUTE_NO_UNROLL
  for (int first = threadIdx.x; first < total; first += kAtOnce * kThreads) {
    std::conditional_t<sizeof(Given) == 4, float, uint32_t> x[kAtOnce][4];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i, walk.advance()) {
      int const h = h0 + walk.row, w = w0 + (walk.at >> cut.shift);
      bool const exists = first + i * kThreads < total && unsigned(h) < unsigned(p.H) && unsigned(w) < unsigned(p.W);
      Read const *const from = image + int64_t(h * p.W + w) * pixel;
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) x[i][c] = load_if(exists && c < channels, from + int64_t(c) * plane);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const at = first + i * kThreads;
      if (at >= total) break;
      uint32_t word[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        if constexpr (sizeof(Given) == 4) {
          Pair<Element> const pair = {Element(x[i][half * 2]), Element(x[i][half * 2 + 1])};
          word[half] = reinterpret_cast<uint32_t const &>(pair);
        } else {
          word[half] = x[i][half * 2] | x[i][half * 2 + 1] << 16;
        }
      }
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(cut.swizzled(shared + at * kUnit)), "r"(word[0]),
                   "r"(word[1])
                   : "memory");
    }
  }
}

// Whether four neighbouring pixels are whole vectors of four numbers: planes, and dense pixels of three channels. Rows
// of a block then begin at such a vector.
__device__ __forceinline__ bool lies_in_fours(Problem const &p, BlockCut const &cut) {
  return cut.shift == 0 && p.W % 4 == 0 && (p.ldx[0] == 1 || (p.ldx[0] == 3 && p.C[0] == 3));
}

__device__ __forceinline__ uint2 load_four_if(bool exists, uint16_t const *x) {
  uint2 y;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
      : "=r"(y.x), "=r"(y.y)
      : "l"(x), "r"(int(exists)));
  return y;
}

__device__ __forceinline__ float4 load_four_if(bool exists, float const *x) {
  float4 y;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0f00000000; mov.b32 %1, 0f00000000; mov.b32 %2, 0f00000000; "
      "mov.b32 %3, 0f00000000; @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];}"
      : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
      : "l"(x), "r"(int(exists)));
  return y;
}

// As copy_elements, four pixels at a time.
template <class Traits, class Given>
__device__ __forceinline__ void copy_fours(Params const &params, ImageTile const &tile, uint32_t shared) {
  using Element = typename Traits::Element;
  constexpr bool kWide = sizeof(Given) == 4;
  constexpr int kUnit = BlockCut::kUnitBytes, kThreads = Traits::kThreads,
                kAtOnce = kWide || Traits::kGroups == 1 ? 2 : 4;
  using Read = std::conditional_t<kWide, float, uint16_t>;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = (tile.column * p.stride_w - p.pad_left) & ~3;
  int const chunks = cut.span / 4, total = cut.rows * chunks, pixel = int(p.ldx[0]);
  int64_t const plane = int64_t(p.H) * p.W, step = pixel == 1 ? plane : 4;
  auto const *const image = static_cast<Read const *>(params.x[0]) + tile.n * plane * p.C[0];
  RowWalk<kThreads> walk(chunks);
  CUTE_NO_UNROLL
  for (int first = threadIdx.x; first < total; first += kAtOnce * kThreads) {
    std::conditional_t<kWide, float4, uint2> read[kAtOnce][4];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i, walk.advance()) {
      int const h = h0 + walk.row, w = w0 + walk.at * 4;
      bool const exists = first + i * kThreads < total && unsigned(h) < unsigned(p.H) && unsigned(w) < unsigned(p.W);
      Read const *const from = image + int64_t(h * p.W + w) * pixel;
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) read[i][c] = load_four_if(exists && c < p.C[0], from + c * step);
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const at = first + i * kThreads;
      if (at >= total) break;
      uint2 x[4];
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) {
        if constexpr (kWide) {
          float4 const &f = read[i][c];
          Channels<Element, 4> const four = {Element(f.x), Element(f.y), Element(f.z), Element(f.w)};
          x[c] = reinterpret_cast<uint2 const &>(four);
        } else {
          x[c] = read[i][c];
        }
      }
      uint4 y[2];
      if (pixel == 1) {
        y[0] = {__byte_perm(x[0].x, x[1].x, 0x5410), __byte_perm(x[2].x, x[3].x, 0x5410),
                __byte_perm(x[0].x, x[1].x, 0x7632), __byte_perm(x[2].x, x[3].x, 0x7632)};
        y[1] = {__byte_perm(x[0].y, x[1].y, 0x5410), __byte_perm(x[2].y, x[3].y, 0x5410),
                __byte_perm(x[0].y, x[1].y, 0x7632), __byte_perm(x[2].y, x[3].y, 0x7632)};
      } else {
        y[0] = {x[0].x, x[0].y & 0xffff, __byte_perm(x[0].y, x[1].x, 0x5432), x[1].x >> 16};
        y[1] = {x[1].y, x[2].x & 0xffff, __byte_perm(x[2].x, x[2].y, 0x5432), x[2].y >> 16};
      }
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared + (at * 4 + half * 2) * kUnit),
                     "r"(y[half].x), "r"(y[half].y), "r"(y[half].z), "r"(y[half].w)
                     : "memory");
      }
    }
  }
}

// Copies pixels as a network is given them, or dense ones of three channels.
template <class Traits, class Given>
__device__ __forceinline__ void copy_given(Params const &params, ImageTile const &tile, uint32_t shared) {
  if (lies_in_fours(params.problem, params.cut)) {
    copy_fours<Traits, Given>(params, tile, shared);
  } else {
    copy_elements<Traits, Given>(params, tile, shared);
  }
}

// Copies the pixels under a block's outputs, in the largest chunks that they allow.
template <class Traits>
__device__ __forceinline__ void copy_pixels(Params const &params, ImageTile const &tile, uint32_t shared) {
  constexpr int kBytes = Traits::kBytes, kThreads = Traits::kThreads;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const pixel_bytes = int(p.ldx[0] * kBytes), align = pixel_bytes | p.start[0] * kBytes;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = tile.column * p.stride_w - p.pad_left;
  char const *const image = static_cast<char const *>(params.x[0]) + int64_t(tile.n) * p.H * p.W * pixel_bytes;
  auto const copy = [&](auto chunk, int shift) {  // 1 << shift chunks a pixel
    constexpr int kChunk = decltype(chunk)::value;
    int const at = (threadIdx.x & ((1 << shift) - 1)) * kChunk, count = max(0, min(kChunk, p.C[0] * kBytes - at));
    int const chunks = cut.span >> cut.shift << shift, total = cut.rows * chunks;
    RowWalk<kThreads> walk(chunks);
#pragma unroll 2
    for (int i = threadIdx.x; i < total; i += kThreads, walk.advance()) {
      int const h = h0 + walk.row, w = w0 + (walk.at >> shift);
      bool const exists = unsigned(h) < unsigned(p.H) && unsigned(w) < unsigned(p.W);
      char const *const from = image + int64_t(h * p.W + w) * pixel_bytes + at;
      g2s_chunk<kChunk>(cut.swizzled(shared + i * kChunk), exists ? from : image, exists ? count : 0);
    }
  };
  if (cut.shift > 0 && align % 16 == 0) {
    copy(Int<16>{}, cut.shift - 1);
  } else if (align % 8 == 0) {
    copy(Int<8>{}, cut.shift);
  } else {
    copy_given<Traits, typename Traits::Element>(params, tile, shared);
  }
}

// Filters as mma reads them, [kGroups * 16 of them][step][16 of those][lane][8 numbers], units behind the last tap and
// filters behind the last are zeros; and where the pixel of each unit lies behind that of the first tap, in bytes,
// -1 behind the last.
//
// A lane's 8 numbers are the first halves of a unit of two filters, then the second halves, so that half a unit is
// copied at a time. Eight threads copy a step of a filter, 32 neighbouring bytes where it is packed compactly.
template <class Traits>
__device__ __forceinline__ void copy_filters(Params const &params, ImageTile const &tile, uint32_t filters,
                                             int *offsets) {
  constexpr int kBytes = Traits::kBytes, kUnit = BlockCut::kUnitBytes, kHalf = kUnit / 2;
  constexpr int kGroups = Traits::kGroups, kVector = Traits::kVector, kRows = Traits::kThreads / 8;
  static_assert(Traits::kTile.n % kRows == 0, "a block's filters are whole rounds of all threads");
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const units = params.taps << cut.shift, parts = (1 << cut.shift) - 1, tap_bytes = p.tap_channels * kBytes;
  int const half = threadIdx.x % 2, lane = threadIdx.x / 2 % 4, n = threadIdx.x / 8;
  int const row_bytes = params.columns * kBytes;
  char const *const from = static_cast<char const *>(params.w) + int64_t(tile.filter + n) * row_bytes + half * kHalf;
  uint32_t to =
      filters + n % kVector / 2 * kFragmentBytes + (n / kVector % 8 * 4 + lane) * 16 + (half * 2 + n % 2) * kHalf;
  CUTE_NO_UNROLL
  for (int unit = lane; unit < cut.steps * 4; unit += 4, to += kGroups * kFragmentBytes) {
    char const *at = from + ((unit >> cut.shift) * tap_bytes + (unit & parts) * kUnit);
    CUTE_UNROLL
    for (int i = 0; i < BlockCut::kMostFilters; i += kRows, at += kRows * row_bytes) {  // filter n + i
      if (i >= cut.filters) break;
      int const pass = i / (kGroups * 16), row = i / kVector % 8;
      g2s_chunk<kHalf>(to + pass * cut.steps * kGroups * kFragmentBytes + row * 64, at,
                       unit < units && n + i < tile.filters ? kHalf : 0);
    }
  }
  for (int unit = threadIdx.x; unit < cut.steps * 4; unit += Traits::kThreads) {
    int const tap = unit >> cut.shift, r = tap / p.S, s = tap - r * p.S;
    int const pixel = (s * p.dilation_w << cut.shift) + (unit & parts);
    offsets[unit] = unit < units ? (r * p.dilation_h * cut.span + pixel) * kUnit : -1;
  }
}

}  // namespace cutefuse::conv
