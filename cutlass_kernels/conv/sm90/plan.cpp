// From a judged problem to a launch of a Hopper kernel.
#include "conv/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if CUTEFUSE_WITH_CUDA
#include <cuda_runtime_api.h>

#include "conv/sm90/cost.h"
#include "conv/sm90/params.h"
#endif

namespace cutefuse::conv {

#if CUTEFUSE_WITH_CUDA
namespace {

// ---- tensor maps ----------------------------------------------------------------------------------------------------

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
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
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

// A plan knows shapes and no addresses: its maps point here until a run replaces it, which costs a few stores where
// encoding costs microseconds.
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

// Dimension 0 is dense, strides_bytes are those of dimensions 1.. . Of dimension 1 the box holds every step-th element.
template <int kRank>
CUresult encode_tiled(CUtensorMap *map, Type type, cuuint64_t const (&dims)[kRank],
                      cuuint64_t const (&strides_bytes)[kRank - 1], cuuint32_t const (&box)[kRank],
                      cuuint32_t step = 1) {
  cuuint32_t steps[kRank];
  std::fill(steps, steps + kRank, 1u);
  steps[1] = step;
  int const row_bytes = int(box[0]) * size_of(type);
  return Driver::get().tiled(map, map_type(type), kRank, kNowhere, dims, strides_bytes, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(row_bytes), kPromotion,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A map over images of dense pixels, (channel,w,h,n), or with the axes of an image swapped.
CUresult encode_image(CUtensorMap *map, Type type, cuuint64_t const (&dims)[4], cuuint64_t pixel, bool swapped,
                      cuuint32_t const (&box)[4]) {
  cuuint64_t const row = pixel * dims[1], image = row * dims[2];
  if (swapped) return encode_tiled<4>(map, type, {dims[0], dims[2], dims[1], dims[3]}, {row, pixel, image}, box);
  return encode_tiled<4>(map, type, dims, {pixel, row, image}, box);
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
  cuuint64_t const dims[4] = {C, W, H, N}, strides[3] = {pixel, pixel * W, pixel * W * H};
  int const lower[2] = {0, 0}, upper[2] = {-1, -1};
  cuuint32_t const steps[4] = {1, 2, 2, 1};
  return Driver::get().im2col(&k.x[i], map_type(p.type), 4, kNowhere, dims, strides, lower, upper, kChannelBlock,
                              pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUresult encode_source(Sm90Params &k, Sm90Tile const &tile, int i) {
  if (tile.beside > 1) return encode_beside(k, tile, i);
  if (k.problem.upsample[i] > 1 && !tile.enlarges) return encode_enlarged(k, tile, i);
  Problem const &p = k.problem;
  cuuint64_t const C = p.C[i], W = p.W, H = p.H, N = p.N, pixel = size_of(p.type) * p.ldx[i];
  if (tile.halo) {
    cuuint32_t const channels = halo_channels(tile), pitch = k.halo.pitch, rows = k.halo.rows;
    return encode_image(&k.x[i], p.type, {C, W, H, N}, pixel, k.halo.swapped, {channels, pitch, rows, 1});
  }
  if (tile.enlarges) return encode_phase(k, tile, i);
  cuuint32_t const share = tile.pixels() / k.cluster_f;  // pixels that one block loads for its cluster
  cuuint32_t const channels = k_channels(tile);
  if (k.pointwise) return encode_tiled<2>(&k.x[i], p.type, {C, N * H * W}, {pixel}, {channels, share});
  cuuint64_t const dims[4] = {C, W, H, N}, strides[3] = {pixel, pixel * W, pixel * W * H};
  int const lower[2] = {-p.pad_left, -p.pad_top};
  int const upper[2] = {p.pad_right - (p.S - 1) * p.dilation_w, p.pad_bottom - (p.R - 1) * p.dilation_h};
  cuuint32_t const steps[4] = {1, cuuint32_t(p.stride_w), cuuint32_t(p.stride_h), 1};
  int const row_bytes = int(channels) * size_of(p.type);
  return Driver::get().im2col(&k.x[i], map_type(p.type), 4, kNowhere, dims, strides, lower, upper, channels, share,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(row_bytes), kPromotion,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// The packed filters for k-tiles of two neighbouring blocks: (column of a block,filter,block), whose box is one tap of
// two blocks, one after the other. With one tap the two are side by side in memory and loaded as one row:
// (column,filter,1). Beyond the last block there are zeros, never another filter's columns. For 8-bit outputs of tiles
// that are not small, `filter` is (pair,even or odd,16 filters), as in encode_filters.
CUresult encode_filter_pairs(Sm90Params &k, Sm90Tile const &tile) {
  Problem const &p = k.problem;
  bool const one_tap = p.R * p.S == 1;
  cuuint64_t const columns = packed_columns(p), filters = p.K, block = one_tap ? columns : p.R * p.S * kChannelBlock;
  cuuint32_t const rows = tile.filters, width = (one_tap ? 2 : 1) * kChannelBlock, depth = one_tap ? 1 : 2;
  if (size_of(p.output_type) == 1 && tile.schedule != Sm90Schedule::kSmall) {
    return encode_tiled<5>(&k.w, p.type, {block, 8, 2, filters / 16, columns / block},
                           {2 * columns, columns, 16 * columns, block}, {width, 8, 2, rows / 16, depth});
  }
  return encode_tiled<3>(&k.w, p.type, {block, filters, columns / block}, {columns, block}, {width, rows, depth});
}

// The packed filters as (column,filter). For 8-bit outputs as (column,pair,even or odd,16 filters): of each 16 filters
// the even ones are loaded first.
CUresult encode_filters(Sm90Params &k, Sm90Tile const &tile) {
  if (k_channels(tile) != kChannelBlock) return encode_filter_pairs(k, tile);
  Problem const &p = k.problem;
  cuuint64_t const columns = packed_columns(p), filters = p.K, pitch = columns * size_of(p.type);
  cuuint32_t const channels = tile.halo ? halo_channels(tile) : kChannelBlock, rows = tile.filters;
  if (size_of(p.output_type) != 1) {
    return encode_tiled<2>(&k.w, p.type, {columns, filters}, {pitch}, {channels, rows});
  }
  return encode_tiled<4>(&k.w, p.type, {columns, 8, 2, filters / 16}, {2 * pitch, pitch, 16 * pitch},
                         {channels, 8, 2, rows / 16});
}

CUresult encode_output(Sm90Params &k, Sm90Tile const &tile, int i) {
  Problem const &p = k.problem;
  Sm90Output const &output = k.outputs[i];
  cuuint64_t const channels = padded_channels(p.output_type, output.last - output.first), P = p.P, Q = p.Q, N = p.N;
  cuuint64_t const pixel = size_of(p.output_type) * output.ld;
  cuuint32_t const rows = sm90_store_rows(tile.pixels_per_warpgroup());
  if (!tile.halo) {
    return encode_tiled<2>(&k.out[i], p.output_type, {channels, N * P * Q}, {pixel}, {kStoreColumns, rows});
  }
  return encode_image(&k.out[i], p.output_type, {channels, Q, P, N}, pixel, k.halo.swapped,
                      {kStoreColumns, 8, rows / 8, 1});
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
    cuuint32_t const rows = tile.schedule == Sm90Schedule::kSplit ? 16 : tile.pixels();
    return encode_tiled<2>(&k.z, p.type, {K, N * P * Q}, {pixel}, {kStoreColumns, rows});
  }
  if (tile.beside > 1) {
    return encode_tiled<4>(&k.z, p.type, {K, Q, P, N}, {pixel, Q * pixel, P * Q * pixel},
                           {cuuint32_t(tile.filters), 16, 8, 1}, 2);
  }
  bool const rows = tile.schedule == Sm90Schedule::kRows;
  cuuint32_t const a = rows ? k.halo.pitch : 8, b = halves_channels(tile) ? k.halo.tile_b / 2 : k.halo.tile_b;
  return encode_image(&k.z, p.type, {K, Q, P, N}, pixel, k.halo.swapped, {kStoreColumns, a, b, 1});
}

CUresult encode_maps(Sm90Params &k, Sm90Tile const &tile) {
  Problem const &p = k.problem;
  Driver const &driver = Driver::get();
  if (driver.tiled == nullptr || driver.im2col == nullptr || driver.replace == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  for (int i = 0; i < p.sources; ++i) {
    if (CUresult const result = encode_source(k, tile, i)) return result;
  }
  CUresult result = encode_filters(k, tile);
  if (tile.type_bytes == 4) return result;  // threads load the shortcut and store the outputs
  if (result == CUDA_SUCCESS && p.residual != Residual::kNone) result = encode_shortcut(k, tile);
  for (int i = 0; i < p.outputs * tile.beside && result == CUDA_SUCCESS; ++i) {
    result = tile.beside > 1 ? encode_output_beside(k, tile, i) : encode_output(k, tile, i);
  }
  return result;
}

// ---- parameters -----------------------------------------------------------------------------------------------------

Rescale make_rescale(Problem const &p, int source) {
  double const factor = size_of(p.type) == 1 ? rescale(p, source) : 1.0, whole = std::floor(factor + 0.5);
  Rescale by{};
  by.factor = float(factor), by.whole = int(std::min(whole, double(kInt32Max)));
  by.fraction = int(std::floor((factor - whole) * 4294967296.0));
  return by;
}

// Channels [begin, end) of the concatenation that k-tile `k` of one block of channels reads.
struct Channels {
  int begin, end;
};
Channels channels_of(Problem const &p, int k) {
  int block = k / (p.R * p.S), source = 0, first = 0;
  for (; block >= blocks_of(p.C[source]); ++source) block -= blocks_of(p.C[source]), first += p.C[source];
  int const channel = block * kChannelBlock;
  return {first + channel, first + std::min(p.C[source], channel + kChannelBlock)};
}

// Divides the k-tiles of both kinds, so that each part of a sum has some of either.
void plan_phases(Sm90Params &k) {
  Problem const &p = k.problem;
  int count = 0, k_tiles[2] = {};  // of sources of full size, of enlarged ones
  for (bool const enlarged : {true, false}) {
    int blocks = 0;
    for (int i = 0; i < p.sources; ++i) {
      if ((p.upsample[i] > 1) == enlarged) {
        k.phases.source[count] = std::uint8_t(i), k.phases.first_block[count++] = std::uint16_t(blocks);
        k_tiles[enlarged] += blocks_of(p.C[i]), k.phases.enlarged += enlarged;
      }
      blocks += blocks_of(p.C[i]);
    }
  }
  for (int i = 0; i <= k.splits; ++i) {
    k.k_begin[i] = k_tiles[1] * i / k.splits, k.phases.begin[i] = std::uint16_t(k_tiles[0] * i / k.splits);
  }
}

Sm90Params make_sm90_params(Sm90Tile const &tile, Problem const &p, int splits) {
  Sm90Params k{};
  k.problem = p;
  k.halo = tile.halo ? halo_plan(p, tile) : HaloPlan{};
  int rows[kMaxOutputs];
  k.tiles_f = output_rows(tile, p, rows);
  for (int i = 0; i < kMaxOutputs; ++i) {
    OutputRange const range = i < p.outputs ? output_range(p, i) : OutputRange{};
    k.outputs[i] = {i < p.outputs ? rows[i] : int(kInt32Max), range.first, range.last, range.ld, nullptr};
  }
  k.tiles_a = tile.halo ? ceil_div(k.halo.size_a, k.halo.tile_a) : ceil_div(p.N * p.P * p.Q, tile.pixels());
  k.tiles_b = tile.halo ? ceil_div(k.halo.size_b, k.halo.tile_b) : 1;
  k.cluster_f = tile.cluster_f, k.splits = splits;
  k.cluster_tiles = ceil_div(k.tiles_f, k.cluster_f) * k.tiles_x();
  k.k_tiles = k_tiles(tile, p);
  for (int i = 0; i <= splits; ++i) k.k_begin[i] = k.k_tiles * i / splits;
  for (int i = 0; i < splits && tile.pixel_rows; ++i) {
    k.activated_begin[i] = channels_of(p, k.k_begin[i]).begin;
    k.activated_end[i] = channels_of(p, k.k_begin[i + 1] - 1).end;
  }
  k.by_f = Divider(ceil_div(k.tiles_f, k.cluster_f)), k.by_a = Divider(k.tiles_a), k.by_b = Divider(k.tiles_b);
  k.by_image = Divider(p.P * p.Q), k.by_row = Divider(p.Q);
  if (tile.enlarges) {  // by pixels of an enlarged source
    k.by_image = Divider(p.P * p.Q / 4), k.by_row = Divider(p.Q / 2);
    plan_phases(k);
  }
  k.by_taps = Divider(p.R * p.S), k.by_s = Divider(p.S);
  k.pointwise = is_pointwise(p);
  for (int i = 1; i < p.sources; ++i) k.first_channel[i] = k.first_channel[i - 1] + p.C[i - 1];
  for (int i = 0; i < p.sources; ++i) k.by_factor[i] = Divider(p.upsample[i]);
  k.drains_after = drains_after(p);
  for (int i = 0; i < p.sources; ++i) k.rescale[i] = make_rescale(p, i);
  k.inverse_output_scale = size_of(p.output_type) == 1 ? 1.f / p.output_scale : 1.f;
  return k;
}

// How many clusters run at once: CUDA says it of those with two blocks at least.
void find_room(Sm90Tile const &tile, Problem const &p, Kernel kernel, int sm_count, Room &room) {
  bool const small = tile.schedule == Sm90Schedule::kSmall;
  for (int blocks = 1; blocks <= (small ? small_blocks(tile) : 1); ++blocks) {
    room[blocks][1] = blocks * sm_count;
    if (small) {
      int const stages = small_stages(tile, p, true, blocks);
      kernel.shared_bytes = small_shared_bytes(tile, p, true, stages);
    }
    for (int i = 2; i <= kMaxSplits && divides_reduction(tile); ++i) {
      room[blocks][i] = clusters_at_once(kernel, i);
    }
  }
}

struct Sm90State {
  Sm90Params params;
  Launch launch;
};
static_assert(sizeof(Sm90State) <= sizeof(Plan::state));

}  // namespace

char const *plan_sm90(Op const &op, Sm90Tile const &row, Call const &call, Problem const &p, Find *find, Plan &plan) {
  plan.launches = 1;
  if (find == nullptr || plan.device < 0) return nullptr;
  Sm90Tile const tile = form_of(row, p.pre_activated);
  Sm90State state{};
  Launch &launch = state.launch;
  Kernel kernel = find(tile.id).main;
  // The most that a launch of the kernel may take.
  if (tile.schedule == Sm90Schedule::kSmall) kernel.shared_bytes = kSmallSharedBytes - 1024;
  launch.kernel = kernel, launch.early = true;
  if (char const *why = prepare(launch, true)) return refused(op, tile.id, why);
  Room room{};
  find_room(tile, p, kernel, call.sm_count, room);
  int const splits = sm90_splits(tile, p, call.sm_count, room);
  state.params = make_sm90_params(tile, p, splits);
  Sm90Params &k = state.params;
  if (tile.schedule == Sm90Schedule::kSmall) {
    k.stages = small_launch(tile, p, splits, room).stages;
    launch.kernel.shared_bytes = small_shared_bytes(tile, p, splits > 1, k.stages);
  }
  launch.cluster = k.cluster_f * k.splits;
  // Blocks that do not divide the reduction take tiles in turn, as many as there are multiprocessors.
  bool const persistent = !divides_reduction(tile);
  int const at_once = std::max(1, call.sm_count / launch.cluster);
  launch.blocks = std::int64_t(persistent ? std::min(k.cluster_tiles, at_once) : k.cluster_tiles) * launch.cluster;
  if (CUresult const result = encode_maps(state.params, tile)) {
    return sentence("%s: tile %s needs tensor maps that the driver refused (error %d); use another tile", op.name,
                    tile.name, int(result));
  }
  plan.splits = k.splits;
  std::memcpy(plan.state, &state, sizeof(state));
  return nullptr;
}

char const *launch_sm90(Op const &op, Plan const &plan, Operands const &operands) {
  auto const replace = Driver::get().replace;
  Sm90State state;
  std::memcpy(&state, plan.state, sizeof(state));
  Sm90Params &k = state.params;
  Problem const &p = k.problem;
  bool refuses = false;
  auto const point = [&](CUtensorMap &map, void const *data, std::int64_t bytes) {
    refuses = refuses || replace(&map, const_cast<char *>(static_cast<char const *>(data) + bytes)) != CUDA_SUCCESS;
  };
  void const *const *next = operands.inputs;
  for (int i = 0; i < p.sources; ++i) {
    std::int64_t const start = std::int64_t(p.start[i]) * size_of(p.type);
    k.sources[i] = static_cast<char const *>(*next) + start;
    point(k.x[i], *next++, start);
  }
  k.filters = *next;
  point(k.w, *next++, 0);
  if (size_of(p.type) == 1) k.w_scale = static_cast<float const *>(*next++);
  k.b = static_cast<float const *>(*next++);
  bool const direct = p.type == Type::kFloat32;  // outputs and shortcut have no maps
  if (p.residual != Residual::kNone) {
    k.shortcut = *next++;
    if (!direct) point(k.z, k.shortcut, 0);
  }
  if (p.pre_activated) k.pre_scale = next[0], k.pre_shift = next[1];
  for (int i = 0; i < p.outputs; ++i) {
    for (int pixel = 0; pixel < std::max(k.halo.beside, 1) && !direct; ++pixel) {
      point(k.out[i + pixel], operands.outputs[i], std::int64_t(pixel) * p.ldy * size_of(p.output_type));
    }
    k.outputs[i].y = operands.outputs[i];
  }
  char const *const why = refuses ? "the driver refused an address for TMA" : start(state.launch, &k, operands.stream);
  return why == nullptr ? nullptr : refused(op, plan.config, why);
}

#else

char const *plan_sm90(Op const &, Sm90Tile const &, Call const &, Problem const &, Find *, Plan &plan) {
  plan.launches = 1;
  return nullptr;
}

char const *launch_sm90(Op const &op, Plan const &plan, Operands const &) {
  return refused(op, plan.config, start({}, nullptr, nullptr));
}

#endif

}  // namespace cutefuse::conv
