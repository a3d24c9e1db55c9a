// The int8 ConcatConv for sm_80 and newer: cp.async multistage -> ldmatrix -> mma.sync on int8 -> shared -> global.
// M = N*P*Q output pixels, N = K output channels, reduction over (source, channel block, r, s) in k-tiles of 64 bytes.
#pragma once

#include <cute/tensor.hpp>

#include "epilogue.cuh"

namespace cutefuse::quant_concat_conv {

using namespace cute;
using concat_conv::KBlock;
using concat_conv::kMaxTaps;
using concat_conv::Pixel;
using cute::Layout;  // here the names mean CuTe's, not those of op.h
using cute::Tensor;

// ---- types ----------------------------------------------------------------------------------------------------------

template <int kTileId>
struct Sm80 {
  static constexpr quant_concat_conv::Tile kTile = *find_tile(kTileId);
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kChannelBlock, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads(), kMmaK = 32, kSteps = kK / kMmaK;

  // 16 columns a warp, two mma wide: one ldmatrix.x4 then fills the filter fragments of both.
  using Mma = TiledMMA<MMA_Atom<SM80_16x8x32_S32S8S8S32_TN>, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, _1>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  static_assert(size(Mma{}) == kThreads && kM % (kTile.warps_m * 16) == 0 && kN % (kTile.warps_n * 16) == 0);

  // The four 16-byte chunks of a row are XORed with bits 1 and 2 of the row: ldmatrix then touches every bank once.
  using Atom = decltype(composition(Swizzle<2, 4, 3>{}, Layout<Shape<_8, Int<kK>>, Stride<Int<kK>, _1>>{}));
  using SmemX = decltype(tile_to_shape(Atom{}, Shape<Int<kM>, Int<kK>, Int<kStages>>{}));  // (M,K,stage)
  using SmemW = decltype(tile_to_shape(Atom{}, Shape<Int<kN>, Int<kK>, Int<kStages>>{}));  // (N,K,stage)
  static_assert(kTile.shared_bytes() >= int(cosize_v<SmemX> + cosize_v<SmemW>) + 8 * kN);

  static constexpr int kChunks = kK / kVector;             // 16-byte chunks in a row of a k-tile
  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  static constexpr int kRowsX = kM / kRowsPerPass, kRowsW = kN / kRowsPerPass;
  static_assert(kM % kRowsPerPass == 0 && kN % kRowsPerPass == 0);
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, int8_t>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, int8_t>;
};

// Copies 16 bytes, or writes zeros: halo, channels past the source's end and rows past the last. Activations go through
// L1 (.ca), where the other taps of a filter find them; filters bypass it (.cg).
template <bool kThroughL1>
__device__ __forceinline__ void g2s_chunk(void *shared, void const *global, bool inside) {
  uint32_t const to = cast_smem_ptr_to_uint(shared);
  int const bytes = inside ? 16 : 0;
  if constexpr (kThroughL1) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes));
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes));
  }
}

// ---- g2s: what one thread copies, k-tile after k-tile ---------------------------------------------------------------

// Column chunk `column` of kRowsX pixels and kRowsW filters; `at` is the k-tile to copy next.
template <class Traits>
struct Loader {
  Params const &params;
  Problem const &p;
  int const m0, row, column;
  int64_t offset[Traits::kRowsX];  // bytes from the source's start to the pixel under tap (0,0); may lie in the halo
  uint32_t valid[Traits::kRowsX];  // bit r: filter row r falls inside the image; bit 16 + s: filter column s does
  KBlock<Traits::kK> at;
  int filters_left;
  int8_t const *from_x = nullptr, *from_w;
  int64_t block_bytes = 0, filter_pass;
  int pixel_bytes = 0, r = 0, s = 0, tap = 0;
  uint32_t tap_bits = 1u | 1u << kMaxTaps;

