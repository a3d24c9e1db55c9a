#include "quant_concat_conv/sm80_launch.cuh"

namespace cutefuse::quant_concat_conv {

Kernels find_drain(int tile_id) { return find_tiles<12, 13, 14>(tile_id); }

}  // namespace cutefuse::quant_concat_conv
