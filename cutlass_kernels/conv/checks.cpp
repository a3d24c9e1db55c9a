#include "conv/checks.h"

#include <algorithm>
#include <numeric>

#include "conv/cost.h"

namespace cutefuse::conv {
namespace {

// The size of an enlarged image. Sizes that are too large stay as they are; check_size refuses them.
std::int64_t enlarged(std::int64_t size, int factor) { return size < 0 || size > (1 << 24) ? size : size * factor; }

// The attributes that are plain numbers, and the bounds of each.
struct Limit {
  Attr attr;
  std::int64_t lowest, highest;
};
constexpr Limit kLimits[] = {{kChannels, 1, 1 << 28},
                             {kKernelShape, 1, kMaxTaps},
                             {kStrides, 1, 1024},
                             {kPads, 0, kMaxPad},
                             {kDilations, 1, 1024}};

// Every pixel stride is a multiple of this many elements.
int vector_of(Problem const &p, Type type) { return p.dense || type == Type::kFloat32 ? 1 : 16 / size_of(type); }

// Elements of a pixel whose tensor names no stride.
std::int64_t pixel_elements(Problem const &p, Type type, std::int64_t channels) {
  return p.dense ? channels : padded_channels(type, channels);
}

char const *check_layout(Op const &op, Call const &call, Problem &p) {
  std::int64_t const layout = call.attrs[op.attrs.size - 2].ints[0];  // conv_attributes puts kLayoutAttr there
  p.dense = layout == 1;
  if (layout == 0 || (p.dense && p.layout == Layout::kChannelsLast)) return nullptr;
  return sentence("%s: layout is %lld over %s tensors; write 0 (padded pixels) or, over channels-last ones, 1 (dense)",
                  op.name, (long long)layout, p.layout == Layout::kChannelsLast ? "channels-last" : "other");
}

char const *check_geometry(Op const &op, Call const &call, Problem &p) {
  for (Attr attr : {kChannels, kPackedSizes}) {
    if (call.attrs[attr].count == p.sources) continue;
    return sentence("%s: %s has %d values, there are %d sources; write one for each", op.name, op.attrs[attr].name,
                    call.attrs[attr].count, p.sources);
  }
  for (Limit const &limit : kLimits) {
    AttrValue const &value = call.attrs[limit.attr];
    for (int i = 0; i < value.count; ++i) {
      if (value.ints[i] >= limit.lowest && value.ints[i] <= limit.highest) continue;
      return sentence("%s: %s[%d] is %lld, it must lie within %lld..%lld; skip this fusion", op.name,
                      op.attrs[limit.attr].name, i, (long long)value.ints[i], (long long)limit.lowest,
                      (long long)limit.highest);
    }
  }
  auto const at = [&](Attr attr, int i) { return static_cast<int>(call.attrs[attr].ints[i]); };
  for (int i = 0; i < p.sources; ++i) p.C[i] = at(kChannels, i);
  p.R = at(kKernelShape, 0), p.S = at(kKernelShape, 1);
  p.stride_h = at(kStrides, 0), p.stride_w = at(kStrides, 1);
  p.pad_top = at(kPads, 0), p.pad_left = at(kPads, 1), p.pad_bottom = at(kPads, 2), p.pad_right = at(kPads, 3);
  // A single tap has no neighbour to keep a distance from.
  p.dilation_h = p.R == 1 ? 1 : at(kDilations, 0), p.dilation_w = p.S == 1 ? 1 : at(kDilations, 1);
  return nullptr;
}

// alpha, lo and hi; `alpha` is the index of the first.
char const *check_activation(Op const &op, Call const &call, Problem &p, int alpha) {
  AttrValue const *const values = call.attrs + alpha;
  p.alpha = values[0].floats[0], p.lo = values[1].floats[0], p.hi = values[2].floats[0];
  if (p.activation != Activation::kClip || p.lo <= p.hi) return nullptr;
  return sentence("%s: clip from %g to %g is empty; lo must not exceed hi", op.name, p.lo, p.hi);
}

char const *check_channels(Op const &op, Call const &call, Problem &p, int i) {
  Tensor const &x = call.inputs[i];
  bool const view = op.variants[call.variant].facts.view;
  std::int64_t const start = p.start[i], last = start + p.C[i];
  if (known(x.dims[1]) && (view ? x.dims[1] < last : x.dims[1] != last)) {
    return sentence("%s: source %d has %lld channels, attribute channels says %d from channel %lld on; %s", op.name, i,
                    (long long)x.dims[1], p.C[i], (long long)start,
                    view ? "they must be positive and lie inside" : "they must be equal and positive");
  }
  std::int64_t const width = view && known(x.dims[1]) ? x.dims[1] : last;
  int const vector = vector_of(p, p.type);
  if (width <= kInt32Max) p.ldx[i] = x.ld != 0 ? x.ld : pixel_elements(p, p.type, width);
  bool const whole = p.ldx[i] % vector == 0 || is_image(p);
  if (p.ldx[i] < last || !whole || p.ldx[i] > (1 << 28) || (x.ld != 0 && p.layout == Layout::kBlocks32)) {
    return sentence(
        "%s: source %d has %lld channels in pixels of %lld %s elements; the pixel stride must be a multiple of %d and "
        "hold them, and kCHW32 has none; pad the channels or skip this fusion",
        op.name, i, (long long)width, (long long)p.ldx[i], name_of(p.type), vector);
  }
  if (p.ldx[i] * size_of(p.type) * p.dilation_w <= kInt32Max) return nullptr;
  return sentence(
      "%s: source %d has filter columns %d pixels of %lld elements apart, a dilation over 2^31 bytes; make "
      "it smaller",
      op.name, i, p.dilation_w, (long long)p.ldx[i]);
}

char const *check_sources(Op const &op, Call const &call, Problem &p) {
  Tensor const &first = call.inputs[0];
  for (int i = 0; i < p.sources; ++i) {
    Tensor const &x = call.inputs[i];
    if (x.rank != 4) {
      return sentence("%s: source %d has rank %d; only 2-D convolutions (rank 4, NCHW) can be fused", op.name, i,
                      x.rank);
    }
    if (x.type != p.type && p.reads != Reads::kFloat32Image) {
      return sentence("%s: source %d is %s; all sources must be %s, insert a Cast", op.name, i, name_of(x.type),
                      name_of(p.type));
    }
    if (is_image(p)) {
      bool const planes = x.layout == Layout::kLinear && x.ld == 0;
      if (!planes && x.layout != Layout::kChannelsLast) {
        return sentence("%s: the image is neither dense in NCHW (TensorRT: kLINEAR) nor channels-last; pass it so",
                        op.name);
      }
      if (char const *reason = check_channels(op, call, p, i)) return reason;
      p.ldx[i] = planes ? 1 : x.ld != 0 ? x.ld : p.C[i];
      continue;
    }
    bool const blocks = p.type == Type::kInt8 && x.layout == Layout::kBlocks32;
    if (x.layout != p.layout || !(blocks || x.layout == Layout::kChannelsLast)) {
      return sentence("%s: source %d is not %s", op.name, i,
                      p.type == Type::kInt8
                          ? "in the format of the others; pass all in kHWC16 or all in kCHW32"
                          : "channels-last; pass it as NHWC (TensorRT: kHWC8, float32 kHWC, float8 kHWC16)");
    }
    for (int d : {0, 2, 3}) {
      std::int64_t const size = enlarged(x.dims[d], d == 0 ? 1 : p.upsample[i]);
      std::int64_t const wanted = enlarged(first.dims[d], d == 0 ? 1 : p.upsample[0]);
      if (!known(size) || !known(wanted) || size == wanted) continue;
      return sentence(
          "%s: source %d is %lldx%lldx%lld (NHW) enlarged by %d, source 0 is %lldx%lldx%lld enlarged by %d; sizes must "
          "agree after upsampling; set upsample or skip this fusion",
          op.name, i, (long long)x.dims[0], (long long)x.dims[2], (long long)x.dims[3], p.upsample[i],
          (long long)first.dims[0], (long long)first.dims[2], (long long)first.dims[3], p.upsample[0]);
    }
    if (char const *reason = check_channels(op, call, p, i)) return reason;
  }
  return nullptr;
}

char const *check_size(Op const &op, Call const &call, Problem &p) {
  Tensor const &x = call.inputs[0];
  std::int64_t const N = x.dims[0], H = enlarged(x.dims[2], p.upsample[0]), W = enlarged(x.dims[3], p.upsample[0]);
  if (N > kInt32Max || H == 0 || H > (1 << 24) || W == 0 || W > (1 << 24)) {
    return sentence("%s: %lldx%lldx%lld (NHW) is not within 2^31 images of 1 to 2^24 pixels a side; repair the model",
                    op.name, (long long)N, (long long)H, (long long)W);
  }
  if (is_upsampled(p) && (H > kMaxUpsampledSide || W > kMaxUpsampledSide)) {
    return sentence("%s: %lldx%lld enlarged pixels are more than %d a side; resize before this fusion", op.name,
                    (long long)H, (long long)W, kMaxUpsampledSide);
  }
  auto const outputs = [](std::int64_t size, int filter, int stride, int pad, int dilation) {
    return size < 0 ? -1 : output_size(static_cast<int>(size), filter, stride, pad, dilation);
  };
  p.N = static_cast<int>(N), p.H = static_cast<int>(H), p.W = static_cast<int>(W);
  p.P = outputs(H, p.R, p.stride_h, p.pad_top + p.pad_bottom, p.dilation_h);
  p.Q = outputs(W, p.S, p.stride_w, p.pad_left + p.pad_right, p.dilation_w);
  if ((known(H) && p.P < 1) || (known(W) && p.Q < 1)) {
    return sentence(
        "%s: a %dx%d filter with dilation %dx%d does not fit into %lldx%lld padded pixels; repair the model", op.name,
        p.R, p.S, p.dilation_h, p.dilation_w, (long long)H + p.pad_top + p.pad_bottom,
        (long long)W + p.pad_left + p.pad_right);
  }
  // The kernels step by whole filters in 32 bits. A filter of one row takes one step.
  if (known(W) && std::int64_t(p.R) * p.dilation_h * W > kInt32Max) {
    return sentence(
        "%s: %d filter rows %d apart reach over more than 2^31 pixels of an image %lld wide; make the "
        "dilation smaller",
        op.name, p.R, p.dilation_h, (long long)W);
  }
  // By division: the product of three legal sizes overflows 64 bits.
  auto const too_many = [](std::int64_t n, std::int64_t h, std::int64_t w) { return n > kInt32Max / h / w; };
  bool const sized = known(N) && known(H) && known(W);
  if (sized && (too_many(N, H, W) || too_many(N, p.P, p.Q))) {
    return sentence("%s: %lldx%lldx%lld (NHW) has more than 2^31 pixels; split the batch", op.name, (long long)N,
                    (long long)H, (long long)W);
  }
  int const widest = *std::max_element(p.C, p.C + p.sources);
  if (sized && p.layout == Layout::kBlocks32 && double(N) * H * W * ceil_div(widest, kLayoutBlock) > kInt32Max) {
    return sentence("%s: %lldx%lldx%lld (NHW) of %d channels are more than 2^31 blocks of kCHW32; split the batch",
                    op.name, (long long)N, (long long)H, (long long)W, widest);
  }
  return nullptr;
}

// The packed filter, whose type is that of the sources.
char const *check_filter(Op const &op, Call const &call, Problem &p) {
  Tensor const &w = call.inputs[p.sources];
  if (w.type != p.type || w.layout != Layout::kLinear || w.rank != 2 || w.ld != 0) {
    return sentence(
        "%s: the packed filter must be a linear %s matrix of rank 2, it is %s of rank %d; repack it with the rewriter",
        op.name, name_of(p.type), name_of(w.type), w.rank);
  }
  bool const depthwise = p.reads == Reads::kOwnChannel;
  // An image's may also be packed like that of any other source.
  bool const compact = is_image(p) && call.attrs[kPackedSizes].ints[0] != packed_columns(p);
  if (compact) p.tap_channels = std::min(ceil_div(p.C[0], 4) * 4, kChannelBlock);
  for (int i = 0; i < p.sources; ++i) {
    std::int64_t const columns = depthwise ? p.C[i] : std::int64_t(blocks_of(p.C[i])) * p.R * p.S * p.tap_channels;
    if (call.attrs[kPackedSizes].ints[i] == columns) continue;
    return sentence("%s: packed_sizes[%d] is %lld, %d channels of a %dx%d filter take %lld columns; repack it", op.name,
                    i, (long long)call.attrs[kPackedSizes].ints[i], p.C[i], p.R, p.S, (long long)columns);
  }
  if (depthwise) {
    p.K = static_cast<int>(std::accumulate(p.C, p.C + p.sources, std::int64_t(0)));
    if (w.dims[0] == p.R * p.S && w.dims[1] == p.K) return nullptr;
    return sentence("%s: the packed depthwise filter is %lldx%lld, %d taps x %d channels are needed; repack it",
                    op.name, (long long)w.dims[0], (long long)w.dims[1], p.R * p.S, p.K);
  }
  if (w.dims[0] < 1 || w.dims[0] > (1 << 20) || w.dims[1] != packed_columns(p) || w.dims[1] > (1 << 30)) {
    return sentence("%s: the packed filter is %lldx%lld, %lld columns and 1 to 1048576 rows are needed; repack it",
                    op.name, (long long)w.dims[0], (long long)w.dims[1], (long long)packed_columns(p));
  }
  if (w.dims[1] * size_of(p.type) > kInt32Max) {  // kernels step from row to row by an int
    return sentence("%s: a row of the packed filter has %lld bytes, fewer than 2^31 are possible; split the channels",
                    op.name, (long long)(w.dims[1] * size_of(p.type)));
  }
  p.K = static_cast<int>(w.dims[0]);
  return nullptr;
}

// A value for each filter, or for each channel.
char const *check_vector(Op const &op, char const *what, Type type, std::int64_t size, Tensor const &given) {
  if (given.type == type && given.layout == Layout::kLinear && given.rank == 1 && given.dims[0] == size) {
    return nullptr;
  }
  return sentence(
      "%s: the %s must be a %s vector of %lld, it is %s of rank %d with %lld rows; repack it, with zeros for no bias",
      op.name, what, name_of(type), (long long)size, name_of(given.type), given.rank,
      (long long)(given.rank > 0 ? given.dims[0] : 1));
}

// Scale and shift of every channel, in the type of the sources: they lie in the order of the concatenation and are read
// a vector at a time.
char const *check_pre_activation(Op const &op, Problem const &p, Tensor const *vectors) {
  int const vector = 16 / size_of(p.type);
  std::int64_t channels = 0;
  for (int i = 0; i < p.sources; ++i) {
    channels += p.C[i];
    if (p.C[i] % vector == 0 && p.ldx[i] % vector == 0) continue;
    return sentence(
        "%s: source %d of a pre-activation has %d channels in pixels of %lld elements; %s takes multiples of %d; leave "
        "the normalisation outside",
        op.name, i, p.C[i], (long long)p.ldx[i], name_of(p.type), vector);
  }
  char const *const reason = check_vector(op, "pre-activation's scale", p.type, channels, vectors[0]);
  return reason != nullptr ? reason : check_vector(op, "pre-activation's shift", p.type, channels, vectors[1]);
}

// Few tiles read the image of a network, or single channels.
char const *check_reading(Family const &family, Problem const &p) {
  for (Tile const &tile : family.tiles) {
    if (runs(tile, p, 0)) return nullptr;
  }
  bool const image = is_image(p);
  int odd = 0;  // the first source without whole vectors, else the last one
  while (odd + 1 < p.sources && p.C[odd] * size_of(p.type) % 16 == 0) ++odd;
  return sentence(
      "%s: %s of %d channels under a %dx%d %s filter with strides %dx%d and dilations %dx%d; %s a float16 or bfloat16 "
      "filter whose taps fit in shared memory are possible; %s",
      family.op.name, image ? "an image" : "a depthwise source", p.C[odd], p.R, p.S, name_of(p.type), p.stride_h,
      p.stride_w, p.dilation_h, p.dilation_w, image ? "at most 8 channels under" : "whole vectors of channels under",
      image ? "use CuteConcatConv1" : "leave the convolution outside");
}

}  // namespace

char const *Checks::pixels(char const *what, Tensor const &y, Type type, int channels, std::int64_t *ld, int start,
                           bool view) const {
  bool const blocks = type == Type::kInt8 && p.layout == Layout::kBlocks32;
  if (y.type != type || y.layout != (blocks ? Layout::kBlocks32 : Layout::kChannelsLast) || y.rank != 4) {
    return sentence("%s: the %s must be a %s %s tensor of rank 4, it is %s of rank %d; rebuild the engine", op.name,
                    what, blocks ? "kCHW32" : "channels-last", name_of(type), name_of(y.type), y.rank);
  }
  std::int64_t const width = view && y.dims[1] > start + channels ? y.dims[1] : start + channels;
  *ld = y.ld != 0 ? y.ld : pixel_elements(p, type, width);
  bool const whole = *ld >= pixel_elements(p, type, width) && *ld % vector_of(p, type) == 0 && *ld <= (1 << 28);
  if (blocks ? y.ld != 0 : !whole) {
    return sentence("%s: %s pixels of %lld elements cannot hold %lld channels%s; pad the channels", op.name, what,
                    (long long)*ld, (long long)width, p.dense ? "" : " in whole 16-byte vectors");
  }
  std::int64_t const expected[4] = {p.N, view ? width : channels, p.P * p.spread, p.Q * p.spread};
  for (int d = 0; d < 4; ++d) {
    if (!known(y.dims[d]) || !known(expected[d]) || y.dims[d] == expected[d]) continue;
    return sentence("%s: dimension %d of the %s is %lld, the convolution gives %lld; repair the model", op.name, d,
                    what, (long long)y.dims[d], (long long)expected[d]);
  }
  return nullptr;
}

char const *problem_of(Family const &family, Call const &call, Problem *problem) {
  Problem &p = *problem = Problem{};
  Op const &op = family.op;
  Variant const &variant = op.variants[call.variant];
  bool const quantised = variant.facts.quantised;
  p.sources = variant.facts.sources, p.outputs = variant.outputs;
  p.activation = variant.facts.activation, p.residual = variant.facts.residual;
  p.pre_activated = variant.facts.pre_activated, p.spread = variant.facts.spread;
  p.type = p.output_type = call.inputs[variant.facts.image ? p.sources : 0].type;
  if (variant.facts.image) p.reads = call.inputs[0].type == Type::kFloat32 ? Reads::kFloat32Image : Reads::kImage;
  if (variant.facts.depthwise) p.reads = Reads::kOwnChannel;
  p.layout = quantised ? call.inputs[0].layout : Layout::kChannelsLast;
  std::fill(p.upsample, p.upsample + p.sources, 1);
  if ((bit_of(p.type) & (quantised ? kQuantisedTypes : kFloatTypes)) == 0) {
    return sentence("%s: %s is not supported; use %s", op.name, name_of(p.type),
                    quantised ? "int8 or float8_e4m3fn" : "float32, float16 or bfloat16");
  }
  Checks const checks{op, call, p};
  if (char const *reason = check_layout(op, call, p)) return reason;
  if (char const *reason = check_geometry(op, call, p)) return reason;
  if (char const *reason = check_activation(op, call, p, family.alpha)) return reason;
  if (char const *reason = family.check_own(checks)) return reason;
  if (char const *reason = check_sources(op, call, p)) return reason;
  if (char const *reason = check_size(op, call, p)) return reason;
  if (char const *reason = check_filter(op, call, p)) return reason;
  Tensor const *const vectors = call.inputs + p.sources + 1;
  char const *const scales =
      quantised ? check_vector(op, "scales of the filter", Type::kFloat32, p.K, vectors[0]) : nullptr;
  if (scales != nullptr) return scales;
  if (char const *reason = check_vector(op, "bias", Type::kFloat32, p.K, vectors[quantised])) return reason;
  char const *const pre = p.pre_activated ? check_pre_activation(op, p, vectors + 1) : nullptr;
  if (pre != nullptr) return pre;
  if (char const *reason = family.check_outputs(checks)) return reason;
  return p.reads == Reads::kSources ? nullptr : check_reading(family, p);
}

}  // namespace cutefuse::conv
