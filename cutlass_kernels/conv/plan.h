// From a judged problem to launches: what the plans of all convolution operators hold, and how their addresses are
// filled in.
#pragma once

#include "conv/cost.h"
#include "conv/params.h"

namespace cutefuse::conv {

// Bits of all tensors: a convolution has none that may be absent.
std::uint32_t all_operands(Call const &call);

// Parameters without addresses.
Params make_params(Problem const &p);

// Sources, packed filter, its scales if it is int8, bias, residual; outputs.
void set_addresses(Params &params, Operands const &operands);

// The main kernel and, where the reduction is divided, the one that adds the parts. `find` is null in a library without
// kernels.
char const *plan_sm80(Op const &op, Tile const &tile, Call const &call, Problem const &p, Find *find, Plan &plan);
char const *launch_sm80(Op const &op, Plan const &plan, Operands const &operands);

// A launch that was refused, as a sentence.
char const *refused(Op const &op, std::int32_t tile, char const *why);

}  // namespace cutefuse::conv
