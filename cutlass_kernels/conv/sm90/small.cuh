// Convolution on Hopper for small maps: a block has one narrow tile, several blocks share a multiprocessor, and a
// cluster divides the reduction. There is no tile scheduler, no barrier before a block's first load and none after its
// last sum, because a few microseconds of work cannot hide them. Filters and pixels are loaded as in im2col.cuh.
#pragma once

#include "conv/sm90/im2col.cuh"
#include "conv/sm90/narrow.cuh"

namespace cutefuse::conv {

// ---- types ----------------------------------------------------------------------------------------------------------

template <class Element_, int kFilters_, int kPixels_, int kMaxBlocks, bool kPre = false>
struct Sm90Small : Sm90Numbers<Element_> {
  using Element = Element_;
  static constexpr int kFilters = kFilters_, kPixels = kPixels_, kChannels = kChannelBlock;
  static constexpr int kN = kPixels, kRowTiles = 1;  // of one warpgroup, which has 64 filters
  static constexpr bool kPingPong = false, kSharesPixels = false, kPreActivated = kPre;
  static constexpr int kShortcutSlots = 0, kPixelGroups = 1;
  static constexpr int kVectors = kPreActivated ? 2 * kChannels : 0;  // elements of a stage's scale and shift
  static constexpr SmallRoom kRoom = small_room(kFilters, kPixels, kMaxBlocks, int(sizeof(Element)) * kVectors);
  static constexpr int kBlocks = kRoom.blocks, kStages = kRoom.stages;
  static constexpr int kReaders = kFilters / 64, kSumThreads = 128 * kReaders, kThreads = kSumThreads + 32;
  static constexpr int kRewriters = 0, kTeam = 4;  // pre-activated pixels are rewritten by the warps that multiply
  static constexpr int kUnits = kPixels / 8, kParts = small_parts(kPixels);  // a unit: 8 pixels, finished by one block
  static constexpr int kPartBytes = kSumThreads * int(sizeof(float4));

  static constexpr int kPixelBytes = kChannels * int(sizeof(Element)), kSteps = kPixelBytes / kStepBytes;
  static constexpr auto kSwizzle = SM90::GMMA::LayoutType::B128;
  static constexpr int kStageBytes = (kFilters + kPixels) * kPixelBytes;

  struct SharedStorage {
    alignas(1024) Element x[kStages][kPixels * kChannels];   // (pixel,channel), 128-byte rows, SWIZZLE_128B
    alignas(1024) Element w[kStages][kFilters * kChannels];  // (filter,channel), likewise
    alignas(16) Element vectors[kPreActivated ? kStages : 1][kPreActivated ? kVectors : 16];
    float4 parts[kParts][kSumThreads];  // (thread,(block of the cluster,unit))
    alignas(8) uint64_t full[kStages], empty[kStages], parts_full;
  };
  static_assert((sizeof(SharedStorage) + 1024) * kBlocks <= kSmallSharedBytes);
};

// ---- reduction ------------------------------------------------------------------------------------------------------

// Gives every unit of sums to the block that finishes it; this block's own stay here.
template <class Traits>
CUTE_DEVICE void send_units(float const (&acc)[Traits::kN / 2], Sm90Params const &params, int rank,
                            typename Traits::SharedStorage &shared) {
  float4 *to = &shared.parts[rank][threadIdx.x];
  uint32_t const full = cast_smem_ptr_to_uint(&shared.parts_full);
  int owner = 0;
  CUTE_UNROLL
  for (int unit = 0; unit < Traits::kUnits; ++unit) {
    float const *const v = acc + 4 * unit;
    if (owner == rank) {
      *to = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      asm volatile(  // CuTe stores single words
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
              set_block_rank(cast_smem_ptr_to_uint(to), owner)),
          "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(set_block_rank(full, owner))
          : "memory");
    }
    if (++owner == params.splits) owner = 0, to += params.splits * Traits::kSumThreads;
  }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

// An 8 x 8 matrix of 16-bit elements, a row in four threads, with rows and columns exchanged. CuTe has no atom for it.
CUTE_DEVICE uint32_t transposed(uint32_t two) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
}