  __device__ __forceinline__ Loader(Params const &params, int m0, int n0, int thread)
      : params(params),
        p(params.problem),
        m0(m0),
        row(thread / Traits::kChunks),
        column(thread % Traits::kChunks * kVector),
        at(p),
        filters_left(p.K - n0 - row),
        from_w(params.w + int64_t(n0 + row) * params.columns + column),
        filter_pass(int64_t(Traits::kRowsPerPass) * params.columns) {
    for_rows([&](int i, Pixel const &pixel, bool exists) {
      valid[i] = exists ? concat_conv::valid_taps(pixel.h0, p.R, p.dilation_h, p.H) : 0;
      valid[i] |= concat_conv::valid_taps(pixel.w0, p.S, p.dilation_w, p.W) << kMaxTaps;
    });
  }

  template <class Body>
  __device__ __forceinline__ void for_rows(Body const &body) {
    int const pixels = p.N * p.P * p.Q;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsX; ++i) {
      int const m = m0 + row + i * Traits::kRowsPerPass;
      body(i, pixel_of(p, params.by_image, params.by_row, m < pixels ? m : 0), m < pixels);
    }
  }

  // Skips channel blocks that belong to another split.
  __device__ __forceinline__ void skip(int blocks) {
    for (int i = 0; i < blocks; ++i) at.advance(p);
    from_w += int64_t(blocks) * p.R * p.S * Traits::kK;
    enter_source();
  }

  __device__ __forceinline__ void enter_source() {
    int const source = at.source, block = (p.C[source] - at.left) / Traits::kK;
    Strides const to = strides_of(p.layout, p.ldx[source], p.C[source], int64_t(p.H) * p.W);
    block_bytes = Traits::kK / kLayoutBlock * to.block, pixel_bytes = to.pixel;
    from_x = params.x[source] + block * block_bytes + column / kLayoutBlock * to.block + column % kLayoutBlock;
    for_rows([&](int i, Pixel const &pixel, bool) {
      offset[i] = pixel.n * to.image + (int64_t(pixel.h0) * p.W + pixel.w0) * to.pixel;
    });
  }

  // Issues the copies of one k-tile into a stage and steps to the next k-tile.
  template <class TXsX, class TWsW>
  __device__ __forceinline__ void load(TXsX const &tXsX, TWsW const &tWsW, int stage) {
    int8_t const *const from = from_x + int64_t(tap) * pixel_bytes;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsX; ++i) {
      bool const inside = column < at.left && (valid[i] & tap_bits) == tap_bits;
      g2s_chunk<true>(&tXsX(0, i, 0, stage), from + offset[i], inside);
    }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsW; ++i) {
      g2s_chunk<false>(&tWsW(0, i, 0, stage), from_w + i * filter_pass, i * Traits::kRowsPerPass < filters_left);
    }
    from_w += Traits::kK;
    tap += p.dilation_w, tap_bits += tap_bits & 0xffff0000u;
    if (++s < p.S) return;
    s = 0, tap = ++r * p.dilation_h * p.W, tap_bits = 1u << r | 1u << kMaxTaps;
    if (r < p.R) return;
    r = 0, tap = 0, tap_bits = 1u | 1u << kMaxTaps;
    from_x += block_bytes;
    if (at.advance(p) && at.source < p.sources) enter_source();
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    quant_concat_conv_sm80(Params const __grid_constant__ params) {
  constexpr int kM = Traits::kM, kN = Traits::kN, kStages = Traits::kStages, kThreads = Traits::kThreads;
  constexpr bool kDrains = Traits::kTile.drains;
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  int const thread = threadIdx.x;

  // Filter tiles are fastest, so that the blocks which read the same pixels run together.
  int const tiles_n = ceil_div(p.K, kN), split = blockIdx.x % params.splits, tile = blockIdx.x / params.splits;
  int const m0 = tile / tiles_n * kM, n0 = tile % tiles_n * kN, pixels = p.N * p.P * p.Q;

  int8_t *const shared_x = reinterpret_cast<int8_t *>(shared), *const shared_w =
                                                                   shared_x + cosize_v<typename Traits::SmemX>;
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});                             // (M,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});                             // (N,K,stage)
  float2 *const scale_and_bias = reinterpret_cast<float2 *>(shared + Traits::kTile.shared_bytes()) - kN;  // (N)
  for (int n = thread; n < kN; n += kThreads) {
    bool const exists = n0 + n < p.K;
    scale_and_bias[n] = exists ? make_float2(__ldg(params.w_scale + n0 + n), __ldg(params.b + n0 + n)) : float2{};
  }

  auto const g2s = typename Traits::G2S{}.get_slice(thread);
  Tensor tXsX = g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = g2s.partition_D(sW);  // (vector,kRowsW,1,stage)
  int const first_block = params.k_blocks * split / params.splits;
  int const k_blocks = params.k_blocks * (split + 1) / params.splits - first_block;
  Loader<Traits> loader(params, m0, n0, thread);
  loader.skip(first_block);
  KBlock<Traits::kK> read = loader.at;

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});  // (MMA,MMA_M,MMA_N)
  Tensor rX = thread_mma.partition_fragment_A(sX(_, _, 0));           // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));           // (MMA,MMA_N,k_step)
  auto const s2r_x = make_tiled_copy_A(typename Traits::S2R{}, mma);
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  Tensor tSsX = s2r_x.get_slice(thread).partition_S(sX);  // (copy,M,k_step,stage)
  Tensor tSsW = s2r_w.get_slice(thread).partition_S(sW);  // (copy,N,k_step,stage)
  Tensor tSrX = s2r_x.get_slice(thread).retile_D(rX);     // (copy,M,k_step)
  Tensor tSrW = s2r_w.get_slice(thread).retile_D(rW);     // (copy,N,k_step)
  auto const fetch = [&](int step, int stage) {
    copy(s2r_x, tSsX(_, _, step, stage), tSrX(_, _, step));
    copy(s2r_w, tSsW(_, _, step, stage), tSrW(_, _, step));
  };

  // ---- drain: at a source's end its integers, times its scale, join the float32 sums ----
  auto sum = make_tensor<float>(shape(acc));  // as acc; only tiles that drain keep it through the main loop
  clear(acc);
  clear(sum);
  auto const drain = [&](int source) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) sum(i) = fmaf(float(acc(i)), p.scale[source], sum(i)), acc(i) = 0;
  };

  // ---- main loop: kStages - 1 k-tiles in flight, the next mma step's fragments on their way ----
  int to_load = k_blocks * p.R * p.S, read_stage = 0, write_stage = kStages - 1;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (to_load-- > 0) loader.load(tXsX, tWsW, stage);
    cp_async_fence();  // also when nothing was issued: the groups are counted
  }
  cp_async_wait<kStages - 2>();
  __syncthreads();
  fetch(0, 0);
  for (int to_read = k_blocks; to_read > 0; --to_read) {
    bool const second = read.left > Traits::kMmaK;  // no mma is spent on channels that do not exist
    CUTE_NO_UNROLL
    for (int taps = p.R * p.S; taps > 0; --taps) {
      if (to_load-- > 0) loader.load(tXsX, tWsW, write_stage);
      cp_async_fence();
      fetch(1, read_stage);
      gemm(mma, rX(_, _, 0), rW(_, _, 0), acc);
      cp_async_wait<kStages - 2>();
      __syncthreads();
      read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
      write_stage = write_stage == kStages - 1 ? 0 : write_stage + 1;
      fetch(0, read_stage);
      if (second) gemm(mma, rX(_, _, 1), rW(_, _, 1), acc);
    }
    int const source = read.source;
    bool const ends = read.advance(p);
    if (kDrains && (ends || to_read == 1)) drain(source);
  }
  if constexpr (!kDrains) drain(0);
  cp_async_wait<0>();
  __syncthreads();

  // ---- epilogue ----
  Tensor tYcY = thread_mma.partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));  // (MMA,MMA_M,MMA_N) -> (m,n)
  if (params.splits > 1) {  // leave the sums to quant_concat_conv_finish: [split][pixel][channel]
    float *const part = params.partials + int64_t(split) * pixels * split_ld(p);
    CUTE_UNROLL
    for (int i = 0; i < size(sum); i += 2) {
      int const m = m0 + get<0>(tYcY(i)), k = n0 + get<1>(tYcY(i));
      if (m >= pixels || k >= split_ld(p)) continue;
      __stcg(reinterpret_cast<float2 *>(part + int64_t(m) * split_ld(p) + k), make_float2(sum(i), sum(i + 1)));
    }
    return;
  }
  CUTE_UNROLL
  for (int j = 0; j < size<2>(sum); ++j) {
    Tensor column = sum(_, _, j);  // (MMA,MMA_M)
    float2 const even = scale_and_bias[get<1>(tYcY(0, 0, j))], odd = scale_and_bias[get<1>(tYcY(1, 0, j))];
    CUTE_UNROLL
    for (int i = 0; i < size(column); ++i) {
      column(i) = i % 2 == 0 ? fmaf(column(i), even.x, even.y) : fmaf(column(i), odd.x, odd.y);
    }
    concat_conv::activate(column, p);
  }
  with_output_type(p, [&](auto type) {
    using Output = decltype(type);
    constexpr int kRowBytes = kN * int(sizeof(Output)) + 16;  // 16: rows start in different banks
    float const inverse = 1.f / p.output_scale;
    CUTE_UNROLL
    for (int i = 0; i < size(sum); i += 2) {
      int const m = get<0>(tYcY(i)), n = get<1>(tYcY(i)), k = n0 + n;
      Output const pair[2] = {k < p.K ? output_of<Output>(sum(i), inverse) : Output(0),
                              k + 1 < p.K ? output_of<Output>(sum(i + 1), inverse) : Output(0)};
      if constexpr (sizeof(Output) == 4) {  // whole sectors already: four neighbouring threads hold eight channels
        if (m0 + m >= pixels) continue;
        Output *const to = output_at<Output>(params, m0 + m, k);
        if (k < p.K) to[0] = pair[0];
        if (k + 1 < p.K) to[1] = pair[1];
      } else {
        auto *const to = reinterpret_cast<Output *>(shared + m * kRowBytes) + n;
        to[0] = pair[0], to[1] = pair[1];  // the compiler joins both stores
      }
    }
    if constexpr (sizeof(Output) < 4) {
      __syncthreads();
      constexpr int kVectorY = 16 / int(sizeof(Output)), kChunksY = kN / kVectorY;
      int const end = stored_channels(p);
      CUTE_UNROLL
      for (int i = 0; i < kM * kChunksY; i += kThreads) {
        int const m = (i + thread) / kChunksY, n = (i + thread) % kChunksY * kVectorY;
        if (m0 + m >= pixels || n0 + n >= end) continue;
        *reinterpret_cast<uint4 *>(output_at<Output>(params, m0 + m, n0 + n)) =
            *reinterpret_cast<uint4 const *>(shared + m * kRowBytes + n * int(sizeof(Output)));
      }
    }
  });
}

