// The Hopper kernels by the ids of their tiles.
#pragma once

#include "conv/sm90/halo.cuh"
#include "conv/sm90/im2col.cuh"
#include "conv/sm90/rows.cuh"

namespace cutefuse::conv {

template <class Element>
Kernels find_sm90(int tile_id) {
  Sm90Tile const &tile = *find_sm90_tile(tile_id);
  auto const with = [&](auto traits, void (*kernel)(Sm90Params)) {
    using Traits = decltype(traits);
    constexpr int kBytes = sizeof(typename Traits::SharedStorage);
    // The maps of one tile in the kernel of another would leave it waiting for bytes that never come.
    if (tile.filters != Traits::kFilters || tile.pixels() != Traits::kPixels) return Kernels{};
    return Kernels{{reinterpret_cast<void const *>(kernel), kSm90Threads, kBytes}, {}};
  };
  auto const im2col = [&](auto traits) { return with(traits, &conv_sm90_im2col<decltype(traits)>); };
  auto const halo = [&](auto traits) { return with(traits, &conv_sm90_halo<decltype(traits)>); };
  auto const rows = [&](auto traits) { return with(traits, &conv_sm90_rows<decltype(traits)>); };
  if (tile.schedule == Sm90Schedule::kRows) {
    return tile.pixels() == 192 ? rows(Sm90Rows<Element, 192>{}) : rows(Sm90Rows<Element, 224>{});
  }
  if (tile.halo) {
    if (tile.filters == 64) return halo(Sm90Halo<Element, 64, 32>{});
    if (tile.pixels_b == 15) return halo(Sm90Halo<Element, 128, 15>{});
    return tile.pixels_b == 32 ? halo(Sm90Halo<Element, 128, 32>{}) : halo(Sm90Halo<Element, 128, 16>{});
  }
  constexpr auto kPingPong = Sm90Schedule::kPingPong;
  if (tile.schedule == kPingPong) {
    if (tile.filters == 64) return im2col(Sm90Im2col<Element, 64, 256, kPingPong>{});
    if (tile.pixels() == 104) return im2col(Sm90Im2col<Element, 128, 104, kPingPong>{});
    return tile.pixels() == 160 ? im2col(Sm90Im2col<Element, 128, 160, kPingPong>{})
                                : im2col(Sm90Im2col<Element, 128, 192, kPingPong>{});
  }
  if (tile.schedule == Sm90Schedule::kSplit) return im2col(Sm90Im2col<Element, 128, 128, Sm90Schedule::kSplit>{});
  if (tile.filters == 64) return im2col(Sm90Im2col<Element, 64, 256>{});
  switch (tile.pixels()) {
    case 64:
      return im2col(Sm90Im2col<Element, 128, 64>{});
    case 128:
      return im2col(Sm90Im2col<Element, 128, 128>{});
    case 200:
      return im2col(Sm90Im2col<Element, 128, 200>{});
    default:
      return im2col(Sm90Im2col<Element, 128, 256>{});
  }
}

}  // namespace cutefuse::conv
