// Nearest-enlarged sources on Hopper: the tensor map has a dimension of stride 0, so that TMA repeats every pixel along
// the axis `a` of a patch, and loads the patch row by row, each row of the source as often as the factor says. A map
// that repeated along both axes would leave no dimension for the batch: five are all there are.
#pragma once

#include "conv/sm90/core.cuh"

namespace cutefuse::conv {

// Pixel `at` of an axis of an enlarged image: the source's pixel that it repeats, and its place among the repetitions.
struct Repetition {
  int pixel, turn;

  CUTE_DEVICE Repetition(Divider const &by_factor, int at) {
    int const positive = at + kMaxPad * by_factor.divisor;  // a patch may begin in the padding
    pixel = by_factor.divide(positive) - kMaxPad, turn = at - pixel * by_factor.divisor;
  }
};

// Pixels that each row of a patch holds before the patch's first pixel, `at` along `a`, since whole repetitions are
// loaded.
CUTE_DEVICE int pixels_before(Sm90Params const &params, int source, int at) {
  return params.problem.upsample[source] == 1 ? 0 : Repetition(params.by_factor[source], at).turn;
}

// Loads a patch of a source, enlarged or not, whose first pixel without those before it is (a,b) of image n.
template <int kPixelBytes>
CUTE_DEVICE void load_patch(Sm90Params const &params, int source, int channel, int a, int b, int n, uint64_t *full,
                            unsigned char *to) {
  CUtensorMap const *const map = &params.x[source];
  if (params.problem.upsample[source] == 1) {
    SM90_TMA_LOAD_4D::copy(map, full, kEvictNormal, to, channel, a, b, n);
    return;
  }
  Divider const &by_factor = params.by_factor[source];
  int const first = Repetition(by_factor, a).pixel;
  Repetition row(by_factor, b);
  for (int i = 0; i < params.halo.rows; ++i, to += params.halo.pitch * kPixelBytes) {
    SM90_TMA_LOAD_5D::copy(map, full, kEvictNormal, to, channel, 0, first, row.pixel, n);
    if (++row.turn == by_factor.divisor) row.turn = 0, ++row.pixel;
  }
}

}  // namespace cutefuse::conv
