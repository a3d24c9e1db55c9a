// Host side of the int8 ConcatConv: what is legal, which tile to try first, and the dispatch. No CUDA header.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "quant_concat_conv/tiles.h"

namespace cutefuse::quant_concat_conv {
namespace {

using conv::blocks_of;
using conv::kMaxTaps;
using conv::output_size;

enum Attr {
  kChannels,
  kKernelShape,
  kStrides,
  kPads,
  kDilations,
  kPackedSizes,
  kInputScales,
  kOutputScale,
  kOutputType,
  kAlpha,
  kLo,
  kHi,
  kAttrs
};

constexpr AttrSpec kAttrSpecs[kAttrs] = {
    {"channels", AttrKind::kInts, 1, kMaxSources, 0, 0.0},
    {"kernel_shape", AttrKind::kInts, 2, 2, 0, 0.0},
    {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
    {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
    {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
    {"packed_sizes", AttrKind::kInts, 1, kMaxSources, 0, 0.0},    // filter columns per source
    {"input_scales", AttrKind::kFloats, 1, kMaxSources, 0, 0.0},  // one for each source
    {"output_scale", AttrKind::kFloats, 1, 1, 1, 1.0},            // of an int8 output
    {"output_type", AttrKind::kInts, 1, 1, 1, 1.0},               // of a float output, as ONNX numbers types
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},                  // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},          // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
};

constexpr int kFloatVariants = kMaxSources * kActivations, kVariants = 2 * kFloatVariants;

// First the variants with a float output, then those with an int8 one, whose names end in Q.
std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  for (int i = 0; i < kVariants; ++i) {
    int const sources = i % kFloatVariants / kActivations + 1;
    bool const int8 = i >= kFloatVariants;
    std::snprintf(table[i].op_type, sizeof(table[i].op_type), "CuteQConcatConv%d%s%s", sources,
                  kActivationNames[i % kActivations], int8 ? "Q" : "");
    table[i].inputs = sources + 3;  // sources, packed filter, its scales, bias
    table[i].outputs = 1;
    table[i].facts = {Kind::kConvolution,
                      sources,
                      static_cast<Activation>(i % kActivations),
                      Residual::kNone,
                      false,
                      true,
                      int8,
                      false};
  }
  return table;
}();

std::array<Config, kTileCount> const kConfigTable = [] {
  std::array<Config, kTileCount> table{};
  for (int i = 0; i < kTileCount; ++i) {
    table[i] = {kTiles[i].id, 80, kTiles[i].name, kTiles[i].halo_rows > 0 ? "rows" : "plain", bit_of(Type::kInt8)};
  }
  return table;
}();

constexpr std::int64_t kInt32Max = 0x7fffffff;

bool known(std::int64_t size) { return size >= 0; }

bool good_scale(float scale) { return std::isfinite(scale) && scale > 0.f; }

// Attributes that are plain numbers, and where each must lie.
struct Limit {
  Attr attr;
  std::int64_t lowest, highest;
};
constexpr Limit kLimits[] = {
    {kChannels, 1, 1 << 28}, {kKernelShape, 1, kMaxTaps}, {kStrides, 1, 1024}, {kPads, 0, 4096}, {kDilations, 1, 1024}};

char const *check_attributes(Call const &call, Problem &p) {
  for (Limit const &limit : kLimits) {
    AttrValue const &value = call.attrs[limit.attr];
    for (int i = 0; i < value.count; ++i) {
      if (value.ints[i] >= limit.lowest && value.ints[i] <= limit.highest) continue;
      return sentence("quant_concat_conv: %s[%d] is %lld, it must lie within %lld..%lld; skip this fusion",
                      kAttrSpecs[limit.attr].name, i, (long long)value.ints[i], (long long)limit.lowest,
                      (long long)limit.highest);
    }
  }
  for (Attr attr : {kChannels, kPackedSizes, kInputScales}) {
    if (call.attrs[attr].count == p.sources) continue;
    return sentence("quant_concat_conv: %s has %d values, there are %d sources; write one for each",
                    kAttrSpecs[attr].name, call.attrs[attr].count, p.sources);
  }
  for (int i = 0; i < p.sources; ++i) {
    p.C[i] = static_cast<int>(call.attrs[kChannels].ints[i]);
    p.scale[i] = call.attrs[kInputScales].floats[i];
    if (!good_scale(p.scale[i])) {
      return sentence("quant_concat_conv: the scale of source %d is %g; scales must be positive and finite", i,
                      p.scale[i]);
    }
  }
  p.output_scale = call.attrs[kOutputScale].floats[0];
  p.alpha = call.attrs[kAlpha].floats[0], p.lo = call.attrs[kLo].floats[0], p.hi = call.attrs[kHi].floats[0];
  if (p.activation == Activation::kClip && !(p.lo <= p.hi)) {
    return sentence("quant_concat_conv: there is nothing between lo=%g and hi=%g; swap them", p.lo, p.hi);
  }
  auto const ints = [&](Attr attr, int i) { return static_cast<int>(call.attrs[attr].ints[i]); };
  for (int i = 0; i < 2; ++i) {
    (i == 0 ? p.R : p.S) = ints(kKernelShape, i);
    (i == 0 ? p.stride_h : p.stride_w) = ints(kStrides, i);
    (i == 0 ? p.dilation_h : p.dilation_w) = ints(kDilations, i);
    (i == 0 ? p.pad_top : p.pad_left) = ints(kPads, i);
    (i == 0 ? p.pad_bottom : p.pad_right) = ints(kPads, i + 2);
  }
  return nullptr;
}

char const *check_sources(Call const &call, Problem &p) {
  p.layout = call.inputs[0].layout;
  for (int i = 0; i < p.sources; ++i) {
    Tensor const &x = call.inputs[i], &first = call.inputs[0];
    if (x.rank != 4 || x.type != Type::kInt8 || x.layout != p.layout || x.layout == Layout::kLinear) {
      return sentence(
          "quant_concat_conv: source %d is %s of rank %d; sources must be int8 NCHW tensors of rank 4, all in "
          "kHWC16 or all in kCHW32",
          i, name_of(x.type), x.rank);
    }
    for (int d = 0; d < 4; ++d) {
      std::int64_t const wanted = d == 1 ? p.C[i] : first.dims[d];
      if (!known(x.dims[d]) || !known(wanted) || x.dims[d] == wanted) continue;
      return sentence(
          "quant_concat_conv: dimension %d of source %d is %lld and must be %lld (channels as the attribute says, "
          "other sizes as those of source 0); repair the model",
          d, i, (long long)x.dims[d], (long long)wanted);
    }
    p.ldx[i] = x.ld != 0 ? x.ld : padded_channels(Type::kInt8, p.C[i]);
    if (p.ldx[i] < p.C[i] || p.ldx[i] % kVector != 0 || p.ldx[i] > (1 << 28) ||
        (x.ld != 0 && p.layout == Layout::kBlocks32)) {
      return sentence(
          "quant_concat_conv: source %d has %d channels in pixels of %lld; the pixel stride must be a multiple of 16 "
          "and hold them, and kCHW32 has none",
          i, p.C[i], (long long)p.ldx[i]);
    }
    if (p.ldx[i] * p.dilation_w > kInt32Max) return "quant_concat_conv: a dilation over 2^31 bytes; make it smaller";
    if (largest_sum(p, i) > kInt32Max) {
      return sentence(
          "quant_concat_conv: %d channels under a %dx%d filter can overflow 32-bit sums; at most %d products each are "
          "allowed, skip this fusion",
          p.C[i], p.R, p.S, int(kInt32Max / kMaxProduct));
    }
  }
  return nullptr;
}

char const *check_size(Call const &call, Problem &p) {
  std::int64_t const N = call.inputs[0].dims[0], H = call.inputs[0].dims[2], W = call.inputs[0].dims[3];
  for (std::int64_t size : {H, W}) {
    if (size == 0 || size > (1 << 24)) {
      return sentence("quant_concat_conv: images of %lldx%lld pixels are not within 1 to 2^24 a side", (long long)H,
                      (long long)W);
    }
  }
  if (N > kInt32Max) return sentence("quant_concat_conv: %lld images are more than 2^31; split them", (long long)N);
  p.N = int(N), p.H = int(H), p.W = int(W);
  p.P = H < 0 ? -1 : output_size(p.H, p.R, p.stride_h, p.pad_top + p.pad_bottom, p.dilation_h);
  p.Q = W < 0 ? -1 : output_size(p.W, p.S, p.stride_w, p.pad_left + p.pad_right, p.dilation_w);
  if (p.P == 0 || p.Q == 0) {
    return sentence("quant_concat_conv: the %dx%d filter is larger than the padded image of %dx%d; repair the model",
                    p.R, p.S, p.H, p.W);
  }
  bool const sized = N >= 0 && H >= 0 && W >= 0;
  if (sized && (double(N) * p.H * p.W > kInt32Max || double(N) * p.P * p.Q > kInt32Max)) {
    return sentence("quant_concat_conv: %dx%dx%d (NHW) are more than 2^31 pixels; split the batch", p.N, p.H, p.W);
  }
  int const widest = *std::max_element(p.C, p.C + p.sources);
  if (sized && p.layout == Layout::kBlocks32 && double(N) * p.H * p.W * ceil_div(widest, kLayoutBlock) > kInt32Max) {
    return sentence(
        "quant_concat_conv: %dx%dx%d (NHW) of %d channels are more than 2^31 blocks of kCHW32; split the batch", p.N,
        p.H, p.W, widest);
  }
  return nullptr;
}

char const *check_parameters(Call const &call, Problem &p) {
  Tensor const *const rest = call.inputs + p.sources;  // packed filter, its scales, bias
  bool const matrix = rest[0].rank == 2 && rest[0].type == Type::kInt8 && rest[0].ld == 0 && rest[0].dims[0] >= 1;
  if (!matrix || rest[0].layout != Layout::kLinear || rest[0].dims[0] > (1 << 20)) {
    return sentence(
        "quant_concat_conv: the packed filter must be a linear int8 matrix of at most 2^20 rows; repack it");
  }
  p.K = static_cast<int>(rest[0].dims[0]);
  for (int i = 0; i < p.sources; ++i) {
    std::int64_t const columns = std::int64_t(blocks_of(p.C[i])) * p.R * p.S * kChannelBlock;
    if (call.attrs[kPackedSizes].ints[i] == columns) continue;
    return sentence(
        "quant_concat_conv: packed_sizes[%d] is %lld, the filter of source %d takes %lld columns; repack it", i,
        (long long)call.attrs[kPackedSizes].ints[i], i, (long long)columns);
  }
  if (rest[0].dims[1] != packed_columns(p) || rest[0].dims[1] > (1 << 30)) {
    return sentence("quant_concat_conv: the packed filter has %lld columns, %lld are needed; repack it",
                    (long long)rest[0].dims[1], (long long)packed_columns(p));
  }
  for (int i : {1, 2}) {
    if (rest[i].type == Type::kFloat32 && rest[i].layout == Layout::kLinear && rest[i].rank == 1 &&
        rest[i].dims[0] == p.K) {
      continue;
    }
    return sentence("quant_concat_conv: the %s must be a float32 vector of %d, it is %s of rank %d",
                    i == 1 ? "scales of the filter" : "bias", p.K, name_of(rest[i].type), rest[i].rank);
  }
  return nullptr;
}

// The type that attribute output_type names; int8 for a number that is none of ours.
Type named_type(std::int64_t number) {
  return number == 1 ? Type::kFloat32 : number == 10 ? Type::kFloat16 : number == 16 ? Type::kBFloat16 : Type::kInt8;
}

char const *check_output(Call const &call, Problem &p) {
  Tensor const &y = call.outputs[0];
  bool const quantised = kVariantTable[call.variant].facts.quantised_output;
  p.output_type = quantised ? Type::kInt8 : named_type(call.attrs[kOutputType].ints[0]);
  if (!quantised && p.output_type == Type::kInt8) {
    return sentence("quant_concat_conv: output_type %lld is none of 1 (float32), 10 (float16), 16 (bfloat16)",
                    (long long)call.attrs[kOutputType].ints[0]);
  }
  if (quantised && !good_scale(p.output_scale)) {
    return sentence("quant_concat_conv: output_scale is %g; scales must be positive and finite", p.output_scale);
  }
  Layout const layout = quantised ? p.layout : Layout::kChannelsLast;
  if (y.type != p.output_type || y.layout != layout || y.rank != 4) {
    return sentence(
        "quant_concat_conv: the output must be a %s tensor of rank 4 in the layout of %s, it is %s of rank %d",
        name_of(p.output_type), quantised ? "the sources" : "channels-last pixels", name_of(y.type), y.rank);
  }
  int const stored = stored_channels(p), vector = std::max(1, 16 / size_of(p.output_type));
  bool const float32 = p.output_type == Type::kFloat32;
  p.ldy = y.ld != 0 ? y.ld : padded_channels(p.output_type, p.K);
  if (layout == Layout::kChannelsLast ? p.ldy < stored || (!float32 && p.ldy % vector != 0) : y.ld != 0) {
    return sentence("quant_concat_conv: output pixels of %lld elements cannot hold %d channels in whole vectors",
                    (long long)p.ldy, p.K);
  }
  std::int64_t const expected[4] = {p.N, p.K, p.P, p.Q};
  for (int d = 0; d < 4; ++d) {
    if (!known(y.dims[d]) || !known(expected[d]) || y.dims[d] == expected[d]) continue;
    return sentence("quant_concat_conv: the output is %lld in dimension %d, the convolution gives %lld",
                    (long long)y.dims[d], d, (long long)expected[d]);
  }
  return nullptr;
}

char const *reject(Call const &call) {
  Problem problem;
  return problem_of(call, &problem);
}

int device_count(Call const &call) { return call.sm_count > 0 ? call.sm_count : 108; }

// A bound for every larger image too, since TensorRT asks at a profile's corners only: a split launch never has more
// blocks than the device has multiprocessors, and an image that needs no split is followed by none that does.
std::int64_t workspace_bytes(Call const &call) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return -1;
  bool const sized = p.N >= 0 && p.P >= 0 && p.Q >= 0;
  std::int64_t bytes = 0;
  int const sm_count = device_count(call);
  for (Tile const &tile : kTiles) {
    if (!runs(tile, p, call.sm) || (sized && splits_of(tile, p, sm_count) == 1)) continue;
    bytes = std::max(bytes, std::int64_t(sm_count) * tile.m * tile.n * 4);
  }
  return bytes;
}

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return 0;
  std::array<std::pair<double, std::int32_t>, kTileCount> legal{};
  int count = 0;
  for (Tile const &tile : kTiles) {
    bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
    if (!runs(tile, p, call.sm) || !fits(tile, p)) continue;
    legal[count++] = {sized ? cost(tile, p, call.sm, device_count(call)) : 0.0, tile.id};
  }
  std::stable_sort(legal.begin(), legal.begin() + count);
  count = std::min(count, int(capacity));
  for (int i = 0; i < count; ++i) ids[i] = legal[i].second;
  return count;
}

char const *run(Call const &call) {
  Params params{};
  if (char const *reason = problem_of(call, &params.problem)) return reason;
  Problem const &p = params.problem;
  if (p.N < 0 || p.P < 0 || p.Q < 0) return sentence("quant_concat_conv: run needs every size, one is still dynamic");
  if (p.N == 0) return nullptr;
  for (int i = 0; i <= call.num_inputs; ++i) {
    void const *const data = i < call.num_inputs ? call.inputs[i].data : call.outputs[0].data;
    if (data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0) continue;
    return sentence("quant_concat_conv: tensor %d is at address %p; pass device pointers aligned to 16 bytes", i, data);
  }
  for (int i = 0; i < p.sources; ++i) params.x[i] = call.inputs[i].data;
  params.w = call.inputs[p.sources].data;
  params.w_scale = static_cast<float const *>(call.inputs[p.sources + 1].data);
  params.b = static_cast<float const *>(call.inputs[p.sources + 2].data);
  params.y = call.outputs[0].data;
  params.columns = static_cast<int>(packed_columns(p));
  params.set_steps();
  params.k_blocks = all_blocks(p);
  std::int32_t ids[kTileCount];
  std::int32_t const count = configs(call, ids, kTileCount), id = call.config != 0 ? call.config : ids[0];
  if (std::find(ids, ids + count, id) == ids + count) {
    return sentence(
        "quant_concat_conv: tile %d cannot run this call (other scales, a narrow image, or a small device); ask "
        "configs()",
        id);
  }
  Tile const &tile = *find_tile(id);
  params.splits = call.workspace != nullptr ? splits_of(tile, p, device_count(call)) : 1;
  params.partials = static_cast<float *>(call.workspace);
#if CUTEFUSE_WITH_CUDA
  auto const launch = tile.halo_rows > 0 ? (tile.drains() ? launch_rows_drain : launch_rows)
                      : tile.drains()    ? launch_drain
                                         : launch_one_scale;
  return launch(id, params, call.stream);
#else
  return sentence("quant_concat_conv: this library has no kernels, it was built without CUDA; install nvcc and build");
#endif
}

}  // namespace

char const *problem_of(Call const &call, Problem *problem) {
  Problem &p = *problem = Problem{};
  p.type = Type::kInt8;
  Facts const &facts = kVariantTable[call.variant].facts;
  p.sources = facts.sources, p.activation = facts.activation;
  for (auto check : {check_attributes, check_sources, check_size, check_parameters, check_output}) {
    if (char const *reason = check(call, p)) return reason;
  }
  return nullptr;
}

extern Op const op;
Op const op = {"quant_concat_conv",
               {kVariantTable.data(), kVariants},
               {kAttrSpecs, kAttrs},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               run};

}  // namespace cutefuse::quant_concat_conv
