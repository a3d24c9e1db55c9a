// The Ampere kernels by the ids of their tiles.
#pragma once

#include "conv/sm80/main_loop.cuh"
#include "conv/sm80/split.cuh"

namespace cutefuse::conv {

template <class Traits>
Kernels sm80_kernels() {
  auto *const finish = &conv_finish<typename Traits::Output, Traits::kScaled>;
  return {{reinterpret_cast<void const *>(&conv_sm80<Traits>), Traits::kThreads, Traits::kTile.shared_bytes()},
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
