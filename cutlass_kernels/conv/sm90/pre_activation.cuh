// Scale, shift and ReLU of the input channels on Hopper: the producer's other warps rewrite a stage's pixels in shared
// memory, where wgmma reads them. For the warpgroups that multiply, such a stage just becomes full a little later;
// several stages are rewritten ahead of them. (Small tiles activate their pixels in registers: activated_rows.cuh.) The
// padding is of the activated tensor: a pixel outside of the image stays zero.
#pragma once

#include "conv/pre_activation.cuh"
#include "conv/sm90/k_tiles.cuh"

namespace cutefuse::conv {

// Bytes of scales and shifts that are loaded with a k-tile.
template <class Traits, class Cursor>
CUTE_DEVICE int vector_bytes(Problem const &p, Cursor const &at) {
  if constexpr (!Traits::kPreActivated || Traits::kSmall) return 0;
  return 2 * int(sizeof(typename Traits::Element)) * min(p.C[at.source] - at.channel(), kChannelBlock);
}

// Loads them into `to`: the scales, and the shifts kChannelBlock elements behind them.
template <class Traits, class Cursor>
CUTE_DEVICE void load_vectors(Sm90Params const &params, Cursor const &at, uint64_t *full,
                              typename Traits::Element *to) {
  using Element = typename Traits::Element;
  int const bytes = vector_bytes<Traits>(params.problem, at) / 2;
  int const channel = params.first_channel[at.source] + at.channel();
  SM90_BULK_COPY_G2S::copy(static_cast<Element const *>(params.pre_scale) + channel, full, to, bytes);
  SM90_BULK_COPY_G2S::copy(static_cast<Element const *>(params.pre_shift) + channel, full, to + kChannelBlock, bytes);
}

// Read and write 16 bytes of shared memory, as assembly so that the compiler keeps their order: it moved reads past the
// branches around writes, where each read takes its full latency.
CUTE_DEVICE uint4 read_chunk(uint32_t from) {
  uint4 chunk;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(from));
  return chunk;
}

CUTE_DEVICE void write_chunk_if(uint32_t condition, uint32_t to, uint4 const &chunk) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(condition),
      "r"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w));
}

// A warp's share of a tile: groups of 8 pixels, in turn with the other warps that rewrite. Of each group a lane has one
// 16-byte chunk of two pixels that are four apart or, where all channels lie in the first half of the block, of one
// pixel. Either way eight lanes at a time cover all banks.
template <class Traits>
struct Rewriter {
  using Element = typename Traits::Element;
  static constexpr int kVector = 16 / int(sizeof(Element)), kChunks = kChannelBlock / kVector;
  static constexpr int kGroups = Traits::kPixels / 8, kMine = ceil_div(kGroups, Traits::kRewriters);
  static constexpr int kQuads = ceil_div(kMine, 4);  // a pixel for every lane
  static_assert(kChunks == 8 && Traits::kPixels % 8 == 0);
  int member, lane;              // the warp's number among them
  Pixel corner[kQuads];          // of this lane's pixels: what lies under tap (0,0); unless the filter is pointwise
  unsigned inside[kQuads] = {};  // a bit for each lane's pixel: not a pad under this tap

  CUTE_DEVICE explicit Rewriter(int member_) : member(member_), lane(threadIdx.x % 32) {}

