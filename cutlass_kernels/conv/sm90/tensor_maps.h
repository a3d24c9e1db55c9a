// The tensor maps of a launch on a Hopper tile: how TMA finds sources, filters, outputs and shortcut, and in which
// boxes it moves them.
#pragma once

#if CUTEFUSE_WITH_CUDA
#include "conv/sm90/params.h"

namespace cutefuse::conv {

// Encodes the maps of a launch whose other parameters are known. They point nowhere: a plan knows shapes and no
// addresses.
CUresult encode_maps(Sm90Params &k, Sm90Tile const &tile);

// Points a map at an address, which costs a few stores where encoding costs microseconds. Returns whether the driver
// took it.
bool point_map(CUtensorMap &map, void const *data);

}  // namespace cutefuse::conv
#endif
