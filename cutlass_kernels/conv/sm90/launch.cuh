// Host side of the Hopper kernels: tensor maps, encoded without device work and kept per thread, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "conv/sm90/halo.cuh"
#include "conv/sm90/im2col.cuh"
#include "conv/sm90/pingpong.cuh"
#include "conv/sm90/rows.cuh"

namespace cutefuse::conv {

// ---- tensor maps ----------------------------------------------------------------------------------------------------

// The driver's encoders, found at run time: the library links to no libcuda and loads on machines without one.
struct MapEncoder {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;

  MapEncoder() {
    find("cuTensorMapEncodeTiled", reinterpret_cast<void **>(&tiled));
    find("cuTensorMapEncodeIm2col", reinterpret_cast<void **>(&im2col));
  }
  static MapEncoder const &get() {
    static MapEncoder const encoder;
    return encoder;
  }

 private:
  static void find(char const *name, void **function) {
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaError_t const error = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
#else
    cudaError_t const error = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) *function = nullptr;
  }
};

// A map over 16-bit elements; dimension 0 is dense, strides_bytes are those of dimensions 1.. .
template <int kRank>
CUresult encode_tiled(CUtensorMap *map, Type type, void const *data, cuuint64_t const (&dims)[kRank],
                      cuuint64_t const (&strides_bytes)[kRank - 1], cuuint32_t const (&box)[kRank]) {
  cuuint32_t ones[kRank];
  std::fill(ones, ones + kRank, 1u);
  return MapEncoder::get().tiled(
      map, type == Type::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
      const_cast<void *>(data), dims, strides_bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      box[0] == 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

inline CUresult encode_source(Sm90Params &k, Sm90Tile const &tile, Params const &params, int i) {
  Problem const &p = k.problem;
  cuuint64_t const C = p.C[i], W = p.W, H = p.H, N = p.N, pixel = 2 * p.ldx[i];
  if (tile.halo) {
    cuuint32_t const channels = halo_channels(tile), pitch = k.halo.pitch, rows = k.halo.rows;
    if (k.halo.swapped) {
      return encode_tiled<4>(&k.x[i], p.type, params.x[i], {C, H, W, N}, {pixel * W, pixel, pixel * W * H},
                             {channels, pitch, rows, 1});
    }
    return encode_tiled<4>(&k.x[i], p.type, params.x[i], {C, W, H, N}, {pixel, pixel * W, pixel * W * H},
                           {channels, pitch, rows, 1});
  }
  cuuint32_t const share = tile.pixels() / k.cluster_f;  // pixels that one block loads for its cluster
  if (k.pointwise) {
    return encode_tiled<2>(&k.x[i], p.type, params.x[i], {C, N * H * W}, {pixel}, {kChannelBlock, share});
  }
  cuuint64_t const dims[4] = {C, W, H, N}, strides[3] = {pixel, pixel * W, pixel * W * H};
  int const lower[2] = {-p.pad_left, -p.pad_top};
  int const upper[2] = {p.pad_right - (p.S - 1) * p.dilation_w, p.pad_bottom - (p.R - 1) * p.dilation_h};
  cuuint32_t const steps[4] = {1, cuuint32_t(p.stride_w), cuuint32_t(p.stride_h), 1};
  return MapEncoder::get().im2col(
      &k.x[i], p.type == Type::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void *>(params.x[i]), dims, strides, lower, upper, kChannelBlock, share, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

inline CUresult encode_maps(Sm90Params &k, Sm90Tile const &tile, Params const &params) {
  Problem const &p = k.problem;
  for (int i = 0; i < p.sources; ++i) {
    if (CUresult const result = encode_source(k, tile, params, i)) return result;
  }
  cuuint64_t const columns = packed_columns(p), filters = p.K;
  cuuint32_t const channels = tile.halo ? halo_channels(tile) : kChannelBlock;
  cuuint32_t const share = tile.filters / k.cluster_x;
  CUresult const result = encode_tiled<2>(&k.w, p.type, params.w, {columns, filters}, {2 * columns}, {channels, share});
  if (result != CUDA_SUCCESS) return result;
  cuuint64_t const padded = (filters + 7) / 8 * 8, P = p.P, Q = p.Q, N = p.N, pixel = 2 * p.ldy;
  cuuint32_t const rows = sm90_store_rows(tile.pixels_per_warpgroup());
  if (!tile.halo) {
    return encode_tiled<2>(&k.out, p.type, params.y, {padded, N * P * Q}, {pixel}, {kStoreColumns, rows});
  }
  if (k.halo.swapped) {
    return encode_tiled<4>(&k.out, p.type, params.y, {padded, P, Q, N}, {pixel * Q, pixel, pixel * Q * P},
                           {kStoreColumns, 8, rows / 8, 1});
  }
  return encode_tiled<4>(&k.out, p.type, params.y, {padded, Q, P, N}, {pixel, pixel * Q, pixel * Q * P},
                         {kStoreColumns, 8, rows / 8, 1});
}

inline CUresult make_params(Sm90Params *k, Sm90Tile const &tile, Params const &params, int splits) {
  Problem const &p = params.problem;
  k->problem = p;
  k->b = params.b;
  k->y = params.y;
  k->halo = tile.halo ? halo_plan(p, tile) : HaloPlan{};
  k->tiles_f = ceil_div(p.K, tile.filters);
  k->tiles_a = tile.halo ? ceil_div(k->halo.size_a, k->halo.tile_a) : ceil_div(p.N * p.P * p.Q, tile.pixels());
  k->tiles_b = tile.halo ? ceil_div(k->halo.size_b, k->halo.tile_b) : 1;
  k->cluster_f = tile.cluster_f, k->cluster_x = tile.cluster_x, k->splits = splits;
  k->cluster_tiles = ceil_div(k->tiles_f, k->cluster_f) * ceil_div(k->tiles_x(), k->cluster_x);
  k->k_tiles = k_tiles<kChannelBlock>(p);
  for (int i = 0; i <= splits; ++i) k->k_begin[i] = k->k_tiles * i / splits;
  k->by_f = Divider(ceil_div(k->tiles_f, k->cluster_f)), k->by_a = Divider(k->tiles_a), k->by_b = Divider(k->tiles_b);
  k->by_image = params.by_image, k->by_row = params.by_row;
  k->by_taps = Divider(p.R * p.S), k->by_s = Divider(p.S);
  k->pointwise = is_pointwise(p);
  if (MapEncoder::get().tiled == nullptr || MapEncoder::get().im2col == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  return encode_maps(*k, tile, params);
}

// Encoding costs microseconds, so each thread keeps the last parameter blocks: a network calls with few sets of
// pointers.
struct ParamsCache {
  static constexpr int kEntries = 32;
  struct Entry {
    Params key;
    int tile, device;
    bool used;
    Sm90Params value;
  };
  Entry entries[kEntries]{};

  Entry &slot(Sm90Tile const &tile, Params const &params) {
    auto const bits = reinterpret_cast<uintptr_t>(params.y) ^ reinterpret_cast<uintptr_t>(params.x[0]) * 31 ^ tile.id;
    return entries[(bits * 0x9e3779b97f4a7c15ull) >> 59];
  }
  static bool holds(Entry const &entry, Sm90Tile const &tile, Params const &params, int device) {
    return entry.used && entry.tile == tile.id && entry.device == device &&
           std::memcmp(&entry.key, &params, sizeof(Params)) == 0;
  }
};

// ---- launch ---------------------------------------------------------------------------------------------------------

struct DeviceFacts {
  int device = 0, sm_count = 0;
  cudaError_t error;
  DeviceFacts() : error(cudaGetDevice(&device)) {
    static std::atomic<int> counts[64];
    if (error != cudaSuccess) return;
    sm_count = counts[device & 63].load(std::memory_order_relaxed);
    if (sm_count != 0) return;
    error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    counts[device & 63].store(sm_count, std::memory_order_relaxed);
  }
};

// Raises the kernel's shared-memory limit once per device.
inline cudaError_t prepare(void const *kernel, int shared_bytes, int device, std::atomic<uint64_t> &ready) {
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (ready.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) ready.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <class Traits>
cudaError_t launch_kernel(void (*kernel)(Sm90Params), Sm90Params const &k, bool persistent, DeviceFacts const &facts,
                          void *stream) {
  static std::atomic<uint64_t> ready{0};
  constexpr int kBytes = sizeof(typename Traits::SharedStorage);
  cudaError_t const error = prepare(reinterpret_cast<void const *>(kernel), kBytes, facts.device, ready);
  if (error != cudaSuccess) return error;
  int const cluster = k.cluster_f * k.cluster_x * k.splits;
  int const clusters = persistent ? std::min(k.cluster_tiles, std::max(1, facts.sm_count / cluster)) : k.cluster_tiles;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * cluster);
  config.blockDim = dim3(kSm90Threads);
  config.dynamicSmemBytes = kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, k);
}

template <class Element>
using SplitTraits = Sm90Im2col<Element, 128, 128, Sm90Schedule::kSplit>;

// room[i]: clusters of i blocks of the split kernel that run at once, each within a GPC; asked of the driver once per
// device. Any other kernel that fills a multiprocessor has the same room.
template <class Element>
cudaError_t cluster_room(int device, int (&room)[kMaxSplits + 1]) {
  using Traits = SplitTraits<Element>;
  static std::atomic<int> known[64][kMaxSplits + 1];
  static std::atomic<uint64_t> ready{0};
  auto const kernel = &concat_conv_sm90_im2col<Traits>;
  constexpr int kBytes = sizeof(typename Traits::SharedStorage);
  if (cudaError_t const error = prepare(reinterpret_cast<void const *>(kernel), kBytes, device, ready)) return error;
  for (int size = 1; size <= kMaxSplits; ++size) {
    room[size] = known[device & 63][size].load(std::memory_order_relaxed);
    if (room[size] != 0) continue;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size * 1024);
    config.blockDim = dim3(kSm90Threads);
    config.dynamicSmemBytes = kBytes;
    config.attrs = &attribute, config.numAttrs = 1;
    if (cudaError_t const error = cudaOccupancyMaxActiveClusters(&room[size], kernel, &config)) return error;
    known[device & 63][size].store(room[size], std::memory_order_relaxed);
  }
  return cudaSuccess;
}

template <class Element>
cudaError_t dispatch(Sm90Tile const &tile, Sm90Params const &k, DeviceFacts const &facts, void *stream) {
  auto const im2col = [&](auto traits) {
    using Traits = decltype(traits);
    return launch_kernel<Traits>(&concat_conv_sm90_im2col<Traits>, k, !Traits::kSplit, facts, stream);
  };
  auto const pingpong = [&](auto traits) {
    using Traits = decltype(traits);
    return launch_kernel<Traits>(&concat_conv_sm90_im2col_pingpong<Traits>, k, true, facts, stream);
  };
  auto const halo = [&](auto traits) {
    using Traits = decltype(traits);
    return launch_kernel<Traits>(&concat_conv_sm90_halo<Traits>, k, true, facts, stream);
  };
  auto const rows = [&](auto traits) {
    using Traits = decltype(traits);
    return launch_kernel<Traits>(&concat_conv_sm90_rows<Traits>, k, false, facts, stream);
  };
  if (tile.schedule == Sm90Schedule::kRows) {
    return tile.pixels() == 192 ? rows(Sm90Rows<Element, 192>{}) : rows(Sm90Rows<Element, 224>{});
  }
  if (tile.halo) {
    if (tile.filters == 64) return halo(Sm90Halo<Element, 64, 32>{});
    if (tile.pixels_b == 15) return halo(Sm90Halo<Element, 128, 15>{});
    return tile.pixels_b == 32 ? halo(Sm90Halo<Element, 128, 32>{}) : halo(Sm90Halo<Element, 128, 16>{});
  }
  constexpr auto kPingPong = Sm90Schedule::kPingPong;
  if (tile.schedule == kPingPong) {
    if (tile.filters == 64) return pingpong(Sm90Im2col<Element, 64, 256, kPingPong>{});
    if (tile.pixels() == 104) return pingpong(Sm90Im2col<Element, 128, 104, kPingPong>{});
    return tile.pixels() == 160 ? pingpong(Sm90Im2col<Element, 128, 160, kPingPong>{})
                                : pingpong(Sm90Im2col<Element, 128, 192, kPingPong>{});
  }
  if (tile.schedule == Sm90Schedule::kSplit) return im2col(SplitTraits<Element>{});
  if (tile.filters == 64) return im2col(Sm90Im2col<Element, 64, 256>{});
  switch (tile.pixels()) {
    case 64:
      return im2col(Sm90Im2col<Element, 128, 64>{});
    case 128:
      return im2col(Sm90Im2col<Element, 128, 128>{});
    case 192:
      return im2col(Sm90Im2col<Element, 128, 192>{});
    case 200:
      return im2col(Sm90Im2col<Element, 128, 200>{});
    default:
      return im2col(Sm90Im2col<Element, 128, 256>{});
  }
}

inline char const *launch_failure(Sm90Tile const &tile, cudaError_t error) {
  return sentence("concat_conv: tile %s could not be launched (%s); check that the library was built for this GPU",
                  tile.name, cudaGetErrorString(error));
}

// Null when the kernel was enqueued, else one sentence.
template <class Element>
char const *launch_sm90(int tile_id, Params const &params, void *stream) {
  Sm90Tile const &tile = *find_sm90_tile(tile_id);
  DeviceFacts const facts;
  cudaError_t error = facts.error;
  if (error == cudaSuccess) {
    thread_local ParamsCache cache;
    auto &entry = cache.slot(tile, params);
    if (!ParamsCache::holds(entry, tile, params, facts.device)) {
      entry.used = false;
      int room[kMaxSplits + 1] = {};
      if (divides_reduction(tile)) error = cluster_room<Element>(facts.device, room);
      if (error != cudaSuccess) return launch_failure(tile, error);
      if (CUresult const result =
              make_params(&entry.value, tile, params, sm90_splits(tile, params.problem, facts.sm_count, room))) {
        return sentence("concat_conv: tile %s needs tensor maps that the driver refused (error %d); use another tile",
                        tile.name, int(result));
      }
      std::memcpy(&entry.key, &params, sizeof(Params));
      entry.tile = tile.id, entry.device = facts.device, entry.used = true;
    }
    error = dispatch<Element>(tile, entry.value, facts, stream);
  }
  return error == cudaSuccess ? nullptr : launch_failure(tile, error);
}

}  // namespace cutefuse::conv
