// What the Hopper kernels share: the ring of stages, the place of a block, wgmma by descriptors, and the epilogue.
//
// The operands are swapped: the filters are the 64-row operand of wgmma and the pixels its wide one (up to 256), so
// that few output channels waste nothing and one 3x3 halo in shared memory can feed every tap. The accumulator is
// therefore (filter, pixel); the epilogue transposes it on its way to shared memory (stmatrix.trans) and TMA writes
// whole pixels.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma 200 pixels wide
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/tensor.hpp>
#include <type_traits>
#include <utility>

#include "conv/epilogue.cuh"
#include "conv/sm90/params.h"
#include "conv/sm90/types.cuh"
#include "dependent_launch.cuh"

// The kernels are written for sm_90a alone. In a library for more architectures their code for the others is empty.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUTEFUSE_SM90A 1
#endif

namespace cutefuse::conv {

using namespace cute;
using cute::Layout;  // these names are CuTe's here, not those of op.h
using cute::Tensor;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
using Barrier = cutlass::arch::ClusterBarrier;

constexpr int kConsumers = 2;  // warpgroups that issue wgmma; the one after them loads
constexpr int kSm90Threads = 128 * (kConsumers + 1);
constexpr int kSharedBytes = 227 * 1024;
constexpr int kProducerRegisters = 56,
              kConsumerRegisters = 224;  // redistributed from the 168 that every thread is launched with

// ---- pipeline -------------------------------------------------------------------------------------------------------

// Position in a ring of stages; `phase` is the parity that the stage's barrier has when it is full.
struct Ring {
  int stage = 0, stages;
  uint32_t phase = 0;
  CUTE_DEVICE explicit Ring(int stages_) : stages(stages_) {}
  CUTE_DEVICE void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  CUTE_DEVICE void skip(int count) {
    stage += count;
    phase ^= stage / stages & 1;
    stage %= stages;
  }
  CUTE_DEVICE int previous() const { return (stage == 0 ? stages : stage) - 1; }
};

// The place of this block. The blocks of a cluster have cluster_f tiles of filters over the same pixels, or the
// `splits` parts of one reduction. Clusters take tiles in turn, filters fastest, so that pixels are read while they are
// in L2.
struct ClusterPlace {
  int cluster_f, rank_f, part;
  int tiles, first_tile, clusters;
  Divider by_f;

  CUTE_DEVICE explicit ClusterPlace(Sm90Params const &params) : cluster_f(params.cluster_f), by_f(params.by_f) {
    int const rank = int(block_rank_in_cluster());
    part = params.splits > 1 ? rank : 0;
    rank_f = cluster_f > 1 ? rank : 0;
    tiles = params.cluster_tiles;
    first_tile = int(cluster_id_in_grid().x), clusters = int(cluster_grid_dims().x);
  }
  CUTE_DEVICE int tile_f(int tile) const { return (tile - by_f.divide(tile) * by_f.divisor) * cluster_f + rank_f; }
  CUTE_DEVICE int tile_x(int tile) const { return by_f.divide(tile); }
};

// Returns `value`, and hides from the compiler how it was computed.
CUTE_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The 64 filters of a tile from its row `row` on, which belong to one output.
struct TileFilters {
  int output, first,
      in_output;  // the output; its first filter among those of the packed matrix, and among the output's channels

  CUTE_DEVICE TileFilters(Sm90Params const &params, int tile_f, int filters, int row)
      : output(0), in_output(tile_f * filters + row) {
    if (params.problem.outputs > 1) {
      CUTE_UNROLL
      for (int i = 1; i < kMaxOutputs; ++i) output = in_output >= params.outputs[i].first_row ? i : output;
    }
    in_output -= params.outputs[output].first_row;
    first = params.outputs[output].first + in_output;
  }
};

// True in one thread of the calling warp. The compiler knows that it is one thread: it keeps that thread's values in
// uniform registers, and issues TMA once. Without elect it would loop over the threads of the warp, which is three
// times as slow.
CUTE_DEVICE bool is_elected() { return elect_one_sync() != 0; }

// Tells every block that loads a share of a stage that this warpgroup has read it; each telling thread tells one block.
struct Release {
  int block;
  bool tells;

