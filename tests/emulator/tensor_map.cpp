#include "tensor_map.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensor_ops.h"

namespace emulator {

// ---- encoding -------------------------------------------------------------------------------------------------------

namespace {

constexpr uint64_t kMagic = 0x70614D726F736E54;

// 0 for a type that TMA packs, or changes on the way in another way than by rounding it to tf32.
int element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

int span_bytes(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      return 16;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return 128;
    default:
      return 0;
  }
}

// What both kinds of maps have: the caller has set the rank and box[0], of a box with any element.
CUresult encode(TensorMap &map, CUtensorMapDataType type, void *address, cuuint64_t const *dims,
                cuuint64_t const *strides, cuuint32_t const *element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapFloatOOBfill fill) {
  int const bytes = element_bytes(type), span = span_bytes(swizzle);
  if (bytes == 0 || span == 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  map.magic = kMagic;
  map.address = reinterpret_cast<uint64_t>(address);
  map.to_tf32 = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map.element_bytes = static_cast<uint8_t>(bytes), map.span_bytes = static_cast<uint8_t>(span);
  if (map.address == 0 || map.address % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < map.rank; ++i) {
    if (dims[i] == 0 || dims[i] > uint64_t(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    map.last[i] = static_cast<uint32_t>(dims[i] - 1);
    // The first element stride is ignored, and still has to be one.
    if (element_strides[i] == 0 || element_strides[i] > 8) return CUDA_ERROR_INVALID_VALUE;
    map.steps[i] = static_cast<uint8_t>(i == 0 ? 1 : element_strides[i]);
  }
  // That each stride be a multiple of the one before is documented but not asked for: maps with swapped axes work.
  for (int i = 0; i + 1 < map.rank; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t(1) << 40) return CUDA_ERROR_INVALID_VALUE;
    map.strides[i] = strides[i];
  }
  int const row_bytes = map.box[0] * bytes;
  if (row_bytes % 16 != 0 || (span > 16 && row_bytes > span)) return CUDA_ERROR_INVALID_VALUE;
  return span > 16 && row_bytes < span ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

bool misaligned(CUtensorMap const *map) { return map == nullptr || reinterpret_cast<uintptr_t>(map) % 64 != 0; }

CUresult finish(CUresult result, TensorMap const &encoded, CUtensorMap *map) {
  if (result == CUDA_SUCCESS) std::memcpy(map, &encoded, sizeof(encoded));
  return result;
}

}  // namespace

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                      cuuint64_t const *dims, cuuint64_t const *strides, cuuint32_t const *box,
                      cuuint32_t const *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap tiled{};
  if (misaligned(map) || rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  tiled.rank = static_cast<uint8_t>(rank);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (box[i] < 1 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    tiled.box[i] = static_cast<uint16_t>(box[i]);
  }
  return finish(encode(tiled, type, address, dims, strides, element_strides, interleave, swizzle, fill), tiled, map);
}

CUresult encode_im2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       cuuint64_t const *dims, cuuint64_t const *strides, int const *lower, int const *upper,
                       cuuint32_t channels_per_pixel, cuuint32_t pixels_per_column, cuuint32_t const *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill fill) {
  TensorMap im2col{};
  if (misaligned(map) || rank < 3 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  im2col.rank = static_cast<uint8_t>(rank), im2col.im2col = 1;
  if (channels_per_pixel < 1 || channels_per_pixel > 256 || pixels_per_column < 1 || pixels_per_column > 1024) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  im2col.box[0] = static_cast<uint16_t>(channels_per_pixel), im2col.box[1] = static_cast<uint16_t>(pixels_per_column);
  int const limit = rank == 3 ? 32768 : rank == 4 ? 128 : 16;
  for (cuuint32_t i = 0; i + 2 < rank; ++i) {
    bool const in_range = std::min(lower[i], upper[i]) >= -limit && std::max(lower[i], upper[i]) < limit;
    // The box of base pixels must have an area.
    if (!in_range || static_cast<int64_t>(dims[i + 1]) - 1 + upper[i] < lower[i]) return CUDA_ERROR_INVALID_VALUE;
    im2col.lower[i] = static_cast<int16_t>(lower[i]), im2col.upper[i] = static_cast<int16_t>(upper[i]);
  }
  return finish(encode(im2col, type, address, dims, strides, element_strides, interleave, swizzle, fill), im2col, map);
}

CUresult replace_address(CUtensorMap *map, void *address) {
  if (misaligned(map)) return CUDA_ERROR_INVALID_VALUE;
  TensorMap replaced;
  std::memcpy(&replaced, map, sizeof(replaced));
  replaced.address = reinterpret_cast<uint64_t>(address);
  bool const valid = replaced.magic == kMagic && replaced.address != 0 && replaced.address % 16 == 0;
  return finish(valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE, replaced, map);
}

// ---- boxes ----------------------------------------------------------------------------------------------------------

namespace {

void check(TensorMap const &map) {
  if (map.magic != kMagic) throw std::runtime_error("A TMA instruction was given what is no tensor map.");
}

int row_bytes(TensorMap const &map) { return map.box[0] * map.element_bytes; }

// Elements of a tiled box along a dimension: the box counts those that its steps leave out too.
int count(TensorMap const &map, int dimension) {
  return (map.box[dimension] + map.steps[dimension] - 1) / map.steps[dimension];
}

int rows(TensorMap const &map) {
  if (map.im2col != 0) return map.box[1];
  int product = 1;
  for (int i = 1; i < map.rank; ++i) product *= count(map, i);
  return product;
}

// The part of a row of the box that is in the tensor: `bytes` from `memory` on, `skipped` bytes from the row's start.
struct Row {
  uint8_t *memory = nullptr;
  int skipped = 0, bytes = 0;

  Row(TensorMap const &map, int64_t const (&position)[5]) {
    uint64_t address = map.address;
    for (int i = 1; i < map.rank; ++i) {
      if (position[i] < 0 || position[i] > map.last[i]) return;
      address += static_cast<uint64_t>(position[i]) * map.strides[i - 1];
    }
    int64_t const first = std::max<int64_t>(position[0], 0);
    int64_t const end = std::min<int64_t>(position[0] + map.box[0], int64_t(map.last[0]) + 1);
    if (first >= end) return;
    memory = reinterpret_cast<uint8_t *>(address + static_cast<uint64_t>(first) * map.element_bytes);
    skipped = static_cast<int>(first - position[0]) * map.element_bytes;
    bytes = static_cast<int>(end - first) * map.element_bytes;
  }
};

// Calls f(Row) for every row of a tiled box, dimension 1 fastest.
template <class F>
void for_each_tiled_row(TensorMap const &map, int const coordinates[5], F const &f) {
  for (int row = 0, total = rows(map); row < total; ++row) {
    int64_t position[5] = {coordinates[0]};
    for (int i = 1, left = row; i < map.rank; ++i) {
      position[i] = int64_t(coordinates[i]) + left % count(map, i) * map.steps[i];
      left /= count(map, i);
    }
    f(Row(map, position));
  }
}

// As above, of an im2col box: PTX ISA, "im2col mode". The coordinates are those of the first base pixel. The next ones
// follow within the box of base pixels, w fastest, image after image; each is read at its place plus the offsets.
template <class F>
void for_each_pixel(TensorMap const &map, int const coordinates[5], unsigned const offsets[3], F const &f) {
  int const images = map.rank - 1;  // the dimension of the images; the ones between it and 0 are spatial
  int64_t base[5] = {};
  for (int i = 0; i < map.rank; ++i) base[i] = coordinates[i];
  for (int pixel = 0; pixel < map.box[1]; ++pixel) {
    int64_t position[5] = {};
    for (int i = 0; i < map.rank; ++i) position[i] = base[i] + (i == 0 || i == images ? 0 : offsets[i - 1]);
    f(Row(map, position));
    int i = 1;
    for (; i < images; ++i) {
      base[i] += map.steps[i];
      if (base[i] <= int64_t(map.last[i]) + map.upper[i - 1]) break;
      base[i] = map.lower[i - 1];
    }
    if (i == images) base[i] += map.steps[i];
  }
}

// A row is as wide as the swizzle's span, which moves its 16-byte chunks within itself: what fits is swizzled in place.
void check_shared(TensorMap const &map, uint32_t address, uint32_t shared_bytes) {
  check(map);
  if (address % 128 == 0 && uint64_t(address) + static_cast<uint64_t>(box_bytes(map)) <= shared_bytes) return;
  throw std::runtime_error("TMA has a box of " + std::to_string(box_bytes(map)) + " bytes at " +
                           std::to_string(address) + " of " + std::to_string(shared_bytes) +
                           " bytes of shared memory, where it does not fit or is not aligned to 128 bytes.");
}

// To nearest, as test_sm90_tf32.py found on an H200; ties to even, as a test of Triton's has it on 12.0
// (triton-lang/triton, pull request 11751). NVIDIA's documentation does not say, and a NaN's bits are our own.
void round_to_tf32(uint8_t *row, int bytes) {
  for (int i = 0; i < bytes; i += 4) {
    float value;
    std::memcpy(&value, row + i, sizeof(value));
    uint32_t const rounded = from_float(Number::kTF32, value);
    std::memcpy(row + i, &rounded, sizeof(rounded));
  }
}

}  // namespace

int box_bytes(TensorMap const &map) {
  check(map);
  return rows(map) * row_bytes(map);
}

void load(TensorMap const &map, int const coordinates[5], unsigned const offsets[3], uint8_t *box) {
  check(map);
  if ((map.im2col != 0) != (offsets != nullptr)) {
    throw std::runtime_error("A TMA load and its tensor map disagree on whether this is im2col.");
  }
  int const bytes = row_bytes(map);
  auto const load_row = [&](Row const &row) {
    std::memset(box, 0, static_cast<size_t>(bytes));
    if (row.bytes > 0) std::memcpy(box + row.skipped, row.memory, static_cast<size_t>(row.bytes));
    if (map.to_tf32 != 0) round_to_tf32(box, bytes);
    box += bytes;
  };
  if (offsets != nullptr) return for_each_pixel(map, coordinates, offsets, load_row);
  for_each_tiled_row(map, coordinates, load_row);
}

void write_swizzled(TensorMap const &map, uint8_t const *box, uint8_t *shared, uint32_t address,
                    uint32_t shared_bytes) {
  check_shared(map, address, shared_bytes);
  uint32_t const end = address + static_cast<uint32_t>(box_bytes(map));
  for (uint32_t to = address; to < end; to += 16, box += 16) {
    std::memcpy(shared + swizzled(to, map.span_bytes), box, 16);
  }
}

void load_to_shared(TensorMap const &map, int const coordinates[5], unsigned const offsets[3], uint8_t *shared,
                    uint32_t address, uint32_t shared_bytes) {
  check_shared(map, address, shared_bytes);
  std::vector<uint8_t> box(static_cast<size_t>(box_bytes(map)));
  load(map, coordinates, offsets, box.data());
  write_swizzled(map, box.data(), shared, address, shared_bytes);
}

void store_from_shared(TensorMap const &map, int const coordinates[5], bool im2col, uint8_t const *shared,
                       uint32_t address, uint32_t shared_bytes) {
  check_shared(map, address, shared_bytes);
  if ((map.im2col != 0) != im2col) {
    throw std::runtime_error("A TMA store and its tensor map disagree on whether this is im2col.");
  }
  std::vector<uint8_t> row_of_box(static_cast<size_t>(row_bytes(map)));
  uint32_t from = address;
  auto const store_row = [&](Row const &row) {
    for (size_t i = 0; i < row_of_box.size(); i += 16, from += 16) {
      std::memcpy(row_of_box.data() + i, shared + swizzled(from, map.span_bytes), 16);
    }
    if (row.bytes > 0) std::memcpy(row.memory, row_of_box.data() + row.skipped, static_cast<size_t>(row.bytes));
  };
  unsigned const none[3] = {};
  if (im2col) return for_each_pixel(map, coordinates, none, store_row);
  for_each_tiled_row(map, coordinates, store_row);
}

}  // namespace emulator
