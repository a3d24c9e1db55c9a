// The convolution as implicit GEMM for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync -> shared ->
// global. M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles. One
// kernel for every number type (traits.cuh) and every way to load pixels (pixels.cuh, halo.cuh).
#pragma once

#include "conv/sm80/few_channels.cuh"
#include "conv/sm80/halo.cuh"
#include "conv/sm80/pixels.cuh"
#include "conv/sm80/pre_activation.cuh"
#include "conv/sm80/store.cuh"
#include "conv/sm80/store_scaled.cuh"
#include "dependent_launch.cuh"

namespace cutefuse::conv {

// Adds half of tf32's last place to each value, so that the tensor core, which truncates, gets the nearest tf32 with
// ties away from zero; without it the error doubles. That half is the value's own power of two times 2^-11, and NaN and
// infinity stay as they are. cvt.rna.tf32 gives the same result, but needs a predicate register, and this loop has none
// left.
template <class Engine, class Shape>
__device__ __forceinline__ void round_to_tf32(Tensor<Engine, Shape> &&fragment) {
  auto r = recast<uint32_t>(fragment);
  CUTE_UNROLL
  for (int i = 0; i < size(r); ++i) {
    float const power = __uint_as_float(r(i) & 0xff800000u);
    r(i) = __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(r(i))));
  }
}

