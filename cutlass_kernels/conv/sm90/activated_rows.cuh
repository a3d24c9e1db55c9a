// Pre-activated sources of small tiles: the pixels are wgmma's rows, which pass through registers anyway. Scale, shift
// and ReLU happen there, so that no k-tile is written back to shared memory. The filters are the width: a tile is the
// mirror image of the one without a pre-activation.
#pragma once

#include "conv/sm90/narrow.cuh"
#include "conv/sm90/pixel_rows.cuh"

namespace cutefuse::conv {

// ---- constants ------------------------------------------------------------------------------------------------------

// What a part of the reduction takes from memory beside pixels and filters. The consumers load it, once, while TMA
// brings the first stage. Its addresses are looked up before the kernel in front has ended.
template <class Traits>
struct Constants {
  using Element = typename Traits::Element;
  static constexpr int kVector = 16 / int(sizeof(Element));
  float *bias;       // of the tile's filters; zeros in every part but the first
  Element *vectors;  // scales of the part's channels, their shifts, and zeros for a block of channels
  Element const *scale, *shift;
  float const *from_bias;
  int channels, filters;  // of the part, and of the tile as far as they exist

  CUTE_DEVICE Constants(typename Traits::SharedStorage &shared, Sm90Params const &params, int first_filter, int part)
      : bias(shared.bias), vectors(shared.vectors(params)) {
    int const begin = params.activated_begin[part];
    channels = opaque(params.activated_end[part] - begin);
    scale = opaque(static_cast<Element const *>(params.pre_scale) + begin);
    shift = opaque(static_cast<Element const *>(params.pre_shift) + begin);
    from_bias = opaque(params.b + first_filter);
    filters = opaque(part == 0 ? params.problem.K - first_filter : 0);
  }
  // It is there for all consumers once each of them has waited for its copies and they have met.
  CUTE_DEVICE void load() const {
    static_assert(Traits::kFilters <= Traits::kSumThreads);
    int const chunks = channels / kVector, thread = threadIdx.x;
    CUTE_NO_UNROLL
    for (int i = thread; i < 2 * chunks + kChannelBlock / kVector; i += Traits::kSumThreads) {
      Element const *const from = i < chunks ? scale + i * kVector : shift + (i - chunks) * kVector;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const *>(from),
                                                       *reinterpret_cast<uint128_t *>(vectors + i * kVector),
                                                       i < 2 * chunks);
    }
    if (thread >= Traits::kFilters) return;
    SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from_bias[thread], bias[thread], thread < filters);
  }
};

// ---- operand --------------------------------------------------------------------------------------------------------

// Where this lane finds its 16 bytes of a k-tile's first step: a warp reads 16 rows of 128 bytes, as TMA swizzles them.
CUTE_DEVICE int first_chunk() {
  int const lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16, chunk = lane / 16;
  return row * 128 + (chunk ^ row % 8) * 16;
}

// The pixels as rows, activated, in the order of the k-tiles of a part of the reduction, of the tile whose outputs
// start at `first`. kPads: the padding is of the activated tensor, so a pixel outside of the image stays zero. Between
// the arrival of a k-tile and its first product nothing is looked up: that is done while the one before is multiplied.
template <class Traits, bool kPads>
struct ActivatedRows {
  using Element = typename Traits::Element;
  static_assert(sizeof(Element) == 2);
  static constexpr int kAhead = 2;  // steps whose scales and shifts are read beforehand; more need too many registers
  Sm90Params const &params;
  int source, left, taps_left;  // channels left of the source, from this block on; as in KCursor
  int chunk;                    // first_chunk()
  // What this lane passes to ldmatrix for the block's first channel: the first 16 lanes pass scales, the others shifts.
  // All eight rows of a matrix are one chunk of 8 channels, so that each thread gets its own two channels'.
  Element const *from;
  uint32_t vectors[kAhead][4];  // (scale,scale,shift,shift) of each 8 channels
  Pixel corner[2];              // kPads: what lies under tap (0,0) of this thread's two rows
  bool outside[2];              // kPads: whether they are pads under this tap

