// mbarrier objects, which lie in shared memory in a layout of our own.
#pragma once

#include "machine.h"

namespace emulator {

struct BarrierState {
  std::uint64_t expected : 20, pending : 20;
  std::uint64_t bytes : 22;  // that are to come in this phase, above kNoBytes; loads may end before they are announced
  std::uint64_t parity : 1;
  std::uint64_t missing : 1;  // shared memory begins with ones: no barrier
};
static_assert(sizeof(BarrierState) == 8);

// The barrier at an address of shared::cluster, as the block `own` sees it.
BarrierState *barrier_at(std::uint32_t address, Block &own);
// Announces bytes, lets them come, and counts threads that arrive; each may end the phase.
void expect_bytes(BarrierState &barrier, std::uint32_t bytes);
void complete_bytes(BarrierState &barrier, std::uint32_t bytes);
void arrive(BarrierState &barrier, std::uint32_t count);

}  // namespace emulator
