// What nvcc leaves in an object file for the runtime library: the PTX of its kernels.
#pragma once

#include <string_view>
#include <vector>

namespace emulator {

struct Ptx {
  int sm;                 // 90 in `.target sm_90a`
  bool alone;             // ends in `a`: for this architecture and no later one
  std::string_view text;  // lies in the program's image
};

// Every PTX behind the pointer that __cudaRegisterFatBinary is given. Throws std::runtime_error in one sentence.
std::vector<Ptx> ptx_in(void const *wrapper);

// What a device runs: the newest PTX that is not newer than it. Null: there is none.
Ptx const *choose(std::vector<Ptx> const &all, int sm);

}  // namespace emulator
