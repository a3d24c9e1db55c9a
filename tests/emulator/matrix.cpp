// The instructions of a warp on matrices: ldmatrix, stmatrix, movmatrix, mma and wgmma.
#include <algorithm>

#include "machine.h"
#include "tensor_ops.h"

namespace emulator {

namespace {

// Registers of all lanes, copied: those of operand `first` on.
struct Registers {
  std::uint32_t words[128][32];

  Registers(Warp &warp, Instruction const &in, int operand) {
    int const first = first_row(in, operand), count = in.counts[std::size_t(operand)];
    for (int i = 0; i < count; ++i) {
      std::uint64_t const *const row = warp.row(in.rows[std::size_t(first + i)]);
      for (int lane = 0; lane < 32; ++lane) words[i][lane] = get<std::uint32_t>(row[lane]);
    }
  }
  Registers() = default;

  void write(Warp &warp, Instruction const &in, int operand) const {
    int const first = first_row(in, operand), count = in.counts[std::size_t(operand)];
    for (int i = 0; i < count; ++i) {
      std::uint64_t *const row = warp.row(in.rows[std::size_t(first + i)]);
      for (int lane = 0; lane < 32; ++lane) put<std::uint32_t>(row[lane], words[i][lane]);
    }
  }

 private:
  static int first_row(Instruction const &in, int operand) {
    int row = 0;
    for (int i = 0; i < operand; ++i) row += in.counts[std::size_t(i)];
    return row;
  }
};

int matrices(Opcode const &opcode) { return opcode.has("x4") ? 4 : opcode.has("x2") ? 2 : 1; }

// The rows of 16 bytes that the lanes point to.
void point(Warp &warp, Instruction const &in, int operand, int count, std::uint8_t *rows[32]) {
  std::uint64_t const *const address = warp.row(in.row_of(operand));
  for (int lane = 0; lane < 32; ++lane) {
    rows[lane] = nullptr;
    if (lane >= 8 * count) continue;
    std::uint64_t const where = address[lane] + std::uint64_t(in.offsets[0]);
    rows[lane] = warp.block().shared_at(std::uint32_t(where), 16, 16);
  }
}

Run moves(Opcode const &opcode) {
  int const count = matrices(opcode);
  bool const trans = opcode.has("trans");
  if (opcode.base() == "ldmatrix") {
    return [=](Warp &warp, Instruction const &in, std::uint32_t) {
      std::uint8_t *rows[32];
      point(warp, in, 1, count, rows);
      Registers out;
      ldmatrix(count, trans, rows, out.words);
      out.write(warp, in, 0);
      return Outcome::kDone;
    };
  }
  if (opcode.base() == "stmatrix") {
    return [=](Warp &warp, Instruction const &in, std::uint32_t) {
      std::uint8_t *rows[32];
      point(warp, in, 0, count, rows);
      stmatrix(count, trans, rows, Registers(warp, in, 1).words);
      return Outcome::kDone;
    };
  }
  if (opcode.base() == "movmatrix") {
    return [](Warp &warp, Instruction const &in, std::uint32_t) {
      Registers matrix(warp, in, 1);
      movmatrix(matrix.words[0], matrix.words[0]);
      matrix.write(warp, in, 0);
      return Outcome::kDone;
    };
  }
  return nullptr;
}

Number number_of(std::string_view type) {
  if (type == "f16") return Number::kF16;
  if (type == "bf16") return Number::kBF16;
  if (type == "tf32") return Number::kTF32;
  if (type == "f32") return Number::kF32;
  if (type == "s8") return Number::kS8;
  if (type == "u8") return Number::kU8;
  if (type == "s32") return Number::kS32;
  if (type == "e4m3") return Number::kE4M3;
  if (type == "e5m2") return Number::kE5M2;
  fail("the interpreter does not multiply '" + std::string(type) + "'");
}

// "m64n128k16": the number behind a letter.
int extent(std::string_view shape, char letter) {
  return std::atoi(std::string(shape.substr(shape.find(letter) + 1)).c_str());
}

std::string_view shape_of(Opcode const &opcode) {
  for (std::string_view const part : opcode.parts) {
    if (part[0] == 'm' && part.size() > 3 && part.find('n') != part.npos && part.find('k') != part.npos) return part;
  }
  fail("a product without a shape");
}

// ".d.a.b.c", operands d, a, b, c.
Run warp_products(Opcode const &opcode) {
  if (opcode.base() != "mma") return nullptr;
  std::string_view const shape = shape_of(opcode);
  std::size_t const types = opcode.parts.size() - 4;
  MmaShape const mma{extent(shape, 'm'),
                     extent(shape, 'n'),
                     extent(shape, 'k'),
                     number_of(opcode.parts[types + 1]),
                     number_of(opcode.parts[types + 2]),
                     number_of(opcode.parts[types]),
                     opcode.has("satfinite")};
  return [=](Warp &warp, Instruction const &in, std::uint32_t) {
    Registers const a(warp, in, 1), b(warp, in, 2), c(warp, in, 3);
    Registers d;
    mma_sync(mma, a.words, b.words, c.words, d.words);
    d.write(warp, in, 0);
    return Outcome::kDone;
  };
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// ".d.a.b", operands d, a or its descriptor, b's descriptor, scale-d, and for floats scale-a, scale-b and perhaps
// whether they are transposed. Each warp of the group computes its own 16 rows.
Run group_products(Opcode const &opcode) {
  std::string_view const shape = shape_of(opcode);
  std::size_t const types = opcode.parts.size() - 3;
  Number const sum = number_of(opcode.parts[types]), a = number_of(opcode.parts[types + 1]);
  Number const b = number_of(opcode.parts[types + 2]);
  int const n = extent(shape, 'n'), k = extent(shape, 'k');
  return [=](Warp &warp, Instruction const &in, std::uint32_t) {
    Warp *const self = &warp;
    Instruction const *const instruction = &in;
    auto const scalar = [&](int operand) { return get<std::int32_t>(warp.row(in.row_of(operand))[0]); };
    int const operands = int(in.counts.size());
    bool const in_registers = in.counts[1] > 1;
    Wgmma const op{n,
                   k,
                   a,
                   b,
                   sum,
                   in_registers,
                   !in_registers && operands > 7 && scalar(6) != 0,
                   operands > (in_registers ? 6 : 7) && scalar(operands - 1) != 0,
                   operands > 4 ? float(scalar(4)) : 1.f,
                   operands > 5 ? float(scalar(5)) : 1.f,
                   get<bool>(warp.row(in.row_of(3))[0])};
    std::uint64_t const a_desc = in_registers ? 0 : warp.row(in.row_of(1))[0], b_desc = warp.row(in.row_of(2))[0];
    Effect const effect = [=] {
      Block &block = self->block();
      Registers d(*self, *instruction, 0);
      Registers const a_registers = in_registers ? Registers(*self, *instruction, 1) : Registers();
      wgmma(op, self->index() % 4, a_desc, b_desc, a_registers.words, block.shared.data(),
            std::uint32_t(block.shared.size()), d.words);
      d.write(*self, *instruction, 0);
    };
    warp.products.add(effect);
    if (timing() == Timing::kEarly) warp.end_products(warp.products.started());
    return Outcome::kDone;
  };
}

}  // namespace

Run matrix(Opcode const &opcode) {
  if (opcode.base() != "wgmma") {
    Run run = moves(opcode);
    return run ? run : warp_products(opcode);
  }
  if (opcode.has("mma_async")) return group_products(opcode);
  if (opcode.has("commit_group")) {
    return [](Warp &warp, Instruction const &, std::uint32_t) { return warp.products.commit(), Outcome::kDone; };
  }
  if (opcode.has("wait_group")) {
    return [](Warp &warp, Instruction const &in, std::uint32_t) {
      std::size_t const operations = warp.products.before(std::size_t(warp.row(in.rows[0])[0]));
      return warp.end_products(operations) ? Outcome::kDone : Outcome::kBlocked;
    };
  }
  return [](Warp &, Instruction const &, std::uint32_t) { return Outcome::kDone; };  // fence
}

}  // namespace emulator
