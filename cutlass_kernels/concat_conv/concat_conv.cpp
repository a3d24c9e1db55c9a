// Host side of ConcatConv: what is legal, which tile to try first, and the dispatch. No CUDA header.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "problem.h"
#include "sm90.h"
#include "tiles.h"

namespace cutefuse::concat_conv {
namespace {

enum Attr { kChannels, kKernelShape, kStrides, kPads, kDilations, kPackedSizes, kAlpha, kLo, kHi, kAttrs };

constexpr AttrSpec kAttrSpecs[kAttrs] = {
    {"channels", AttrKind::kInts, 1, kMaxSources, 0, 0.0},
    {"kernel_shape", AttrKind::kInts, 2, 2, 0, 0.0},
    {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
    {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
    {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
    {"packed_sizes", AttrKind::kInts, 1, kMaxSources, 0,
     0.0},                                                // filter columns per source; the function body splits by it
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},          // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},  // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
};

constexpr int kVariants = kMaxSources * kActivations;

std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  for (int i = 0; i < kVariants; ++i) {
    int const sources = i / kActivations + 1;
    std::snprintf(table[i].op_type, sizeof(table[i].op_type), "CuteConcatConv%d%s", sources,
                  kActivationNames[i % kActivations]);
    table[i].inputs = sources + 2;
    table[i].outputs = 1;
  }
  return table;
}();

constexpr int kAllTiles = kTileCount + kSm90TileCount;

std::array<Config, kAllTiles> const kConfigTable = [] {
  std::array<Config, kAllTiles> table{};
  for (int i = 0; i < kTileCount; ++i) table[i] = {kTiles[i].id, kTiles[i].min_sm, kTiles[i].name};
  for (int i = 0; i < kSm90TileCount; ++i) table[kTileCount + i] = {kSm90Tiles[i].id, 90, kSm90Tiles[i].name};
  return table;
}();

constexpr std::int64_t kInt32Max = 0x7fffffff;

// Dynamic shared memory that one block may ask for, by compute capability (CUDA programming guide, table of limits).
int shared_limit(int sm) {
  if (sm == 86 || sm == 89 || sm >= 120) return 99 * 1024;
  return sm >= 90 || sm == 0 ? 227 * 1024 : 163 * 1024;
}

bool known(std::int64_t size) { return size >= 0; }

char const *check_sources(Call const &call, Problem &p) {
  Tensor const &first = call.inputs[0];
  for (int i = 0; i < p.sources; ++i) {
    Tensor const &x = call.inputs[i];
    if (x.rank != 4) {
      return sentence("concat_conv: source %d has rank %d; only 2-D convolutions (rank 4, NCHW) can be fused", i,
                      x.rank);
    }
    if (x.type != p.type) {
      return sentence("concat_conv: source %d is %s, source 0 is %s; all must agree, insert a Cast", i, name_of(x.type),
                      name_of(p.type));
    }
    if (x.layout != Layout::kChannelsLast) {
      return sentence("concat_conv: source %d is not channels-last; pass it as NHWC (TensorRT: kHWC8, float32 kHWC)",
                      i);
    }
    for (int d : {0, 2, 3}) {
      if (known(x.dims[d]) && known(first.dims[d]) && x.dims[d] != first.dims[d]) {
        return sentence("concat_conv: source %d is %lldx%lldx%lld (NHW), source 0 is %lldx%lldx%lld; sizes must agree",
                        i, (long long)x.dims[0], (long long)x.dims[2], (long long)x.dims[3], (long long)first.dims[0],
                        (long long)first.dims[2], (long long)first.dims[3]);
      }
    }
    std::int64_t const channels = call.attrs[kChannels].ints[i];
    if (channels < 1 || channels > kInt32Max / 2 || (known(x.dims[1]) && x.dims[1] != channels)) {
      return sentence(
          "concat_conv: source %d has %lld channels, attribute channels says %lld; they must be equal and positive", i,
          (long long)x.dims[1], (long long)channels);
    }
    p.C[i] = static_cast<int>(channels);
    p.ldx[i] = x.ld != 0 ? x.ld : padded_channels(p.type, channels);
    int const vector = 16 / size_of(p.type);
    if (p.ldx[i] < channels || p.ldx[i] % vector != 0 || p.ldx[i] > (1 << 28)) {
      return sentence(
          "concat_conv: source %d has %lld channels in pixels of %lld %s elements; the pixel stride must be a "
          "multiple of %d and hold them; pad the channels or skip this fusion",
          i, (long long)channels, (long long)p.ldx[i], name_of(p.type), vector);
    }
  }
  return nullptr;
}

char const *check_geometry(Call const &call, Problem &p) {
  auto const at = [&](Attr attr, int i) { return call.attrs[attr].ints[i]; };
  if (at(kKernelShape, 0) < 1 || at(kKernelShape, 0) > kMaxTaps || at(kKernelShape, 1) < 1 ||
      at(kKernelShape, 1) > kMaxTaps) {
    return sentence("concat_conv: filter %lldx%lld is not within 1x1..%dx%d", (long long)at(kKernelShape, 0),
                    (long long)at(kKernelShape, 1), kMaxTaps, kMaxTaps);
  }
  for (int i = 0; i < 2; ++i) {
    if (at(kStrides, i) < 1 || at(kStrides, i) > 1024 || at(kDilations, i) < 1 || at(kDilations, i) > 1024) {
      return sentence("concat_conv: stride %lld or dilation %lld is not within 1..1024", (long long)at(kStrides, i),
                      (long long)at(kDilations, i));
    }
  }
  for (int i = 0; i < 4; ++i) {
    if (at(kPads, i) < 0 || at(kPads, i) > 4096) {
      return sentence("concat_conv: pad %lld is not within 0..4096", (long long)at(kPads, i));
    }
  }
  p.R = static_cast<int>(at(kKernelShape, 0)), p.S = static_cast<int>(at(kKernelShape, 1));
  p.stride_h = static_cast<int>(at(kStrides, 0)), p.stride_w = static_cast<int>(at(kStrides, 1));
  p.dilation_h = static_cast<int>(at(kDilations, 0)), p.dilation_w = static_cast<int>(at(kDilations, 1));
  p.pad_top = static_cast<int>(at(kPads, 0)), p.pad_left = static_cast<int>(at(kPads, 1));
  p.pad_bottom = static_cast<int>(at(kPads, 2)), p.pad_right = static_cast<int>(at(kPads, 3));
  return nullptr;
}

char const *check_filter(Call const &call, Problem &p) {
  Tensor const &w = call.inputs[p.sources], &b = call.inputs[p.sources + 1];
  if (w.type != p.type || w.layout != Layout::kLinear || w.rank != 2 || w.ld != 0) {
    return sentence(
        "concat_conv: the packed filter must be a linear %s matrix of rank 2, it is %s of rank %d; repack it "
        "with the rewriter",
        name_of(p.type), name_of(w.type), w.rank);
  }
  for (int i = 0; i < p.sources; ++i) {
    std::int64_t const columns = std::int64_t(blocks_of(p.C[i])) * p.R * p.S * kChannelBlock;
    if (call.attrs[kPackedSizes].ints[i] != columns) {
      return sentence(
          "concat_conv: packed_sizes[%d] is %lld, %d channels of a %dx%d filter take %lld columns; repack it", i,
          (long long)call.attrs[kPackedSizes].ints[i], p.C[i], p.R, p.S, (long long)columns);
    }
  }
  if (w.dims[0] < 1 || w.dims[0] > (1 << 20) || w.dims[1] != packed_columns(p) || w.dims[1] > (1 << 30)) {
    return sentence(
        "concat_conv: the packed filter is %lldx%lld, %lld columns and 1 to 1048576 rows are needed; repack it",
        (long long)w.dims[0], (long long)w.dims[1], (long long)packed_columns(p));
  }
  p.K = static_cast<int>(w.dims[0]);
  if (b.type != Type::kFloat32 || b.layout != Layout::kLinear || b.rank != 1 || b.dims[0] != p.K) {
    return sentence(
        "concat_conv: the bias must be a float32 vector of %d, it is %s of rank %d; write zeros for no bias", p.K,
        name_of(b.type), b.rank);
  }
  return nullptr;
}

char const *check_output(Call const &call, Problem &p) {
  Tensor const &y = call.outputs[0];
  if (y.type != p.type || y.layout != Layout::kChannelsLast || y.rank != 4) {
    return sentence("concat_conv: the output must be a channels-last %s tensor of rank 4, it is %s of rank %d",
                    name_of(p.type), name_of(y.type), y.rank);
  }
  p.ldy = y.ld != 0 ? y.ld : padded_channels(p.type, p.K);
  if (p.ldy < p.K || (size_of(p.type) == 2 && (p.ldy % 8 != 0 || p.ldy < padded_channels(p.type, p.K)))) {
    return sentence("concat_conv: output pixels of %lld elements cannot hold %d channels in whole 16-byte vectors",
                    (long long)p.ldy, p.K);
  }
  std::int64_t const expected[4] = {p.N, p.K, p.P, p.Q};
  for (int d = 0; d < 4; ++d) {
    if (known(y.dims[d]) && known(expected[d]) && y.dims[d] != expected[d]) {
      return sentence("concat_conv: dimension %d of the output is %lld, the convolution gives %lld", d,
                      (long long)y.dims[d], (long long)expected[d]);
    }
  }
  return nullptr;
}

char const *reject(Call const &call) {
  Problem problem;
  return problem_of(call, &problem);
}

int device_count(Call const &call) { return call.sm_count > 0 ? call.sm_count : call.sm == 90 ? 132 : 108; }

int resident_blocks(Tile const &tile, int sm) {
  return std::max(1, std::min(tile.blocks_per_sm, shared_limit(sm) / tile.shared_bytes()));
}

std::int64_t output_tiles(Tile const &tile, Problem const &p) {
  return (std::int64_t(p.N) * p.P * p.Q + tile.m - 1) / tile.m * ceil_div(p.K, tile.n);
}

// Parts into which the reduction is cut when the tiles fill less than half of the device; each keeps four k-tiles.
int splits_of(Tile const &tile, Problem const &p, int sm, int sm_count) {
  std::int64_t const slots = std::int64_t(sm_count) * resident_blocks(tile, sm), tiles = output_tiles(tile, p);
  int blocks = 0;
  for (int i = 0; i < p.sources; ++i) blocks += ceil_div(p.C[i], tile.k);
  std::int64_t const longest = std::min(blocks, std::max(1, blocks * p.R * p.S / 4));
  return tiles == 0 ? 1
                    : static_cast<int>(std::max<std::int64_t>(1, std::min({slots / tiles, longest, std::int64_t(16)})));
}

// A bound that holds for every larger image too, as TensorRT asks at a profile's corners only: a split launch never has
// more blocks than the device has slots, and an image that needs no split is followed by none that does.
std::int64_t workspace_bytes(Call const &call) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return -1;
  bool const sized = p.N >= 0 && p.P >= 0 && p.Q >= 0;
  std::int64_t bytes = 0;
  for (Tile const &tile : kTiles) {
    if (tile.type_bytes != size_of(p.type)) continue;
    int const sm_count = device_count(call);
    if (sized && splits_of(tile, p, call.sm, sm_count) == 1) continue;
    bytes = std::max(bytes, std::int64_t(sm_count) * resident_blocks(tile, call.sm) * tile.m * tile.n * 4);
  }
  return bytes;
}

// Predicted time of a tile in microseconds. Blocks go to the multiprocessors in turn; two or three on one
// multiprocessor hide each other's latencies and take 1.45 and 1.8 times as long as one alone.
double cost(Tile const &tile, Problem const &p, int sm, int sm_count) {
  constexpr double kTogether[] = {0.0, 1.0, 1.45, 1.8};
  int const splits = splits_of(tile, p, sm, sm_count), resident = resident_blocks(tile, sm);
  std::int64_t const blocks = output_tiles(tile, p) * splits, per_sm = (blocks + sm_count - 1) / sm_count;
  double reduction = 0;  // channels times taps, in whole mma steps
  for (int i = 0; i < p.sources; ++i) reduction += double(ceil_div(p.C[i], 16)) * 16 * p.R * p.S / splits;
  double const rounds = double(per_sm / resident) * kTogether[resident] + kTogether[per_sm % resident];
  double const sum_us = splits > 1 ? 3.0 + 0.1 * splits : 0.0;  // a second launch, and its reads
  return rounds * (reduction * tile.channel_ns * 1e-3 + tile.block_us) + sum_us;
}

bool whole_vectors(Problem const &p) {
  return std::all_of(p.C, p.C + p.sources, [&](int channels) { return channels * size_of(p.type) % 16 == 0; });
}

bool runs(Tile const &tile, Problem const &p, int sm) {
  return (sm == 0 || sm >= tile.min_sm) && tile.type_bytes == size_of(p.type) &&
         tile.shared_bytes() <= shared_limit(sm) && (tile.any_channels || whole_vectors(p));
}

// Hopper code (sm_90a) runs on compute capability 9.0 alone, where the library was built for it.
bool runs_sm90(int sm) { return sm == 0 || (sm == 90 && std::strstr(CUTEFUSE_ARCHS, "90a") != nullptr); }

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return 0;
  struct Candidate {
    int id;
    bool later;  // the Ampere tiles on Hopper, and the Hopper tiles where the device is not known
    double cost;
  } legal[kAllTiles];
  int count = 0;
  bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
  int const sm_count = device_count(call);
  for (Tile const &tile : kTiles) {
    if (!runs(tile, p, call.sm)) continue;
    legal[count++] = {tile.id, call.sm == 90, sized ? cost(tile, p, call.sm, sm_count) : 0};
  }
  for (Sm90Tile const &tile : kSm90Tiles) {
    if (!runs_sm90(call.sm) || !sm90_can_run(tile, p)) continue;
    legal[count++] = {tile.id, call.sm != 90, sized ? sm90_cost(tile, p, sm_count) : 0};
  }
  std::stable_sort(legal, legal + count, [](Candidate const &a, Candidate const &b) {
    return a.later != b.later ? b.later : a.cost < b.cost;
  });
  count = std::min(count, int(capacity));
  for (int i = 0; i < count; ++i) ids[i] = legal[i].id;
  return count;
}

char const *run(Call const &call) {
  Params params{};
  if (char const *reason = problem_of(call, &params.problem)) return reason;
  Problem const &p = params.problem;
  if (p.N < 0 || p.P < 0 || p.Q < 0) return sentence("concat_conv: run needs every size, one is still dynamic");
  if (p.N == 0 || p.P == 0 || p.Q == 0) return nullptr;
  for (int i = 0; i <= p.sources + 2; ++i) {
    void *data = i <= p.sources + 1 ? call.inputs[i].data : call.outputs[0].data;
    if (data == nullptr || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
      return sentence("concat_conv: tensor %d is at address %p; device pointers must be set and aligned to 16 bytes", i,
                      data);
    }
    if (i < p.sources) params.x[i] = data;
  }
  params.by_image = Divider(p.P * p.Q), params.by_row = Divider(p.Q);
  params.columns = static_cast<int>(packed_columns(p));
  params.w = call.inputs[p.sources].data;
  params.b = static_cast<float const *>(call.inputs[p.sources + 1].data);
  params.y = call.outputs[0].data;
  std::int32_t ids[kAllTiles];
  std::int32_t const count = configs(call, ids, kAllTiles);
  std::int32_t const id = call.config != 0 ? call.config : count > 0 ? ids[0] : 0;
  if (std::find(ids, ids + count, id) == ids + count) {
    return sentence("concat_conv: tile %d cannot run %s on compute capability %d.%d; ask configs() for the legal ones",
                    id, name_of(p.type), call.sm / 10, call.sm % 10);
  }
  params.splits = 1;
  if (Tile const *const tile = find_tile(id); tile != nullptr && call.workspace != nullptr) {
    params.splits = splits_of(*tile, p, call.sm, device_count(call));
    params.partials = static_cast<float *>(call.workspace);
  }
#if CUTEFUSE_WITH_CUDA
  if (find_sm90_tile(id) != nullptr) {
    return p.type == Type::kFloat16 ? launch_sm90_f16(id, params, call.stream)
                                    : launch_sm90_bf16(id, params, call.stream);
  }
  switch (p.type) {
    case Type::kFloat16:
      return launch_sm80_f16(id, params, call.stream);
    case Type::kBFloat16:
      return launch_sm80_bf16(id, params, call.stream);
    default:
      return launch_sm80_f32(id, params, call.stream);
  }
#else
  return sentence("concat_conv: this library was built without CUDA; install nvcc and build again to run kernels");
#endif
}

}  // namespace