// Finishes a unit from pixel m on: values holds (2,2) = (pixel,filter). A warp's 16 filters of a pixel are one sector
// of memory, so they are stored from registers, without a barrier.
template <Finish kFinish, class Element>
CUTE_DEVICE void store_unit(float (&values)[4], FilterPair const &pair, bool pads, Sm90Params const &params, int m) {
  Problem const &p = params.problem;
  uint32_t packed[2];
  convert<kFinish, Element>(values, packed, pair, p);
  if (pads) clear_pad_lanes(packed, pair);
  int const lane = threadIdx.x % 32, pixel = m + lane / 4, filter = p.K - pair.left - lane / 4;
  auto *const to = static_cast<Element *>(params.outputs[0].y) + pixel * params.outputs[0].ld + filter + lane % 4 * 2;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const two = transposed(packed[i]);
    if (pixel < p.N * p.P * p.Q && filter + 8 * i < p.K) *reinterpret_cast<uint32_t *>(to + 8 * i) = two;
  }
}

// Adds up this block's units in the order of the blocks, so that results never depend on timing.
template <class Traits, Finish kFinish>
CUTE_DEVICE void add_units(FilterPair const &pair, bool pads, Sm90Params const &params, int rank,
                           typename Traits::SharedStorage &shared, int first) {
  float4 const *part = &shared.parts[0][threadIdx.x];
  CUTE_NO_UNROLL
  for (int unit = rank; unit < Traits::kUnits; unit += params.splits) {
    float values[4] = {};
    CUTE_UNROLL
    for (int block = 0; block < kMaxSplits; ++block, part += Traits::kSumThreads) {
      if (block == params.splits) break;
      values[0] += part->x, values[1] += part->y, values[2] += part->z, values[3] += part->w;
    }
    store_unit<kFinish, typename Traits::Element>(values, pair, pads, params, first + 8 * unit);
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    conv_sm90_small(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  let_next_kernel_start();
  ClusterPlace const place(params);
  int const k_begin = params.k_begin[place.part], k_end = params.k_begin[place.part + 1];
  bool const divided = params.splits > 1;
  prefetch_maps(params);

  if (threadIdx.x >= Traits::kSumThreads) {
    // ---- producer ----
    bool const loads = is_elected();
    if (loads) {
      init_ring<Traits>(shared, place);
      TransactionBarrier::init(&shared.parts_full, 1);
      cutlass::arch::fence_barrier_init();
      int const units = place.part < Traits::kUnits ? ceil_div(Traits::kUnits - place.part, params.splits) : 0;
      TransactionBarrier::arrive_and_expect_tx(&shared.parts_full, units * (params.splits - 1) * Traits::kPartBytes);
    }
    __syncwarp();
    cutlass::arch::NamedBarrier::arrive(Traits::kThreads, 0);
    if (divided) cluster_arrive();
    if (loads) fill_ring<Traits>(shared, params, place, k_begin, k_end);
    __syncwarp();
    if (divided) cluster_wait();
  } else {
    // ---- consumers ----
    if (divided) cluster_arrive();
    int const row_w = threadIdx.x / 128 * 64, first = place.tile_x(place.first_tile) * Traits::kPixels;
    Release const release(place);
    Ring ring(Traits::kStages);
    wait_for_previous_kernel();
    FilterPair const pair(params, TileFilters(params, place.tile_f(place.first_tile), Traits::kFilters, row_w));
    cutlass::arch::NamedBarrier::sync(Traits::kThreads, 0);
    float acc[1][Traits::kN / 2];
    OwnRewriter<Traits> rewriter(params, first, k_begin);
    narrow_loop<Traits>(acc[0], ring, shared, release, row_w, k_begin, k_end, rewriter);
    finish_loop<Traits>(acc, ring, shared, release);

    if (divided) {
      cluster_wait();  // every block has made its barriers
      send_units<Traits>(acc[0], params, place.part, shared);
      TransactionBarrier::wait(&shared.parts_full, 0);
    }
    bool const pads = holds_pad_lanes(pair);
    with_finish(params.problem.activation, [&](auto finish) {
      if (divided) return add_units<Traits, finish.value>(pair, pads, params, place.part, shared, first);
      CUTE_UNROLL
      for (int unit = 0; unit < Traits::kUnits; ++unit) {
        store_unit<finish.value, typename Traits::Element>(reinterpret_cast<float (&)[4]>(acc[0][4 * unit]), pair, pads,
                                                           params, first + 8 * unit);
      }
    });
  }
#endif
}

}  // namespace cutefuse::conv
