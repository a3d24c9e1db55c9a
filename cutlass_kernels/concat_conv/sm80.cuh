// ConcatConv as implicit GEMM for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync -> shared -> global.
// M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles.
#pragma once

#include <cutlass/array.h>
#include <cutlass/numeric_types.h>

#include <atomic>
#include <cute/tensor.hpp>

#include "epilogue.cuh"
#include "sm80_split.cuh"
#include "tiles.h"

namespace cutefuse::concat_conv {

using namespace cute;
using cute::Layout;  // here the names mean CuTe's, not those of op.h
using cute::Tensor;

// ---- types ----------------------------------------------------------------------------------------------------------

template <class Element>
struct MmaOf;
template <>
struct MmaOf<cutlass::half_t> {
  using Op = SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaOf<cutlass::bfloat16_t> {
  using Op = SM80_16x8x16_F32BF16BF16F32_TN;
};
template <>
struct MmaOf<cutlass::tfloat32_t> {
  using Op = SM80_16x8x8_F32TF32TF32F32_TN;
};

// Element is the type the tensor cores read; memory holds the same bits (float32 is rounded to tf32 in registers).
template <class Element_, int kTileId>
struct Sm80 {
  using Element = Element_;
  static constexpr Tile kTile = *find_tile(kTileId);
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kTile.k, kStages = kTile.stages, kThreads = kTile.threads();
  static constexpr bool kTf32 = sizeof(Element) == 4;
  using Output = std::conditional_t<kTf32, float, Element>;
  static_assert(kTile.type_bytes == sizeof(Element));

  using Atom = MMA_Atom<typename MmaOf<Element>::Op>;
  static constexpr int kMmaK = size<2>(typename Atom::Shape_MNK{});
  // 16 columns a warp, two mma wide: one ldmatrix.x4 then fills the filter fragments of both.
  using Mma = TiledMMA<Atom, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, _1>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  static_assert(size(Mma{}) == kThreads);
  static_assert(kM % (kTile.warps_m * 16) == 0 && kN % (kTile.warps_n * 16) == 0 && kK % kMmaK == 0);

  // 16-byte chunks are XORed with the row, so that ldmatrix reads and 16-byte writes touch every bank once.
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kVectorBits = kTf32 ? 2 : 3;
  template <int kColumns>
  using SwizzleAtom = decltype(composition(Swizzle<(kColumns * sizeof(Element) >= 128 ? 3 : 2), kVectorBits, 3>{},
                                           Layout<Shape<_8, Int<kColumns>>, Stride<Int<kColumns>, _1>>{}));
  using SmemAtom = SwizzleAtom<kK>;
  using SmemX = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kM>, Int<kK>, Int<kStages>>{}));  // (M,K,stage)
  using SmemW = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kN>, Int<kK>, Int<kStages>>{}));  // (N,K,stage)
  static constexpr int kColumnsY = kN < 128 / int(sizeof(Element)) ? kN : 128 / int(sizeof(Element));
  using SmemY = decltype(tile_to_shape(SwizzleAtom<kColumnsY>{}, Shape<Int<kM>, Int<kN>>{}));  // (M,N)
  static constexpr int kSharedBytes =
      int(sizeof(Element)) * cute::max(int(cosize_v<SmemX> + cosize_v<SmemW>), int(cosize_v<SmemY>));
  static_assert(kSharedBytes == kTile.shared_bytes(), "the host's table must agree with the kernel");

  static constexpr int kChunks = kK / kVector;             // 16-byte chunks in a row of a k-tile
  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  static constexpr int kRowsX = kM / kRowsPerPass, kRowsW = kN / kRowsPerPass;
  static_assert(kM % kRowsPerPass == 0 && kN % kRowsPerPass == 0);
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
};

