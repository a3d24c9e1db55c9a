// Runs kernels on the CPU by interpreting their PTX: what the stand-in for the CUDA runtime asks of the interpreter.
// Device memory is host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace emulator {

struct Module;

// Every function below throws std::runtime_error, in one sentence.
std::shared_ptr<Module const> parse(std::string_view ptx);

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Function {
  std::shared_ptr<Module const> module;
  std::string name;  // as in the PTX, mangled
};

struct FunctionFacts {
  int static_shared_bytes, parameter_bytes, max_threads;
};
FunctionFacts facts(Function const &function);

struct GridLaunch {
  Function function;
  Dim3 grid, block, cluster;
  std::size_t dynamic_shared_bytes = 0;
  bool early = false;  // a programmatic dependent launch: the kernel itself waits for the one before it
};
// Runs a grid to its end. `parameters` points to each parameter of the kernel. Throws on a deadlock, an address that is
// not the kernel's, and whatever the PTX ISA leaves undefined and the interpreter sees.
void run(GridLaunch const &launch, void *const *parameters);

// Global memory that kernels may touch. While none is named, they may touch all.
void allow(void const *data, std::size_t bytes);
void forbid(void const *data);

// When what runs beside a thread is done: TMA, cp.async, wgmma. kEarly: at once. kLate: when something waits for it.
// kAny: at any time between, decided by the seed, as is which warp runs next.
enum class Timing { kEarly, kLate, kAny };
void set_timing(Timing timing, std::uint64_t seed);

}  // namespace emulator
