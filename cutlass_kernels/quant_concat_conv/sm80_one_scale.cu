#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

Kernels find_one_scale(int tile_id) { return find_tiles<1, 17>(tile_id); }

}  // namespace cutefuse::quant_concat_conv
