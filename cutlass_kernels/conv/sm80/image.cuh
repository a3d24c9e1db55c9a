// Images: one source of a few channels, up to 32, in pixels or in planes. A block copies the pixels under all of its
// outputs and the filters once, and its warps multiply from there, 32 outputs at a time, and store from registers:
// k-tiles of mostly absent channels, and barriers between them, would take longer than memory does.
//
// A unit is 4 channels of a pixel, 8 bytes. An mma step has four of them, one for each of four neighbouring lanes,
// whichever tap they belong to: the order of the sum is free as long as pixels and filters agree.
#pragma once

#include "conv/sm80/store.cuh"
#include "dependent_launch.cuh"

namespace cutefuse::conv {

// A number type and a row of a table of tiles: `m` is of no meaning, `n` the filters whose sums a thread holds at once.
template <class Element_, class Row>
struct ImageTraits {
  using Element = Element_;
  static constexpr Tile kTile = Row::kTile;
  static constexpr int kBytes = sizeof(Element), kThreads = kTile.threads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // here the compiler takes more registers, and would spill two
  static constexpr int kBlocks = kThreads > 128 ? 1 : kTile.blocks_per_sm;
#else
  static constexpr int kBlocks = kTile.blocks_per_sm;
#endif
  static_assert(kBytes == 2 && kThreads >= BlockCut::kMostFilters);
};

// Copies 8 or 16 bytes; `bytes` of them are read and the rest becomes zero.
template <int kChunk>
__device__ __forceinline__ void g2s_chunk(uint32_t shared, void const *global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kChunk), "r"(bytes));
}

__device__ __forceinline__ uint2 load_unit(uint32_t shared) {
  uint2 unit;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(unit.x), "=r"(unit.y) : "r"(shared));
  return unit;
}

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

// Copies rows of an image as a network is given it, one row a warp and a pixel a lane: NCHW or pixels, of the filter's
// numbers or others.
template <class Traits, class Given>
__device__ __forceinline__ void copy_given(Params const &params, ImageTile const &tile, uint32_t shared) {
  using Element = typename Traits::Element;
  constexpr int kUnit = BlockCut::kUnitBytes;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = tile.column * p.stride_w - p.pad_left;
  int const pixel = int(p.ldx[0]), pixels = p.H * p.W, plane = pixel == 1 ? pixels : 1;
  int const lane = threadIdx.x % 32, part = lane & ((1 << cut.shift) - 1), channels = p.C[0] - part * 4;
  auto const *const image = static_cast<Given const *>(params.x[0]) +
                            int64_t(tile.n) * pixels * (pixel == 1 ? p.C[0] : pixel) + int64_t(part * 4) * plane;
  CUTE_NO_UNROLL
  for (int row = threadIdx.x / 32; row < cut.rows; row += Traits::kThreads / 32) {
    int const h = h0 + row;
    bool const inside = unsigned(h) < unsigned(p.H);
    uint32_t const to = shared + row * cut.span * kUnit;
#pragma unroll 2
    for (int i = lane; i < cut.span; i += 32) {
      int const w = w0 + (i >> cut.shift);
      bool const exists = inside && unsigned(w) < unsigned(p.W);
      Given const *const x = image + (exists ? int64_t(h * p.W + w) * pixel : 0);
      Channels<Element, 4> unit;
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) unit.v[c] = exists && c < channels ? Element(x[int64_t(c) * plane]) : Element(0);
      uint2 const words = reinterpret_cast<uint2 const &>(unit);
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + i * kUnit), "r"(words.x), "r"(words.y) : "memory");
    }
  }
}

