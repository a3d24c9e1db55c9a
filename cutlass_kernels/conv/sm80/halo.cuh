// Pixels of a whole filter row, for filters three wide over neighbouring pixels: a stage holds the pixels under one
// filter row of one channel block with the halo of its taps, so that a third of the pixels is copied. 16-bit types read
// a tap of filters from a stage of its own, with a barrier after each; 8-bit types have all three taps in the stage and
// one barrier.
#pragma once

#include "conv/sm80/copy.cuh"

namespace cutefuse::conv {

// The order of a stage's rows: the outputs of a tile in their order, and after those of each image row the `halo`
// pixels that the filter reads beyond it. Tap s of output m is `of(m) + s * dilation_w` rows into the stage.
struct HaloRows {
  Params const &params;
  int image_row, q0, halo;  // of the tile's first output: its row counted through all images, its column

  __device__ __forceinline__ HaloRows(Params const &all, int m0) : params(all), halo(halo_of(all.problem)) {
    image_row = params.by_row.divide(m0), q0 = m0 - image_row * params.problem.Q;
  }
  __device__ __forceinline__ int of(int m) const { return m + params.by_row.divide(q0 + m) * halo; }

  // Output row, counted through all images, over row `row` of the stage.
  __device__ __forceinline__ int output_row(int row) const { return image_row + params.by_padded_row.divide(q0 + row); }

  // Index of the pixel under filter row 0, and the filter rows (bit r) that fall outside of the image there; all of
  // them where the tile needs no such pixel.
  __device__ __forceinline__ int2 pixel(int row, int used) const {
    Problem const &p = params.problem;
    int const at = output_row(row);
    bool const exists = row < used && at < p.N * p.P;
    int const n = exists ? params.by_image.divide(at * p.Q) : 0;
    int const w = q0 + row - (at - image_row) * (p.Q + halo) - p.pad_left;
    int const h = (at - n * p.P) * p.stride_h - p.pad_top;
    uint32_t outside = exists && unsigned(w) < unsigned(p.W) ? 0 : 0xffff;
    CUTE_NO_UNROLL
    for (int r = 0; r < p.R; ++r) outside |= uint32_t(unsigned(h + r * p.dilation_h) >= unsigned(p.H)) << r;
    return {(n * p.H + h) * p.W + w, int(outside)};
  }
};

// One thread's share of the copies: a column chunk of kRowsX pixels for each filter row, and of kRowsW filters for each
// tap. A filter row past the last is copied as zeros.
template <class Traits>
struct HaloLoader {
  static constexpr bool kTapStages = Traits::kTapStages;
  static constexpr int kK = Traits::kK, kBytes = Traits::kBytes, kPass = Traits::kRowsPerPass;
  static constexpr int kRowsX = Traits::kRowsX, kRowsW = Traits::kRowsW, kFirst = ceil_div(kRowsX, 2);
  static_assert(kK == kChannelBlock && kMaxTaps <= 16);
  // With tap stages the pixels of the next filter row are copied during the first two taps of the present one, so that
  // they arrive one k-tile before they are read, and so are the filters of the tap two ahead. Otherwise a stage's
  // copies are spread over all its steps; with two stages the first steps issue them all, since the barrier waits for
  // the last copy.
  static constexpr int kGroups = kTapStages ? kRowTaps : 1, kStageSteps = kRowTaps * Traits::kSteps;
  static constexpr int kParts = kTapStages ? Traits::kSteps : Traits::kStages == 2 ? kStageSteps - 3 : kStageSteps;
  static constexpr int kMostCopies = kRowsX + kRowsW * kRowTaps;
  Params const &params;
  FilterRows<Traits> filters;  // at tap 0 of the filter row that is read (tap stages) or copied
  KBlock<kK> block;
  int blocks_left, r = 0;
  int const column;
  int pixel[kRowsX];
  uint32_t outside[ceil_div(kRowsX, 2)];  // bits of two pixels' filter rows
  char const *from_x;
  int pixel_bytes;
  uint32_t bits = 1, closed, absent;  // absent: filters.absent in the next filter row
  int in_last_pass;                   // whether this thread has a pixel in the last pass, which may be a part of one

