// How the int8 kernel reaches global memory on the way in: one thread's copies, k-tile after k-tile. The float kernel's
// pixels, taps and cp.async in two memory layouts; pad lanes of activations meet zeros of the packed filter.
#pragma once

#include "conv/sm80/copy.cuh"
#include "quant_concat_conv/tiles.h"

namespace cutefuse::quant_concat_conv {

using namespace cute;
using cute::Layout;  // here the names mean CuTe's, not those of op.h
using cute::Tensor;

// Column chunk `column` of kRowsX pixels and kRowsW filters. The filters of k-tiles that follow each other lie side by
// side; the pixels are stepped by a tap, and at a filter row's end by selects: only the next channel block is a branch.
// A k-tile past the last is copied as zeros.
template <class Traits>
struct Loader {
  static constexpr int kK = Traits::kK, kRowsX = Traits::kRowsX, kRowsW = Traits::kRowsW, kCopies = kRowsX + kRowsW;
  static_assert(kK == kChannelBlock && kRowsW <= 32);
  Params const &params;
  conv::SourceRows<Traits> rows;
  KBlock<kK> block;
  int const column;
  int blocks_left;
  int run, rows_left;  // k-tiles left of the filter row, or of the source's channel blocks under a 1x1 filter
  char const *from_x, *from_w;
  int pixel_bytes, step_x;  // step_x: from k-tile to k-tile of a run
  uint32_t tap_bits;        // those of rows.outside that must be clear
  uint32_t closed;          // all ones where the chunk has no channels, else zeros
  uint32_t filters = 0;     // bit i: filter row i exists

  // The `blocks` channel blocks from `at` on, in front of which lie `skipped` of the packed filter's.
  __device__ __forceinline__ Loader(Params const &all, Place const &place, KBlock<kK> const &at, int skipped,
                                    int blocks)
      : params(all), block(at), column(place.thread % Traits::kChunks * kVector), blocks_left(blocks) {
    Problem const &p = params.problem;
    int const row = place.n0 + place.thread / Traits::kChunks;
    from_w =
        reinterpret_cast<char const *>(params.w) + int64_t(row) * params.columns + skipped * params.taps * kK + column;
    CUTE_UNROLL
    for (int i = 0; i < kRowsW; ++i) filters |= uint32_t(row + i * Traits::kRowsPerPass < p.K) << i;
    rows.set(params, place.m0 + place.thread / Traits::kChunks);
    enter_source(1);
  }

  // Images of kCHW32 lie all the source's blocks apart; `before`: those that rows.pixel reckons with.
  __device__ __forceinline__ void enter_source(int before) {
    Problem const &p = params.problem;
    Strides const to = strides_of(p, block.source);
    int const chunk = (p.C[block.source] - block.left + column) / kVector;
    from_x = reinterpret_cast<char const *>(params.x[block.source]) + chunk / 2 * to.block + chunk % 2 * kVector;
    pixel_bytes = to.pixel;
    step_x = params.taps > 1 ? p.dilation_w * pixel_bytes : kK;
    if (p.layout == cutefuse::Layout::kBlocks32) {
      int const apart = (ceil_div(p.C[block.source], kLayoutBlock) - before) * (p.H * p.W);
      Place const place = Place::of<Traits>(params);
      CUTE_UNROLL
      for (int i = 0; i < kRowsX; ++i) {
        int const m = place.m0 + place.thread / Traits::kChunks + i * Traits::kRowsPerPass;
        rows.pixel[i] += m < p.N * p.P * p.Q ? params.by_image.divide(m) * apart : 0;
      }
    }
    enter_block();
  }

  __device__ __forceinline__ void enter_block() {
    Problem const &p = params.problem;
    closed = column < block.left ? 0u : ~0u;
    tap_bits = 1u | 1u << kMaxTaps, rows_left = p.R, run = p.S;
    if (params.side_by_side) {  // 1x1: up to the last of the source's whole blocks
      run = max(1, min(block.left / kK, blocks_left));
      blocks_left -= run - 1, block.left -= (run - 1) * kK;
    }
    --blocks_left;
  }

  __device__ __forceinline__ void advance() {
    Problem const &p = params.problem;
    bool const row_ends = --run == 0;
    from_w += kK, from_x += step_x;
    from_x = conv::address_of(from_x, row_ends ? params.row_step : 0, pixel_bytes);
    tap_bits = row_ends ? 2 * (tap_bits & 0xffffu) + (1u << kMaxTaps)
                        : tap_bits + (params.taps > 1 ? tap_bits & ~0u << kMaxTaps : 0);
    run = row_ends ? p.S : run, rows_left -= row_ends;
    if (rows_left > 0) return;
    if (!params.side_by_side) from_x += kK / kLayoutBlock * strides_of(p, block.source).block;
    from_x -= int64_t(params.block_step) * pixel_bytes;
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

  // Issues copy `i` of kCopies: the pixels first, then the filters.
  template <class ToX, class ToW>
  __device__ __forceinline__ void copy(int i, ToX const &to_x, ToW const &to_w) const {
    if (i < kRowsX) {
      conv::g2s_unless(&to_x(0, i, 0), conv::address_of(from_x, rows.pixel[i], pixel_bytes),
                       (rows.outside[i] & tap_bits) | closed);
    } else {
      int const j = i - kRowsX;
      conv::g2s_if(&to_w(0, j, 0), conv::address_of(from_w, j * Traits::kRowsPerPass, params.columns),
                   filters & 1u << j);
    }
  }
};

}  // namespace cutefuse::quant_concat_conv