  CUTE_DEVICE explicit Release(ClusterPlace const &place)
      : block(threadIdx.x % 128 + place.part), tells(int(threadIdx.x % 128) < place.cluster_f) {}
  CUTE_DEVICE void operator()(uint64_t *empty) const { Barrier::arrive(empty, block, tells); }
};

// Fetches the tensor maps from the kernel's parameters ahead of the first load through each, which would wait for it.
// kDirect: outputs and shortcut have no maps.
template <bool kDirect = false>
CUTE_DEVICE void prefetch_maps(Sm90Params const &params) {
  Problem const &p = params.problem;
  int const i = int(threadIdx.x) - 32;  // thread 0 is busy with the barriers
  int const output = kDirect ? -1 : i - p.sources - 1;
  CUtensorMap const *map = i == p.sources ? &params.w : nullptr;
  if (i >= 0 && i < p.sources) map = &params.x[i];
  if (output >= 0 && output < p.outputs) map = &params.out[output];
  if (output == p.outputs && p.residual != Residual::kNone) map = &params.z;
  if (map != nullptr) prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const *>(map));
}

// Loads a tile of filters into `to`, with a hint to keep them in L2. 8-bit outputs (kScaled) are stored two filters at
// a time, and a thread must have two neighbouring ones: of each 16 filters the even ones are loaded first.
template <bool kScaled = false>
CUTE_DEVICE void load_filters(Sm90Params const &params, int column, int filter, uint64_t *full, void *to) {
  constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
  if (kScaled && size_of(params.problem.output_type) == 1) {
    SM90_TMA_LOAD_4D::copy(&params.w, full, kHint, to, column, 0, 0, filter / 16);
  } else {
    SM90_TMA_LOAD_2D::copy(&params.w, full, kHint, to, column, filter);
  }
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// K-major operand tile in shared memory: 8-row groups `stride_bytes` apart, rows swizzled as TMA wrote them.
CUTE_DEVICE uint64_t operand(void const *tile, int stride_bytes, SM90::GMMA::LayoutType swizzle) {
  GmmaDescriptor desc;
  desc.bitfield.start_address_ = cast_smem_ptr_to_uint(tile) >> 4;
  desc.bitfield.leading_byte_offset_ = 1;  // ignored: a k-step never leaves the swizzle atom
  desc.bitfield.stride_byte_offset_ = stride_bytes >> 4;
  desc.bitfield.layout_type_ = static_cast<uint8_t>(swizzle);
  return desc.desc_;
}

template <class Op, class Sum, int kRegisters, size_t... I>
CUTE_DEVICE void wgmma(Sum (&acc)[kRegisters], uint64_t a, uint64_t b, SM90::GMMA::ScaleOut scale,
                       std::index_sequence<I...>) {
  Op::fma(a, b, acc[I]..., scale);
}

// acc(kRowTiles, 64 filters, kPixels) (+)= filters x pixels over the first `steps` of the tile's k-steps, or of every
// kStride-th one. In bytes: from 64 filters to the next, and from two k-steps of a filter to the next two.
template <class Element, int kPixels, int kSteps, int kStride = 1, int kRowTiles, class Sum>
CUTE_DEVICE void multiply(Sum (&acc)[kRowTiles][kPixels / 2], uint64_t filters, uint64_t pixels, int steps,
                          SM90::GMMA::ScaleOut &scale, int row_tile_bytes = 64 * kSteps * kStepBytes,
                          int two_steps_bytes = 2 * kStepBytes) {
  using Step = Shape<_64, Int<kPixels>, Int<kStepBytes / int(sizeof(Element))>>;
  using WgmmaSum = cute::conditional_t<cute::is_same_v<Sum, uint32_t>, int32_t, Sum>;
  using Op = decltype(SM90::GMMA::ss_op_selector<Element, Element, WgmmaSum, Step>());
  static_assert(kStride == 1 || kRowTiles == 1);
  auto const step = [&](int i) {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      int const at = i * kStride, of_filters = m * row_tile_bytes + at % 2 * kStepBytes + at / 2 * two_steps_bytes;
      wgmma<Op>(acc[m], filters + of_filters / 16, pixels + at * kStepBytes / 16, scale,
                std::make_index_sequence<kPixels / 2>{});
    }
    scale = SM90::GMMA::ScaleOut::One;
  };
  warpgroup_arrive();
  CUTE_UNROLL
  for (int count = kSteps; count > 0; --count) {
    if (steps != count) continue;
    CUTE_UNROLL
    for (int i = 0; i < count; ++i) step(i);
    warpgroup_commit_batch();  // in the branch, since one behind it would close a second, empty group
  }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

// The two filters of a thread's accumulator rows, which are 8 apart: their biases, and how many filters the output has
// from the first of the two on.
struct FilterPair {
  int left;
  float bias[2];

  FilterPair() = default;
  CUTE_DEVICE FilterPair(Sm90Params const &params, TileFilters const &filters) {
    left = params.outputs[filters.output].last - filters.first - threadIdx.x % 128 / 32 * 16 - threadIdx.x % 32 / 4;
    float const *const b = params.b + params.outputs[filters.output].last - left;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) bias[row] = left > 8 * row ? __ldg(b + 8 * row) : 0.f;
  }
  // values holds (2,2,kGroups) = (pixel,filter,group).
  template <int kValues>
  CUTE_DEVICE void add_to(float (&values)[kValues]) const {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] += bias[i / 2 % 2];
  }
};

