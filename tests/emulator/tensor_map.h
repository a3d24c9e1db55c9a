// TMA: the driver's tensor maps, in a layout of our own, and the loads and stores of boxes through them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

namespace emulator {

// Lies in the first bytes of a CUtensorMap. Only encode_tiled and encode_im2col make one.
struct TensorMap {
  uint64_t magic;
  uint64_t address;
  uint64_t strides[4];  // bytes, of the dimensions from 1 on
  uint32_t last[5];     // the last index of each dimension, whose length may be 2^32
  int16_t lower[3];     // corner of the box of base pixels, im2col: w, h, d
  int16_t upper[3];     // as seen from the last pixel
  uint16_t box[5];      // elements of each dimension; im2col: channels and pixels
  uint8_t steps[5];     // of each dimension, in elements
  uint8_t rank, im2col;
  uint8_t element_bytes, span_bytes;  // span: of the swizzle, 16 for none
  uint8_t to_tf32;                    // loads round float32
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap) && std::is_trivially_copyable_v<TensorMap>);

// As cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col and cuTensorMapReplaceAddress. CUDA_ERROR_INVALID_VALUE is what
// the driver's documentation forbids, CUDA_ERROR_NOT_SUPPORTED what it allows and this emulator cannot: interleaved
// layouts, fills with NaN, types that TMA packs or flushes, atoms of swizzles, rows narrower than the swizzle.
CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                      cuuint64_t const *dims, cuuint64_t const *strides, cuuint32_t const *box,
                      cuuint32_t const *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);
CUresult encode_im2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       cuuint64_t const *dims, cuuint64_t const *strides, int const *lower, int const *upper,
                       cuuint32_t channels_per_pixel, cuuint32_t pixels_per_column, cuuint32_t const *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill);
CUresult replace_address(CUtensorMap *map, void *address);

// All that follow throw std::runtime_error, in one sentence, on what is no map.

// What a load adds to its barrier's transactions: the whole box, parts out of bounds too.
int box_bytes(TensorMap const &map);

// The box, dense, as it lies in shared memory before swizzling. Coordinates of dimension 0 first; offsets of an im2col
// map are those of w, h and d, rank - 2 of them, and null of a tiled one.
void load(TensorMap const &map, int const coordinates[5], unsigned const offsets[3], uint8_t *box);

// Places a dense box in shared memory; the swizzle looks at the bits of the shared address. Both throw if `address` is
// no multiple of 128 or the box lies outside of `shared_bytes`.
void write_swizzled(TensorMap const &map, uint8_t const *box, uint8_t *shared, uint32_t address, uint32_t shared_bytes);
void load_to_shared(TensorMap const &map, int const coordinates[5], unsigned const offsets[3], uint8_t *shared,
                    uint32_t address, uint32_t shared_bytes);

// Writes what is in bounds of a swizzled box to global memory. `im2col`: what the instruction takes the map for.
void store_from_shared(TensorMap const &map, int const coordinates[5], bool im2col, uint8_t const *shared,
                       uint32_t address, uint32_t shared_bytes);

}  // namespace emulator
