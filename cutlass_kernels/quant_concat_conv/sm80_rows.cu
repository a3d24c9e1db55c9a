#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

Kernels find_rows(int tile_id) { return find_tiles<15, 16>(tile_id); }

}  // namespace cutefuse::quant_concat_conv
