// The tensor maps of a launch on a Hopper tile, encoded when it is planned.
#include "conv/sm90/tensor_maps.h"

#include <algorithm>
#include <cstdint>

#include "conv/sm90/k_tiles.h"

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>

namespace cutefuse::conv {
namespace {

// A function of the driver, found at run time: the library links to no libcuda and loads on machines without one.
template <class Function>
Function found(char const *name) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaError_t const error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
  cudaError_t const error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the process's next call would report it
    return nullptr;
  }
  if (result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

struct Driver {
  decltype(&cuTensorMapEncodeTiled) tiled = found<decltype(tiled)>("cuTensorMapEncodeTiled");
  decltype(&cuTensorMapEncodeIm2col) im2col = found<decltype(im2col)>("cuTensorMapEncodeIm2col");
  decltype(&cuTensorMapReplaceAddress) replace = found<decltype(replace)>("cuTensorMapReplaceAddress");

  static Driver const &get() {
    static Driver const driver;
    return driver;
  }
};

// Where maps point until a launch.
void *const kNowhere = reinterpret_cast<void *>(std::uintptr_t(1) << 20);

// wgmma would cut off the 13 low bits of float32; TMA rounds them to nearest even.
CUtensorMapDataType map_type(Type type) {
  return size_of(type) == 1       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : type == Type::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
         : type == Type::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// For rows of 128 or 64 bytes in shared memory.
CUtensorMapSwizzle swizzle_of(int row_bytes) {
  return row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}
// What L2 fetches at a time. 256 bytes take up to a tenth longer where pixels begin between two of its lines.
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

// Dimension 0 is dense, strides_bytes are those of dimensions 1.. . Of dimensions 1 and 2 the box holds every step-th
// element.
template <int kRank>
CUresult encode_tiled(CUtensorMap *map, Type type, cuuint64_t const (&dims)[kRank],
                      cuuint64_t const (&strides_bytes)[kRank - 1], cuuint32_t const (&box)[kRank], cuuint32_t step = 1,
                      cuuint32_t rows_step = 1) {
  cuuint32_t steps[kRank];
  std::fill(steps, steps + kRank, 1u);
  steps[1] = step;
  if (kRank > 2) steps[2] = rows_step;
  int const row_bytes = int(box[0]) * size_of(type);
  return Driver::get().tiled(map, map_type(type), kRank, kNowhere, dims, strides_bytes, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(row_bytes), kPromotion,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A map over runs of the pixels of images, (channel,w,h,n), as far as they lie between two corners. Of each dimension
// every step-th pixel is read; of the tensor's rows every row_step-th one is a row of the map.
CUresult encode_im2col(CUtensorMap *map, Type type, cuuint64_t const (&dims)[4], cuuint64_t pixel,
                       int const (&lower)[2], int const (&upper)[2], cuuint32_t channels, cuuint32_t pixels, int step_w,
                       int step_h, int row_step = 1) {
  cuuint64_t const row = pixel * dims[1] * row_step, strides[3] = {pixel, row, row * dims[2]};
  cuuint32_t const steps[4] = {1, cuuint32_t(step_w), cuuint32_t(step_h), 1};
  return Driver::get().im2col(map, map_type(type), 4, kNowhere, dims, strides, lower, upper, channels, pixels, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(int(channels) * size_of(type)), kPromotion,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A map over images of dense pixels, (channel,w,h,n), or with the axes of an image swapped, as those of the box are; of
// the tensor's rows every row_step-th one. The box holds every step-th pixel.
CUresult encode_image(CUtensorMap *map, Type type, cuuint64_t const (&dims)[4], cuuint64_t pixel, bool swapped,
                      cuuint32_t const (&box)[4], int row_step = 1, cuuint32_t step_w = 1, cuuint32_t step_h = 1) {
  cuuint64_t const row = pixel * dims[1] * row_step, image = row * dims[2];
  if (!swapped) return encode_tiled<4>(map, type, dims, {pixel, row, image}, box, step_w, step_h);
  return encode_tiled<4>(map, type, {dims[0], dims[2], dims[1], dims[3]}, {row, pixel, image}, box, step_h, step_w);
}

// An enlarged source of a patch, of which one load brings a row: (channel,repetition,a,b,n).
CUresult encode_enlarged(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  cuuint64_t const C = p.C[i], factor = p.upsample[i], W = p.W / factor, H = p.H / factor, N = p.N;
  cuuint64_t const pixel = size_of(p.type) * p.ldx[i], row = pixel * W, image = row * H;
  cuuint32_t const channels = halo_channels(tile), times = p.upsample[i], pixels = k.halo.pitch / p.upsample[i];
  cuuint32_t const box[5] = {channels, times, pixels, 1, 1};
  if (k.halo.swapped) return encode_tiled<5>(&k.x[i], p.type, {C, factor, H, W, N}, {0, row, pixel, image}, box);
  return encode_tiled<5>(&k.x[i], p.type, {C, factor, W, H, N}, {0, pixel, row, image}, box);
}

// A part of a patch of pairs of pixels, or of an enlarged source a row of it.
CUresult encode_beside(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  int const factor = p.upsample[i], step = 2 / factor;
  cuuint64_t const C = p.C[i], W = p.W / factor, H = p.H / factor, N = p.N, pixel = size_of(p.type) * p.ldx[i];
  cuuint32_t const channels = halo_channels(tile), pixels = k.halo.pitch * step, rows = factor == 1 ? k.halo.rows : 1;
  return encode_tiled<4>(&k.x[i], p.type, {C, W, H, N}, {pixel, pixel * W, pixel * W * H}, {channels, pixels, rows, 1},
                         step);
}

// A phase of a tile of phases.cuh: pixels of a source that it enlarges, as a plain matrix, or a tap of a 2 x 2 filter
// with stride 2.
CUresult encode_phase(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  cuuint64_t const C = p.C[i], W = p.W, H = p.H, N = p.N, pixel = size_of(p.type) * p.ldx[i];
  cuuint32_t const pixels = tile.pixels() / 4;
  if (p.upsample[i] == 2) return encode_tiled<2>(&k.x[i], p.type, {C, N * H * W / 4}, {pixel}, {kChannelBlock, pixels});
  int const lower[2] = {0, 0}, upper[2] = {-1, -1};
  return encode_im2col(&k.x[i], p.type, {C, W, H, N}, pixel, lower, upper, kChannelBlock, pixels, 2, 2);
}

CUresult encode_source(Sm90Params &k, Sm90Tile const &tile, int i) {
  if (tile.beside > 1) return encode_beside(k, tile, i);
  if (k.problem.upsample[i] > 1 && !tile.enlarges) return encode_enlarged(k, tile, i);
  Problem const &p = k.problem;
  cuuint64_t const C = p.C[i], W = p.W, H = p.H, N = p.N, pixel = size_of(p.type) * p.ldx[i];
  if (tile.halo) {
    cuuint32_t const step_w = p.stride_w, step_h = p.stride_h;
    cuuint32_t const a = k.halo.pitch * (k.halo.swapped ? step_h : step_w),
                     b = k.halo.rows * (k.halo.swapped ? step_w : step_h);
    return encode_image(&k.x[i], p.type, {C, W, H, N}, pixel, k.halo.swapped,
                        {cuuint32_t(halo_channels(tile)), a, b, 1}, 1, step_w, step_h);
  }
  if (tile.enlarges) return encode_phase(k, tile, i);
  cuuint32_t const share = tile.pixels() / k.cluster_f;  // pixels that one block loads for its cluster
  cuuint32_t const channels = i < k.joined.from ? k_channels(tile) : joined_channels(tile);
  if (k.pointwise) return encode_tiled<2>(&k.x[i], p.type, {C, N * H * W}, {pixel}, {channels, share});
  int const lower[2] = {-p.pad_left, -p.pad_top};
  int const upper[2] = {p.pad_right - (p.S - 1) * p.dilation_w, p.pad_bottom - (p.R - 1) * p.dilation_h};
  return encode_im2col(&k.x[i], p.type, {C, W, H, N}, pixel, lower, upper, channels, share, p.stride_w, p.stride_h);
}

// The packed filters as (column of a block,filter,block), where a block has `block` columns and the box `width` of
// `depth` blocks, one after the other. Beyond the last block there are zeros, never another filter's columns. For 8-bit
// outputs `filter` is (pair,even or odd,16 filters), as in encode_filters, unless the tile loads filters in their
// order.
CUresult encode_blocks(CUtensorMap &map, Sm90Params const &k, Sm90Tile const &tile, cuuint64_t block, cuuint32_t width,
                       cuuint32_t depth, cuuint32_t rows) {
  Problem const &p = k.problem;
  cuuint64_t const columns = packed_columns(p), filters = p.K;
  bool const in_order = loads_in_order(tile.schedule == Sm90Schedule::kSmall, tile.pixels());
  if (size_of(p.output_type) == 1 && !in_order) {
    return encode_tiled<5>(&map, p.type, {block, 8, 2, filters / 16, columns / block},
                           {2 * columns, columns, 16 * columns, block}, {width, 8, 2, rows / 16, depth});
  }
  cuuint64_t const bytes = size_of(p.type);
  return encode_tiled<3>(&map, p.type, {block, filters, columns / block}, {columns * bytes, block * bytes},
                         {width, rows, depth});
}

// For k-tiles of two neighbouring blocks: a tap of both. With one tap the two are side by side in memory and loaded as
// one row.
CUresult encode_filter_pairs(CUtensorMap &map, Sm90Params const &k, Sm90Tile const &tile, int box_filters) {
  int const taps = k.problem.R * k.problem.S;
  if (taps == 1) return encode_blocks(map, k, tile, packed_columns(k.problem), 2 * kChannelBlock, 1, box_filters);
  return encode_blocks(map, k, tile, taps * kChannelBlock, kChannelBlock, 2, box_filters);
}

// The packed filters as (column,filter). For 8-bit outputs as (column,pair,even or odd,16 filters): of each 16 filters
// the even ones are loaded first.
CUresult encode_filters(CUtensorMap &map, Sm90Params const &k, Sm90Tile const &tile, int box_filters) {
  if (k_channels(tile) != kChannelBlock) return encode_filter_pairs(map, k, tile, box_filters);
  if (takes_rows(tile)) return encode_blocks(map, k, tile, kChannelBlock, kChannelBlock, kSmallPatchTaps, box_filters);
  Problem const &p = k.problem;
  cuuint64_t const columns = packed_columns(p), filters = p.K, pitch = columns * size_of(p.type);
  cuuint32_t const channels = tile.halo ? halo_channels(tile) : kChannelBlock, rows = box_filters;
  if (size_of(p.output_type) != 1) {
    return encode_tiled<2>(&map, p.type, {columns, filters}, {pitch}, {channels, rows});
  }
  return encode_tiled<4>(&map, p.type, {columns, 8, 2, filters / 16}, {2 * pitch, pitch, 16 * pitch},
                         {channels, 8, 2, rows / 16});
}

CUresult encode_output(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  Sm90Output const &output = k.outputs[i];
  cuuint64_t const channels = padded_channels(p.output_type, output.last - output.first), P = p.P, Q = p.Q, N = p.N;
  cuuint64_t const pixel = size_of(p.output_type) * output.ld;
  cuuint32_t const rows = sm90_store_rows(tile.pixels_per_warpgroup());
  cuuint64_t const dims[4] = {channels, Q, P, N};
  if (tile.halo) {
    return encode_image(&k.out[i], p.output_type, dims, pixel, k.halo.swapped, {kStoreColumns, 8, rows / 8, 1},
                        p.spread);
  }
  if (p.spread == 1) {
    return encode_tiled<2>(&k.out[i], p.output_type, {channels, N * P * Q}, {pixel}, {kStoreColumns, rows});
  }
  // Runs of pixels, as im2col walks over them: from row to row it leaves out those of the other ranges.
  int const corner[2] = {0, 0};
  return encode_im2col(&k.out[i], p.output_type, dims, pixel, corner, corner, kStoreColumns, rows, 1, 1, p.spread);
}

// The first or second pixels of all pairs. An image that has no second one is not stored.
CUresult encode_output_beside(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  cuuint64_t const channels = padded_channels(p.output_type, p.K), P = p.P, Q = p.Q, N = p.N;
  cuuint64_t const pixel = size_of(p.output_type) * p.ldy, pairs = ceil_div(std::max(p.Q - i, 1), 2);
  return encode_tiled<4>(&k.out[i], p.output_type, {channels, pairs, P, N}, {2 * pixel, Q * pixel, P * Q * pixel},
                         {cuuint32_t(tile.filters), 8, 8, 1});
}

// The shortcut, in the boxes in which the kernels load it. TMA fills in zeros for filters that do not exist.
CUresult encode_shortcut(Sm90Params &k, Sm90Tile const &tile) {
  Problem const &p = k.problem;
  cuuint64_t const K = p.K, P = p.P, Q = p.Q, N = p.N, pixel = 2 * p.ldz;
  if (!tile.halo) {
    return encode_tiled<2>(&k.z, p.type, {K, N * P * Q}, {pixel}, {kStoreColumns, cuuint32_t(tile.pixels())});
  }
  if (tile.beside > 1) {
    return encode_tiled<4>(&k.z, p.type, {K, Q, P, N}, {pixel, Q * pixel, P * Q * pixel},
                           {cuuint32_t(tile.filters), 16, 8, 1}, 2);
  }
  cuuint32_t const b = halves_channels(tile) ? k.halo.tile_b / 2 : k.halo.tile_b;
  return encode_image(&k.z, p.type, {K, Q, P, N}, pixel, k.halo.swapped, {kStoreColumns, 8, b, 1});
}

}  // namespace

CUresult encode_maps(Sm90Params &k, Sm90Tile const &tile) {
  Problem const &p = k.problem;
  Driver const &driver = Driver::get();
  if (driver.tiled == nullptr || driver.im2col == nullptr || driver.replace == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  for (int i = 0; i < p.sources; ++i) {
    if (CUresult const result = encode_source(k, tile, i)) return result;
  }
  CUresult result = encode_filters(k.w, k, tile, tile.filters);
  if (result == CUDA_SUCCESS && k.last_f >= 0) {
    result = encode_filters(k.w_second, k, tile, tile.filters - k.missing_filters);
  }
  bool const joins = k.joined.from < p.sources;
  if (result == CUDA_SUCCESS && (joins || k.lone_block >= 0)) {  // two taps of a block, among those of all blocks
    result = encode_blocks(k.w_second, k, tile, kChannelBlock, kChannelBlock, 2, tile.filters);
  }
  if (tile.type_bytes == 4) return result;  // threads load the shortcut and store the outputs
  if (result == CUDA_SUCCESS && p.residual != Residual::kNone) result = encode_shortcut(k, tile);
  for (int i = 0; i < p.outputs * tile.beside && result == CUDA_SUCCESS; ++i) {
    result = tile.beside > 1 ? encode_output_beside(k, tile, i) : encode_output(k, tile, i);
  }
  return result;
}

bool point_map(CUtensorMap &map, void const *data) {
  return Driver::get().replace(&map, const_cast<void *>(data)) == CUDA_SUCCESS;
}

}  // namespace cutefuse::conv
#endif
