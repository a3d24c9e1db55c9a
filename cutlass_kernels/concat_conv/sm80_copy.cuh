// How the Ampere path reaches global memory on the way in: cp.async, and the pixels that a thread's rows stand for.
#pragma once

#include "sm80_traits.cuh"

namespace cutefuse::concat_conv {

// Copies 16 bytes, of which `bytes` are read and the rest becomes zero: halo, channel tails and rows past the end.
// Activations go through L1 (.ca), where the other taps of a filter find them; filters bypass it (.cg).
__device__ __forceinline__ void g2s_activation(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

__device__ __forceinline__ void g2s_filter(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

// The same 16 bytes by four copies, for pixels that start at any multiple of 4 bytes.
__device__ __forceinline__ void g2s_by_element(void *shared, void const *global, int bytes) {
  CUTE_UNROLL
  for (int at = 0; at < 16; at += 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cast_smem_ptr_to_uint(shared) + at),
                 "l"(static_cast<char const *>(global) + at), "r"(bytes > at ? 4 : 0));
  }
}

// A filter tap: its index, and its distance from tap (0,0) in input pixels.
struct Tap {
  int r = 0, s = 0, h = 0, w = 0, offset = 0;
  uint32_t bits = 1u | 1u << kMaxTaps;  // those of SourceRows::valid that must be set

  // Returns true when the last tap was left and the first one is up again.
  __device__ __forceinline__ bool advance(Problem const &p) {
    ++s, w += p.dilation_w, offset += p.dilation_w, bits += bits & 0xffff0000u;
    if (s < p.S) return false;
    ++r, h += p.dilation_h, s = 0, w = 0, offset = r * p.dilation_h * p.W, bits = 1u << r | 1u << kMaxTaps;
    if (r < p.R) return false;
    *this = Tap{};
    return true;
  }
};

// The input pixels under the kRowsX GEMM rows that one thread copies.
template <class Traits>
struct SourceRows {
  static constexpr int kRows = Traits::kRowsX;
  static constexpr bool kUpsamples = Traits::kTile.upsamples;
  int pixel[kRows];       // linear index of the pixel under tap (0,0), maybe in the halo; upsampled: index of its image
  uint32_t valid[kRows];  // bit r: filter row r falls inside the image; bit 16 + s: filter column s does
  static_assert(2 * kMaxTaps <= 32);
  int corner[kUpsamples ? kRows : 1];  // h0 and w0 in the enlarged image, 16 bits each
  int H, W;                            // of the source, before it is enlarged
  uint32_t multiplier;

  __device__ __forceinline__ void set(int i, Problem const &p, Pixel const &at, bool exists) {
    pixel[i] = kUpsamples ? at.n : (at.n * p.H + at.h0) * p.W + at.w0;
    if constexpr (kUpsamples) corner[i] = int(unsigned(at.h0) << 16 | (unsigned(at.w0) & 0xffffu));
    valid[i] = exists ? valid_taps(at.h0, p.R, p.dilation_h, p.H) : 0;
    valid[i] |= valid_taps(at.w0, p.S, p.dilation_w, p.W) << kMaxTaps;
  }

  __device__ __forceinline__ void enter_source(Params const &params, int source) {
    if constexpr (kUpsamples) {
      multiplier = params.upsample_multiplier[source];
      H = source_coordinate(params.problem.H, multiplier), W = source_coordinate(params.problem.W, multiplier);
    }
  }

  // Linear index in the source; without meaning where the tap is not valid.
  __device__ __forceinline__ int at(int i, Tap const &tap) const {
    if constexpr (!kUpsamples) return pixel[i] + tap.offset;
    int const h = (corner[i] >> 16) + tap.h, w = int(int16_t(corner[i])) + tap.w;
    return (pixel[i] * H + source_coordinate(h, multiplier)) * W + source_coordinate(w, multiplier);
  }

  __device__ __forceinline__ bool inside(int i, Tap const &tap) const { return (valid[i] & tap.bits) == tap.bits; }
};

}  // namespace cutefuse::concat_conv