// Two values rounded into one register, with ReLU first where it is asked for; a NaN is propagated.
template <class Element, bool kRelu>
CUTE_DEVICE uint32_t pack(float first, float second) {
  uint32_t packed;
  if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
    if constexpr (kRelu) {
      asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
  } else if constexpr (kRelu) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  }
  return packed;
}

// Activations with code of their own for a whole tile, without branches. For the rest, kOther branches on the kind for
// every slice of values; kAny does so among all kinds. Such a branch jumps over the code of the other kinds, and costs
// as much as some ten values.
enum class Finish { kNone, kRelu, kSilu, kSigmoid, kOther, kAny };

template <class Body>
CUTE_DEVICE void with_finish(Activation kind, Body const &body) {
  if (kind == Activation::kSilu) {
    body(std::integral_constant<Finish, Finish::kSilu>{});
  } else if (kind == Activation::kSigmoid) {
    body(std::integral_constant<Finish, Finish::kSigmoid>{});
  } else if (kind == Activation::kRelu) {
    body(std::integral_constant<Finish, Finish::kRelu>{});
  } else if (kind == Activation::kNone) {
    body(std::integral_constant<Finish, Finish::kNone>{});
  } else {
    body(std::integral_constant<Finish, Finish::kOther>{});
  }
}

// Bias and activation: values holds (2,2,kGroups) = (pixel,filter,group). Returns whether a ReLU is left to the
// rounding.
template <Finish kFinish, bool kBesideLoop = false, int kValues, class Pair>
CUTE_DEVICE bool finish_values(float (&values)[kValues], Pair const &pair, Problem const &p) {
  pair.add_to(values);
  bool relu = kFinish == Finish::kRelu;
  if constexpr (kFinish == Finish::kSilu && kBesideLoop) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] *= sigmoid(values[i]);
  } else if constexpr (kFinish == Finish::kSilu) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; i += 2) silu_pair(values[i], values[i + 1]);
  } else if constexpr (kFinish == Finish::kSigmoid) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = sigmoid(values[i]);
  } else if constexpr (kFinish == Finish::kOther) {
    activate<false>(make_tensor(&values[0], Layout<Int<kValues>>{}), p);
  } else if constexpr (kFinish == Finish::kAny) {
    relu = p.activation == Activation::kRelu;
    if (!relu && p.activation != Activation::kNone) activate(make_tensor(&values[0], Layout<Int<kValues>>{}), p);
  }
  return relu;
}

// Bias, activation and rounding. Each element of `packed` has two pixels of one filter.
template <Finish kFinish, class Element, bool kBesideLoop = false, int kValues, class Pair>
CUTE_DEVICE void convert(float (&values)[kValues], uint32_t (&packed)[kValues / 2], Pair const &pair,
                         Problem const &p) {
  if (finish_values<kFinish, kBesideLoop>(values, pair, p)) {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) packed[i] = pack<Element, true>(values[2 * i], values[2 * i + 1]);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) packed[i] = pack<Element, false>(values[2 * i], values[2 * i + 1]);
  }
}

// Whether a thread of this warp has a pad lane. Pad lanes are stored as zeros, whatever the activation makes of zero.
CUTE_DEVICE bool holds_pad_lanes(FilterPair const &pair) { return __any_sync(~0u, pair.left <= 8); }

// The same biases, which become known only after the value `after`: otherwise the compiler starts on more values than
// registers hold.
template <class Pair>
CUTE_DEVICE Pair biases_after(uint32_t after, Pair pair, Problem const &p) {
  uint32_t const zero = after & uint32_t(p.outputs >> 16);  // 0, but only the host knows
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) pair.bias[row] = __uint_as_float(__float_as_uint(pair.bias[row]) ^ zero);
  return pair;
}

template <int kPacked>
CUTE_DEVICE void clear_pad_lanes(uint32_t (&packed)[kPacked], FilterPair const &pair) {
  CUTE_UNROLL
  for (int i = 0; i < kPacked; ++i) packed[i] = pair.left > 8 * (i % 2) ? packed[i] : 0;
}