// Copies 16 bytes, of which `bytes` are read and the rest becomes zero: halo, channel tails and rows past the end.
// Activations go through L1 (.ca), where the other taps of a filter find them; filters bypass it (.cg).
__device__ __forceinline__ void g2s_activation(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

__device__ __forceinline__ void g2s_filter(void *shared, void const *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(bytes));
}

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

  int pixel[Traits::kRowsX];       // linear index of the input pixel under tap (0,0); may lie in the halo
  uint32_t valid[Traits::kRowsX];  // bit r: filter row r falls inside the image; bit 16 + s: filter column s does
  static_assert(2 * kMaxTaps <= 32);
  CUTE_UNROLL
  for (int i = 0; i < Traits::kRowsX; ++i) {
    int const m = m0 + row + i * Traits::kRowsPerPass;
    Pixel const at = pixel_of(p, params.by_image, params.by_row, m < pixels ? m : 0);
    pixel[i] = (at.n * p.H + at.h0) * p.W + at.w0;
    valid[i] = m < pixels ? valid_taps(at.h0, p.R, p.dilation_h, p.H) : 0;
    valid[i] |= valid_taps(at.w0, p.S, p.dilation_w, p.W) << kMaxTaps;
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
  int r = 0, s = 0, tap = 0;  // filter tap, and its distance from tap (0,0) in pixels
  uint32_t tap_bits = 1u | 1u << kMaxTaps;
  char const *from_x,
      *from_w = static_cast<char const *>(params.w) + (int64_t(n0 + row) * columns + filter_column) * sizeof(Element);
  int ld_bytes;
  auto const enter_source = [&] {
    int const channel = p.C[write.source] - write.left + column;
    from_x = static_cast<char const *>(params.x[write.source]) + channel * sizeof(Element);
    ld_bytes = int(p.ldx[write.source] * sizeof(Element));
  };
  enter_source();
  auto const next_tap = [&] {
    ++s, tap += p.dilation_w, tap_bits += tap_bits & 0xffff0000u, from_w += kChannelBlock * sizeof(Element);
    if (s < p.S) return;
    s = 0, ++r, tap = r * p.dilation_h * p.W, tap_bits = 1u << r | 1u << kMaxTaps;
    if (r < p.R) return;
    r = 0, tap = 0, tap_bits = 1u | 1u << kMaxTaps;
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
      bool const inside = left > 0 && (valid[i] & tap_bits) == tap_bits;
      g2s_activation(&tXsX(0, i, 0, stage), from_x + int64_t(pixel[i] + tap) * ld_bytes, inside ? bytes : 0);
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

  // ---- epilogue: activation in registers, r2s, then 16-byte s2g ----
  Tensor sY = make_tensor(make_smem_ptr(reinterpret_cast<Output *>(shared)), typename Traits::SmemY{});  // (M,N)
  Tensor tYsY = thread_mma.partition_C(sY);  // (MMA,MMA_M,MMA_N)
  CUTE_UNROLL
  for (int j = 0; j < size<2>(acc); ++j) {
    int const k = n0 + get<1>(tYcY(0, 0, j));
    Tensor column = acc(_, _, j);  // (MMA,MMA_M)
    activate(column, p);
    CUTE_UNROLL
    for (int i = 0; i < size(column); i += 2) {
      cutlass::Array<Output, 2> pair;  // pad lanes of the output are zeros
      pair[0] = k < p.K ? Output(column(i)) : Output(0);
      pair[1] = k + 1 < p.K ? Output(column(i + 1)) : Output(0);
      *reinterpret_cast<cutlass::Array<Output, 2> *>(&tYsY(_, _, j)(i)) = pair;
    }
  }
  __syncthreads();

  constexpr int kChunksY = kN / kVector, kRowsY = Traits::kThreads / kChunksY;
  static_assert(Traits::kThreads % kChunksY == 0 && kM % kRowsY == 0);
  int const n = thread % kChunksY * kVector, k = n0 + n;
  Output *const gY = static_cast<Output *>(params.y) + k;
  // float32 pixels are not padded: the last vector, or every one when the stride is odd, goes out by elements.
  bool const whole = p.ldy % kVector == 0 && (sizeof(Element) == 2 || k + kVector <= p.K);
  CUTE_UNROLL
  for (int i = 0; i < kM; i += kRowsY) {
    int const m = m0 + i + thread / kChunksY;
    if (m >= pixels || k >= p.K) continue;
    Output const *const from = &sY(i + thread / kChunksY, n);
    Output *const to = gY + int64_t(m) * p.ldy;
    if (whole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<uint4 const *>(from);
    } else {
      for (int v = 0; v < kVector && k + v < p.K; ++v) to[v] = from[v];
    }
  }
}

// ---- launcher -------------------------------------------------------------------------------------------------------

// Null when the kernel was enqueued, else one sentence. Raises the kernel's shared-memory limit once per device.
template <class Traits>
char const *launch_sm80(Params params, void *stream) {
  params.k_blocks = k_blocks<Traits::kK>(params.problem);
  auto *const kernel = &concat_conv_sm80<Traits>;
  static std::atomic<uint64_t> ready{0};  // one bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (error == cudaSuccess && !(ready.load(std::memory_order_relaxed) & bit)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
    ready.fetch_or(error == cudaSuccess ? bit : 0, std::memory_order_relaxed);
  }
  Problem const &p = params.problem;
  int64_t const tiles = int64_t(ceil_div(p.N * p.P * p.Q, Traits::kM)) * ceil_div(p.K, Traits::kN);
  int64_t const blocks = tiles * params.splits;
  if (blocks > 0x7fffffff) {
    return sentence("concat_conv: %lld blocks exceed the 2^31 of one launch; split the batch", (long long)blocks);
  }
  if (error == cudaSuccess) {
    kernel<<<unsigned(blocks), Traits::kThreads, Traits::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess && params.splits > 1) {
    error = launch_finish<typename Traits::Output>(params, static_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return nullptr;
  return sentence("concat_conv: tile %s could not be launched (%s); check that the library was built for this GPU",
                  Traits::kTile.name, cudaGetErrorString(error));
}

// One switch per element type over the tiles of the table that it can run.
template <class Element, int... kTileIds>
char const *launch_sm80_tile(int tile_id, Params const &params, void *stream) {
  char const *reason = nullptr;
  bool const found =
      ((tile_id == kTileIds && (reason = launch_sm80<Sm80<Element, kTileIds>>(params, stream), true)) || ...);
  return found ? reason : sentence("concat_conv: tile %d is not built for this type", tile_id);
}

}  // namespace cutefuse::concat_conv
