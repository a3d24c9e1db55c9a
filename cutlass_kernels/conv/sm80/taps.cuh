// ConcatConv for filters three wide, for sm_80 and newer: the taps of a filter row share their pixels. A stage of
// pixels serves one filter row of one channel block, with the halo that its taps reach into; the stages of the filters
// are the three taps. So a third of the pixels is copied, and a loop over a filter row knows every stage beforehand.
#pragma once

#include "conv/sm80/copy.cuh"
#include "conv/sm80/epilogue.cuh"
#include "conv/sm80/traits.cuh"

namespace cutefuse::conv {

constexpr int kTaps = 3;

// Where the rows of a stage lie: the outputs of a tile in their order, and behind those of each image row the `halo`
// pixels that the filter reaches beyond it. Tap s of output m is `of(m) + s * dilation_w` rows into the stage.
struct HaloRows {
  Params const &params;
  int image_row, q0, halo;  // of the tile's first output: its row counted through all images, its column

  __device__ __forceinline__ HaloRows(Params const &all, int m0) : params(all), halo(halo_of(all.problem)) {
    image_row = params.by_row.divide(m0), q0 = m0 - image_row * params.by_row.divisor;
  }
  __device__ __forceinline__ int of(int m) const { return m + params.by_row.divide(q0 + m) * halo; }

  // Index of the pixel under filter row 0, and the filter rows (bit r) that fall outside of the image there.
  __device__ __forceinline__ int2 pixel(int row) const {
    Problem const &p = params.problem;
    int const behind = row - (p.Q - q0 + halo), pitch = p.Q + halo;
    int const at = image_row + (behind < 0 ? 0 : 1 + behind / pitch);
    int const w = (behind < 0 ? q0 + row : behind % pitch) - p.pad_left;
    int const n = at / p.P, h0 = (at - n * p.P) * p.stride_h - p.pad_top;
    uint32_t outside = unsigned(w) < unsigned(p.W) && n < p.N ? 0 : ~0u;
    CUTE_NO_UNROLL
    for (int r = 0; r < p.R; ++r) outside |= uint32_t(unsigned(h0 + r * p.dilation_h) >= unsigned(p.H)) << r;
    return {(n * p.H + h0) * p.W + w, int(outside)};
  }
};

// One thread's share of the copies: a column chunk of kRowsX pixels for each filter row, and of kRowsW filters for each
// tap. The pixels of the next filter row are copied under the first two taps of the present one, so that they are there
// one k-tile before they are read.
template <class Traits>
struct TapLoader {
  using Element = typename Traits::Element;
  static constexpr int kBytes = sizeof(Element), kPass = Traits::kRowsPerPass, kRowsW = Traits::kRowsW;
  static constexpr int kRowsX = Traits::kRowsHalo / kPass, kFirst = ceil_div(kRowsX, 2);
  static_assert(Traits::kRowsHalo % kPass == 0 && Traits::kK == kChannelBlock);
  static constexpr int kTileBytes = kChannelBlock * kBytes;
  Params const &params;
  KBlock<Traits::kK> block;
  int blocks_left, r = 0;
  int const column;
  int pixel[kRowsX];
  uint32_t outside[ceil_div(kRowsX, 2)];  // bits of two pixels' filter rows
  static_assert(kMaxTaps <= 16);
  char const *from_x;
  char const *from_w;  // at tap 0 of the present filter row
  int ld_bytes;
  uint32_t bits = 1, closed, filters, next_filters;  // bit i: filter i exists, in this filter row, in the next

  __device__ __forceinline__ TapLoader(Params const &all, int thread, int n0, KBlock<Traits::kK> const &first,
                                       int64_t first_column, int blocks)
      : params(all), block(first), blocks_left(blocks), column(thread % Traits::kChunks * Traits::kVector) {
    int const row = thread / Traits::kChunks;
    from_w =
        static_cast<char const *>(params.w) + (int64_t(n0 + row) * params.columns + first_column + column) * kBytes;
    filters = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRowsW; ++i) filters |= uint32_t(n0 + row + i * kPass < params.problem.K) << i;
    next_filters = filters;
    enter_source();
  }

