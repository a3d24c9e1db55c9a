// The Ampere kernels by the ids of their tiles.
#pragma once

#include "conv/sm80/main_loop.cuh"
#include "conv/sm80/taps.cuh"

namespace cutefuse::conv {

template <class Traits>
Kernels sm80_kernels() {
  auto *const kernel = [] {
    if constexpr (Traits::kSharesTaps) {
      return &concat_conv_sm80_taps<Traits>;
    } else {
      return &concat_conv_sm80<Traits>;
    }
  }();
  auto *const finish = &concat_conv_sm80_finish<typename Traits::Output>;
  return {{reinterpret_cast<void const *>(kernel), Traits::kThreads, Traits::kSharedBytes},
          {reinterpret_cast<void const *>(finish), kFinishThreads, 0}};
}

// One switch per number type over the rows of the table that it can run.
template <class Element, class... Rows>
Kernels find_sm80(int tile_id) {
  Kernels found;
  ((tile_id == Rows::kTile.id ? void(found = sm80_kernels<Sm80<Element, Rows>>()) : void()), ...);
  return found;
}

}  // namespace cutefuse::conv
