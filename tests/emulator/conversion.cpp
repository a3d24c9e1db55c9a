// Moves between registers and conversions between number types.
#include <cfenv>
#include <cmath>
#include <limits>

#include "machine.h"
#include "numbers.h"

namespace emulator {

namespace {

// Bytes of the parts of mov.b32 {a, b}, c and mov.b64 {a, b}, c.
Run move(Opcode const &opcode) {
  if (opcode.base() != "mov") return nullptr;
  int const bytes = opcode.last() == "b32" ? 4 : opcode.last() == "b16" ? 2 : 8;
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    int const parts_to = in.counts[0], parts_from = in.counts[1], parts = parts_to * parts_from;
    each_lane(mask, [&](int lane) {
      if (parts == 1) {
        warp.row(in.rows[0])[lane] = warp.row(in.rows[1])[lane];
        return;
      }
      int const width = 8 * bytes / parts;
      std::uint64_t const ones = (std::uint64_t(1) << width) - 1;
      if (parts_from > 1) {
        std::uint64_t all = 0;
        for (int i = 0; i < parts; ++i) all |= (warp.row(in.rows[std::size_t(1 + i)])[lane] & ones) << i * width;
        warp.row(in.rows[0])[lane] = all;
      } else {
        std::uint64_t const all = warp.row(in.rows[std::size_t(parts)])[lane];
        for (int i = 0; i < parts; ++i) warp.row(in.rows[std::size_t(i)])[lane] = all >> i * width & ones;
      }
    });
    return Outcome::kDone;
  };
}

// Parameters and shared memory have addresses of their own; generic ones are host pointers, but for shared memory.
Run address(Opcode const &opcode) {
  if (opcode.base() != "cvta") return nullptr;
  bool const to = opcode.has("to"), parameter = opcode.has("param"), shared = opcode.has("shared");
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      std::uint64_t value = warp.row(in.rows[1])[lane];
      if (parameter) value += reinterpret_cast<std::uint64_t>(warp.block().cluster.parameters);
      if (shared) value = to ? value - kGenericShared : value + kGenericShared;
      warp.row(in.rows[0])[lane] = value;
    });
    return Outcome::kDone;
  };
}

bool is_integer(std::string_view type) {
  return (type[0] == 's' || type[0] == 'u' || type[0] == 'b') && type.substr(0, 2) != "bf";
}

std::int64_t integer_of(std::uint64_t bits, std::string_view type) {
  if (type == "s8") return get<std::int8_t>(bits);
  if (type == "s16") return get<std::int16_t>(bits);
  if (type == "s32") return get<std::int32_t>(bits);
  if (type == "u8" || type == "b8") return get<std::uint8_t>(bits);
  if (type == "u16" || type == "b16") return get<std::uint16_t>(bits);
  if (type == "u32" || type == "b32") return get<std::uint32_t>(bits);
  return std::int64_t(bits);
}

struct Range {
  double least, most;
};

Range range_of(std::string_view type) {
  int const bits = type == "s8" || type == "u8"     ? 8
                   : type == "s16" || type == "u16" ? 16
                   : type.substr(1) == "32"         ? 32
                                                    : 64;
  if (type[0] == 'u') return {0., std::ldexp(1., bits) - 1};
  return {-std::ldexp(1., bits - 1), std::ldexp(1., bits - 1) - 1};
}

// A float rounded as the opcode says, within what the type holds; NaN is zero (PTX ISA, cvt).
std::uint64_t rounded(double value, std::string_view rounding, Range range, int bytes) {
  if (value != value) return 0;
  double const whole = rounding == "rzi"   ? std::trunc(value)
                       : rounding == "rmi" ? std::floor(value)
                       : rounding == "rpi" ? std::ceil(value)
                                           : std::nearbyint(value);
  double const held = std::min(std::max(whole, range.least), range.most);
  std::uint64_t const all = held < 0 ? std::uint64_t(std::int64_t(held)) : std::uint64_t(held);
  return bytes == 8 ? all : all & ((std::uint64_t(1) << 8 * bytes) - 1);
}

