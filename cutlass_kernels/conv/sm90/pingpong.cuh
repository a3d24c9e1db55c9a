// ConcatConv on Hopper for short reductions, such as 1x1 filters: each warpgroup has whole tiles of its own, and the
// two take turns at the tensor cores, so that one stores its outputs while the other multiplies. Loads are those of
// sm90_im2col.cuh: one ring serves both, whose tiles follow each other in it.
#pragma once

#include "conv/sm90/im2col.cuh"

namespace cutefuse::conv {

constexpr int kPingPongProducerRegisters = 40, kPingPongConsumerRegisters = 232;  // up to 192 of them are accumulators

template <class Traits>
__global__ void __launch_bounds__(kSm90Threads, 1)
    concat_conv_sm90_im2col_pingpong(Sm90Params const __grid_constant__ params) {
#if CUTEFUSE_SM90A
  using Element = typename Traits::Element;
  constexpr int kN = Traits::kN, kRowTiles = Traits::kRowTiles;
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(raw);
  Problem const &p = params.problem;
  int const warpgroup = cutlass::canonical_warp_group_idx();
  ClusterPlace const place(params);

  init_ring<Traits>(shared, place);
  prefetch_maps(params);
  cluster_sync();
  let_next_kernel_start();

  if (warpgroup == kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<kPingPongProducerRegisters>();
    if (threadIdx.x == 128 * kConsumers) fill_ring<Traits>(shared, params, place, 0, params.k_tiles);
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kPingPongConsumerRegisters>();
    wait_for_previous_kernel();
    // ---- consumers: every second tile each, all of it ----
    int const consumer = warpgroup, my_turn = kConsumers + consumer, other_turn = kConsumers + (consumer ^ 1);
    Release const release(place);

    Ring ring(Traits::kStages);
    ring.skip(consumer * params.k_tiles);
    for (int tile = place.first_tile + consumer * place.clusters; tile < place.tiles; tile += 2 * place.clusters) {
      int const filter = place.tile_f(tile) * Traits::kFilters, first = place.tile_x(tile) * Traits::kPixels;
      FilterPair pairs[kRowTiles];
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) pairs[m] = FilterPair(params, filter + 64 * m);
      if (tile != place.first_tile) cutlass::arch::NamedBarrier::sync(2 * 128, my_turn);
      float acc[kRowTiles][kN / 2];
      main_loop<Traits>(acc, ring, shared, params, release, 0, 0, 0, params.k_tiles);
      if (tile + place.clusters < place.tiles) cutlass::arch::NamedBarrier::arrive(2 * 128, other_turn);
      finish_loop<Traits>(acc, ring, shared, release);

      constexpr bool kBesideLoop = kRowTiles > 1;  // with 64 filters, thus 256 pixels, it spills
      CUTE_UNROLL
      for (int m = 0; m < kRowTiles; ++m) {
        store_outputs<Element, kN, Traits::kStoreRows, Traits::kStagings, kRowTiles, kBesideLoop>(
            acc[m], pairs[m], p, shared.y[consumer], consumer, [&](int i, Element const *from) {
              SM90_TMA_STORE_2D::copy(&params.out, from, filter + 64 * m, first + i * Traits::kStoreRows);
            });
      }
      ring.skip(params.k_tiles);  // the other warpgroup's
    }
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
  }
  cluster_sync();  // no block leaves while another may still write to its shared memory
#endif
}

}  // namespace cutefuse::conv
