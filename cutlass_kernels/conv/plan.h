// What the convolution operators answer as an Op, from a judged problem to launches: what their plans hold, and how the
// addresses are filled in.
#pragma once

#include "conv/checks.h"
#include "conv/cost.h"
#include "conv/sm90/tiles.h"

namespace cutefuse::conv {

// The functions of Op.
char const *reject(Family const &family, Call const &call);
std::int64_t workspace_bytes(Family const &family, Call const &call);
std::int32_t configs(Family const &family, Call const &call, std::int32_t *ids, std::int32_t capacity);
char const *obstacle(Family const &family, Call const &call, std::int32_t config);
double predicted_us(Family const &family, Call const &call);
char const *plan(Family const &family, Call const &call, Plan &plan);
char const *launch(Family const &family, Plan const &plan, Operands const &operands);

// The Hopper path. `find` is null in a library without kernels.
char const *plan_sm90(Op const &op, Sm90Tile const &tile, Call const &call, Problem const &p, Find *find, Plan &plan);
char const *launch_sm90(Op const &op, Plan const &plan, Operands const &operands);

// The sentence for a launch that was refused.
char const *refused(Op const &op, std::int32_t tile, char const *why);

}  // namespace cutefuse::conv
