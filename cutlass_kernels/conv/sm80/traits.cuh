// Types of the Ampere path: what a number type and a row of a table of tiles mean in CuTe.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "conv/params.h"

namespace cutefuse::conv {

using namespace cute;
using cute::Layout;  // these names are CuTe's here, not those of op.h
using cute::Tensor;

// The instruction that multiplies what the tensor cores read, and what it adds up in.
template <class Op_, class Sum_>
struct Multiply {
  using Op = Op_;
  using Sum = Sum_;
  // Each source has a scale, and its sums are added to float32 ones at its end; memory may then hold blocks of 32
  // channels.
  static constexpr bool kScaled = sizeof(typename MMA_Traits<Op>::ValTypeA) == 1;
  // The tensor cores of 8.9 keep 14 bits of such a sum and of what is added to it, so that a product loses the more,
  // the longer the sum is. So it goes on in float32 ones every kInexactTiles k-tiles, too. (Where mma.sync of float8 is
  // float16's, sums are better than that, but one kernel serves all.)
  static constexpr bool kInexact = kScaled && std::is_same_v<Sum, float>;
};

constexpr int kInexactTiles = 2;  // 128 products, as in DeepSeek-V3 (arXiv 2412.19437, 3.3.2); twice as many lose twice

template <class Element>
struct Numbers;
template <>
struct Numbers<cutlass::half_t> : Multiply<SM80_16x8x16_F32F16F16F32_TN, float> {};
template <>
struct Numbers<cutlass::bfloat16_t> : Multiply<SM80_16x8x16_F32BF16BF16F32_TN, float> {};
template <>  // memory holds float32, rounded to tf32 in registers
struct Numbers<cutlass::tfloat32_t> : Multiply<SM80_16x8x8_F32TF32TF32F32_TN, float> {};
template <>
struct Numbers<int8_t> : Multiply<SM80_16x8x32_S32S8S8S32_TN, int32_t> {};
template <>
struct Numbers<cutlass::float_e4m3_t> : Multiply<SM89_16x8x32_F32E4M3E4M3F32_TN, float> {};

// Row is a row of the operator's table as a type: its kTile says what to instantiate; kPre: for pre-activated sources.
template <class Element_, class Row, bool kPre = false>
struct Sm80 {
  using Element = Element_;
  using Sum = typename Numbers<Element>::Sum;
  static constexpr Tile kTile = Row::kTile;
  static constexpr int kM = kTile.m, kN = kTile.n, kK = kTile.k, kStages = kTile.stages, kThreads = kTile.threads();
  static constexpr int kBytes = sizeof(Element), kVector = 16 / kBytes;
  static constexpr bool kTf32 = kBytes == 4, kScaled = Numbers<Element>::kScaled;
  static constexpr bool kInexact = Numbers<Element>::kInexact, kPreActivated = kPre;
  static_assert(kTile.type_bytes == kBytes && kTile.float8 == kInexact);
  // Pad lanes may hold NaN, and NaN times a filter's zero is NaN: tails of channels are masked.
  static_assert(!kInexact || (kTile.any_channels && kTile.drains()));
  // The order of a step's mma. By rows the pixels' fragment of four registers stays at the operand port, by columns the
  // filters' of two: a GPU at its power limit is 1 to 4 % faster with fewer reads of registers. By columns the copies
  // are further apart, which gains 1 to 2 % on short reductions with the tile that is best there.
  static constexpr bool kRowsFirst = !(kM == 128 && kN == 128 && kK == 64 && kBytes == 2);