  __device__ __forceinline__ void look_up(int2 const *table, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsX; ++i) {
      int2 const at = table[thread / Traits::kChunks + i * kPass];
      pixel[i] = at.x;
      outside[i / 2] = i % 2 == 0 ? uint32_t(at.y) & 0xffff : outside[i / 2] | uint32_t(at.y) << 16;
    }
  }

  __device__ __forceinline__ void enter_source() {
    int const channel = params.problem.C[block.source] - block.left + column;
    from_x = static_cast<char const *>(params.x[block.source]) + channel * kBytes;
    ld_bytes = int(params.problem.ldx[block.source] * kBytes);
    closed = block.left - column > 0 ? 0u : ~0u;
  }

  // Pixels: to the next filter row, of zeros behind the last one.
  __device__ __forceinline__ void next_row() {
    Problem const &p = params.problem;
    bits <<= 1, from_x += int64_t(p.dilation_h * p.W) * ld_bytes;
    if (++r < p.R) return;
    r = 0, bits = 1, from_x += Traits::kK * kBytes - int64_t(p.R * p.dilation_h * p.W) * ld_bytes;
    bool const changed = block.advance(p);
    if (--blocks_left <= 0) {
      closed = ~0u, next_filters = 0;
    } else if (changed) {
      enter_source();
    } else {
      closed = block.left - column > 0 ? 0u : ~0u;
    }
  }

  template <class ToX>
  __device__ __forceinline__ void copy_x(int i, ToX const &to_x) const {
    g2s_unless(&to_x(0, i, 0), address_of(from_x, pixel[i], ld_bytes),
               (outside[i / 2] & (i % 2 == 0 ? bits : bits << 16)) | closed);
  }

  // Filter j of the tap that is `ahead` taps behind the present filter row's first one.
  template <class ToW>
  __device__ __forceinline__ void copy_w(int j, int ahead, ToW const &to_w) const {
    g2s_if(&to_w(0, j, 0), from_w + int64_t(j * kPass) * (params.columns * kBytes) + ahead * kTileBytes,
           (ahead < kTaps ? filters : next_filters) & 1u << j);
  }

  static __host__ __device__ constexpr int copies_x(int tap) {
    return tap == 0 ? kFirst : tap == 1 ? kRowsX - kFirst : 0;
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.blocks_per_sm)
    concat_conv_sm80_taps(Params const __grid_constant__ params) {
  using Element = typename Traits::Element;
  using Loads = TapLoader<Traits>;
  constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK;
  static_assert(Traits::kStages == kTaps);
  extern __shared__ __align__(1024) unsigned char shared[];
  Problem const &p = params.problem;
  auto const [thread, split, m0, n0] = Place::of<Traits>(params);

  Element *const shared_x = reinterpret_cast<Element *>(shared);
  Element *const shared_w = shared_x + cosize_v<typename Traits::SmemX>;
  int2 *const table = reinterpret_cast<int2 *>(shared_w + cosize_v<typename Traits::SmemW>);
  Tensor sX = make_tensor(make_smem_ptr(shared_x), typename Traits::SmemX{});  // (halo rows,K,stage)
  Tensor sW = make_tensor(make_smem_ptr(shared_w), typename Traits::SmemW{});  // (N,K,tap)

  // ---- g2s: each thread copies one column chunk of some pixels and filters ----
  auto const thread_g2s = typename Traits::G2S{}.get_slice(thread);
  Tensor tXsX = thread_g2s.partition_D(sX);  // (vector,kRowsX,1,stage)
  Tensor tWsW = thread_g2s.partition_D(sW);  // (vector,kRowsW,1,tap)
  int const first_block = params.k_blocks * split / params.splits;
  int const k_blocks = params.k_blocks * (split + 1) / params.splits - first_block;
  KBlock<kK> read(p);
  for (int i = 0; i < first_block; ++i) read.advance(p);
  Loads loader(params, thread, n0, read, int64_t(first_block) * p.R * kTaps * kChannelBlock, k_blocks);
  constexpr int kSteps = kK / Traits::kMmaK;
  // Part `part` of what is copied under a tap, one for each mma step; `issued` of the step's `all` mma rows are behind
  // it. The filters are those two taps ahead, the pixels those of the next filter row.
  int write_x = 1;
  auto const copy_part = [&](int tap, int part, int issued, int all) {
    int const copies_x = Loads::copies_x(tap), copies = copies_x + Traits::kRowsW;
    int const begin = part * copies / kSteps, count = (part + 1) * copies / kSteps - begin;
    CUTE_UNROLL
    for (int i = 0; i < Loads::kRowsX + Traits::kRowsW; ++i) {
      if (i < begin + (issued - 1) * count / all || i >= begin + issued * count / all) continue;
      if (i < copies_x) {
        loader.copy_x(i + (tap == 1 ? Loads::kFirst : 0), tXsX(_, _, _, write_x));
      } else {
        loader.copy_w(i - copies_x, tap + 2, tWsW(_, _, _, (tap + 2) % kTaps));
      }
    }
  };
  auto const copy_filters = [&](int tap) {
    CUTE_UNROLL
    for (int j = 0; j < Traits::kRowsW; ++j) loader.copy_w(j, tap, tWsW(_, _, _, tap));
  };
  // The filters of two taps and the first filter row of pixels; where those lie is computed once, by all threads.
  copy_filters(0);
  HaloRows const halo(params, m0);
  CUTE_NO_UNROLL
  for (int row = thread; row < Traits::kRowsHalo; row += Traits::kThreads) table[row] = halo.pixel(row);
  __syncthreads();
  loader.look_up(table, thread);
  CUTE_UNROLL
  for (int i = 0; i < Loads::kRowsX; ++i) loader.copy_x(i, tXsX(_, _, _, 0));
  cp_async_fence();
  loader.next_row();
  copy_filters(1);
  cp_async_fence();
  copy_part(0, 0, 1, 1);

  // ---- s2r: ldmatrix fills the fragments of one mma k-step ----
  typename Traits::Mma mma;
  auto const thread_mma = mma.get_slice(thread);
  Tensor acc = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});  // (MMA,MMA_M,MMA_N)
  Tensor tile_x = make_tensor(make_smem_ptr(shared_x), Layout<Shape<Int<kM>, Int<kK>>, Stride<Int<kK>, _1>>{});
  Tensor rX = thread_mma.partition_fragment_A(tile_x);       // (MMA,MMA_M,k_step)
  Tensor rW = thread_mma.partition_fragment_B(sW(_, _, 0));  // (MMA,MMA_N,k_step)
  auto const s2r_x = make_tiled_copy_A(typename Traits::S2R{}, mma);
  auto const s2r_w = make_tiled_copy_B(typename Traits::S2R{}, mma);
  auto const thread_s2r_w = s2r_w.get_slice(thread);
  Tensor tSsW = thread_s2r_w.partition_S(sW);  // (copy,N,k_step,tap)
  Tensor tSrW = thread_s2r_w.retile_D(rW);     // (copy,N,k_step)
  Tensor tScX = s2r_x.get_slice(thread).partition_S(make_identity_tensor(Shape<Int<kM>, Int<kK>>{}));
  // What this lane reads of each mma row, in bytes. 16-byte chunks are XORed with their row, counted from the start of
  // shared memory, and a tap starts at any row: so the address follows anew from the row. A pitch that needs no XOR
  // would let a pixel's 128 bytes straddle lines of shared memory, and cp.async reads the sectors at the seam twice.
  constexpr uint32_t kRowBytes = kK * sizeof(Element);  // unsigned: by it is divided
  constexpr int kRowsA = size<1>(rX);
  static_assert(kRowBytes == 128 && Traits::kRowsHalo % 8 == 0);
  int const chunk = get<1>(tScX(0, 0, 0)) / Traits::kVector;
  uint32_t from_x[kRowsA];
  auto const move = [&](int i, uint32_t row) { from_x[i] = row * kRowBytes + ((row ^ chunk) & 7) * 16; };
  CUTE_UNROLL
  for (int i = 0; i < kRowsA; ++i) {
    move(i, cast_smem_ptr_to_uint(shared_x) / kRowBytes + halo.of(get<0>(tScX(0, i, 0))));
  }
  int to_next_row = Traits::kRowsHalo - (kTaps - 1) * p.dilation_w;  // from the last tap, in rows of shared memory
  auto const fetch = [&](int slot, int step, int tap) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsA; ++i) {
      auto r = recast<uint32_t>(rX(_, i, slot));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r(0)), "=r"(r(1)), "=r"(r(2)), "=r"(r(3))
                   : "r"(from_x[i] ^ (step * Traits::kMmaK * int(sizeof(Element)))));
    }
    copy(s2r_w, tSsW(_, _, step, tap), tSrW(_, _, slot));
  };
  auto const multiply = [&](int step, int tap, int part) {
    constexpr int kColumns = size<2>(acc), kRows = size<1>(acc);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        int const j = i % 2 ? kColumns - 1 - column : column;  // and forth: the last fragment is still at hand
        gemm(mma, rX(_, i, step), rW(_, j, step), acc(_, i, j));
      }
      if (part >= 0) copy_part(tap, part, i + 1, kRows);
    }
  };
  auto const leave_tap = [&](int tap) {
    cp_async_fence();
    if (tap == kTaps - 1) {
      loader.from_w += kTaps * Loads::kTileBytes, loader.filters = loader.next_filters;
      loader.next_row();
      write_x ^= 1;
    }
    int const rows = tap == kTaps - 1 ? to_next_row : p.dilation_w;
    CUTE_UNROLL
    for (int i = 0; i < kRowsA; ++i) move(i, from_x[i] / kRowBytes + rows);
    if (tap == kTaps - 1) to_next_row = -2 * (kTaps - 1) * p.dilation_w - to_next_row;
    cp_async_wait<1>();
    __syncthreads();
  };

  start_at_bias<Traits>(params, split, n0, thread_mma, acc);
  cp_async_wait<1>();
  __syncthreads();
  fetch(0, 0, 0);

  for (int to_read = k_blocks; to_read > 0;) {                             // a source at a time
    int const whole = min((read.left + Traits::kMmaK - 1) / kK, to_read);  // blocks with channels for every mma step
    CUTE_NO_UNROLL
    for (int rows = whole * p.R; rows > 0; --rows) {
      CUTE_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) {
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          bool const last = step == kSteps - 1;
          if (last) leave_tap(tap);
          int const next = last ? (tap + 1) % kTaps : tap;
          fetch((step + 1) % kSteps, (step + 1) % kSteps, next);
          multiply(step, next, (step + 1) % kSteps);
        }
      }
    }
    to_read -= whole, read.left -= whole * kK;
    if (to_read > 0 && read.left > 0) {  // the source's last channels: no step is spent on those that do not exist
      int const steps = ceil_div(read.left, Traits::kMmaK);
      CUTE_NO_UNROLL
      for (int rows = p.R; rows > 0; --rows) {
        CUTE_UNROLL
        for (int tap = 0; tap < kTaps; ++tap) {
          CUTE_UNROLL
          for (int part = 1; part < kSteps; ++part) copy_part(tap, part, 1, 1);
          multiply(0, tap, -1);
          CUTE_NO_UNROLL
          for (int step = 1; step < steps; ++step) {
            fetch(0, step, tap);
            multiply(0, tap, -1);
          }
          leave_tap(tap);
          copy_part((tap + 1) % kTaps, 0, 1, 1);
          fetch(0, 0, (tap + 1) % kTaps);
        }
      }
      --to_read;
    }
    if (++read.source < p.sources) read.left = p.C[read.source];
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<Traits>(params, mma, acc, shared);
}

}  // namespace cutefuse::conv
