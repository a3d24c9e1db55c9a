// How the Ampere path reads global memory: cp.async of one 16-byte chunk, and the tile of a block.
#pragma once

#include "conv/sm80/traits.cuh"

namespace cutefuse::conv {

// Copies 16 bytes without L1 (.cg); `bytes` of them are read and the rest becomes zero: halo, channel tails and rows
// past the end. Through L1 (.ca) the taps of a filter would share pixels, but every chunk would pass L1's banks twice.
// CuTe's atom copies all bytes or none.
__device__ __forceinline__ void g2s(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

// Copies 16 bytes or, if a bit of `mask` is set, writes 16 zeros. The test is part of the assembly: with CuTe's atom
// the compiler makes the 16 from that bit by a shift, and the mma wait for it. The second form writes nothing where
// `some` is 0; a branch around it would separate the mma.
__device__ __forceinline__ void g2s_unless(void *shared, void const *global, uint32_t mask) {
  asm volatile(
      "{.reg .pred p; .reg .b32 n; setp.eq.u32 p, %2, 0; selp.b32 n, 16, 0, p;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;}" ::"r"(cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(mask));
}

__device__ __forceinline__ void g2s_unless(void *shared, void const *global, uint32_t mask, int some) {
  asm volatile(
      "{.reg .pred p, q; .reg .b32 n; setp.eq.u32 p, %2, 0; selp.b32 n, 16, 0, p; setp.ne.s32 q, %3, 0;\n"
      "@q cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;}" ::"r"(cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(mask), "r"(some));
}

// Four bytes, or zeros.
__device__ __forceinline__ void g2s_word(void *shared, void const *global, bool exists) {
  SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>::copy(*static_cast<uint32_t const *>(global),
                                                  *static_cast<uint32_t *>(shared), exists);
}

// Copies the `bytes` of a 16-byte chunk that exist, a piece at a time through registers, and zeros for the others:
// cp.async copies no fewer than four bytes.
template <class Piece>
__device__ __forceinline__ void g2s_through_registers(void *shared, void const *global, int bytes) {
  constexpr int kPieces = 4 / sizeof(Piece);  // of a word
  Piece const *const from = static_cast<Piece const *>(global);
  uint32_t word[4] = {};
  CUTE_UNROLL
  for (int i = 0; i < 4 * kPieces; ++i) {
    uint32_t const piece = i * int(sizeof(Piece)) < bytes ? from[i] : 0;
    word[i / kPieces] |= piece << i % kPieces * 8 * sizeof(Piece);
  }
  *static_cast<uint4 *>(shared) = {word[0], word[1], word[2], word[3]};
}

// Copies 16 bytes in pieces of `piece` bytes: 16, 8, 4 or fewer, down to kSmallest. Only the first `bytes` of the chunk
// exist, a whole number of pieces; the others become zeros. No branch down to pieces of 4, since it would separate the
// mma.
template <int kSmallest>
__device__ __forceinline__ void g2s_pieces(void *shared, void const *global, int bytes, int piece) {
  if constexpr (kSmallest < 4) {
    if (piece >= 4) return g2s_pieces<4>(shared, global, bytes, piece);
    if (kSmallest == 2 || piece == 2) return g2s_through_registers<uint16_t>(shared, global, bytes);
    return g2s_through_registers<uint8_t>(shared, global, bytes);
  }
  uint32_t const to = cast_smem_ptr_to_uint(shared);
  asm volatile(
      "{.reg .pred p, q, w, h; .reg .b32 a, b, c;\n"
      "setp.gt.s32 p, %2, 0; setp.gt.s32 q, %2, 8; setp.eq.s32 w, %3, 16; setp.eq.s32 h, %3, 8;\n"
      "selp.b32 a, 16, 0, p; selp.b32 b, 8, 0, p; selp.b32 c, 8, 0, q;\n"
      "@w cp.async.cg.shared.global.L2::128B [%0], [%1], 16, a;\n"
      "@h cp.async.ca.shared.global [%0], [%1], 8, b;\n"
      "@h cp.async.ca.shared.global [%0+8], [%1+8], 8, c;}" ::"r"(to),
      "l"(global), "r"(bytes), "r"(piece));
  CUTE_UNROLL
  for (int at = 0; at < 16; at += 4) {
    asm volatile(
        "{.reg .pred p, s; .reg .b32 n; setp.eq.s32 s, %3, 4; setp.gt.s32 p, %2, 0; selp.b32 n, 4, 0, p;\n"
        "@s cp.async.ca.shared.global [%0], [%1], 4, n;}" ::"r"(to + at),
        "l"(static_cast<char const *>(global) + at), "r"(bytes - at), "r"(piece));
  }
}

// base + index * stride in one instruction: in C++, the compiler regroups sums of such products into longer ones.
__device__ __forceinline__ char const *address_of(char const *base, int index, int stride) {
  char const *at;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(index), "r"(stride), "l"(base));
  return at;
}

// The tile of a block and the place of a thread in it. Reloaded on every call: one more load after the main loop is
// cheaper than holding the registers through it.
struct Place {
  int thread, split, m0, n0;

  template <class Traits>
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

// One thread's share of the filters: a column chunk of kRowsW of them, in the order of the packed matrix.
template <class Traits>
struct FilterRows {
  static constexpr int kBytes = Traits::kBytes, kTapBytes = kChannelBlock * kBytes;
  char const *from;
  uint32_t absent = 0;  // bit i: there is no filter i

  __device__ __forceinline__ FilterRows(Params const &params, Place const &place, int first_column) {
    int const row = place.n0 + place.thread / Traits::kChunks;
    int const column = first_column + place.thread % Traits::kChunks * Traits::kVector;
    from = static_cast<char const *>(params.w) + (int64_t(row) * params.columns + column) * kBytes;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsW; ++i) {
      absent |= uint32_t(row + i * Traits::kRowsPerPass >= params.problem.K) << i;
    }
  }

  // Filter i, `ahead` taps further on.
  template <class ToW>
  __device__ __forceinline__ void copy(Params const &params, int i, int ahead, uint32_t without,
                                       ToW const &to_w) const {
    char const *const at = address_of(from, i * Traits::kRowsPerPass, params.columns * kBytes) + ahead * kTapBytes;
    g2s_unless(&to_w(0, i, 0), at, without & 1u << i);
  }
};

// The largest piece of at most 16 bytes that divides a source's pixels, first channel and channels.
__device__ __forceinline__ int piece_of(Problem const &p, int source, int pixel_bytes, int element_bytes) {
  int const sizes = (p.C[source] | p.start[source]) * element_bytes | pixel_bytes;
  return min(16, sizes & -sizes);
}

// The address of a channel of a source at its pixel 0, and the bytes from pixel to pixel.
struct SourceStart {
  char const *from;
  int pixel_bytes;
};

template <class Traits>
__device__ __forceinline__ SourceStart start_of(Params const &params, int source, int channel) {
  constexpr int kBytes = Traits::kBytes;
  Problem const &p = params.problem;
  char const *const x = static_cast<char const *>(params.x[source]);
  if constexpr (!Traits::kScaled) return {x + channel * kBytes, int(p.ldx[source] * kBytes)};
  Strides const to = strides_of(p, source);
  return {x + (channel / kLayoutBlock * to.block + channel % kLayoutBlock) * kBytes, to.pixel * kBytes};
}

// Bytes from a channel block of a source to its next one.
template <class Traits>
__device__ __forceinline__ int64_t block_bytes(Problem const &p, int source) {
  if constexpr (!Traits::kScaled) return Traits::kK * Traits::kBytes;
  return Traits::kK / kLayoutBlock * strides_of(p, source).block * Traits::kBytes;
}

// Images of kCHW32 lie as far apart as all channel blocks of their source: the pixels by which the image of output `m`
// moves where a source of `now` blocks follows one of `before` blocks.
__device__ __forceinline__ int image_shift(Params const &params, int m, int now, int before) {
  Problem const &p = params.problem;
  return m < p.N * p.P * p.Q ? params.by_image.divide(m) * ((now - before) * (p.H * p.W)) : 0;
}

}  // namespace cutefuse::conv
