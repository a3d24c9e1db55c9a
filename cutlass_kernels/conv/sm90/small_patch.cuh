// Patches on small tiles, for filters three taps wide of stride 1. As in halo.cuh, the pixels of a block of channels
// come into shared memory once, with their halo, and every tap is multiplied from there. A stage of the ring is the
// filters of a row of taps, one load: a block of few pixels waits for loads, and for the thread that issues them,
// longer than for its products.
#pragma once

#include "conv/sm90/k_tiles.cuh"
#include "conv/sm90/patch.cuh"

namespace cutefuse::conv {

// The block's patch: 8 pixels along `a`.
template <class Traits>
CUTE_DEVICE Patch patch_of(ClusterPlace const &place, Sm90Params const &params) {
  return Patch(params, place.tile_x(place.first_tile), 8, Traits::kPixels / 8);
}

// Walks a part of the reduction in rows of three taps of a block of channels.
struct RowCursor {
  int source, row, left;  // left: channels of the source from this block on
  bool begins = true;     // a patch

  CUTE_DEVICE RowCursor(Sm90Params const &params, int part)
      : source(params.starts[part].source),
        row(params.starts[part].r),
        left(params.problem.C[source] - params.starts[part].block * kChannelBlock) {}
  CUTE_DEVICE void advance(Problem const &p) {
    begins = ++row == p.R;
    if (!begins) return;
    row = 0, left -= kChannelBlock;
    if (left <= 0 && source + 1 < p.sources) left = p.C[++source];
  }
};

// Keeps the ring full with the filters of a part of the reduction, and loads its patches; one thread calls it.
template <class Traits>
CUTE_DEVICE void fill_ring_and_patches(typename Traits::SharedStorage &shared, Sm90Params const &params,
                                       ClusterPlace const &place) {
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const tile_f = place.tile_f(place.first_tile), filter = TileFilters(params, tile_f, Traits::kFilters, 0).first;
  FilterBox const box(params, tile_f);
  Patch const patch = patch_of<Traits>(place, params);
  int const a = patch.a - (plan.swapped ? p.pad_top : p.pad_left),
            b = patch.b - (plan.swapped ? p.pad_left : p.pad_top);
  int const patch_bytes = plan.pitch * plan.rows * Traits::kPixelBytes;
  int const stage_bytes = Traits::kTaps * (Traits::kFilters - box.missing) * Traits::kPixelBytes;
  RowCursor cursor(params, place.part);
  Ring ring(params.stages), patches(plan.halo_stages);
  bool waits = true;
  CUTE_NO_UNROLL
  for (int k = params.k_begin[place.part]; k < params.k_begin[place.part + 1]; ++k) {
    if (cursor.begins) {
      uint64_t *const full = open_stage(shared.patch_full, shared.patch_empty, patches, patch_bytes);
      if (waits) wait_for_previous_kernel();
      waits = false;
      SM90_TMA_LOAD_4D::copy(&params.x[cursor.source], full, kEvictNormal, shared.patch(params, patches.stage),
                             p.C[cursor.source] - cursor.left, a, b, patch.n);
      patches.advance();
    }
    uint64_t *const full = open_stage(shared.full, shared.empty, ring, stage_bytes);
    SM90_TMA_LOAD_3D::copy(box.map, full, kEvictLast, shared.w_of(ring.stage), 0, filter, k * Traits::kTaps);
    ring.advance();
    cursor.advance(p);
  }
}

// As narrow_loop, over rows of taps. The pixels that a tap reads lie further on in the patch than those of the tap
// before. `row` is the first of this warpgroup's filters, `missing` are rows that a tap's filters lack in the stage.
template <class Traits>
CUTE_DEVICE void loop_over_patches(float (&acc)[1][Traits::kN / 2], Ring &ring, typename Traits::SharedStorage &shared,
                                   Sm90Params const &params, Release const &release, int row, int missing, int part) {
  using Element = typename Traits::Element;
  Problem const &p = params.problem;
  HaloPlan const &plan = params.halo;
  int const to_next_filters = (Traits::kFilters - missing) * Traits::kPixelBytes;
  int const to_next = plan.step_s * Traits::kPixelBytes, to_next_row = plan.step_r * Traits::kPixelBytes;
  uint64_t const filters = operand(shared.w_of(0) + row * Traits::kChannels, 8 * Traits::kPixelBytes, Traits::kSwizzle);
  uint64_t const first_patch = operand(shared.patch(params, 0), plan.pitch * Traits::kPixelBytes, Traits::kSwizzle);
  RowCursor cursor(params, part);
  Ring patches(plan.halo_stages);
  auto scale = SM90::GMMA::ScaleOut::Zero;  // the first step overwrites acc
  bool running = false, half = false;       // half: the block's other channels are zeros
  CUTE_NO_UNROLL
  for (int k = params.k_begin[part]; k < params.k_begin[part + 1]; ++k) {
    bool const begins = cursor.begins;
    if (begins) {
      // The same in all threads, as the compiler has to know: it would wait for every wgmma behind a branch.
      half = __shfl_sync(~0u, cursor.left, 0) <= Traits::kChannels / 2;
      TransactionBarrier::wait(&shared.patch_full[patches.stage], patches.phase);
    }
    TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
    uint64_t w = further(filters, ring.stage * Traits::kStageBytes);
    uint64_t x = further(first_patch, patches.stage * plan.stage_bytes + cursor.row * to_next_row);
    auto const multiply_taps = [&](auto steps) {
      CUTE_NO_UNROLL
      for (int tap = 0; tap < Traits::kTaps; ++tap) {
        warpgroup_arrive();
        CUTE_UNROLL
        for (int i = 0; i < decltype(steps)::value; ++i) {
          wgmma<Element>(acc[0], scale, further(w, i * kStepBytes), further(x, i * kStepBytes));
          scale = SM90::GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        w = further(w, to_next_filters), x = further(x, to_next);
      }
    };
    if (half) {
      multiply_taps(cute::Int<Traits::kSteps / 2>{});
    } else {
      multiply_taps(cute::Int<Traits::kSteps>{});
    }
    warpgroup_wait<Traits::kTaps>();  // those before have ended
    arrive_if(release.tells && running, &shared.empty[ring.previous()]);
    arrive_if(release.tells && running && begins, &shared.patch_empty[patches.previous()]);
    running = true;
    ring.advance();
    cursor.advance(p);
    if (cursor.begins) patches.advance();
  }
}

}  // namespace cutefuse::conv
