// What ConcatConv accepts: attributes and tensors of a call become a Problem, or one sentence. No CUDA header.
#include "conv/problem.h"

#include "concat_conv/variants.h"

namespace cutefuse::concat_conv {
namespace {

constexpr std::int64_t kInt32Max = 0x7fffffff;

bool known(std::int64_t size) { return size >= 0; }

// The size of an enlarged image; too large ones stay as they are, for problem_of to refuse.
std::int64_t enlarged(std::int64_t size, int factor) { return size < 0 || size > (1 << 24) ? size : size * factor; }

// channel_starts and upsample: one value for each source of a view, the default otherwise.
char const *check_views(Call const &call, Facts const &facts, Problem &p) {
  for (Attr const attr : {kChannelStarts, kUpsample}) {
    AttrValue const &given = call.attrs[attr];
    std::int64_t const neutral = attr == kUpsample, most = attr == kUpsample ? kMaxUpsample : kInt32Max / 2;
    bool const is_default = given.count == 1 && given.ints[0] == neutral;
    if (!is_default && (!facts.view || given.count != p.sources)) {
      return sentence("concat_conv: attribute %s has %d values, the first %lld, for %d sources; %s",
                      kAttrSpecs[attr].name, given.count, (long long)given.ints[0], p.sources,
                      facts.view ? "write one for each" : "only CuteView op_types take other values than the default");
    }
    for (int i = 0; i < p.sources; ++i) {
      std::int64_t const value = is_default ? neutral : given.ints[i];
      if (value < neutral || value > most) {
        return sentence("concat_conv: %s[%d] is %lld, %lld to %lld are allowed", kAttrSpecs[attr].name, i,
                        (long long)value, (long long)neutral, (long long)most);
      }
      (attr == kUpsample ? p.upsample : p.start)[i] = static_cast<int>(value);
    }
  }
  for (int i = 0; i < p.sources; ++i) {
    if (std::int64_t(p.start[i]) * size_of(p.type) % 16 != 0) {
      return sentence("concat_conv: source %d starts at channel %d; a range must start at a multiple of %d %s channels",
                      i, p.start[i], 16 / size_of(p.type), name_of(p.type));
    }
  }
  return nullptr;
}

char const *check_channels(Call const &call, Facts const &facts, Problem &p, int i) {
  Tensor const &x = call.inputs[i];
  std::int64_t const channels = call.attrs[kChannels].ints[i], start = p.start[i];
  bool const inside = facts.view ? x.dims[1] >= start + channels : x.dims[1] == channels;
  if (channels < 1 || channels > kInt32Max / 2 || (known(x.dims[1]) && !inside)) {
    return sentence("concat_conv: source %d has %lld channels, attribute channels says %lld from channel %lld on; %s",
                    i, (long long)x.dims[1], (long long)channels, (long long)start,
                    facts.view ? "they must be positive and lie inside" : "they must be equal and positive");
  }
  p.C[i] = static_cast<int>(channels);
  std::int64_t const width = facts.view && known(x.dims[1]) ? x.dims[1] : start + channels;
  if (width <= kInt32Max) p.ldx[i] = x.ld != 0 ? x.ld : padded_channels(p.type, width);
  int const vector = size_of(p.type) == 2 ? 8 : 1;  // of which a pixel is a multiple
  if (p.ldx[i] < start + channels || p.ldx[i] % vector != 0 || p.ldx[i] > (1 << 28)) {
    return sentence(
        "concat_conv: source %d has %lld channels in pixels of %lld %s elements; the pixel stride must be a "
        "multiple of %d and hold them; pad the channels or skip this fusion",
        i, (long long)width, (long long)p.ldx[i], name_of(p.type), vector);
  }
  return nullptr;
}

char const *check_sources(Call const &call, Facts const &facts, Problem &p) {
  Tensor const &first = call.inputs[0];
  if (char const *reason = check_views(call, facts, p)) return reason;
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
      std::int64_t const size = enlarged(x.dims[d], d == 0 ? 1 : p.upsample[i]);
      std::int64_t const wanted = enlarged(first.dims[d], d == 0 ? 1 : p.upsample[0]);
      if (known(size) && known(wanted) && size != wanted) {
        return sentence(
            "concat_conv: source %d is %lldx%lldx%lld (NHW) enlarged by %d, source 0 is %lldx%lldx%lld enlarged by "
            "%d; sizes must agree after upsampling; set upsample or skip this fusion",
            i, (long long)x.dims[0], (long long)x.dims[2], (long long)x.dims[3], p.upsample[i],
            (long long)first.dims[0], (long long)first.dims[2], (long long)first.dims[3], p.upsample[0]);
      }
    }
    if (char const *reason = check_channels(call, facts, p, i)) return reason;
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

// A tensor like the output or a channel range of it: y, y_j or z.
char const *check_pixels(Problem const &p, Tensor const &y, char const *what, int channels, std::int64_t *ld) {
  if (y.type != p.type || y.layout != Layout::kChannelsLast || y.rank != 4) {
    return sentence("concat_conv: the %s must be a channels-last %s tensor of rank 4, it is %s of rank %d", what,
                    name_of(p.type), name_of(y.type), y.rank);
  }
  *ld = y.ld != 0 ? y.ld : padded_channels(p.type, channels);
  if (*ld < channels || *ld > (1 << 28) ||
      (size_of(p.type) == 2 && (*ld % 8 != 0 || *ld < padded_channels(p.type, channels)))) {
    return sentence("concat_conv: %s pixels of %lld elements cannot hold %d channels in whole 16-byte vectors", what,
                    (long long)*ld, channels);
  }
  std::int64_t const expected[4] = {p.N, channels, p.P, p.Q};
  for (int d = 0; d < 4; ++d) {
    if (known(y.dims[d]) && known(expected[d]) && y.dims[d] != expected[d]) {
      return sentence("concat_conv: dimension %d of the %s is %lld, the convolution gives %lld", d, what,
                      (long long)y.dims[d], (long long)expected[d]);
    }
  }
  return nullptr;
}

char const *check_outputs(Call const &call, Problem &p) {
  AttrValue const &given = call.attrs[kOutputChannels];
  int const vector = 16 / size_of(p.type);
  std::int64_t sum = 0;
  bool legal = given.count == p.outputs;
  for (int j = 0; legal && j < p.outputs; ++j) {
    std::int64_t const channels = p.outputs == 1 && given.ints[j] == 0 ? p.K : given.ints[j];
    legal = channels >= 1 && channels <= p.K - sum && (j + 1 == p.outputs || channels % vector == 0);
    p.ranges[j].first = static_cast<int>(sum);
    sum += legal ? channels : 0;
    p.ranges[j].last = static_cast<int>(sum);
  }
  if (!legal || sum != p.K) {
    return sentence(
        "concat_conv: output_channels has %d values, the first %lld, for %d outputs of %d channels; write one for each "
        "that add up, all but the last multiples of %d",
        given.count, (long long)given.ints[0], p.outputs, p.K, vector);
  }
  for (int j = 0; j < p.outputs; ++j) {
    OutputRange &range = p.ranges[j];
    if (char const *reason = check_pixels(p, call.outputs[j], "output", range.last - range.first, &range.ld)) {
      return reason;
    }
  }
  p.ldy = p.ranges[0].ld;
  return p.residual == Residual::kNone ? nullptr : check_pixels(p, call.inputs[p.sources + 2], "residual", p.K, &p.ldz);
}

}  // namespace

char const *problem_of(Call const &call, Problem *problem) {
  Problem &p = *problem;
  p = Problem{};
  Variant const &variant = kVariantTable[call.variant];
  Facts const &facts = variant.facts;
  p.sources = facts.sources, p.outputs = variant.outputs;
  p.activation = facts.activation, p.residual = facts.residual;
  p.type = p.output_type = call.inputs[0].type;
  p.layout = Layout::kChannelsLast;
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
  if (char const *reason = check_sources(call, facts, p)) return reason;
  if (char const *reason = check_geometry(call, p)) return reason;
  if (char const *reason = check_filter(call, p)) return reason;

  std::int64_t const N = call.inputs[0].dims[0], H = enlarged(call.inputs[0].dims[2], p.upsample[0]);
  std::int64_t const W = enlarged(call.inputs[0].dims[3], p.upsample[0]);
  if (N > kInt32Max || H == 0 || H > (1 << 24) || W == 0 || W > (1 << 24)) {
    return sentence("concat_conv: %lldx%lldx%lld (NHW) is not within 2^31 images of 1 to 2^24 pixels a side",
                    (long long)N, (long long)H, (long long)W);
  }
  if (is_upsampled(p) && (H > kMaxUpsampledSide || W > kMaxUpsampledSide)) {
    return sentence("concat_conv: %lldx%lld enlarged pixels are more than %d a side; resize before this fusion",
                    (long long)H, (long long)W, kMaxUpsampledSide);
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
  return check_outputs(call, p);
}

}  // namespace cutefuse::concat_conv
