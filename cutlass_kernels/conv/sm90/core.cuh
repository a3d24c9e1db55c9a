// What the Hopper kernels share: the ring of stages, the place of a block, and wgmma by descriptors.
//
// The operands are swapped: the filters are the 64-row operand of wgmma and the pixels its wide one (up to 256), so
// that few output channels waste nothing and one 3x3 halo in shared memory can feed every tap. The accumulator is
// therefore (filter, pixel), and outputs.cuh transposes it. In the tiles of pixel_rows.cuh the pixels are the rows.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma 200 pixels wide; ahead of epilogue.cuh, which includes CuTe too
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

// TMA's hints to L2: pixels and shortcuts are read once or by neighbours, filters by every block.
constexpr uint64_t kEvictNormal = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint64_t kEvictLast = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);

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

// Initialises the barriers of kStages stages, each of which `readers` warpgroups free; one thread calls it.
template <int kStages>
CUTE_DEVICE void init_stages(uint64_t (&full)[kStages], uint64_t (&empty)[kStages], int readers) {
  for (int i = 0; i < kStages; ++i) {
    TransactionBarrier::init(&full[i], 1);
    Barrier::init(&empty[i], readers);
  }
}

// Waits until a ring's stage is free, and says at its barrier, which is returned, how many bytes will come.
CUTE_DEVICE uint64_t *open_stage(uint64_t *full, uint64_t *empty, Ring const &ring, int bytes) {
  Barrier::wait(&empty[ring.stage], ring.phase ^ 1);
  TransactionBarrier::arrive_and_expect_tx(&full[ring.stage], bytes);
  return &full[ring.stage];
}

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
  // The first of a tile's pixels, of runs of kPixels. TMA takes four times as long over a row that does not exist as
  // over one that it loads, so the last tile begins earlier and computes some pixels again.
  template <int kPixels>
  CUTE_DEVICE int first_pixel(int tile, Sm90Params const &params) const {
    return cute::min(tile_x(tile) * kPixels, params.last_pixel);
  }
};

// Returns `value`, and hides from the compiler how it was computed.
CUTE_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T>
CUTE_DEVICE T *opaque(T *value) {
  asm volatile("" : "+l"(value));
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

// Arrives at a barrier of this block if `arrives`, without a branch.
CUTE_DEVICE void arrive_if(bool arrives, uint64_t *barrier) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(
                   cast_smem_ptr_to_uint(barrier)),
               "r"(uint32_t(arrives))
               : "memory");
}

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

// What TMA loads of a tile's filters in a k-tile: those that exist. A row of zeros takes it four times as long as a row
// that it loads, and the rows of filters that do not exist may hold anything.
struct FilterBox {
  CUtensorMap const *map;
  int missing;  // rows
  CUTE_DEVICE FilterBox(Sm90Params const &params, int tile_f)
      : map(tile_f == params.last_f ? &params.w_second : &params.w),
        missing(tile_f == params.last_f ? params.missing_filters : 0) {}
};

// Loads a tile of filters into `to`, with a hint to keep them in L2. 8-bit outputs (kScaled) are stored two filters at
// a time, and a thread must have two neighbouring ones: of each 16 filters the even ones are loaded first.
template <bool kScaled = false>
CUTE_DEVICE void load_filters(Sm90Params const &params, CUtensorMap const *w, int column, int filter, uint64_t *full,
                              void *to) {
  if (kScaled && size_of(params.problem.output_type) == 1) {
    SM90_TMA_LOAD_4D::copy(w, full, kEvictLast, to, column, 0, 0, filter / 16);
  } else {
    SM90_TMA_LOAD_2D::copy(w, full, kEvictLast, to, column, filter);
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

// The operand that begins `bytes` further on. Its address is in the low word: one addition, without a carry.
CUTE_DEVICE uint64_t further(uint64_t operand, int bytes) {
  return (operand >> 32 << 32) | (uint32_t(operand) + uint32_t(bytes) / 16);
}

// Calls f(value) for every value of an array, which may hold arrays.
template <class Value, class F>
CUTE_DEVICE void for_each_value(Value &value, F const &f) {
  f(value);
}
template <class Values, int kCount, class F>
CUTE_DEVICE void for_each_value(Values (&values)[kCount], F const &f) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) for_each_value(values[i], f);
}

// What reads or writes the sums does not move across this.
template <class Sums>
CUTE_DEVICE void fence_sums(Sums &sums) {
  for_each_value(sums, [](auto &sum) { warpgroup_fence_operand(sum); });
}

template <class Op, class Sum, int kSums, size_t... I, class... Operands>
CUTE_DEVICE void issue(Sum (&acc)[kSums], std::index_sequence<I...>, SM90::GMMA::ScaleOut scale, Operands... operands) {
  Op::fma(operands..., acc[I]..., scale);
}

// acc(64 rows, 2 * kSums columns) (+)= rows x columns over one k-step. The operands are descriptors of both or, of rows
// in registers, the four registers and the columns' descriptor.
template <class Element, class Sum, int kSums, class... Operands>
CUTE_DEVICE void wgmma(Sum (&acc)[kSums], SM90::GMMA::ScaleOut scale, Operands... operands) {
  using Step = Shape<_64, Int<2 * kSums>, Int<kStepBytes / int(sizeof(Element))>>;
  using WgmmaSum = cute::conditional_t<cute::is_same_v<Sum, uint32_t>, int32_t, Sum>;
  constexpr auto kAll = std::make_index_sequence<kSums>{};
  if constexpr (sizeof...(Operands) == 2) {
    issue<decltype(SM90::GMMA::ss_op_selector<Element, Element, WgmmaSum, Step>())>(acc, kAll, scale, operands...);
  } else {
    issue<decltype(SM90::GMMA::rs_op_selector<Element, Element, WgmmaSum, Step>())>(acc, kAll, scale, operands...);
  }
}

// acc(kRowTiles, 64 filters, kPixels) (+)= filters x pixels over the first `steps` of the tile's k-steps, or of every
// kStride-th one. In bytes: from 64 filters to the next, and from two k-steps of a filter to the next two.
template <class Element, int kPixels, int kSteps, int kStride = 1, int kRowTiles, class Sum>
CUTE_DEVICE void multiply(Sum (&acc)[kRowTiles][kPixels / 2], uint64_t filters, uint64_t pixels, int steps,
                          SM90::GMMA::ScaleOut &scale, int row_tile_bytes = 64 * kSteps * kStepBytes,
                          int two_steps_bytes = 2 * kStepBytes) {
  static_assert(kStride == 1 || kRowTiles == 1);
  auto const step = [&](int i) {
    CUTE_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      int const at = i * kStride, of_filters = m * row_tile_bytes + at % 2 * kStepBytes + at / 2 * two_steps_bytes;
      wgmma<Element>(acc[m], scale, filters + of_filters / 16, pixels + at * kStepBytes / 16);
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

}  // namespace cutefuse::conv
