// A PTX module in the form that the interpreter executes: operands are rows of a warp's registers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "grid.h"

namespace emulator {

class Warp;
struct Instruction;

enum class Outcome { kDone, kBlocked, kJumped };
// Executes an instruction for the lanes of `mask`. kBlocked: nothing happened, and it has to be tried again.
using Run = std::function<Outcome(Warp &, Instruction const &, std::uint32_t mask)>;

// "add.rn.f32" as its parts.
struct Opcode {
  std::vector<std::string_view> parts;

  explicit Opcode(std::string_view text);
  std::string_view base() const { return parts[0]; }
  std::string_view last() const { return parts.back(); }
  std::string_view last_but_one() const { return parts.size() > 1 ? parts[parts.size() - 2] : parts[0]; }
  bool has(std::string_view part) const;
};

struct Instruction {
  Run run;
  std::vector<int> rows;         // of all operands in their order, those of a vector one after the other
  std::vector<int> counts;       // rows of each operand
  std::int64_t offsets[2] = {};  // bytes that the first and second memory operand add to their address
  int guard = -1;                // row of the predicate
  bool unless = false;           // the predicate is negated
  int target = -1;               // of a branch
  bool converges = false;        // all lanes of the warp execute it together
  std::string text;

  // The first row of an operand.
  int row_of(int operand) const {
    int row = 0;
    for (int i = 0; i < operand; ++i) row += counts[std::size_t(i)];
    return rows[std::size_t(row)];
  }
};

// Rows that hold the same at every launch, or what only the launch knows.
enum class Special {
  kTidX,
  kNtidX,
  kCtaidX,
  kNctaidX,
  kClusterCtarank,
  kClusterNctarank,
  kClusteridX,
  kNclusteridX,
  kLaneid,
  kZero,  // of y and z: grids and blocks have one dimension
  kOne,
};

constexpr int kSharedBase = 1024;  // of a block's shared memory; the hardware keeps what is below

struct Entry {
  std::string name;
  std::vector<Instruction> code;
  int rows = 0;
  std::vector<std::pair<int, std::uint64_t>> constants;
  std::vector<std::pair<int, Special>> specials;
  std::vector<int> dynamic_shared;  // rows that hold the address of dynamic shared memory
  std::vector<int> parameter_offsets, parameter_sizes;
  int parameter_bytes = 0, static_shared_bytes = 0, max_threads = 1024;
  unsigned cluster = 1;  // blocks, where the kernel says how many
};

struct Module {
  std::map<std::string, std::shared_ptr<Entry const>> entries;
};

// What an opcode does; a file each for kinds of instructions. Null where the file does not know it.
Run scalar(Opcode const &opcode);
Run conversion(Opcode const &opcode);
Run memory(Opcode const &opcode);
Run matrix(Opcode const &opcode);
Run barrier(Opcode const &opcode);
Run tensor_memory(Opcode const &opcode);

[[noreturn]] inline void fail(std::string const &sentence) { throw std::runtime_error(sentence); }

}  // namespace emulator