// Copies rows of pixels, one row a warp.
template <class Traits>
__device__ __forceinline__ void copy_pixels(Params const &params, ImageTile const &tile, uint32_t shared) {
  constexpr int kBytes = Traits::kBytes, kUnit = BlockCut::kUnitBytes;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const pixel_bytes = int(p.ldx[0] * kBytes), bytes = p.C[0] * kBytes, lane = threadIdx.x % 32;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = tile.column * p.stride_w - p.pad_left;
  char const *const image = static_cast<char const *>(params.x[0]) + int64_t(tile.n) * p.H * p.W * pixel_bytes;
  int const align = pixel_bytes | p.start[0] * kBytes;
  CUTE_NO_UNROLL
  for (int row = threadIdx.x / 32; row < cut.rows; row += Traits::kThreads / 32) {
    int const h = h0 + row;
    bool const inside = unsigned(h) < unsigned(p.H);
    char const *const from = image + (int64_t(h) * p.W + w0) * pixel_bytes;
    uint32_t const to = shared + row * cut.span * kUnit;
    auto const copy = [&](auto chunk, int shift) {  // 1 << shift chunks a pixel
      constexpr int kChunk = decltype(chunk)::value;
      int const at = (lane & ((1 << shift) - 1)) * kChunk, count = max(0, min(kChunk, bytes - at));
      int const left = cut.span * kUnit / kChunk;
#pragma unroll 2
      for (int i = lane; i < left; i += 32) {
        int const pixel = i >> shift;
        bool const exists = inside && unsigned(w0 + pixel) < unsigned(p.W);
        g2s_chunk<kChunk>(cut.swizzled(to + i * kChunk), exists ? from + pixel * pixel_bytes + at : image,
                          exists ? count : 0);
      }
    };
    if (cut.shift > 0 && align % 16 == 0) {
      copy(Int<16>{}, cut.shift - 1);
    } else if (align % 8 == 0) {
      copy(Int<8>{}, cut.shift);
    } else {  // an element at a time
      int const at = (lane & ((1 << cut.shift) - 1)) * kUnit, count = (bytes - at) / kBytes;
#pragma unroll 2
      for (int i = lane; i < cut.span; i += 32) {
        int const pixel = i >> cut.shift;
        bool const exists = inside && unsigned(w0 + pixel) < unsigned(p.W);
        auto const *const x = reinterpret_cast<uint16_t const *>(from + pixel * pixel_bytes + at);
        uint32_t word[2] = {};
        CUTE_UNROLL
        for (int c = 0; c < 4; ++c) word[c / 2] |= uint32_t(exists && c < count ? __ldg(x + c) : 0) << c % 2 * 16;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(cut.swizzled(to + i * kUnit)), "r"(word[0]), "r"(word[1])
                     : "memory");
      }
    }
  }
}

// Where a filter stands among its 16: a thread's four sums of two mma are then those of four neighbouring filters.
__device__ __forceinline__ int place_of_filter(int filter) {
  return (filter & ~15) | (filter & 2) << 2 | (filter & 12) >> 1 | (filter & 1);
}

// [unit][filter], units behind the last tap and filters behind the last are zeros; and where the pixel of each unit
// lies behind that of the first tap, in bytes, -1 behind the last.
template <class Traits>
__device__ __forceinline__ void copy_filters(Params const &params, ImageTile const &tile, uint32_t filters,
                                             int *offsets) {
  constexpr int kBytes = Traits::kBytes, kUnit = BlockCut::kUnitBytes;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const units = params.taps << cut.shift, parts = (1 << cut.shift) - 1, first = threadIdx.x % 4;
  CUTE_NO_UNROLL
  for (int n = threadIdx.x / 4; n < cut.filters; n += Traits::kThreads / 4) {
    auto const *const w = static_cast<char const *>(params.w);
    char const *const from = w + int64_t(tile.filter + n) * params.columns * kBytes;
    int const left = n < tile.filters ? units : 0;
    uint32_t to = filters + (first * cut.pitch() + place_of_filter(n)) * kUnit;
#pragma unroll 2
    for (int unit = first; unit < cut.steps * 4; unit += 4, to += 4 * cut.pitch() * kUnit) {
      int const at = (unit >> cut.shift) * (kChannelBlock * kBytes) + (unit & parts) * kUnit;
      g2s_chunk<kUnit>(to, unit < left ? from + at : w, unit < left ? kUnit : 0);
    }
  }
  for (int unit = threadIdx.x; unit < cut.steps * 4; unit += Traits::kThreads) {
    int const tap = unit >> cut.shift, r = tap / p.S, s = tap - r * p.S;
    int const pixel = (s * p.dilation_w << cut.shift) + (unit & parts);
    offsets[unit] = unit < units ? (r * p.dilation_h * cut.span + pixel) * kUnit : -1;
  }
}