// Element of a staging tile at which a thread's row of the matrices of two 8-pixel groups begins, or of one: matrix
// lane / 8 holds filters 0-7 or 8-15 of this warp's 16 and the first group, then of the second. A row is a pixel with
// 64 filters, 16-byte chunks XORed with the row as SWIZZLE_128B does.
CUTE_DEVICE int staged_row(int thread, int group, bool single) {
  int const lane = thread % 32, warp = thread % 128 / 32;
  int const row = (single ? 0 : lane / 16 * 8) + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  return (8 * group + row) * kStoreColumns + chunk * 8;
}

// Transposes 8-pixel groups: pixel i of the staging tile becomes a row of 64 filters.
template <class Element, int kGroups>
CUTE_DEVICE void stage(uint32_t const *packed, Element *staging) {
  CUTE_UNROLL
  for (int group = 0; group < kGroups; group += 2) {
    uint32_t const *const r = packed + 2 * group;
    bool const last = group + 1 == kGroups;  // an odd count ends with a single group
    auto *const to = staging + staged_row(threadIdx.x, group, last);
    if (last) {
      SM90_U16x4_STSM_T::copy(r[0], r[1], *reinterpret_cast<uint128_t *>(to));
    } else {
      SM90_U16x8_STSM_T::copy(r[0], r[1], r[2], r[3], *reinterpret_cast<uint128_t *>(to));
    }
  }
}

// Converts a few groups and writes them to the staging tile.
template <class Element, int kGroups, class Pair>
CUTE_DEVICE void stage_outputs(float (&values)[4 * kGroups], Pair const &pair, Problem const &p, Element *staging) {
  uint32_t packed[2 * kGroups];
  convert<Finish::kAny, Element>(values, packed, pair, p);
  if (holds_pad_lanes(pair)) clear_pad_lanes(packed, pair);
  stage<Element, kGroups>(packed, staging);
}

// Writes activation(acc(64 filters, kPixels) + bias) by TMA stores of kRows pixels. kStagings stores are converted at
// once, because fences, barriers and the wait for the last stores cost more than the conversion; it comes first, while
// those stores still read. store(tile, pointer) issues one store; one thread calls it. kRowTiles: how many accumulators
// of kPixels the warpgroup holds. kBesideLoop: another warpgroup is in its main loop, and the fewest instructions win;
// where both warpgroups convert, the special-function unit limits.
template <class Element, int kPixels, int kRows, int kStagings, int kRowTiles = 1, bool kBesideLoop = false, class Pair,
          class Store>
CUTE_DEVICE void store_outputs(float (&acc)[kPixels / 2], Pair const &pair, Activation activation, Problem const &p,
                               Element *staging, int warpgroup, Store const &store) {
  static_assert(kPixels / kRows % kStagings == 0);
  bool const issues = threadIdx.x % 128 == 0;
  with_finish(activation, [&](auto finish) {
    constexpr Finish kFinish = decltype(finish)::value;
    constexpr int kTiles = kPixels / kRows, kValues = kRows / 2;
    // Convert before the wait where earlier stores of this tile may still read, if registers hold the results beside
    // the sums.
    constexpr bool kExponential = kFinish == Finish::kSilu || kFinish == Finish::kSigmoid;
    constexpr bool kConvertFirst = kFinish != Finish::kOther && (kRowTiles > 1 || kTiles > kStagings) &&
                                   kRowTiles * kPixels <= 320 && !(kExponential && kPixels == 256);
    auto const wait = [&] {
      if (issues) tma_store_wait<0>();  // the last stores have read the staging tiles
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
    };
    CUTE_UNROLL
    for (int first = 0; first < kTiles; first += kStagings) {
      uint32_t packed[kStagings][kValues / 2];
      Pair next = pair;
      if (!kConvertFirst) wait();
      CUTE_UNROLL
      for (int i = 0; i < kStagings; ++i) {
        auto &values = reinterpret_cast<float (&)[kValues]>(acc[kValues * (first + i)]);
        convert<kFinish, Element, kBesideLoop>(values, packed[i], next, p);
        if (kExponential) next = biases_after(packed[i][kValues / 2 - 1], next, p);
        if (holds_pad_lanes(pair)) clear_pad_lanes(packed[i], pair);
        if (!kConvertFirst) stage<Element, kRows / 8>(packed[i], staging + i * kRows * kStoreColumns);
      }
      if (kConvertFirst) {
        wait();
        CUTE_UNROLL
        for (int i = 0; i < kStagings; ++i) stage<Element, kRows / 8>(packed[i], staging + i * kRows * kStoreColumns);
      }
      tma_store_fence();
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      if (issues) {
        CUTE_UNROLL
        for (int i = 0; i < kStagings; ++i) store(first + i, staging + i * kRows * kStoreColumns);
        tma_store_arrive();
      }
    }
  });
}

}  // namespace cutefuse::conv
