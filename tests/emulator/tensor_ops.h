// The instructions of a warp or a warpgroup on matrices, on plain data: a register is one word of every lane or thread.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace emulator {

// ---- matrices of 8 x 8 16-bit elements, row by row 16 bytes each ----------------------------------------------------

// count is 1, 2 or 4 matrices; rows[8 * i + r] is row r of matrix i, later ones are not looked at.
void ldmatrix(int count, bool trans, uint8_t const *const rows[32], uint32_t (*out)[32]);
void stmatrix(int count, bool trans, uint8_t *const rows[32], uint32_t const (*in)[32]);
// .trans, the only one; in and out may be the same.
void movmatrix(uint32_t const in[32], uint32_t out[32]);

// ---- products -------------------------------------------------------------------------------------------------------

struct MmaShape {
  int m, n, k;
  Number a, b, sum;
  bool saturate;  // of int32 sums, which wrap around otherwise
};

// m16n8, row.col: D = A * B + C; d may be the same registers as any of the others. A has 2 registers or 4, as k says.
void mma_sync(MmaShape, uint32_t const (*a)[32], uint32_t const (*b)[32], uint32_t const (*c)[32], uint32_t (*d)[32]);

struct Wgmma {
  int n, k;
  Number a, b, sum;
  bool a_in_registers;
  bool trans_a, trans_b;
  float scale_a, scale_b;  // 1 or -1; integers have only 1
  bool scale_d;            // false: D = A * B
};

// What a warp of the warpgroup, 0 to 3, does of m64: 16 rows, d has n / 2 registers. a_registers are used if
// a_in_registers, a_desc otherwise.
void wgmma(Wgmma const &, int warp, uint64_t a_desc, uint64_t b_desc, uint32_t const (*a_registers)[32],
           uint8_t const *shared, uint32_t shared_bytes, uint32_t (*d)[32]);

// Where shared memory has the byte that a layout without swizzle has at `address`. The span is 128, 64 or 32 bytes, or
// 16 for none: address bits 7-9 are XORed into bits 4-6, as many as the span has.
inline uint32_t swizzled(uint32_t address, int span) {
  return address ^ (address >> 7 & (static_cast<uint32_t>(span) / 16 - 1)) << 4;
}

}  // namespace emulator
