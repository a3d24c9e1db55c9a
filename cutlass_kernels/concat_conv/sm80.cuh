// ConcatConv as implicit GEMM for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync -> shared -> global.
// M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles.
#pragma once

#include "epilogue.cuh"
#include "sm80_copy.cuh"
#include "sm80_split.cuh"
#include "sm80_store.cuh"
#include "sm80_traits.cuh"

namespace cutefuse::concat_conv {

// float32 bits -> nearest tf32; without it the tensor core truncates and the error doubles.
template <class Engine, class Shape>
__device__ __forceinline__ void round_to_tf32(Tensor<Engine, Shape> &&fragment) {
  auto r = recast<uint32_t>(fragment);
  CUTE_UNROLL
  for (int i = 0; i < size(r); ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r(i)) : "f"(__uint_as_float(r(i))));
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    concat_conv_sm80(Params const __grid_constant__ params) {
  using Element = typename Traits::Element;
  using Output = typename Traits::Output;
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages, kVector = Traits::kVector;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  int const thread = threadIdx.x;

  // Filter tiles are fastest, so that the blocks which read the same pixels run together.
  int const tiles_n = ceil_div(p.K, kN);
  int const split = params.splits > 1 ? blockIdx.x % params.splits : 0;
  int const output_tile = params.splits > 1 ? blockIdx.x / params.splits : blockIdx.x;
  int const m0 = output_tile / tiles_n * kM, n0 = output_tile % tiles_n * kN;
  int const pixels = p.N * p.P * p.Q;

  Element *const shared_x = reinterpret_cast<Element *>(shared);
  Element *const shared_w = shared_x + cosize_v<typename Traits::SmemX>;
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});  // (M,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});  // (N,K,stage)

  // ---- g2s: each thread copies one column chunk of kRowsX pixels and kRowsW filters ----
  auto const g2s = typename Traits::G2S{}.get_slice(thread);
  Tensor tXsX = g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = g2s.partition_D(sW);  // (vector,kRowsW,1,stage)
  int const row = thread / Traits::kChunks, column = thread % Traits::kChunks * kVector;

  SourceRows<Traits> rows;
  CUTE_UNROLL
  for (int i = 0; i < Traits::kRowsX; ++i) {
    int const m = m0 + row + i * Traits::kRowsPerPass;
    rows.set(i, p, pixel_of(p, params.by_image, params.by_row, m < pixels ? m : 0), m < pixels);
  }
  int const columns = params.columns, filters_left = p.K - n0 - row;
  int64_t const pass_bytes = int64_t(Traits::kRowsPerPass) * columns * sizeof(Element);

  // The k-tile to copy next. Everything a row needs is one add and one multiply-add away: these few scalars are all
  // that changes, so that address arithmetic fits between the mma instructions.
  KBlock<kK> write(p);
  int filter_column = column;
  int const first_block = params.k_blocks * split / params.splits;
  for (int i = 0; i < first_block; ++i) {
    filter_column += p.R * p.S * kChannelBlock + write.filter_step(p.R * p.S);
    write.advance(p);
  }
  int const k_blocks = params.k_blocks * (split + 1) / params.splits - first_block;
  KBlock<kK> read = write;
  Tap tap;
  char const *from_x,
      *from_w = static_cast<char const *>(params.w) + (int64_t(n0 + row) * columns + filter_column) * sizeof(Element);
  int ld_bytes;
  auto const enter_source = [&] {
    int const channel = p.C[write.source] - write.left + column;
    from_x = static_cast<char const *>(params.x[write.source]) + channel * sizeof(Element);
    ld_bytes = int(p.ldx[write.source] * sizeof(Element));
    rows.enter_source(params, write.source);
  };
  enter_source();
  auto const next_tap = [&] {
    from_w += kChannelBlock * sizeof(Element);
    if (!tap.advance(p)) return;
    from_x += kK * sizeof(Element);
    from_w += write.filter_step(p.R * p.S) * int(sizeof(Element));
    if (write.advance(p) && write.source < p.sources) enter_source();
  };
  // Issues part `part` of `parts` of the k-tile: spread over the mma steps, the copies never form a burst. Channels
  // past the source's end read as zero: pad lanes may hold anything, and NaN times zero is NaN.
  auto const load = [&](int stage, int part, int parts) {
    int const left = write.left - column;
    int const bytes = !Traits::kTile.any_channels ? 16 : left < kVector ? left * int(sizeof(Element)) : 16;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsX; ++i) {
      if (i * parts / Traits::kRowsX != part) continue;
      bool const inside = left > 0 && rows.inside(i, tap);
      char const *const from = from_x + int64_t(rows.at(i, tap)) * ld_bytes;
      if constexpr (Traits::kTile.any_stride) {
        g2s_by_element(&tXsX(0, i, 0, stage), from, inside ? bytes : 0);
      } else {
        g2s_activation(&tXsX(0, i, 0, stage), from, inside ? bytes : 0);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsW; ++i) {
      if (i * parts / Traits::kRowsW != part) continue;
      g2s_filter(&tWsW(0, i, 0, stage), from_w + i * pass_bytes, i * Traits::kRowsPerPass < filters_left ? 16 : 0);
    }
    if (part == parts - 1) next_tap();
  };

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});  // (MMA,MMA_M,MMA_N)
  Tensor rX = thread_mma.partition_fragment_A(sX(_, _, 0));           // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));           // (MMA,MMA_N,k_step)
  auto const s2r_x = make_tiled_copy_A(typename Traits::S2R{}, mma);
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  auto const thread_s2r_x = s2r_x.get_slice(thread);
  auto const thread_s2r_w = s2r_w.get_slice(thread);
  Tensor tSsX = thread_s2r_x.partition_S(sX);  // (copy,M,k_step,stage)
  Tensor tSsW = thread_s2r_w.partition_S(sW);  // (copy,N,k_step,stage)
  Tensor tSrX = thread_s2r_x.retile_D(rX);     // (copy,M,k_step)
  Tensor tSrW = thread_s2r_w.retile_D(rW);     // (copy,N,k_step)
  constexpr int kSteps = kK / Traits::kMmaK;
  auto const fetch = [&](int step, int stage) {
    copy(s2r_x, tSsX(_, _, step, stage), tSrX(_, _, step));
    copy(s2r_w, tSsW(_, _, step, stage), tSrW(_, _, step));
    if constexpr (Traits::kTf32) {
      round_to_tf32(rX(_, _, step));
      round_to_tf32(rW(_, _, step));
    }
  };

  // ---- main loop: kStages - 1 k-tiles in flight, the next mma step's fragments on their way ----
  int to_load = k_blocks * p.R * p.S;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (to_load-- > 0) load(stage, 0, 1);
    cp_async_fence();  // also when nothing was issued: the groups are counted
  }
  int read_stage = 0, write_stage = kStages - 1;
  auto const enter_next_stage = [&] {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
    write_stage = write_stage == kStages - 1 ? 0 : write_stage + 1;
  };
  // The sums start at the bias, whose loads hide behind those of the first tiles; of several splits, the first has it.
  Tensor tYcY = thread_mma.partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));  // (MMA,MMA_M,MMA_N) -> (m,n)
  CUTE_UNROLL
  for (int j = 0; j < size<2>(acc); ++j) {
    int const k = n0 + get<1>(tYcY(0, 0, j));  // this thread holds channels k and k + 1
    float const bias[2] = {split == 0 && k < p.K ? __ldg(params.b + k) : 0.f,
                           split == 0 && k + 1 < p.K ? __ldg(params.b + k + 1) : 0.f};
    CUTE_UNROLL
    for (int i = 0; i < size(acc(_, _, 0)); ++i) acc(_, _, j)(i) = bias[i % 2];
  }
  cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0, 0);

  for (int to_read = k_blocks; to_read > 0; --to_read, read.advance(p)) {
    int const steps = ceil_div(read.left, Traits::kMmaK);  // none are spent on channels that do not exist
    if (steps >= kSteps) {
      CUTE_NO_UNROLL
      for (int taps = p.R * p.S; taps > 0; --taps) {
        bool const more = to_load-- > 0;
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          if (step == kSteps - 1) {
            cp_async_fence();
            enter_next_stage();
          } else if (more) {
            load(write_stage, step, kSteps - 1);
          }
          fetch((step + 1) % kSteps, read_stage);
          gemm(mma, rX(_, _, step), rW(_, _, step), acc);
        }
      }
    } else {  // a source's last channels: short, so simple
      CUTE_NO_UNROLL
      for (int taps = p.R * p.S; taps > 0; --taps) {
        if (to_load-- > 0) load(write_stage, 0, 1);
        cp_async_fence();
        gemm(mma, rX(_, _, 0), rW(_, _, 0), acc);
        CUTE_UNROLL
        for (int step = 1; step < kSteps - 1; ++step) {
          if (step >= steps) break;
          fetch(step, read_stage);
          gemm(mma, rX(_, _, step), rW(_, _, step), acc);
        }
        enter_next_stage();
        fetch(0, read_stage);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  if (params.splits > 1) {  // leave the sums to concat_conv_sm80_finish: [split][pixel][channel]
    float *const part = params.partials + int64_t(split) * pixels * split_ld(p);
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 2) {
      int const m = m0 + get<0>(tYcY(i)), k = n0 + get<1>(tYcY(i));
      if (m < pixels && k < split_ld(p)) {
        __stcg(reinterpret_cast<float2 *>(part + int64_t(m) * split_ld(p) + k), make_float2(acc(i), acc(i + 1)));
      }
    }
    return;
  }

  // ---- epilogue: residual and activation in registers, r2s, then 16-byte s2g ----
  Tensor sY = make_tensor(make_smem_ptr(reinterpret_cast<Output *>(shared)), typename Traits::SmemY{});  // (M,N)
  Tensor tYsY = thread_mma.partition_C(sY);  // (MMA,MMA_M,MMA_N)
  if (p.residual != Residual::kNone) load_residual<Traits>(params, sY, m0, n0);
  struct alignas(2 * sizeof(Output)) Pair {
    Output v[2];
  };
  CUTE_UNROLL
  for (int j = 0; j < size<2>(acc); ++j) {
    int const k = n0 + get<1>(tYcY(0, 0, j));
    Tensor column = acc(_, _, j);  // (MMA,MMA_M)
    auto const pair_of = [&](int i) -> Pair & { return *reinterpret_cast<Pair *>(&tYsY(_, _, j)(i)); };
    auto const add_residual = [&] {  // each thread reads just the elements that it will overwrite
      CUTE_UNROLL
      for (int i = 0; i < size(column); i += 2) {
        column(i) += float(pair_of(i).v[0]), column(i + 1) += float(pair_of(i).v[1]);
      }
    };
    if (p.residual == Residual::kBefore) add_residual();
    activate(column, p);
    if (p.residual == Residual::kAfter) add_residual();
    CUTE_UNROLL
    for (int i = 0; i < size(column); i += 2) {
      Pair pair;  // pad lanes of the output are zeros
      pair.v[0] = k < p.K ? Output(column(i)) : Output(0);
      pair.v[1] = k + 1 < p.K ? Output(column(i + 1)) : Output(0);
      pair_of(i) = pair;
    }
  }
  __syncthreads();

  int const n = thread % Traits::kChunksY * kVector, k = n0 + n;
  if (k >= p.K) return;
  Target<Output> const target(params, k);
  CUTE_UNROLL
  for (int i = 0; i < kM; i += Traits::kRowsY) {
    int const m = m0 + i + thread / Traits::kChunksY;
    if (m < pixels) target.store(m, &sY(i + thread / Traits::kChunksY, n));
  }
}

}  // namespace cutefuse::concat_conv
