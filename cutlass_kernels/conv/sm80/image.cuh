// Images: one source of a few channels, up to 32, in pixels or in planes. A block copies the pixels under all of its
// outputs and the filters once, and its warps multiply from there, 32 outputs at a time, and store from registers:
// k-tiles of mostly absent channels, and barriers between them, would take longer than memory does.
//
// An mma step has four units of pixels, one for each of four neighbouring lanes, whichever tap they belong to: the
// order of the sum is free as long as pixels and filters agree. Filters are mma's rows: pixels, its columns, are then
// read as they lie, filters in the order of its registers, and a thread's sums of a pixel can be those of neighbouring
// filters.
#pragma once

#include "conv/sm80/image_copy.cuh"
#include "conv/sm80/store.cuh"
#include "dependent_launch.cuh"

namespace cutefuse::conv {

// A number type and a row of a table of tiles: `m` is of no meaning, `n` the filters whose sums a thread holds at once.
template <class Element_, class Row>
struct ImageTraits {
  using Element = Element_;
  static constexpr Tile kTile = Row::kTile;
  static constexpr int kBytes = sizeof(Element), kThreads = kTile.threads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // here the compiler takes more registers, and would spill some
  static constexpr int kBlocks = kThreads > 128 ? 1 : kTile.blocks_per_sm / 2;
#else
  static constexpr int kBlocks = kTile.blocks_per_sm;
#endif
  static constexpr int kGroups = kTile.n / 16;  // of filters
  static constexpr int kVector = kGroups * 2;   // of a pixel, whose sums a thread has
  static_assert(kBytes == 2 && kThreads >= BlockCut::kMostFilters);
};

__device__ __forceinline__ uint4 load_fragment(uint32_t shared) {
  uint4 fragment;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment.x), "=r"(fragment.y), "=r"(fragment.z), "=r"(fragment.w)
               : "r"(shared));
  return fragment;
}

