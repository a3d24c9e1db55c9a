// Types of the Ampere path: what a number type and a row of a table of tiles mean in CuTe.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "conv/sm80/tiles.h"

namespace cutefuse::conv {

using namespace cute;
using cute::Layout;  // these names are CuTe's here, not those of op.h
using cute::Tensor;

// The mma instruction of a number type, and the type of its sums.
template <class Op_, class Sum_>
struct Multiply {
  using Op = Op_;
  using Sum = Sum_;
  // Of 8-bit types each source has a scale, and at its end its sums are added to float32 sums. Memory may hold blocks
  // of 32 channels (kCHW32).
  static constexpr bool kScaled = sizeof(typename MMA_Traits<Op>::ValTypeA) == 1;
  // Float8: the tensor cores of 8.9 keep 14 bits of a sum and of each product that they add to it, so that the error
  // grows with the length of the sum. Therefore such sums are also added to the float32 sums every kInexactTiles
  // k-tiles. (GPUs that run mma.sync of float8 as one of float16 keep more bits, but one kernel serves all.)
  static constexpr bool kInexact = kScaled && std::is_same_v<Sum, float>;
};

constexpr int kInexactTiles = 2;  // 128 products, as in DeepSeek-V3 (arXiv 2412.19437, 3.3.2); 256 double the error

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
  // Float8's pad lanes may hold NaN, and NaN times a filter's zero is NaN: its tiles mask tails of channels.
  static_assert(!kInexact || (kTile.any_channels && kTile.drains()));
  // The order of the mma of a step. By rows, neighbouring mma share the pixels' fragment, four registers; by columns,
  // the filters' two. Fewer reads of registers make a GPU at its power limit 1 to 4 % faster. By columns the copies are
  // further apart, which gains 1 to 2 % on short reductions, for which 16-bit 128x128x64 is the best tile.
  static constexpr bool kRowsFirst = !(kM == 128 && kN == 128 && kK == 64 && kBytes == 2);

  using Atom = MMA_Atom<typename Numbers<Element>::Op>;
  // Two teams of warps multiply two mma steps at once, each its own, and add up their sums in the end (teams.cuh):
  // twice as many warps hide each other's latency where a multiprocessor has one block. To the loop both steps are one.
  static constexpr int kTeams = kTile.teams, kTeamThreads = kThreads / kTeams;
  static constexpr int kMmaK = kTeams * size<2>(typename Atom::Shape_MNK{}), kSteps = kK / kMmaK;
  // Mma steps whose fragments are in registers at once. Most types read the next step's fragments while they multiply
  // this one's. Float8 has registers for one step: it holds two sets of sums and, on 9.0 to 11.0, the operands once
  // more as float16. It multiplies in one warp while another warp reads.
  static constexpr int kSlots = kInexact ? 1 : kSteps;
  // 16 columns a warp, two mma wide: one ldmatrix.x4 then fills the filter fragments of both.
  using Mma = TiledMMA<Atom, Layout<Shape<Int<kTile.warps_m>, Int<kTile.warps_n>, Int<kTeams>>>,
                       cute::Tile<Int<kTile.warps_m * 16>, Int<kTile.warps_n * 16>, Int<kMmaK>>>;
  using S2R = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  static_assert(size(Mma{}) == kThreads);
  static_assert(kTeams == 1 || (kTeams == 2 && !kScaled && kTile.halo_rows == 0));
  static_assert(kM % (kTile.warps_m * 16) == 0 && kN % (kTile.warps_n * 16) == 0 && kK % kMmaK == 0);

  // ---- global to shared: all threads copy kRowsPerPass rows at once, 16 bytes each ----
  static constexpr int kChunks = kK / kVector, kRowsPerPass = kThreads / kChunks;
  using G2S = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                       Layout<Shape<Int<kRowsPerPass>, Int<kChunks>>, Stride<Int<kChunks>, _1>>{},
                                       Layout<Shape<_1, Int<kVector>>>{}));
  // Where taps share pixels, a stage of pixels holds their halo too. In 16-bit types there are two such stages, one
  // being read and one being filled, and a stage of filters is one tap; in 8-bit types a stage is a filter row with its
  // three taps.
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
  // 8-bit pixels that taps share lie at a pitch instead, so that a tap is an immediate offset. Their last pass may be
  // partial.
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
