#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

Kernels find_rows_drain(int tile_id) { return find_tiles<18, 19>(tile_id); }

}  // namespace cutefuse::quant_concat_conv