  __device__ __forceinline__ HaloLoader(Params const &all, Place const &place, KBlock<kK> const &first,
                                        int first_column, int blocks)
      : params(all),
        filters(all, place, first_column),
        block(first),
        blocks_left(blocks),
        column(place.thread % Traits::kChunks * Traits::kVector),
        absent(filters.absent) {}

  // The places of the pixels are computed once, by all threads, into a table in which each thread looks up those that
  // it copies. It takes the end of the last stage, where no copy goes before the first barrier of the main loop.
  __device__ __forceinline__ void locate(Place const &place, void *stages_end) {
    int2 *const table = static_cast<int2 *>(stages_end) - Traits::kPixels;
    HaloRows const rows(params, place.m0);
    int const used = rows.of(Traits::kM - 1) + rows.halo + 1;
    CUTE_NO_UNROLL
    for (int row = place.thread; row < Traits::kPixels; row += Traits::kThreads) table[row] = rows.pixel(row, used);
    __syncthreads();
    int const first = place.thread / Traits::kChunks;
    CUTE_UNROLL
    for (int i = 0; i < kRowsX; ++i) {
      int2 const at = table[Traits::kPitched ? min(first + i * kPass, Traits::kPixels - 1) : first + i * kPass];
      pixel[i] = at.x;
      outside[i / 2] = i % 2 == 0 ? uint32_t(at.y) & 0xffff : outside[i / 2] | uint32_t(at.y) << 16;
    }
    in_last_pass = first + (kRowsX - 1) * kPass < Traits::kPixels;
    enter_source(1);
  }

  // `before`: channel blocks of the source for which `pixel` was computed; images of kCHW32 lie that many blocks apart.
  __device__ __forceinline__ void enter_source(int before) {
    Problem const &p = params.problem;
    auto const start = start_of<Traits>(params, block.source, p.C[block.source] - block.left + column);
    from_x = start.from, pixel_bytes = start.pixel_bytes;
    if (Traits::kScaled && p.layout == cutefuse::Layout::kBlocks32) {
      int const now = ceil_div(p.C[block.source], kLayoutBlock);
      Place const place = Place::of<Traits>(params);
      HaloRows const rows(params, place.m0);
      CUTE_UNROLL
      for (int i = 0; i < kRowsX; ++i) {
        int const row = rows.output_row(place.thread / Traits::kChunks + i * kPass);
        pixel[i] += image_shift(params, row * p.Q, now, before);
      }
    }
    closed = block.left - column > 0 ? 0u : ~0u;
  }

  // Moves the pixels to the next filter row; after the last one they are copied as zeros.
  __device__ __forceinline__ void next_row() {
    Problem const &p = params.problem;
    bits <<= 1, from_x = address_of(from_x, p.dilation_h * p.W, pixel_bytes);
    if (++r < p.R) return;
    r = 0, bits = 1, from_x -= int64_t(params.block_step) * pixel_bytes;
    from_x += block_bytes<Traits>(p, block.source);
    int const before = ceil_div(p.C[block.source], kLayoutBlock);
    bool const changed = block.advance(p);
    if (--blocks_left <= 0) {
      closed = ~0u, absent = ~0u;
    } else if (changed) {
      enter_source(before);
    } else {
      closed = block.left - column > 0 ? 0u : ~0u;
    }
  }

  __device__ __forceinline__ void advance() {
    filters.from += kRowTaps * FilterRows<Traits>::kTapBytes;
    if constexpr (kTapStages) {
      filters.absent = absent;
      next_row();
    } else {
      next_row();
      filters.absent = absent;
    }
  }

  template <class ToX>
  __device__ __forceinline__ void copy_x(int i, ToX const &to_x) const {
    char const *const from = address_of(from_x, pixel[i], pixel_bytes);
    uint32_t const mask = (outside[i / 2] & (i % 2 == 0 ? bits : bits << 16)) | closed;
    if (Traits::kPixels % kPass == 0 || i < kRowsX - 1) {
      g2s_unless(&to_x(0, i, 0), from, mask);
    } else {
      g2s_unless(&to_x(0, i, 0), from, mask, in_last_pass);
    }
  }

  // Filter i of the tap that is `ahead` taps after the present filter row's first one.
  template <class ToW>
  __device__ __forceinline__ void copy_w(int i, int ahead, ToW const &to_w) const {
    filters.copy(params, i, ahead, ahead < kRowTaps ? filters.absent : absent, to_w);
  }