// acc += X * W for one mma step. `between(done, all)` runs after each of the `all` rows or columns of mma.
template <class Traits, class FragmentX, class FragmentW, class Acc, class Between>
__device__ __forceinline__ void multiply(FragmentX &rX, FragmentW &rW, Acc &acc, int step, Between const &between) {
  if constexpr (Traits::kTf32) {
    round_to_tf32(rX(_, _, step));
    round_to_tf32(rW(_, _, step));
  }
  constexpr int kColumns = decltype(size<2>(acc))::value, kRows = decltype(size<1>(acc))::value;
  constexpr int kOuter = Traits::kRowsFirst ? kRows : kColumns, kInner = Traits::kRowsFirst ? kColumns : kRows;
  CUTE_UNROLL
  for (int outer = 0; outer < kOuter; ++outer) {
    CUTE_UNROLL
    for (int inner = 0; inner < kInner; ++inner) {
      int const back = outer % 2 ? kInner - 1 - inner : inner;  // back and forth, so that the last fragment is reused
      int const i = Traits::kRowsFirst ? outer : back, j = Traits::kRowsFirst ? back : outer;
      gemm(typename Traits::Mma{}, rX(_, i, step), rW(_, j, step), acc(_, i, j));
    }
    between(outer + 1, kOuter);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    conv_sm80(Params const __grid_constant__ params) {
  using Element = typename Traits::Element;
  constexpr bool kFewChannels = Traits::kTile.few_channels;
  using Loader = std::conditional_t<kFewChannels, FewChannelsLoader<Traits>,
                                    std::conditional_t<Traits::kSharesTaps, HaloLoader<Traits>, TapLoader<Traits>>>;
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages, kSteps = Traits::kSteps;
  constexpr int kSlots = Traits::kSlots;
  constexpr bool kTapStages = Traits::kTapStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  Place const place = Place::of<Traits>(params);

  Element *const shared_x = reinterpret_cast<Element *>(shared), *const shared_w = shared_x + Traits::kSmemX;
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});  // (M,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});  // (N,K,stage)

  // ---- g2s: each thread copies one column chunk of kRowsX pixels and kRowsW filters ----
  auto const thread_g2s = typename Traits::G2S{}.get_slice(place.thread);
  Tensor tXsX = thread_g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = thread_g2s.partition_D(sW);  // (vector,kRowsW,1,stage)
  int const first_block = params.k_blocks * place.split / params.splits;
  int const k_blocks = params.k_blocks * (place.split + 1) / params.splits - first_block;
  KBlock<kK> read(p);
  int first_column = 0;
  CUTE_NO_UNROLL
  for (int i = 0; i < first_block; ++i) {
    first_column += params.taps * kChannelBlock + read.filter_step(params.taps);
    read.advance(p);
  }
  Loader loader(params, place, read, first_column, k_blocks);
  PreActivation<Traits> pre(params, place, read);
  let_next_kernel_start();
  wait_for_previous_kernel();  // no global memory has been touched yet
  if constexpr (Traits::kScaled) load_scales_and_biases<Traits>(params, place, shared);

  // A unit is an mma step: kUnits of them make a k-tile or, where taps share pixels, a filter row. copy_part issues
  // those copies into stage `stage` that come after row `done` of the `all` rows of mma of unit `unit`.
  constexpr int kUnits = Traits::kTaps * kSteps;
  auto const copy_part = [&](int unit, int stage, int done, int all) {
    int const group = Loader::kGroups == 1 ? 0 : unit / kSteps, part = Loader::kGroups == 1 ? unit : unit % kSteps;
    if (part >= Loader::kParts) return;
    int const copies = Loader::copies(group), begin = part * copies / Loader::kParts;
    int const count = (part + 1) * copies / Loader::kParts - begin;
    CUTE_UNROLL
    for (int i = 0; i < Loader::kMostCopies; ++i) {
      if (i < begin + (done - 1) * count / all || i >= begin + done * count / all) continue;
      loader.copy(group, i, stage, tXsX, tWsW);
    }
  };
  // ---- prologue: all stages but one ----
  // kStages k-tiles are in flight. The stage that all warps have read is filled again at once: part 0 of the copies
  // right after the barrier, the others between the mma of the next k-tile's steps.
  int read_stage = 0, write_stage = kTapStages ? 1 : kStages - 1;
  if constexpr (Traits::kSharesTaps) {
    auto const copy_filters = [&](int stage) {
      constexpr int kCount = kTapStages ? 1 : Traits::kTaps;
      CUTE_UNROLL
      for (int i = 0; i < Traits::kRowsW * kCount; ++i) {
        loader.copy_w(i / kCount, kTapStages ? stage : i % kCount, tWsW(_, _, _, stage * kCount + i % kCount));
      }
    };
    copy_filters(0);
    loader.locate(place, shared_w);  // the pixels, while the first filters are being copied
    CUTE_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage > 0) copy_filters(stage);
      if (!kTapStages || stage == 0) {
        CUTE_UNROLL
        for (int i = 0; i < Traits::kRowsX; ++i) loader.copy_x(i, tXsX(_, _, _, stage));
      }
      cp_async_fence();
      if (!kTapStages) loader.advance();
      if (kTapStages && stage == 0) loader.next_row();
    }
  } else {
    CUTE_NO_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      CUTE_UNROLL
      for (int unit = 0; unit < kUnits; ++unit) copy_part(unit, stage, 1, 1);
      cp_async_fence();
      loader.advance();
    }
  }
  copy_part(0, write_stage, 1, 1);

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(place.thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});                    // (MMA,MMA_M,MMA_N)
  Tensor rX = make_tensor<Element>(partition_shape_A(mma, Shape<Int<kM>, Int<kK>>{}));  // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));                             // (MMA,MMA_N,k_step)
  auto const s2r_x = make_tiled_copy_A(typename Traits::S2R{}, mma);
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  Tensor tSsW = s2r_w.get_slice(place.thread).partition_S(sW);  // (copy,N,k_step,stage)
  Tensor tSrW = s2r_w.get_slice(place.thread).retile_D(rW);     // (copy,N,k_step)
  auto reader = [&] {
    if constexpr (Traits::kSharesTaps) {
      return HaloReader<Traits>(params, place, cast_smem_ptr_to_uint(shared_x));
    } else {
      return s2r_x.get_slice(place.thread).partition_S(sX);  // (copy,M,k_step,stage)
    }
  }();
  auto const fetch = [&](int tap, int step, int slot) {  // into the fragments' k_step `slot`
    if constexpr (Traits::kSharesTaps) {
      reader.fetch(tap, step, read_stage, rX(_, _, slot));
      copy(s2r_w, tSsW(_, _, step, kTapStages ? tap : read_stage * kRowTaps + tap), tSrW(_, _, slot));
    } else {
      Tensor tSrX = s2r_x.get_slice(place.thread).retile_D(rX);  // (copy,M,k_step)
      copy(s2r_x, reader(_, _, step, read_stage), tSrX(_, _, slot));
      copy(s2r_w, tSsW(_, _, step, read_stage), tSrW(_, _, slot));
      pre.fetch(step, slot);
    }
  };

  // ---- main loop ----
  // leave() runs at the last unit of a stage, whose fragments are then in registers. When it returns, the next stage
  // has arrived and all warps have read this one.
  auto const is_last = [](int unit) { return unit == kUnits - 1 || (kTapStages && unit % kSteps == kSteps - 1); };
  auto const leave = [&](int unit) {
    cp_async_fence();
    if (unit == kUnits - 1) loader.advance(), pre.advance();
    if constexpr (kTapStages) {
      if (unit == kUnits - 1) write_stage ^= 1;
      reader.leave(unit / kSteps);
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if constexpr (!kTapStages) {
      write_stage = read_stage;
      read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
    }
  };
  SourceSums<Traits, decltype(acc)> sums;
  sums.start(params, place, acc);
  auto const end_round = [&](int round) {  // of float8: adds the sums of a few k-tiles to those in float32
    if (Traits::kInexact && round % kInexactTiles == 0) sums.drain(params, shared, read.source, acc);
  };
  cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0, 0, 0);

  if (kFewChannels) read.left = kK;                                        // taps take the place of channels
  for (int to_read = k_blocks;;) {                                         // a source at a time
    int const whole = min((read.left + Traits::kMmaK - 1) / kK, to_read);  // blocks with channels for every mma step
    // Passes over the units for each channel block.
    int const rounds = Traits::kSharesTaps ? p.R : kFewChannels ? ceil_div(params.taps, Traits::kChunks) : params.taps;
    CUTE_NO_UNROLL
    for (int round = whole * rounds; round > 0; --round) {
      CUTE_UNROLL
      for (int unit = 0; unit < kUnits; ++unit) {
        int const next = (unit + 1) % kUnits;
        if (is_last(unit)) leave(unit);
        if (kSlots > 1) fetch(next / kSteps, next % kSteps, next % kSlots);
        pre.apply(rX(_, _, unit % kSlots), unit % kSlots);
        multiply<Traits>(rX, rW, acc, unit % kSlots,
                         [&](int done, int all) { copy_part(next, write_stage, done, all); });
        if (kSlots == 1) fetch(next / kSteps, next % kSteps, 0);
      }
      end_round(round);
    }
    to_read -= whole, read.left -= whole * kK;
    if (to_read > 0 && read.left > 0) {  // the source's last channels: no step is spent on those that do not exist
      int const steps = ceil_div(read.left, Traits::kMmaK);
      auto const multiply_alone = [&](int slot) {
        pre.apply(rX(_, _, slot), slot);
        multiply<Traits>(rX, rW, acc, slot, [](int, int) {});
      };
      CUTE_NO_UNROLL
      for (int round = rounds; round > 0; --round) {
        CUTE_UNROLL
        for (int tap = 0; tap < Traits::kTaps; ++tap) {
          int const first = tap * kSteps, next = (first + kSteps) % kUnits;
          CUTE_UNROLL
          for (int step = 1; step < kSteps; ++step) copy_part(first + step, write_stage, 1, 1);
          multiply_alone(0);
          if constexpr (kTapStages) {  // unrolled three times, it would need more registers than there are
            CUTE_NO_UNROLL
            for (int step = 1; step < steps; ++step) fetch(tap, step, 0), multiply_alone(0);
          } else {
            CUTE_UNROLL
            for (int step = 1; step < kSteps - 1; ++step) {
              if (step >= steps) break;
              fetch(tap, step, step), multiply_alone(step);
            }
          }
          if (is_last(first + kSteps - 1)) leave(first + kSteps - 1);
          copy_part(next, write_stage, 1, 1);
          fetch(next / kSteps, 0, 0);
        }
        end_round(round);
      }
      --to_read;
    }
    if (to_read == 0) break;
    sums.drain(params, shared, read.source, acc);
    read.left = p.C[++read.source];
  }

  // ---- epilogue ----
  if constexpr (Traits::kScaled) sums.drain_last(params, shared, read.source, acc);
  cp_async_wait<0>();
  __syncthreads();
  if constexpr (Traits::kTile.drains()) {
    store_scaled<Traits>(params, shared, 1.f, sums.sum);
  } else if constexpr (Traits::kScaled) {
    store_scaled<Traits>(params, shared, p.scale[0], acc);
  } else {
    add_teams<Traits>(acc, shared, place.thread);
    store_tile<Traits>(params, acc, shared);
  }
}

}  // namespace cutefuse::conv
