// Two teams of warps with the same outputs, each of which multiplied every other mma step.
#pragma once

#include "conv/sm80/traits.cuh"

namespace cutefuse::conv {

// The first team starts at the bias and finishes the outputs.
template <class Traits>
__device__ __forceinline__ bool is_first_team(int thread) {
  return Traits::kTeams == 1 || thread < Traits::kTeamThreads;
}

// Adds the second team's sums to those of the first, through the shared memory that the main loop no longer needs.
template <class Traits, class Acc>
__device__ __forceinline__ void add_teams(Acc &acc, unsigned char *shared, int thread) {
  if constexpr (Traits::kTeams == 1) return;
  static_assert(Traits::kTeams == 1 || 4 * Traits::kM * Traits::kN <= Traits::kTile.stages_bytes());
  // [four sums][thread]: neighbouring threads touch neighbouring banks.
  float4 *const at = reinterpret_cast<float4 *>(shared) + thread % Traits::kTeamThreads;
  bool const adds = is_first_team<Traits>(thread);
  if (!adds) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 4) {
      at[i / 4 * Traits::kTeamThreads] = {acc(i), acc(i + 1), acc(i + 2), acc(i + 3)};
    }
  }
  __syncthreads();
  if (adds) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 4) {
      float4 const x = at[i / 4 * Traits::kTeamThreads];
      acc(i) += x.x, acc(i + 1) += x.y, acc(i + 2) += x.z, acc(i + 3) += x.w;
    }
  }
  __syncthreads();
}

}  // namespace cutefuse::conv
