// Finds a Hopper kernel by the id of its tile.
#pragma once

#include "conv/sm90/halo.cuh"
#include "conv/sm90/im2col.cuh"
#include "conv/sm90/patch_rows.cuh"
#include "conv/sm90/small.cuh"

namespace cutefuse::conv {

template <class Traits>
Kernels sm90_kernels(void (*kernel)(Sm90Params)) {
  return {{reinterpret_cast<void const *>(kernel), Traits::kThreads, sizeof(typename Traits::SharedStorage)}, {}};
}

// The kernel of row kIndex of an operator's table, if the group has one.
template <class Element, auto const &kTiles, Group kGroup, std::size_t kIndex>
Kernels sm90_kernels() {
  constexpr bool kPre = kGroup == Group::kHopperPreActivated;
  constexpr Sm90Tile kTile = form_of(kTiles[kIndex], kPre);
  constexpr bool kHasKernel = kPre ? kTile.pre_activates : kTile.plain && group_of(kTile) == kGroup;
  if constexpr (kTile.type_bytes != int(sizeof(Element)) || !kHasKernel) {
    return {};
  } else if constexpr (kTile.schedule == Sm90Schedule::kSmall) {
    using Traits =
        Sm90Small<Element, kTile.filters, kTile.pixels(), kPre, kTile.enlarges, kTile.pixel_rows, kTile.halo>;
    return {{reinterpret_cast<void const *>(conv_sm90_small<Traits>), Traits::kThreads, 0}, {}};  // see plan_sm90
  } else if constexpr (kTile.halo && kTile.pixel_rows) {
    using Traits = Sm90PatchRows<Element, kTile.filters, kTile.pixels_b, halo_channels(kTile)>;
    return {{reinterpret_cast<void const *>(conv_sm90_patch_rows<Traits>), Traits::kThreads, 0}, {}};  // see plan_sm90
  } else if constexpr (kTile.halo) {
    constexpr Sm90Tile kPatch = as_multiplied(kTile);
    using Traits = Sm90Halo<Element, kPatch.filters, kPatch.pixels_a, kPatch.pixels_b, kTile.pairs, kTile.beside>;
    return sm90_kernels<Traits>(conv_sm90_halo<Traits>);
  } else {
    using Traits =
        Sm90Im2col<Element, kTile.filters, kTile.pixels(), kTile.schedule, kPre, kTile.pairs, kTile.pixel_rows>;
    return sm90_kernels<Traits>(conv_sm90_im2col<Traits>);
  }
}

template <class Element, auto const &kTiles, Group kGroup, std::size_t... kRows>
Kernels find_sm90(int tile_id, std::index_sequence<kRows...>) {
  Kernels found;
  ((kTiles[kRows].id == tile_id ? void(found = sm90_kernels<Element, kTiles, kGroup, kRows>()) : void()), ...);
  return found;
}

}  // namespace cutefuse::conv

#define CUTEFUSE_KERNELS(stem, type, group, Element)                                        \
  namespace cutefuse::stem {                                                                \
  Kernels find_##type##_##group(int tile_id) {                                              \
    constexpr auto kRows = std::make_index_sequence<std::extent_v<decltype(kSm90Tiles)>>{}; \
    return find_sm90<Element, kSm90Tiles, Group::group>(tile_id, kRows);                    \
  }                                                                                         \
  }