  CUTE_DEVICE ActivatedRows(Sm90Params const &params_, int first, int part, Element const *part_vectors)
      : params(params_), chunk(first_chunk()) {
    Problem const &p = params.problem;
    PartStart const start = params.starts[part];
    source = start.source, left = p.C[source] - start.block * kChannelBlock;
    taps_left = params.by_taps.divisor - start.r * p.S - start.s;
    int const lane = threadIdx.x % 32, channel = params.activated_begin[part];
    int const to_shifts = params.activated_end[part] - channel;
    from = part_vectors + lane / 16 * to_shifts + lane / 8 % 2 * 8;
    if constexpr (!kPads) return;
    int const pixel = first + threadIdx.x / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) corner[i] = pixel_of(params.problem, params.by_image, params.by_row, pixel + 8 * i);
    find_pads();
  }

  // The first ones of a k-tile, before it is waited for.
  CUTE_DEVICE void read_vectors(int step = 0) {
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      auto const &two = *reinterpret_cast<uint128_t const *>(from + (step + i) * 16);
      SM75_U32x4_LDSM_N::copy(two, vectors[i][0], vectors[i][1], vectors[i][2], vectors[i][3]);
    }
  }
  // Channels that a source's last block lacks are zeros times the next channels' scales, plus their shifts, or plus
  // zeros behind the last ones. Their filters are zeros, so they count for nothing.
  CUTE_DEVICE void read(uint32_t (&a)[Traits::kSteps][4], Element const *pixels) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSteps; ++i) {  // a step moves the chunk by exclusive or: no sum of the two carries
      auto const *const at = reinterpret_cast<char const *>(pixels) + (chunk ^ i * kStepBytes);
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const *>(at), a[i][0], a[i][1], a[i][2], a[i][3]);
    }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kSteps; ++i) {
      if (i > 0 && i % kAhead == 0) read_vectors(i);
      uint32_t const(&v)[4] = vectors[i % kAhead];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) a[i][j] = pre_activate<Element>(a[i][j], v[j / 2], v[2 + j / 2]);  // (row,8 channels)
    }
    if constexpr (kPads) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kSteps; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) a[i][j] = outside[j % 2] ? 0 : a[i][j];
      }
    }
  }
  // To the next k-tile.
  CUTE_DEVICE void advance() {
    if (--taps_left == 0) {
      Problem const &p = params.problem;
      taps_left = params.by_taps.divisor;
      from += cute::min(left, int(Traits::kChannels)), left -= Traits::kChannels;
      if (left <= 0 && ++source < p.sources) left = p.C[source];
    }
    if constexpr (kPads) find_pads();
  }
  CUTE_DEVICE void find_pads() {
    Problem const &p = params.problem;
    int const tap = p.R * p.S - taps_left, r = params.by_s.divide(tap);
    int const h = r * p.dilation_h, w = (tap - r * p.S) * p.dilation_w;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      outside[i] = unsigned(corner[i].h0 + h) >= unsigned(p.H) || unsigned(corner[i].w0 + w) >= unsigned(p.W);
    }
  }
};

// ---- sums and outputs -----------------------------------------------------------------------------------------------

// Every filter is a column, so a thread has sums of kN / 4 filters, and keeps no biases of them through the main loop:
// the first part's sums begin with the biases.
template <class Traits>
CUTE_DEVICE void begin_sums(float (&acc)[Traits::kN / 2], float const *bias) {
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnits; ++unit) {
    auto const two = *reinterpret_cast<float2 const *>(bias + 8 * unit + threadIdx.x % 4 * 2);
    float *const v = acc + 4 * unit;  // (2,2) = (filter,pixel)
    v[0] = v[2] = two.x, v[1] = v[3] = two.y;
  }
}

// The sums of a tile's part. Of 1x1 filters they have code of their own: a branch behind each k-tile's arrival costs
// them 3 %.
template <class Traits, bool kPads>
CUTE_DEVICE void activated_loop(float (&acc)[Traits::kN / 2], Ring &ring, typename Traits::SharedStorage &shared,
                                Sm90Params const &params, Release const &release, Constants<Traits> const &constants,
                                int first, int part) {
  ActivatedRows<Traits, kPads> rows(params, first, part, constants.vectors);
  wait_and_let_next_start();
  constants.load();
  cp_async_wait<0>();
  cutlass::arch::NamedBarrier::sync(Traits::kThreads, 0);
  begin_sums<Traits>(acc, constants.bias);
  narrow_loop<Traits>(acc, ring, shared, release, rows, params.k_begin[part], params.k_begin[part + 1]);
  // Where two loops meet while their products run, ptxas makes all products run one by one.
  warpgroup_wait<0>();
  fence_sums(acc);
}

}  // namespace cutefuse::conv