// Stores outputs k to k + 3 of a pixel, as many as it has; by_fours: pixels are whole fours.
template <class Output>
__device__ __forceinline__ void store_four(Problem const &p, int stored, bool by_fours, Output *at, int k,
                                           Channels<Output, 4> &y) {
  if (k + 4 > p.K) {  // pad lanes are zeros, whatever the activation makes of them
    CUTE_UNROLL
    for (int c = 0; c < 4; ++c) {
      if (k + c >= p.K) y.v[c] = Output(0);
    }
  }
  if (by_fours && k + 4 <= stored) {
    *reinterpret_cast<Channels<Output, 4> *>(at) = y;
  } else {
    CUTE_UNROLL
    for (int c = 0; c < 4; ++c) {
      if (k + c < stored) at[c] = y.v[c];
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    conv_sm80_image(Params const __grid_constant__ params) {
  using Output = typename Traits::Element;
  constexpr int kUnit = BlockCut::kUnitBytes, kMostFilters = BlockCut::kMostFilters, kThreads = Traits::kThreads;
  constexpr int kGroups = Traits::kTile.n / 16, kWarps = kThreads / 32;  // groups of filters with sums in registers
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  ImageTile const tile(p, cut);
  uint32_t const pixels = cast_smem_ptr_to_uint(shared), filters = pixels + cut.pixels_bytes();
  float *const bias = reinterpret_cast<float *>(shared + cut.pixels_bytes() + cut.filters_bytes());
  int *const offsets = reinterpret_cast<int *>(bias + kMostFilters);
  let_next_kernel_start();
  wait_for_previous_kernel();  // no global memory has been touched yet
  if (p.reads == Reads::kSources) {
    copy_pixels<Traits>(params, tile, pixels);
  } else if (p.reads == Reads::kImage) {
    copy_given<Traits, Output>(params, tile, pixels);
  } else {
    copy_given<Traits, float>(params, tile, pixels);
  }
  copy_filters<Traits>(params, tile, filters, offsets);
  if (int const k = threadIdx.x; k < kMostFilters) bias[k] = k < tile.filters ? __ldg(params.b + tile.filter + k) : 0;
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();

  int const lane = threadIdx.x % 32, unit = lane % 4, group = lane / 4;  // of the mma's operands
  Clamp<Output> const clamp(p);
  int const ld = cut.ld, stored = cut.stored;
  bool const by_fours = ld % 4 == 0;
  int row = 0;
  CUTE_NO_UNROLL
  for (int part = threadIdx.x / 32;; part += kWarps) {
    while (part >= tile.parts) part -= tile.parts, ++row;
    if (row >= tile.rows) break;
    int const first = part * 32 + group;  // this thread's columns are 8 apart
    uint32_t const from = pixels + (row * p.stride_h * cut.span + (first * p.stride_w << cut.shift)) * kUnit;
    Output *const to =
        static_cast<Output *>(params.ys[0]) + (int64_t(tile.n * p.P + tile.row + row) * p.Q + tile.column + first) * ld;
    CUTE_NO_UNROLL
    for (int k0 = 0;;) {  // more sums at a time would need more registers
      Tensor acc = make_tensor<float>(Shape<_4, _2, _2, Int<kGroups>>{});  // (MMA,MMA_M,MMA_N,group)
      CUTE_UNROLL
      for (int j = 0; j < kGroups; ++j) {
        float4 const b = *reinterpret_cast<float4 const *>(bias + k0 + j * 16 + unit * 4);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          acc(i % 2 * 2, i / 2, 0, j) = b.x, acc(i % 2 * 2 + 1, i / 2, 0, j) = b.y;
          acc(i % 2 * 2, i / 2, 1, j) = b.z, acc(i % 2 * 2 + 1, i / 2, 1, j) = b.w;
        }
      }
      uint32_t w = filters + (unit * cut.pitch() + k0 + group) * kUnit;
      CUTE_NO_UNROLL
      for (int step = 0;; w += 4 * cut.pitch() * kUnit) {
        int const offset = offsets[step * 4 + unit];
        uint32_t const at = cut.swizzled(from + max(offset, 0));
        uint2 x[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = load_unit(at + i * cut.columns_bytes);
        bool const last = ++step == cut.steps;
        if (last) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            if (offset < 0) x[i] = {};  // NaN times the filter's zero would be NaN
          }
        }
        CUTE_UNROLL
        for (int j = 0; j < kGroups; ++j) {
          if (k0 + j * 16 >= cut.filters) break;
          uint2 const b[2] = {load_unit(w + j * 16 * kUnit), load_unit(w + (j * 16 + 8) * kUnit)};
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            Tensor y = acc(_, i / 2, i % 2, j);
            uint2 const &lo = x[i / 2 * 2], &hi = x[i / 2 * 2 + 1], &bi = b[i % 2];
            Numbers<typename Traits::Element>::Op::fma(y(0), y(1), y(2), y(3), lo.x, hi.x, lo.y, hi.y, bi.x, bi.y, y(0),
                                                       y(1), y(2), y(3));
          }
        }
        if (last) break;
      }
      CUTE_UNROLL
      for (int j = 0; j < kGroups; ++j) {
        if (k0 + j * 16 >= cut.filters) break;
        if (!clamp.is_all) activate(acc(_, _, _, j), p);
        int const k = tile.filter + k0 + j * 16 + unit * 4;
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (first + i * 8 >= tile.columns) break;
          Channels<Output, 4> y;
          CUTE_UNROLL
          for (int half = 0; half < 2; ++half) {
            Pair<Output> const pair = clamp(acc(i % 2 * 2, i / 2, half, j), acc(i % 2 * 2 + 1, i / 2, half, j));
            y.v[half * 2] = pair.v[0], y.v[half * 2 + 1] = pair.v[1];
          }
          store_four(p, stored, by_fours, to + int64_t(i * 8) * ld + k, k, y);
        }
      }
      if ((k0 += kGroups * 16) >= cut.filters) break;
    }
  }
}

}  // namespace cutefuse::conv