  // The tile's outputs start at `first`.
  CUTE_DEVICE void begin_tile(Sm90Params const &params, int first) {
    if (params.pointwise) return;
    CUTE_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      int const group = member + (4 * i + lane / 8) * Traits::kRewriters;
      corner[i] = pixel_of(params.problem, params.by_image, params.by_row, first + 8 * group + lane % 8);
    }
  }

  // `at` is the k-tile to be rewritten next.
  CUTE_DEVICE void begin_tap(Sm90Params const &params, Steps<Traits> const &at) {
    Problem const &p = params.problem;
    int const tap = p.R * p.S - at.taps_left, r = params.by_s.divide(tap);
    int const h = r * p.dilation_h, w = (tap - r * p.S) * p.dilation_w;
    CUTE_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      bool const is = unsigned(corner[i].h0 + h) < unsigned(p.H) && unsigned(corner[i].w0 + w) < unsigned(p.W);
      inside[i] = __ballot_sync(~0u, params.pointwise || is);
    }
  }

  // This warp's share of a stage that has arrived.
  CUTE_DEVICE void rewrite_stage(Element *stage, Element const *stage_vectors, int channels) const {
    if (channels <= kChannelBlock / 2) {
      rewrite<1>(stage, stage_vectors, channels);
    } else {
      rewrite<2>(stage, stage_vectors, channels);
    }
    cutlass::arch::fence_view_async_shared();
  }

  // kPixels of each group.
  template <int kPixels>
  CUTE_DEVICE void rewrite(Element *stage, Element const *stage_vectors, int channels) const {
    int const chunk = lane % (kChunks / 2 * kPixels), first = lane / 8 + (kPixels == 2 ? 0 : lane / 4 % 2 * 4);
    if (chunk * kVector >= channels) return;  // the others are zeros
    uint32_t const vectors = cast_smem_ptr_to_uint(stage_vectors) + 16 * chunk;
    uint4 const scale = read_chunk(vectors), shift = read_chunk(vectors + 16 * kChunks);
    uint32_t x[kPixels];
    CUTE_UNROLL
    for (int j = 0; j < kPixels; ++j) {
      int const pixel = first + 4 * j;
      x[j] = cast_smem_ptr_to_uint(stage) + 16 * ((8 * member + pixel) * kChunks + (chunk ^ pixel));  // SWIZZLE_128B
    }
    // Groups that are read before the first of them is written, so that the latencies of up to six reads overlap.
    constexpr int kBatch = ceil_div(kMine, ceil_div(kMine * kPixels, 6));
    CUTE_UNROLL
    for (int begin = 0; begin < kMine; begin += kBatch) {
      uint4 values[kBatch][kPixels];
      auto const each = [&](auto const &body) {
        CUTE_UNROLL
        for (int i = begin; i < begin + kBatch && i < kMine; ++i) {
          bool const always = (i + 1) * Traits::kRewriters <= kGroups;
          if (!always && i * Traits::kRewriters + member >= kGroups) continue;
          CUTE_UNROLL
          for (int j = 0; j < kPixels; ++j) {
            uint32_t const is_inside = inside[i / 4] >> first & 1u << (i % 4 * 8 + 4 * j);
            body(values[i - begin][j], x[j] + i * 16 * 8 * kChunks * Traits::kRewriters, is_inside);
          }
        }
      };
      each([](uint4 &value, uint32_t at, uint32_t) { value = read_chunk(at); });
      each([&](uint4 const &value, uint32_t at, uint32_t is_inside) {
        write_chunk_if(
            is_inside, at,
            {pre_activate<Element>(value.x, scale.x, shift.x), pre_activate<Element>(value.y, scale.y, shift.y),
             pre_activate<Element>(value.z, scale.z, shift.z), pre_activate<Element>(value.w, scale.w, shift.w)});
      });
    }
  }
};

// Rewrites the k-tiles of each of this block's tiles, in the order in which the ring is filled; this is warp
// `rewriter`.
template <class Traits>
CUTE_DEVICE void rewrite_ring(typename Traits::SharedStorage &shared, Sm90Params const &params,
                              ClusterPlace const &place, int rewriter) {
  Problem const &p = params.problem;
  Rewriter<Traits> mine(rewriter);
  Ring ring(Traits::kStages);
  for (int tile = place.first_tile; tile < place.tiles; tile += place.clusters) {
    mine.begin_tile(params, place.first_pixel<Traits::kPixels>(tile, params));
    Steps<Traits> at(p);
    for (int k = 0; k < params.k_tiles; ++k) {
      int const channels = p.C[at.source] - at.channel;
      mine.begin_tap(params, at);
      TransactionBarrier::wait(&shared.full[ring.stage], ring.phase);
      mine.rewrite_stage(shared.x[ring.stage], shared.vectors[ring.stage], channels);
      __syncwarp();
      if (threadIdx.x % 32 == 0) Barrier::arrive(&shared.ready[ring.stage]);
      ring.advance();
      at.advance(p);
    }
  }
}

}  // namespace cutefuse::conv