int bytes_of(std::string_view type) {
  std::string_view const bits = type.substr(type.find_first_of("0123456789"));
  return bits == "8" ? 1 : bits.substr(0, 2) == "16" ? 2 : bits.substr(0, 2) == "32" ? 4 : 8;
}

Number number_of(std::string_view type) {
  if (type.substr(0, 4) == "bf16") return Number::kBF16;
  if (type.substr(0, 3) == "f16") return Number::kF16;
  if (type.substr(0, 4) == "e4m3") return Number::kE4M3;
  if (type.substr(0, 4) == "e5m2") return Number::kE5M2;
  if (type == "tf32") return Number::kTF32;
  if (type == "f32") return Number::kF32;
  fail("the interpreter does not convert '" + std::string(type) + "'");
}

// Two floats into one register, the first in its upper half.
Run convert_pair(Number number, bool relu) {
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      std::uint32_t packed = 0;
      for (int i = 0; i < 2; ++i) {
        float const value = get<float>(warp.row(in.rows[std::size_t(1 + i)])[lane]);
        packed = packed << bits_of(number) | from_float(number, relu && value < 0 ? 0.f : value);
      }
      put<std::uint32_t>(warp.row(in.rows[0])[lane], packed);
    });
    return Outcome::kDone;
  };
}

Run widen_pair(Number from) {  // cvt.rn.f16x2.e4m3x2
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      auto const two = get<std::uint32_t>(warp.row(in.rows[1])[lane]);
      std::uint32_t packed = 0;
      for (int i = 0; i < 2; ++i) packed |= from_float(Number::kF16, to_float(from, two >> 8 * i & 255)) << 16 * i;
      put<std::uint32_t>(warp.row(in.rows[0])[lane], packed);
    });
    return Outcome::kDone;
  };
}

// cvt.pack.sat.s8.s32.b32 d, a, b, c: b in the lowest byte, then a, then the lower half of c.
Run pack_bytes(Opcode const &opcode) {
  if (opcode.parts[2] != "sat" || opcode.parts[3] != "s8" || opcode.parts[4] != "s32") return nullptr;
  return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      auto const byte = [&](std::size_t operand) {
        int const value = get<std::int32_t>(warp.row(in.rows[operand])[lane]);
        return std::uint32_t(std::min(std::max(value, -128), 127)) & 255;
      };
      auto const rest = get<std::uint32_t>(warp.row(in.rows[3])[lane]);
      put<std::uint32_t>(warp.row(in.rows[0])[lane], rest << 16 | byte(1) << 8 | byte(2));
    });
    return Outcome::kDone;
  };
}

// Whether the conversion is one of those below: another modifier would change its result.
bool is_known(Opcode const &opcode) {
  static char const *const kModifiers[] = {"rn",  "rna", "rni", "rz",        "rzi", "rmi",
                                           "rpi", "ftz", "sat", "satfinite", "relu"};
  for (std::size_t i = 1; i + 2 < opcode.parts.size(); ++i) {
    bool found = false;
    for (char const *modifier : kModifiers) found = found || opcode.parts[i] == modifier;
    if (!found) return false;
  }
  return !opcode.has("rz");
}