char const *problem_of(Call const &call, Problem *problem) {
  Problem &p = *problem;
  p = Problem{};
  p.sources = call.variant / kActivations + 1;
  p.activation = static_cast<Activation>(call.variant % kActivations);
  p.type = call.inputs[0].type;
  if (p.type != Type::kFloat32 && p.type != Type::kFloat16 && p.type != Type::kBFloat16) {
    return sentence("concat_conv: %s is not supported; use float32, float16 or bfloat16", name_of(p.type));
  }
  for (Attr attr : {kChannels, kPackedSizes}) {
    if (call.attrs[attr].count != p.sources) {
      return sentence("concat_conv: attribute %s has %d values for %d sources; write one for each",
                      kAttrSpecs[attr].name, call.attrs[attr].count, p.sources);
    }
  }
  p.alpha = call.attrs[kAlpha].floats[0], p.lo = call.attrs[kLo].floats[0], p.hi = call.attrs[kHi].floats[0];
  if (p.activation == Activation::kClip && !(p.lo <= p.hi)) {
    return sentence("concat_conv: clip from %g to %g is empty; lo must not exceed hi", p.lo, p.hi);
  }
  if (char const *reason = check_sources(call, p)) return reason;
  if (char const *reason = check_geometry(call, p)) return reason;
  if (char const *reason = check_filter(call, p)) return reason;

  std::int64_t const N = call.inputs[0].dims[0], H = call.inputs[0].dims[2], W = call.inputs[0].dims[3];
  if (N > kInt32Max || H == 0 || H > (1 << 24) || W == 0 || W > (1 << 24)) {
    return sentence("concat_conv: %lldx%lldx%lld (NHW) is not within 2^31 images of 1 to 2^24 pixels a side",
                    (long long)N, (long long)H, (long long)W);
  }
  auto const outputs = [](std::int64_t size, int filter, int stride, int pad, int dilation) {
    return size < 0 ? -1 : output_size(static_cast<int>(size), filter, stride, pad, dilation);
  };
  p.N = static_cast<int>(N), p.H = static_cast<int>(H), p.W = static_cast<int>(W);
  p.P = outputs(H, p.R, p.stride_h, p.pad_top + p.pad_bottom, p.dilation_h);
  p.Q = outputs(W, p.S, p.stride_w, p.pad_left + p.pad_right, p.dilation_w);
  if ((known(H) && p.P < 1) || (known(W) && p.Q < 1)) {
    return sentence("concat_conv: a %dx%d filter with dilation %dx%d does not fit into %lldx%lld padded pixels", p.R,
                    p.S, p.dilation_h, p.dilation_w, (long long)H + p.pad_top + p.pad_bottom,
                    (long long)W + p.pad_left + p.pad_right);
  }
  // By division: the product of three legal sizes overflows 64 bits.
  auto const too_many = [](std::int64_t n, std::int64_t h, std::int64_t w) { return n > kInt32Max / h / w; };
  if (known(N) && known(H) && known(W) && (too_many(N, H, W) || too_many(N, p.P, p.Q))) {
    return sentence("concat_conv: %lldx%lldx%lld (NHW) has more than 2^31 pixels; split the batch", (long long)N,
                    (long long)H, (long long)W);
  }
  return check_output(call, p);
}

extern Op const op;
Op const op = {"concat_conv",
               {kVariantTable.data(), kVariants},
               {kAttrSpecs, kAttrs},
               {kConfigTable.data(), kAllTiles},
               reject,
               workspace_bytes,
               configs,
               run};

}  // namespace cutefuse::concat_conv