// Computes a block's outputs, 32 pixels a warp at a time, and stores them.
template <class Traits>
__device__ __forceinline__ void compute(Params const &params, ImageTile const &tile, uint32_t pixels, uint32_t filters,
                                        float const *bias, int const *offsets) {
  using Output = typename Traits::Element;
  constexpr int kUnit = BlockCut::kUnitBytes, kWarps = Traits::kThreads / 32;
  constexpr int kGroups = Traits::kGroups, kVector = Traits::kVector;
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  int const lane = threadIdx.x % 32, unit = lane % 4, group = lane / 4;  // of mma's operands
  Clamp<Output> const clamp(p);
  int const ld = cut.ld, columns = tile.columns - unit * 2;
  Output *const first = static_cast<Output *>(params.ys[0]) +
                        (int64_t(tile.n * p.P + tile.row) * p.Q + tile.column + unit * 2) * ld + tile.filter +
                        group * kVector;
  // Pixels of a row that were copied in front of those under the first output.
  int const skipped = lies_in_fours(p, cut) ? (tile.column * p.stride_w - p.pad_left) & 3 : 0;
  int const step_rows = quotient(kWarps, tile.parts), step_parts = kWarps - step_rows * tile.parts;
  int row = quotient(threadIdx.x / 32, tile.parts), part = threadIdx.x / 32 - row * tile.parts;
  CUTE_NO_UNROLL
  for (; row < tile.rows; row += step_rows, part += step_parts) {
    if (part >= tile.parts && (part -= tile.parts, ++row >= tile.rows)) break;
    int const column = part * 32, left = columns - column;
    uint32_t const from =
        pixels + (row * p.stride_h * cut.span + ((column + group) * p.stride_w + skipped << cut.shift)) * kUnit;
    Output *const to = first + int64_t(row * p.Q + column) * ld;
    uint32_t w = filters + lane * 16;
    CUTE_NO_UNROLL
    for (int k0 = 0; k0 < cut.filters; k0 += kGroups * 16) {  // more sums at a time would need more registers
      Tensor acc = make_tensor<float>(Shape<Shape<_2, _2>, Int<kGroups>, _4>{});  // ((pixel,filter),group,MMA_N)
      CUTE_UNROLL
      for (int v = 0; v < kVector; ++v) {
        float const b = bias[k0 + group * kVector + v];
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) acc(make_coord(i % 2, v % 2), v / 2, i / 2) = b;
      }
      int next = offsets[unit];
      CUTE_NO_UNROLL
      for (int step = 0; step < cut.steps; ++step) {
        // Behind the last tap the filter's zeros stand for the pixels: NaN times zero would be NaN.
        int const offset = next;
        next = offsets[step * 4 + 4 + unit];  // read early; behind the last is nothing that is used
        uint32_t const at = offset < 0 ? w : cut.swizzled(from + offset), apart = offset < 0 ? 0 : cut.columns_bytes;
        uint2 x[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = load_unit(at + i * apart);
        CUTE_UNROLL
        for (int j = 0; j < kGroups; ++j, w += kFragmentBytes) {
          uint4 const f = load_fragment(w);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            Tensor y = acc(_, j, i);
            Numbers<Output>::Op::fma(y(0), y(1), y(2), y(3), f.x, f.y, f.z, f.w, x[i].x, x[i].y, y(0), y(1), y(2),
                                     y(3));
          }
        }
      }
      if (!clamp.is_all) {
        CUTE_UNROLL
        for (int j = 0; j < kGroups; ++j) activate(acc(_, j, _), p);
      }
      int const channel = tile.filter + k0 + group * kVector;
      Output *at = to + k0;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i, at += (i % 2 == 0 ? 7 : 1) * int64_t(ld)) {
        if (i / 2 * 8 + i % 2 >= left) break;
        uint32_t y[kGroups];  // two filters each
        CUTE_UNROLL
        for (int j = 0; j < kGroups; ++j) {
          auto const pair = clamp(acc(make_coord(i % 2, 0), j, i / 2), acc(make_coord(i % 2, 1), j, i / 2));
          y[j] = reinterpret_cast<uint32_t const &>(pair);
        }
        if (ld % kVector == 0 && channel + kVector <= p.K) {  // of a struct the compiler would store 4 bytes at a time
          if constexpr (kGroups == 2) {
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(y[0]), "r"(y[1]) : "memory");
          } else if constexpr (kGroups == 4) {
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(y[0]), "r"(y[1]), "r"(y[2]),
                         "r"(y[3])
                         : "memory");
          } else {
            *reinterpret_cast<uint32_t *>(at) = y[0];
          }
        } else {
          CUTE_UNROLL
          for (int c = 0; c < kVector; ++c) {  // pad lanes are zeros, whatever the activation makes of them
            if (channel + c < cut.stored)
              at[c] = channel + c < p.K ? reinterpret_cast<Pair<Output> const &>(y[c / 2]).v[c % 2] : Output(0);
          }
        }
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    conv_sm80_image(Params const __grid_constant__ params) {
  using Output = typename Traits::Element;
  constexpr int kMostFilters = BlockCut::kMostFilters;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  BlockCut const &cut = params.cut;
  ImageTile const tile(p, cut);
  uint32_t const pixels = cast_smem_ptr_to_uint(shared), filters = pixels + cut.pixels_bytes();
  float *const bias = reinterpret_cast<float *>(shared + cut.pixels_bytes() + cut.filters_bytes());
  int *const offsets = reinterpret_cast<int *>(bias + kMostFilters);
  let_next_kernel_start();
  wait_for_previous_kernel();  // no global memory has been touched yet
  copy_filters<Traits>(params, tile, filters, offsets);
  if (int const k = threadIdx.x; k < kMostFilters) bias[k] = k < tile.filters ? __ldg(params.b + tile.filter + k) : 0;
  if (p.reads == Reads::kSources) {
    copy_pixels<Traits>(params, tile, pixels);
  } else if (p.reads == Reads::kImage) {
    copy_given<Traits, Output>(params, tile, pixels);
  } else {
    copy_given<Traits, float>(params, tile, pixels);
  }
  cp_async_fence();
  cp_async_wait<0>();
  __syncthreads();
  compute<Traits>(params, tile, pixels, filters, bias, offsets);
}

}  // namespace cutefuse::conv