Run convert(Opcode const &opcode) {
  if (opcode.base() != "cvt") return nullptr;
  if (opcode.has("pack")) return pack_bytes(opcode);
  if (!is_known(opcode)) return nullptr;
  std::string const to(opcode.last_but_one()), from(opcode.last());
  bool const saturates = opcode.has("sat"), relu = opcode.has("relu");
  if (to.find("x2") != to.npos && from.find("x2") != from.npos) return widen_pair(number_of(from));
  if (to.find("x2") != to.npos) return convert_pair(number_of(to), relu);
  std::string rounding = "rni";
  for (char const *each : {"rzi", "rmi", "rpi"}) {
    if (opcode.has(each)) rounding = each;
  }
  bool const whole = rounding != "rni" || opcode.has("rni");
  if (is_integer(to) && is_integer(from)) {
    Range const range = range_of(to);
    int const bytes = bytes_of(to);
    return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
      each_lane(mask, [&](int lane) {
        std::int64_t value = integer_of(warp.row(in.rows[1])[lane], from);
        if (saturates) value = std::int64_t(std::min(std::max(double(value), range.least), range.most));
        std::uint64_t const all = std::uint64_t(value);
        warp.row(in.rows[0])[lane] = bytes == 8 ? all : all & ((std::uint64_t(1) << 8 * bytes) - 1);
      });
      return Outcome::kDone;
    };
  }
  if (is_integer(to)) {
    Number const number = number_of(from);
    Range const range = range_of(to);
    int const bytes = bytes_of(to);
    return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
      each_lane(mask, [&](int lane) {
        double const value = to_float(number, get<std::uint32_t>(warp.row(in.rows[1])[lane]));
        warp.row(in.rows[0])[lane] = rounded(value, rounding, range, bytes);
      });
      return Outcome::kDone;
    };
  }
  Number const number = number_of(to);
  bool const from_integer = is_integer(from), away = opcode.has("rna");
  Number const source = from_integer ? Number::kF32 : number_of(from);
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      std::uint64_t const bits = warp.row(in.rows[1])[lane];
      float value = from_integer ? (from == "u64" ? float(bits) : float(integer_of(bits, from)))
                                 : to_float(source, std::uint32_t(bits));
      if (whole)
        value = rounding == "rzi"   ? std::trunc(value)
                : rounding == "rmi" ? std::floor(value)
                : rounding == "rpi" ? std::ceil(value)
                                    : std::nearbyint(value);
      if (saturates) value = value > 1 ? 1.f : value > 0 ? value : 0.f;
      if (relu && value < 0) value = 0;
      if (number == Number::kTF32 && away && std::isfinite(value)) {  // half of the last kept bit up, then truncated
        put<std::uint32_t>(warp.row(in.rows[0])[lane], (from_float(Number::kF32, value) + 0x1000u) & ~0x1fffu);
      } else {
        put<std::uint32_t>(warp.row(in.rows[0])[lane], from_float(number, value));
      }
    });
    return Outcome::kDone;
  };
}

// Arithmetic on registers of two halves: fma.rn.f16x2, max.f16x2 and their like, and on single ones.
Run packed(Opcode const &opcode) {
  std::string_view const base = opcode.base(), type = opcode.last();
  if (type != "f16x2" && type != "bf16x2" && type != "f16" && type != "bf16") return nullptr;
  Number const number = number_of(type);
  int const parts = type.find("x2") != type.npos ? 2 : 1;
  bool const relu = opcode.has("relu"), nan = opcode.has("NaN");
  char const operation = base == "fma"   ? 'f'
                         : base == "mul" ? '*'
                         : base == "add" ? '+'
                         : base == "sub" ? '-'
                         : base == "max" ? 'M'
                         : base == "min" ? 'm'
                                         : '?';
  if (operation == '?') return nullptr;
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      std::uint32_t result = 0;
      for (int i = 0; i < parts; ++i) {
        auto const part = [&](std::size_t operand) {
          return double(to_float(number, get<std::uint32_t>(warp.row(in.rows[operand])[lane]) >> 16 * i & 0xffff));
        };
        double const a = part(1), b = part(2);
        double value = operation == 'f' ? a * b + part(3) : operation == '*' ? a * b : operation == '+' ? a + b : a - b;
        if (operation == 'M' || operation == 'm') {
          value = a != a ? (nan ? a : b) : b != b ? (nan ? b : a) : (a < b) == (operation == 'm') ? a : b;
        }
        if (relu && value < 0) value = 0;
        result |= from_float(number, float(value)) << 16 * i;
      }
      put<std::uint32_t>(warp.row(in.rows[0])[lane], result);
    });
    return Outcome::kDone;
  };
}

}  // namespace

Run conversion(Opcode const &opcode) {
  for (auto const find : {move, address, convert, packed}) {
    if (Run run = find(opcode)) return run;
  }
  return nullptr;
}

}  // namespace emulator
