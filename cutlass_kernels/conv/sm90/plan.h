// From a judged problem to launches of the Hopper kernels, one for each output.
#pragma once

#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// `find` is null in a library without kernels.
char const *plan_sm90(Op const &op, Sm90Tile const &tile, Call const &call, Problem const &p, Find *find, Plan &plan);
char const *launch_sm90(Op const &op, Plan const &plan, Operands const &operands);

}  // namespace cutefuse::conv