  static __host__ __device__ constexpr int copies_x(int group) {
    return !kTapStages ? kRowsX : group == 0 ? kFirst : group == 1 ? kRowsX - kFirst : 0;
  }
  static __host__ __device__ constexpr int copies(int group) {
    return copies_x(group) + (kTapStages ? kRowsW : kRowsW * kRowTaps);
  }

  // Copy i of a group, the pixels first; `stage` is that of the pixels.
  template <class ToX, class ToW>
  __device__ __forceinline__ void copy(int group, int i, int stage, ToX const &to_x, ToW const &to_w) const {
    if (i < copies_x(group)) {
      copy_x(i + (kTapStages && group == 1 ? kFirst : 0), to_x(_, _, _, stage));
    } else if constexpr (kTapStages) {
      copy_w(i - copies_x(group), group + 2, to_w(_, _, _, (group + 2) % kRowTaps));
    } else {
      int const j = (i - kRowsX) / kRowTaps, tap = (i - kRowsX) % kRowTaps;
      copy_w(j, tap, to_w(_, _, _, stage * kRowTaps + tap));
    }
  }
};

// A lane's reads of the stage's pixels: ldmatrix by 32-bit shared addresses, since CuTe's atom takes a pointer, twice
// the registers for each row of the fragment.
template <class Traits>
struct HaloReader {
  static constexpr int kBytes = Traits::kBytes, kRowBytes = Traits::kPitched ? kInt8Pitch : Traits::kK * kBytes;
  static constexpr int kRows = Traits::kM / (Traits::kTile.warps_m * 16);  // of the fragment
  // 16-byte chunks are XORed with their row, counted from the start of shared memory, and a tap may start at any row,
  // so the address is computed again from the row. Pitched rows need no XOR and a tap is an immediate offset; in 16-bit
  // types a pixel's 128 bytes would then straddle lines of shared memory, and cp.async reads the sectors at the seam
  // twice.
  static_assert(Traits::kPitched || (kRowBytes == 128 && Traits::kPixels % 8 == 0));
  uint32_t from[kRows];
  Params const &params;
  int chunk, to_next_row;  // rows of shared memory from the last tap to the next stage of pixels

  __device__ __forceinline__ HaloReader(Params const &all, Place const &place, uint32_t shared_x) : params(all) {
    HaloRows const halo(params, place.m0);
    auto const s2r = make_tiled_copy_A(typename Traits::S2R{}, typename Traits::Mma{});
    Tensor at = s2r.get_slice(place.thread)
                    .partition_S(make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kK>>{}));  // -> (m,k)
    chunk = get<1>(at(0, 0, 0)) / Traits::kVector;
    to_next_row = Traits::kPixels - halo.halo;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      uint32_t const row = halo.of(get<0>(at(0, i, 0)));
      if constexpr (Traits::kPitched) {
        from[i] = shared_x + row * kRowBytes + chunk * 16;
      } else {
        move(i, shared_x / kRowBytes + row);
      }
    }
  }

  __device__ __forceinline__ void move(int i, uint32_t row) { from[i] = row * kRowBytes + ((row ^ chunk) & 7) * 16; }

  // Moves on from `tap` to the next one, where that is not an immediate offset.
  __device__ __forceinline__ void leave(int tap) {
    if constexpr (Traits::kTapStages) {
      bool const last = tap == kRowTaps - 1;
      int const rows = last ? to_next_row : params.problem.dilation_w;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) move(i, from[i] / uint32_t(kRowBytes) + rows);
      if (last) to_next_row = -2 * halo_of(params.problem) - to_next_row;
    }
  }

  // rX: (MMA,MMA_M) of one mma step.
  template <class Fragment>
  __device__ __forceinline__ void fetch(int tap, int step, int stage, Fragment &&rX) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Tensor r = recast<uint32_t>(rX(_, i));
      uint32_t const at = Traits::kPitched ? from[i] + stage * Traits::kStageX + tap * kInt8Pitch + step * Traits::kMmaK
                                           : from[i] ^ (step * Traits::kMmaK * kBytes);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r(0)), "=r"(r(1)), "=r"(r(2)), "=r"(r(3))
                   : "r"(at));
    }
  }
};

}  // namespace cutefuse::conv