  using Atom = MMA_Atom<typename Numbers<Element>::Op>;
  static constexpr int kMmaK = size<2>(typename Atom::Shape_MNK{}), kSteps = kK / kMmaK;
  // Steps whose fragments are in registers. Float8 has one, read while another warp multiplies: beside two sums, and
  // the operands once more in float16 on 9.0 to 11.0, a second one would spill. The others read the next step's
  // meanwhile.
  static constexpr int kSlots = kInexact ? 1 : kSteps;
  // 16 columns a warp, two mma wide: one ldmatrix.x4 then fills the filter fragments of both.
  using Mma = TiledMMA<Atom, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, _1>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  static_assert(size(Mma{}) == kThreads);
  static_assert(kM % (kTile.warps_m * 16) == 0 && kN % (kTile.warps_n * 16) == 0 && kK % kMmaK == 0);

  // ---- global to shared: all threads copy kRowsPerPass rows at once, 16 bytes each ----
  static constexpr int kChunks = kK / kVector, kRowsPerPass = kThreads / kChunks;
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  // Where taps share pixels, a stage of those holds the halo too. In 16-bit types there are two such stages, one being
  // read and one being filled, and a filter stage is a tap; in 8-bit types a stage is a filter row with its three taps.
  static constexpr bool kSharesTaps = kTile.halo_rows > 0, kTapStages = kSharesTaps && kBytes > 1;
  static constexpr int kTaps = kSharesTaps ? kRowTaps : 1;
  static constexpr int kPixels = kM + kTile.halo_rows, kStagesX = kTapStages ? 2 : kStages;
  static constexpr int kStagesW = kTapStages ? kStages : kStages * kTaps;
  static constexpr int kRowsX = ceil_div(kPixels, kRowsPerPass), kRowsW = kN / kRowsPerPass;  // of one thread
  static_assert(kN % kRowsPerPass == 0 && kRowsW <= 32);

  // 16-byte chunks are XORed with the row, so that ldmatrix reads and 16-byte writes touch every bank once.
  static constexpr int kVectorBits = kBytes == 1 ? 4 : kBytes == 2 ? 3 : 2;
  template <int kColumns>
  using SwizzleAtom = decltype(composition(Swizzle<(kColumns * kBytes >= 128 ? 3 : 2), kVectorBits, 3>{},
                                           Layout<Shape<_8, Int<kColumns>>, Stride<Int<kColumns>, _1>>{}));
  template <int kRows, int kCount>
  using Stages = decltype(tile_to_shape(SwizzleAtom<kK>{}, Shape<Int<kRows>, Int<kK>, Int<kCount>>{}));
  // Shared 8-bit pixels are pitched instead: a tap is then an immediate offset. Their last pass may be a part of one.
  static constexpr bool kPitched = kSharesTaps && !kTapStages;
  static constexpr int kStageX = kPitched ? kPixels * kInt8Pitch : kPixels * kK;  // elements
  using Pitched = Layout<Shape<Int<kRowsX * kRowsPerPass>, Int<kK>, Int<kStagesX>>,
                         Stride<Int<kInt8Pitch>, _1, Int<kPixels * kInt8Pitch>>>;
  using SmemX = std::conditional_t<kPitched, Pitched, Stages<kPixels, kStagesX>>;  // (M,K,stage)
  using SmemW = Stages<kN, kStagesW>;                                              // (N,K,stage)
  static constexpr int kSmemX = kStagesX * kStageX;                                // elements
  static_assert(kPitched || kPixels % kRowsPerPass == 0);
  static_assert(kTile.stages_bytes() == kBytes * (kSmemX + int(cosize_v<SmemW>)),
                "the host's table must agree with the kernel");

  // ---- registers to shared to global: outputs, or where sources have scales their 32-bit sums ----
  using Output = std::conditional_t<kTf32, float, Element>;
  static constexpr int kColumnsY = cute::min(kN, 128 / kBytes), kChunksY = kN / kVector, kRowsY = kThreads / kChunksY;
  using SmemY = decltype(tile_to_shape(SwizzleAtom<kColumnsY>{}, Shape<Int<kM>, Int<kN>>{}));  // (M,N)
  static_assert(kThreads % kChunksY == 0 && kM % kRowsY == 0);
};

}  // namespace cutefuse::conv