// ---- launcher -------------------------------------------------------------------------------------------------------

// Null when the kernel was enqueued, else one sentence.
template <class Traits>
char const *launch_sm80(Params const &params, cudaStream_t stream) {
  constexpr quant_concat_conv::Tile kTile = Traits::kTile;
  Problem const &p = params.problem;
  int64_t const tiles = int64_t(ceil_div(p.N * p.P * p.Q, kTile.m)) * ceil_div(p.K, kTile.n) * params.splits;
  if (tiles > 0x7fffffff) {
    return sentence("quant_concat_conv: %lld blocks do not fit into one launch; split the batch", (long long)tiles);
  }
  auto *const kernel = &quant_concat_conv_sm80<Traits>;
  // Set at every launch: it holds for one device only and costs less than a record of who has it.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTile.shared_bytes());
  if (error == cudaSuccess) {
    kernel<<<unsigned(tiles), kTile.threads(), kTile.shared_bytes(), stream>>>(params);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return params.splits > 1 ? launch_finish(params, stream) : nullptr;
  return sentence("quant_concat_conv: tile %s failed to launch (%s); was the library built for this GPU?", kTile.name,
                  cudaGetErrorString(error));
}

template <int... kTileIds>
char const *launch_tile(int id, Params const &params, void *stream) {
  char const *reason = "quant_concat_conv: this tile is not built";
  ((id == kTileIds ? (void)(reason = launch_sm80<Sm80<kTileIds>>(params, static_cast<cudaStream_t>(stream))) : (void)0),
   ...);
  return reason;
}

}  // namespace cutefuse::quant_concat_conv
