// The kernels of the row norms for one number type.
#pragma once

#include "row_norm/backward.cuh"
#include "row_norm/forward.cuh"

#define CUTEFUSE_KERNELS(stem, type, group, Element)                                   \
  namespace cutefuse::stem {                                                           \
  Kernels kernels_##type() { return {pick_forward<Element>, pick_backward<Element>}; } \
  }
