// The int8 kernels by the ids of their tiles.
#pragma once

#include "quant_concat_conv/sm80.cuh"
#include "quant_concat_conv/sm80_rows.cuh"

namespace cutefuse::quant_concat_conv {

Kernel finish_kernel();  // adds the splits

template <int kTileId>
Kernels sm80_kernels() {
  constexpr quant_concat_conv::Tile kTile = *find_tile(kTileId);
  auto *const kernel = [] {
    if constexpr (find_tile(kTileId)->halo_rows > 0) {
      return &quant_concat_conv_rows_sm80<Sm80Rows<kTileId>>;
    } else {
      return &quant_concat_conv_sm80<Sm80<kTileId>>;
    }
  }();
  return {{reinterpret_cast<void const *>(kernel), kTile.threads(), kTile.shared_bytes()}, finish_kernel()};
}

template <int... kTileIds>
Kernels find_tiles(int id) {
  Kernels found;
  ((id == kTileIds ? void(found = sm80_kernels<kTileIds>()) : void()), ...);
  return found;
}

}  // namespace cutefuse::quant_concat_conv
