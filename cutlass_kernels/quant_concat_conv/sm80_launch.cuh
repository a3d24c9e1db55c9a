// Host side of the int8 kernels: shared-memory limit, grid, and the dispatch over the table's tiles.
#pragma once

#include "quant_concat_conv/sm80.cuh"
#include "quant_concat_conv/sm80_rows.cuh"

namespace cutefuse::quant_concat_conv {

template <int kTileId>
constexpr auto kernel_of() {
  if constexpr (find_tile(kTileId)->halo_rows > 0) {
    return &quant_concat_conv_rows_sm80<Sm80Rows<kTileId>>;
  } else {
    return &quant_concat_conv_sm80<Sm80<kTileId>>;
  }
}

// Null when the kernel was enqueued, else one sentence.
template <int kTileId>
char const *launch_sm80(Params const &params, cudaStream_t stream) {
  constexpr quant_concat_conv::Tile kTile = *find_tile(kTileId);
  Problem const &p = params.problem;
  int64_t const tiles = int64_t(ceil_div(p.N * p.P * p.Q, kTile.m)) * ceil_div(p.K, kTile.n) * params.splits;
  if (tiles > 0x7fffffff) {
    return sentence("quant_concat_conv: %lld blocks do not fit into one launch; split the batch", (long long)tiles);
  }
  auto *const kernel = kernel_of<kTileId>();
  // Set at every launch: it holds for one device only and costs less than a record of who has it.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTile.shared_bytes());
  if (error == cudaSuccess) {
    kernel<<<unsigned(tiles), kTile.threads(), kTile.shared_bytes(), stream>>>(params);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return params.splits > 1 ? launch_finish(params, stream) : nullptr;
  return sentence("quant_concat_conv: tile %s failed to launch (%s); was the library built for this GPU?", kTile.name,
                  cudaGetErrorString(error));
}

template <int... kTileIds>
char const *launch_tile(int id, Params const &params, void *stream) {
  char const *reason = "quant_concat_conv: this tile is not built";
  ((id == kTileIds ? (void)(reason = launch_sm80<kTileIds>(params, static_cast<cudaStream_t>(stream))) : (void)0), ...);
  return reason;
}

}  // namespace cutefuse::quant_concat_conv
