// Finds an Ampere kernel by the id of its tile.
#pragma once

#include <utility>

#include "conv/sm80/depthwise.cuh"
#include "conv/sm80/image.cuh"
#include "conv/sm80/main_loop.cuh"
#include "conv/sm80/split.cuh"

namespace cutefuse::conv {

template <class Traits>
Kernels sm80_kernels() {
  auto *const finish = &conv_finish<typename Traits::Output, Traits::kScaled>;
  return {{reinterpret_cast<void const *>(&conv_sm80<Traits>), Traits::kThreads, Traits::kTile.shared_bytes()},
          {reinterpret_cast<void const *>(finish), kFinishThreads, 0}};
}

// The row of an operator's table as a type: what a kernel is instantiated with.
template <auto const &kTiles, std::size_t kIndex>
struct Row {
  static constexpr Tile kTile = kTiles[kIndex];
};

// One test for each row that is in the group.
template <class Element, auto const &kTiles, Group kGroup, std::size_t... kRows>
Kernels find_sm80(int tile_id, std::index_sequence<kRows...>) {
  Kernels found;
  auto const visit = [&](auto row) {
    constexpr Tile kTile = kTiles[decltype(row)::value];
    constexpr bool kPre = kGroup == Group::kPreActivated;
    constexpr bool kTakes = kTile.type_bytes == sizeof(Element) && kTile.float8 == Numbers<Element>::kInexact;
    if constexpr (kTakes && (kPre ? kTile.pre_activates : kTile.group() == kGroup)) {
      if (tile_id != kTile.id) return;
      if constexpr (kTile.image) {
        using Traits = ImageTraits<Element, Row<kTiles, decltype(row)::value>>;
        found.main = {reinterpret_cast<void const *>(&conv_sm80_image<Traits>), kTile.threads(), 0};
      } else if constexpr (kTile.depthwise) {
        using Traits = DepthwiseTraits<Element, Row<kTiles, decltype(row)::value>>;
        found.main = {reinterpret_cast<void const *>(&conv_sm80_depthwise<Traits>), kTile.threads(), 0};
      } else {
        found = sm80_kernels<Sm80<Element, Row<kTiles, decltype(row)::value>, kPre>>();
      }
    }
  };
  (visit(std::integral_constant<std::size_t, kRows>{}), ...);
  return found;
}

}  // namespace cutefuse::conv

// A translation unit: CMake writes one for each group of an operator's tiles and number type.
#define CUTEFUSE_KERNELS(stem, type, group, Element)                                    \
  namespace cutefuse::stem {                                                            \
  Kernels find_##type##_##group(int tile_id) {                                          \
    constexpr auto kRows = std::make_index_sequence<std::extent_v<decltype(kTiles)>>{}; \
    return find_sm80<Element, kTiles, Group::group>(tile_id, kRows);                    \
  }                                                                                     \
  }
