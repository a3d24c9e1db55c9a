// The problem and its index arithmetic, shared by host and device: what the GEMM's rows, columns and k-tiles mean.
#pragma once

#include <algorithm>
#include <cstdint>

#include "divider.h"
#include "op.h"

namespace cutefuse::conv {

constexpr int kMaxSources = 8;
constexpr int kMaxOutputs = 4;
constexpr int kMaxUpsample = 64;
constexpr int kMaxPad = 4096;
constexpr int kMaxUpsampledSide = 1 << 14;  // of an enlarged image, whose kernels keep h and w in 16 bits each
constexpr int kMaxTaps = 16;                // R and S: one validity bit per filter row and column, both in one register
constexpr int kChannelBlock = 64;           // channels of one packed block: filter columns never straddle two sources
constexpr int kLayoutBlock = 32;            // channels of one block of Layout::kBlocks32

// Channels [first, last) of the K, in pixels of `ld` elements.
struct OutputRange {
  int first, last;
  std::int64_t ld;
};

// What a filter reads: all channels of all sources; those of the one image that a network is given, which lies in NCHW
// where its `ldx` is 1 and may be float32; or the one channel of its own number, as a depthwise convolution does.
enum class Reads : std::uint8_t { kSources, kImage, kFloat32Image, kOwnChannel };

// y[n,k,p,q] = act(b[k] + sum_{c,r,s} concat(x)[n,c,h,w] * w[k,c,r,s]), h = p*stride_h - pad_top + r*dilation_h.
// Of a depthwise convolution the sum is over r and s alone, of c = k.
//
// Pre-activated, a filter sees max(0, x[n,c,h,w] * s[c] + t[c]), and zeros outside of the image.
//
// Over int8 or float8 sources: y = act(b[k] + w_scale[k] * sum_i scale[i] * sum_{c,r,s} x_i[n,c,h,w] * w[k,c,r,s]). The
// outer sum is float32, so that each source keeps a scale of its own; the inner sums of int8 are exact integers. An
// 8-bit output is y / output_scale, rounded to nearest even and saturated.
//
// What a kernel reads first stands first: constants come in lines of 64 bytes, and each line's first use waits.
struct Problem {
  Activation activation;
  Residual residual;
  int sources, outputs;
  int N, H, W, K, P, Q, R, S;
  int stride_h, stride_w, pad_top, pad_left;
  int C[kMaxSources];  // channels of each source
  int dilation_h, dilation_w, pad_bottom, pad_right;
  float alpha, lo, hi;
  Type type, output_type;
  Layout layout;              // of all sources, and of an output of their type
  int start[kMaxSources];     // the first of a source's channels in its tensor
  int residual_start;         // likewise of the residual's
  int upsample[kMaxSources];  // pixel (h,w) of the concatenation is pixel (h / upsample, w / upsample) of the source
  int tap_channels = kChannelBlock;  // that a packed filter has for each tap of a block
  std::int64_t ldx[kMaxSources];     // elements between neighbouring pixels of each source
  std::int64_t ldy, ldz;             // ldy: of the first output
  OutputRange ranges[kMaxOutputs];
  float scale[kMaxSources], output_scale;  // of int8 and float8 tensors
  bool pre_activated;
  bool dense;       // pixels hold their channels and no padding (kLayoutAttr is 1)
  bool small_sums;  // of int8: within 2^22 where they are brought to another source's unit, before and after
  Reads reads;
  int spread;  // 1, or s: filter (i * s + j) * K / s^2 + k of pixel (p,q) is channel k of output (p * s + i,q * s + j)
};

// Where element (n, c, h, w) of a tensor lies: n * image + (h * W + w) * pixel + c / 32 * block + c % 32.
struct Strides {
  std::int64_t image, block;
  int pixel;
};

CUTEFUSE_HOST_DEVICE Strides strides_of(Layout layout, std::int64_t ld, int channels, std::int64_t pixels) {
  if (layout == Layout::kChannelsLast) return {pixels * ld, kLayoutBlock, static_cast<int>(ld)};
  return {(channels + kLayoutBlock - 1) / kLayoutBlock * pixels * kLayoutBlock, pixels * kLayoutBlock, kLayoutBlock};
}

// Strides of source i.
CUTEFUSE_HOST_DEVICE Strides strides_of(Problem const &p, int i) {
  return strides_of(p.layout, p.ldx[i], p.C[i], std::int64_t(p.H) * p.W);
}

inline bool is_image(Problem const &p) { return p.reads == Reads::kImage || p.reads == Reads::kFloat32Image; }

// The address of range i of the outputs. Spread ones have one tensor, in which a pixel of a range is a row of a square.
inline char *output_of(Problem const &p, Operands const &operands, int i) {
  auto *const y = static_cast<char *>(operands.outputs[p.spread > 1 ? 0 : i]);
  return p.spread > 1 ? y + i * p.Q * p.ldy * size_of(p.output_type) : y;
}

inline bool is_upsampled(Problem const &p) {
  return std::any_of(p.upsample, p.upsample + p.sources, [](int factor) { return factor != 1; });
}

// Largest |sum of products| of an int8 source; beyond 2^31 - 1 the integers could overflow.
inline std::int64_t largest_sum(Problem const &p, int source) {
  constexpr int kMaxProduct = 1 << 14;  // |x * w| of two int8
  return std::int64_t(p.C[source]) * p.R * p.S * kMaxProduct;
}

// Bit i: after source i the sums are drained, that is scaled and added to float32 sums. Either source i + 1 has another
// scale, or int8's 32-bit sums could overflow in it, or there is no such source.
inline std::uint32_t drains_after(Problem const &p) {
  std::uint32_t bits = 0;
  std::int64_t sum = 0;
  for (int i = 0; i < p.sources; ++i) {
    sum += largest_sum(p, i);
    bool const last = i + 1 == p.sources;
    bool const fits = p.type != Type::kInt8 || last || sum + largest_sum(p, i + 1) <= 0x7fffffff;
    if (!last && p.scale[i + 1] == p.scale[i] && fits) continue;
    bits |= 1u << i, sum = 0;
  }
  return bits;
}

// The sums are drained once, after the last source: one sum serves all sources.
inline bool drains_once(Problem const &p) { return drains_after(p) == 1u << (p.sources - 1); }

// What the sums of the sources before source i are multiplied by, to count in units of its scale.
inline double rescale(Problem const &p, int i) { return i == 0 ? 1.0 : double(p.scale[i - 1]) / p.scale[i]; }

// Whether one sum serves all sources, if it is brought to the unit of each source's scale before that source's products
// are added: int8's must stay within 32 bits, float8's within float32.
inline bool one_sum_fits(Problem const &p) {
  bool const integers = p.type == Type::kInt8;
  double const most = integers ? 0x7fffffff : 1e37, product = integers ? 1 : 14;  // 448 * 448 < 14 * 2^14
  double sum = 0;
  for (int i = 0; i < p.sources; ++i) {
    sum = sum * rescale(p, i) + product * double(largest_sum(p, i)) + 1;
    if (!(sum <= most)) return false;
  }
  return true;
}

// Whether the pixels hold these channels alone. The lanes up to a whole vector are then padding and are written as
// zeros; in wider pixels they are other channels and must not be written. Dense pixels have no such lanes.
CUTEFUSE_HOST_DEVICE bool owns_pad_lanes(Problem const &p, OutputRange const &range) {
  return !p.dense && range.ld == padded_channels(p.output_type, range.last - range.first);
}

// source_coordinate(at, upsample_multiplier(factor)) is at / factor in one multiplication, for 0 <= at < 2^15: the row
// or column of a source that its enlargement repeats at `at`.
constexpr std::uint32_t upsample_multiplier(int factor) { return ((1u << 31) + factor - 1) / factor; }

CUTEFUSE_HOST_DEVICE int source_coordinate(int at, std::uint32_t multiplier) {
  return static_cast<int>(std::uint64_t(2 * static_cast<std::uint32_t>(at)) * multiplier >> 32);
}

CUTEFUSE_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

CUTEFUSE_HOST_DEVICE constexpr int blocks_of(int channels) { return ceil_div(channels, kChannelBlock); }

// Columns of the packed filter matrix [K][source][ceil(C/64)][R][S][64], or of an image [K][R][S][ceil(C/4)*4].
CUTEFUSE_HOST_DEVICE std::int64_t packed_columns(Problem const &p) {
  std::int64_t columns = 0;
  for (int i = 0; i < p.sources; ++i) columns += std::int64_t(blocks_of(p.C[i])) * p.R * p.S * p.tap_channels;
  return columns;
}

CUTEFUSE_HOST_DEVICE constexpr int output_size(int input, int filter, int stride, int pad, int dilation) {
  int const room = input + pad - dilation * (filter - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

// Row m of the GEMM is output pixel (n, p, q); (h0, w0) is the input pixel under filter tap (0, 0), maybe outside.
struct Pixel {
  int n, h0, w0;
};

// The dividers are by P*Q and by Q.
CUTEFUSE_HOST_DEVICE Pixel pixel_of(Problem const &p, Divider const &by_image, Divider const &by_row, int m) {
  int const n = by_image.divide(m), pq = m - n * by_image.divisor, row = by_row.divide(pq);
  return {n, row * p.stride_h - p.pad_top, (pq - row * by_row.divisor) * p.stride_w - p.pad_left};
}

// Where pixel m of the GEMM lies in a range of spread outputs, which is a row of every square: in pixels of the range.
// The divider is by Q.
CUTEFUSE_HOST_DEVICE int spread_pixel(Problem const &p, Divider const &by_row, int m) {
  return m + by_row.divide(m) * (p.spread - 1) * p.Q;
}

// Walks the reduction in k-tiles of 64 channels, ordered (source, channel block, r, s): s fastest, so that neighbouring
// taps hit the cache.
struct KCursor {
  int source = 0, first = 0, r = 0, s = 0;  // first: channel of the source
  int channels;                             // of the source; to look them up for every k-tile would take too long
  int taps_left;                            // of this block, with this one
  std::int64_t column = 0;                  // of the packed filter matrix

  CUTEFUSE_HOST_DEVICE explicit KCursor(Problem const &p) : channels(p.C[0]), taps_left(p.R * p.S) {}
  CUTEFUSE_HOST_DEVICE int channel() const { return first; }

  CUTEFUSE_HOST_DEVICE void advance(Problem const &p) {
    column += kChannelBlock;
    if (--taps_left > 0) {
      if (++s == p.S) s = 0, ++r;
      return;
    }
    r = s = 0, taps_left = p.R * p.S;
    first += kChannelBlock;
    if (first < channels) return;
    first = 0;
    if (++source < p.sources) channels = p.C[source];
  }
};

// The same reduction by channel blocks of kTileK <= 64: the R*S taps of one block follow each other 64 columns apart.
template <int kTileK>
struct KBlock {
  static_assert(kChannelBlock % kTileK == 0, "a k-tile must not straddle a channel block");
  int source = 0;
  int left;        // channels of the source from this block on
  int offset = 0;  // of this block inside its packed block

  CUTEFUSE_HOST_DEVICE explicit KBlock(Problem const &p) : left(p.C[0]) {}

  // Filter columns from the end of this block's last tap to the start of the next block.
  CUTEFUSE_HOST_DEVICE int filter_step(int taps) const {
    if (kTileK == kChannelBlock) return 0;
    bool const inside = offset + kTileK < kChannelBlock && left > kTileK;
    return inside ? kTileK - taps * kChannelBlock : -offset;
  }

  // Returns true when the source changed.
  CUTEFUSE_HOST_DEVICE bool advance(Problem const &p) {
    offset = kTileK < kChannelBlock ? (offset + kTileK) & (kChannelBlock - 1) : 0;
    left -= kTileK;
    if (left > 0) return false;
    offset = 0;
    left = ++source < p.sources ? p.C[source] : 0;
    return true;
  }
};

template <int kTileK>
CUTEFUSE_HOST_DEVICE int k_tiles(Problem const &p) {
  int tiles = 0;
  for (int i = 0; i < p.sources; ++i) tiles += ceil_div(p.C[i], kTileK) * p.R * p.S;
  return tiles;
}

}  // namespace cutefuse::conv
