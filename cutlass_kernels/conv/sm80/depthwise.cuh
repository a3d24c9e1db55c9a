// Depthwise convolutions: a block copies the pixels under its outputs and the filters of its channels once, and its
// threads add up from there. A tensor core would multiply mostly zeros, and zero times another channel's infinity is
// NaN.
//
// A unit is 4 channels of a pixel, 8 bytes. A thread computes a unit of kDepthwiseColumns neighbouring outputs, so that
// each pixel of a row is read once for all of them.
//
// Where a filter is dilated and has stride 1, outputs of one residue class read pixels of one such class: dilation_h *
// dilation_w convolutions without dilation, of as many images. A block computes outputs of one class, down an image
// and, where that is faster, along its rows.
#pragma once

#include "conv/cuts.h"
#include "conv/sm80/image_copy.cuh"
#include "conv/sm80/store.cuh"
#include "dependent_launch.cuh"

namespace cutefuse::conv {

template <class Element_, class Row>
struct DepthwiseTraits {
  using Element = Element_;
  static constexpr Tile kTile = Row::kTile;
  static constexpr int kBytes = sizeof(Element), kThreads = kTile.threads(), kBlocks = kTile.blocks_per_sm;
  static_assert(kBytes == 2 && kThreads == kDepthwiseThreads && kBlocks == kDepthwiseBlocks);
};

// The outputs of a block, a step apart from the first one on.
struct DepthwiseTile : ImageTile {
  __device__ __forceinline__ DepthwiseTile(Problem const &p, BlockCut const &cut) : ImageTile(p, cut) {
    if (cut.classes == 1) return;  // else n counts the classes of all images
    int const image = n / cut.classes, own = n - image * cut.classes, across = min(cut.step_w, p.Q);
    int const down = own / across;
    n = image, row = row * cut.step_h + down, column = column * cut.step_w + own - down * across;
    rows = min(cut.height, ceil_div(p.P - row, cut.step_h));  // none where the last classes have fewer
    columns = min(cut.width, ceil_div(p.Q - column, cut.step_w));
  }
};

// Copies rows of pixels, the channels of this block alone, one row a warp and 16 bytes a lane.
template <class Traits>
__device__ __forceinline__ void copy_channels(Params const &params, DepthwiseTile const &tile, uint32_t shared) {
  constexpr int kBytes = Traits::kBytes, kChunk = 16;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const h0 = tile.row * p.stride_h - p.pad_top, w0 = tile.column * p.stride_w - p.pad_left;
  int const lane = threadIdx.x % 32, shift = cut.shift - 1;  // 1 << shift chunks of a pixel
  int const at = (lane & ((1 << shift) - 1)) * kChunk, count = max(0, min(kChunk, tile.filters * kBytes - at));
  int source = 0, channel = tile.filter + at / kBytes;  // of the lane's chunk, which lies in one source
  for (; source + 1 < p.sources && channel >= p.C[source]; ++source) channel -= p.C[source];
  int64_t const pixel_bytes = p.ldx[source] * kBytes;
  char const *const image =
      static_cast<char const *>(params.x[source]) + int64_t(tile.n) * p.H * p.W * pixel_bytes + channel * kBytes;
  CUTE_NO_UNROLL
  for (int row = threadIdx.x / 32; row < cut.rows; row += Traits::kThreads / 32) {
    int const h = h0 + row * cut.step_h;
    bool const inside = unsigned(h) < unsigned(p.H) && count > 0;
    char const *const from = image + (int64_t(h) * p.W + w0) * pixel_bytes;
    uint32_t const to = shared + row * cut.span * BlockCut::kUnitBytes;
#pragma unroll 2
    for (int i = lane; i < cut.span / 2; i += 32) {
      int const pixel = (i >> shift) * cut.step_w;
      bool const exists = inside && unsigned(w0 + pixel) < unsigned(p.W);
      g2s_chunk<kChunk>(to + i * kChunk, exists ? from + pixel * pixel_bytes : params.x[0], exists ? count : 0);
    }
  }
}

// [R][S][channel] of this block's channels; those behind the last are zeros.
template <class Traits>
__device__ __forceinline__ void copy_taps(Params const &params, DepthwiseTile const &tile, uint32_t shared) {
  using Element = typename Traits::Element;
  constexpr int kChunk = 16, kVector = kChunk / Traits::kBytes;
  int const shift = params.cut.shift - 1, K = params.problem.K;
  auto const *const w = static_cast<Element const *>(params.w);
  for (int i = threadIdx.x; i < params.taps << shift; i += Traits::kThreads) {
    int const k = tile.filter + (i & ((1 << shift) - 1)) * kVector;
    Element const *const from = w + int64_t(i >> shift) * K + k;
    if (K % kVector == 0) {
      g2s_chunk<kChunk>(shared + i * kChunk, k < K ? from : w, k < K ? kChunk : 0);
    } else {
      CUTE_UNROLL
      for (int c = 0; c < kVector; ++c) {
        Element const value = k + c < K ? from[c] : Element(0);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared + i * kChunk + c * Traits::kBytes),
                     "h"(reinterpret_cast<uint16_t const &>(value))
                     : "memory");
      }
    }
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

template <class Element>
__device__ __forceinline__ float4 widened(Element const *four) {
  Channels<Element, 4> const x = *reinterpret_cast<Channels<Element, 4> const *>(four);
  return {float(x.v[0]), float(x.v[1]), float(x.v[2]), float(x.v[3])};
}

// Sums of a thread, (channel,column). `from` is the pixel under the first tap of its first output, `w` its channels'
// filter. kS and kStride are the filter's columns and the stride along a row; 0: any, with any dilation.
template <class Traits, int kS, int kStride, class Sums>
__device__ __forceinline__ void add_taps(Params const &params, uint32_t from, typename Traits::Element const *w,
                                         Sums &sums) {
  using Element = typename Traits::Element;
  constexpr int kColumns = kDepthwiseColumns;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const pixel_bytes = BlockCut::kUnitBytes << cut.shift;
  auto const add = [&](float4 const &filter, uint2 const &unit, int column) {
    Channels<Element, 4> const &x = reinterpret_cast<Channels<Element, 4> const &>(unit);
    sums(0, column) += float(x.v[0]) * filter.x, sums(1, column) += float(x.v[1]) * filter.y;
    sums(2, column) += float(x.v[2]) * filter.z, sums(3, column) += float(x.v[3]) * filter.w;
  };
  CUTE_NO_UNROLL
  for (int r = 0; r < p.R; ++r, from += cut.dilation_h * cut.span * BlockCut::kUnitBytes) {
    if constexpr (kS > 0) {
      float4 filter[kS];
      CUTE_UNROLL
      for (int s = 0; s < kS; ++s, w += cut.filters) filter[s] = widened(w);
      uint32_t at = from;
      CUTE_UNROLL
      for (int i = 0; i < (kColumns - 1) * kStride + kS; ++i, at += pixel_bytes) {
        uint2 const x = load_unit(at);
        CUTE_UNROLL
        for (int s = 0; s < kS; ++s) {
          if ((i - s) % kStride == 0 && i >= s && i - s < kColumns * kStride) add(filter[s], x, (i - s) / kStride);
        }
      }
    } else {
      CUTE_NO_UNROLL
      for (int s = 0; s < p.S; ++s, w += cut.filters) {
        float4 const filter = widened(w);
        CUTE_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          add(filter, load_unit(from + (i * p.stride_w + s * cut.dilation_w) * pixel_bytes), i);
        }
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    conv_sm80_depthwise(Params const __grid_constant__ params) {
  using Element = typename Traits::Element;
  constexpr int kColumns = kDepthwiseColumns, kThreads = Traits::kThreads, kUnit = BlockCut::kUnitBytes;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  DepthwiseTile const tile(p, cut);
  uint32_t const pixels = cast_smem_ptr_to_uint(shared);
  auto *const filters = reinterpret_cast<Element *>(shared + cut.pixels_bytes());  // [R][S][channel]
  auto *const bias = reinterpret_cast<float *>(filters + params.taps * cut.filters);
  let_next_kernel_start();
  wait_for_previous_kernel();  // no global memory has been touched yet
  if (tile.rows <= 0 || tile.columns <= 0) return;
  copy_channels<Traits>(params, tile, pixels);
  copy_taps<Traits>(params, tile, cast_smem_ptr_to_uint(filters));
  if (int const k = threadIdx.x; k < cut.filters) bias[k] = k < tile.filters ? __ldg(params.b + tile.filter + k) : 0;
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();

  // Neighbouring units are neighbouring lanes, then come neighbouring rows.
  int const unit = threadIdx.x & ((1 << cut.shift) - 1), first = threadIdx.x >> cut.shift, step = kThreads >> cut.shift;
  int const step_groups = step / tile.rows, step_rows = step - step_groups * tile.rows;
  int group = first / tile.rows, row = first - group * tile.rows;  // of kColumns outputs
  int const k = tile.filter + unit * 4;
  Clamp<Element> const clamp(p);
  bool const by_fours = cut.ld % 4 == 0;
  // Of a filter's columns and its stride, where code for them may exist.
  int const kind = cut.dilation_w == 1 && p.stride_w <= 2 ? p.S * 2 + p.stride_w : 0;
  CUTE_NO_UNROLL
  for (; group * kColumns < tile.columns; group += step_groups, row += step_rows) {
    if (row >= tile.rows && (row -= tile.rows, ++group * kColumns >= tile.columns)) break;
    Tensor sums = make_tensor<float>(Shape<_4, Int<kColumns>>{});
    float4 const b = *reinterpret_cast<float4 const *>(bias + unit * 4);
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) sums(0, i) = b.x, sums(1, i) = b.y, sums(2, i) = b.z, sums(3, i) = b.w;
    int const column = group * kColumns;
    uint32_t const from = pixels + (row * p.stride_h * cut.span + (column * p.stride_w << cut.shift) + unit) * kUnit;
    Element const *const w = filters + unit * 4;
    switch (kind) {
      case 3 * 2 + 1:
        add_taps<Traits, 3, 1>(params, from, w, sums);
        break;
      case 3 * 2 + 2:
        add_taps<Traits, 3, 2>(params, from, w, sums);
        break;
      case 5 * 2 + 1:
        add_taps<Traits, 5, 1>(params, from, w, sums);
        break;
      case 5 * 2 + 2:
        add_taps<Traits, 5, 2>(params, from, w, sums);
        break;
      case 7 * 2 + 1:
        add_taps<Traits, 7, 1>(params, from, w, sums);
        break;
      default:
        add_taps<Traits, 0, 0>(params, from, w, sums);
    }
    if (!clamp.is_all) activate(sums, p);
    int64_t const y_row = int64_t(tile.n * p.P + tile.row + row * cut.step_h) * p.Q, ld = int64_t(cut.step_w) * cut.ld;
    auto *const to = static_cast<Element *>(params.ys[0]) + (y_row + tile.column + column * cut.step_w) * cut.ld + k;
    auto const store = [&](auto const &put) {
      CUTE_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        if (column + i >= tile.columns) break;
        Channels<Element, 4> y;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          Pair<Element> const pair = clamp(sums(half * 2, i), sums(half * 2 + 1, i));
          y.v[half * 2] = pair.v[0], y.v[half * 2 + 1] = pair.v[1];
        }
        put(to + i * ld, y);
      }
    };
    if (by_fours && k + 4 <= p.K) {  // without the tests of each channel, which would take as long as the sums
      store([](Element *at, auto const &y) { *reinterpret_cast<std::decay_t<decltype(y)> *>(at) = y; });
    } else {
      store([&](Element *at, auto &y) { store_four(p, cut.stored, by_fours, at, k, y); });
    }
  }
}

}  // namespace cutefuse::conv
