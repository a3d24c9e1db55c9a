// Types of the Ampere path: what one tile of the table means in CuTe.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "conv/params.h"

namespace cutefuse::conv {

using namespace cute;
using cute::Layout;  // here the names mean CuTe's, not those of op.h
using cute::Tensor;

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

// Element is the type the tensor cores read; memory holds the same bits (float32 is rounded to tf32 in registers). Row
// is a row of the operator's table as a type: its `kTile` says what to instantiate.
template <class Element_, class Row>
struct Sm80 {
  using Element = Element_;
  static constexpr Tile kTile = Row::kTile;
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kTile.k, kStages = kTile.stages, kThreads = kTile.threads();
  static constexpr bool kTf32 = sizeof(Element) == 4, kSharesTaps = kTile.halo_rows > 0;
  using Output = std::conditional_t<kTf32, float, Element>;
  static_assert(kTile.type_bytes == sizeof(Element));
  // The order of a step's mma. By rows the pixels' fragment of four registers stays at the operand port, by columns the
  // filters' of two: a GPU at its power limit is 1 to 4 % faster with fewer reads of registers. By columns the copies
  // stand further apart, which is worth 1 to 2 % to short reductions under the tile that is best at them.
  static constexpr bool kRowsFirst = !(kM == 128 && kN == 128 && kK == 64);

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
  // Rows of a stage of pixels, and stages: where taps share them, one stage is being read, the other one filled.
  static constexpr int kRowsHalo = kM + kTile.halo_rows, kStagesX = kSharesTaps ? 2 : kStages;
  using SmemX = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kRowsHalo>, Int<kK>, Int<kStagesX>>{}));  // (M,K,stage)
  using SmemW = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kN>, Int<kK>, Int<kStages>>{}));          // (N,K,stage)
  static constexpr int kColumnsY = kN < 128 / int(sizeof(Element)) ? kN : 128 / int(sizeof(Element));
  using SmemY = decltype(tile_to_shape(SwizzleAtom<kColumnsY>{}, Shape<Int<kM>, Int<kN>>{}));  // (M,N)
  static constexpr int kSharedBytes =
      cute::max(int(sizeof(Element)) * int(cosize_v<SmemX> + cosize_v<SmemW>) + (kSharesTaps ? kRowsHalo * 8 : 0),
                int(sizeof(Element)) * int(cosize_v<SmemY>));
  static_assert(kSharedBytes == kTile.shared_bytes(), "the host's table must agree with the kernel");

  static constexpr int kChunks = kK / kVector;             // 16-byte chunks in a row of a k-tile
  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  static constexpr int kRowsX = kM / kRowsPerPass, kRowsW = kN / kRowsPerPass;
  static_assert(kM % kRowsPerPass == 0 && kN % kRowsPerPass == 0);
  static constexpr int kChunksY = kN / kVector, kRowsY = kThreads / kChunksY;  // the same for the way out
  static_assert(kThreads % kChunksY == 0 && kM % kRowsY == 0);
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
};

}  // namespace cutefuse::conv
