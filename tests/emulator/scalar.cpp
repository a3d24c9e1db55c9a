// Arithmetic, comparisons, logic and jumps, lane by lane.
#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"

namespace emulator {

namespace {

template <class D, class A, class F>
Run unary(F f) {
  return [f](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint64_t *const d = warp.row(in.rows[0]), *const a = warp.row(in.rows[1]);
    each_lane(mask, [&](int lane) { put<D>(d[lane], f(get<A>(a[lane]))); });
    return Outcome::kDone;
  };
}

template <class D, class A, class B, class F>
Run binary(F f) {
  return [f](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint64_t *const d = warp.row(in.rows[0]), *const a = warp.row(in.rows[1]), *const b = warp.row(in.rows[2]);
    each_lane(mask, [&](int lane) { put<D>(d[lane], f(get<A>(a[lane]), get<B>(b[lane]))); });
    return Outcome::kDone;
  };
}

template <class D, class A, class B, class C, class F>
Run ternary(F f) {
  return [f](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint64_t *const d = warp.row(in.rows[0]), *const a = warp.row(in.rows[1]), *const b = warp.row(in.rows[2]);
    std::uint64_t *const c = warp.row(in.rows[3]);
    each_lane(mask, [&](int lane) { put<D>(d[lane], f(get<A>(a[lane]), get<B>(b[lane]), get<C>(c[lane]))); });
    return Outcome::kDone;
  };
}

// Calls f with a value of the C++ type that the last part of an opcode names; null for another.
template <class F>
Run with_integer(std::string_view type, F f) {
  if (type == "s16") return f(std::int16_t{});
  if (type == "u16" || type == "b16") return f(std::uint16_t{});
  if (type == "s32") return f(std::int32_t{});
  if (type == "u32" || type == "b32") return f(std::uint32_t{});
  if (type == "s64") return f(std::int64_t{});
  if (type == "u64" || type == "b64") return f(std::uint64_t{});
  return nullptr;
}

template <class F>
Run with_number(std::string_view type, F f) {
  if (type == "f32") return f(float{});
  if (type == "f64") return f(double{});
  return with_integer(type, f);
}

__extension__ using Int128 = __int128;

template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, Int128, std::int64_t>;

float fused(float a, float b, float c) { return float(double(a) * b + c); }
double fused(double a, double b, double c) { return std::fma(a, b, c); }

// A quotient that PTX leaves to the hardware where it is not one.
template <class T>
T quotient(T a, T b) {
  if constexpr (!std::is_floating_point_v<T>) {
    if (b == 0) return std::numeric_limits<T>::max();
  }
  return a / b;
}

Run arithmetic(Opcode const &opcode) {
  std::string_view const base = opcode.base(), type = opcode.last();
  bool const high = opcode.has("hi"), wide = opcode.has("wide"), nan = opcode.has("NaN");
  return with_number(type, [&](auto zero) -> Run {
    using T = decltype(zero);
    constexpr bool kFloat = std::is_floating_point_v<T>;
    if (base == "add") return binary<T, T, T>([](T a, T b) { return T(a + b); });
    if (base == "sub") return binary<T, T, T>([](T a, T b) { return T(a - b); });
    if (base == "div") return binary<T, T, T>([](T a, T b) { return quotient(a, b); });
    if (base == "neg") return unary<T, T>([](T a) { return T(-a); });
    if (base == "abs") return unary<T, T>([](T a) { return a < 0 ? T(-a) : a == 0 ? T(0) : a; });
    if (base == "min" || base == "max") {
      bool const is_min = base == "min";
      return binary<T, T, T>([=](T a, T b) {
        if (a != a) return nan ? a : b;
        if (b != b) return nan ? b : a;
        return (a < b) == is_min ? a : b;
      });
    }
    if constexpr (kFloat) {
      if (base == "mul") return binary<T, T, T>([](T a, T b) { return a * b; });
      bool const relu = opcode.has("relu");
      if (base == "fma" || base == "mad") {
        return ternary<T, T, T, T>([=](T a, T b, T c) {
          T const sum = fused(a, b, c);
          return relu && sum < 0 ? T(0) : sum;
        });
      }
    } else {
      if (base == "rem") return binary<T, T, T>([](T a, T b) { return b == 0 ? a : T(a % b); });
      using W = Wide<T>;
      constexpr int kBits = 8 * sizeof(T);
      if (base == "mul" && wide) {
        return binary<std::int64_t, T, T>([](T a, T b) { return std::int64_t(W(a) * W(b)); });
      }
      if (base == "mad" && wide) {
        return ternary<std::int64_t, T, T, std::int64_t>(
            [](T a, T b, std::int64_t c) { return std::int64_t(W(a) * W(b) + c); });
      }
      int const shift = high ? kBits : 0;
      if (base == "mul") return binary<T, T, T>([=](T a, T b) { return T(W(a) * W(b) >> shift); });
      if (base == "mad") return ternary<T, T, T, T>([=](T a, T b, T c) { return T((W(a) * W(b) >> shift) + c); });
    }
    return nullptr;
  });
}

Run logic(Opcode const &opcode) {
  std::string_view const base = opcode.base(), type = opcode.last();
  if (type == "pred") {
    if (base == "and") return binary<bool, bool, bool>([](bool a, bool b) { return a && b; });
    if (base == "or") return binary<bool, bool, bool>([](bool a, bool b) { return a || b; });
    if (base == "xor") return binary<bool, bool, bool>([](bool a, bool b) { return a != b; });
    if (base == "not") return unary<bool, bool>([](bool a) { return !a; });
    return nullptr;
  }
  return with_integer(type, [&](auto zero) -> Run {
    using T = decltype(zero);
    constexpr std::uint32_t kBits = 8 * sizeof(T);
    if (base == "and") return binary<T, T, T>([](T a, T b) { return T(a & b); });
    if (base == "or") return binary<T, T, T>([](T a, T b) { return T(a | b); });
    if (base == "xor") return binary<T, T, T>([](T a, T b) { return T(a ^ b); });
    if (base == "not") return unary<T, T>([](T a) { return T(~a); });
    if (base == "shl") {
      return binary<T, T, std::uint32_t>([](T a, std::uint32_t by) { return by < kBits ? T(a << by) : T(0); });
    }
    if (base == "shr") {
      return binary<T, T, std::uint32_t>(
          [](T a, std::uint32_t by) { return T(a >> std::min(by, kBits - 1)) >> (by >= kBits); });
    }
    if (base == "clz") {
      return unary<std::uint32_t, std::make_unsigned_t<T>>(
          [](std::make_unsigned_t<T> a) { return a == 0 ? kBits : std::uint32_t(__builtin_clzll(a)) - (64 - kBits); });
    }
    if (base == "popc")
      return unary<std::uint32_t, std::make_unsigned_t<T>>(
          [](auto a) { return std::uint32_t(__builtin_popcountll(a)); });
    return nullptr;
  });
}

// Rows d, a, b, position, length.
template <class T>
Run insert_bits() {
  return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
    each_lane(mask, [&](int lane) {
      T const a = get<T>(warp.row(in.rows[1])[lane]), b = get<T>(warp.row(in.rows[2])[lane]);
      auto const at = get<std::uint32_t>(warp.row(in.rows[3])[lane]),
                 bits = get<std::uint32_t>(warp.row(in.rows[4])[lane]);
      T const ones = bits >= 8 * sizeof(T) ? ~T(0) : (T(1) << bits) - 1;
      put<T>(warp.row(in.rows[0])[lane], T((b & ~(ones << at)) | ((a & ones) << at)));
    });
    return Outcome::kDone;
  };
}

Run bits(Opcode const &opcode) {
  std::string_view const base = opcode.base(), type = opcode.last();
  if (base == "bfi") return type == "b64" ? insert_bits<std::uint64_t>() : insert_bits<std::uint32_t>();
  if (base == "prmt") {
    return ternary<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        [](std::uint32_t a, std::uint32_t b, std::uint32_t choice) {
          std::uint64_t const bytes = std::uint64_t(b) << 32 | a;
          std::uint32_t result = 0;
          for (int i = 0; i < 4; ++i) {
            std::uint32_t const nibble = choice >> 4 * i & 15, byte = std::uint32_t(bytes >> 8 * (nibble & 7)) & 255;
            result |= ((nibble & 8) != 0 ? (byte >> 7) * 255 : byte) << 8 * i;
          }
          return result;
        });
  }
  if (base == "bfe" && type == "u32") {
    return ternary<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        [](std::uint32_t a, std::uint32_t at, std::uint32_t count) {
          return count == 0 || at > 31 ? 0u : (a >> at) & (count > 31 ? ~0u : (1u << count) - 1);
        });
  }
  if (base == "shf" && type == "b32") {  // rows d, low, high, by
    bool const left = opcode.has("l"), wraps = opcode.has("wrap");
    return ternary<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        [=](std::uint32_t low, std::uint32_t high, std::uint32_t by) {
          by = wraps ? by & 31 : std::min(by, 32u);
          std::uint64_t const both = std::uint64_t(high) << 32 | low;
          return left ? std::uint32_t(both << by >> 32) : std::uint32_t(both >> by);
        });
  }
  return nullptr;
}

// The functions that the hardware computes nearly: here they are exact, but for one rounding.
Run function(Opcode const &opcode) {
  if (opcode.last() != "f32") return nullptr;
  std::string_view const base = opcode.base();
  if (base == "ex2") return unary<float, float>([](float a) { return std::exp2(a); });
  if (base == "lg2") return unary<float, float>([](float a) { return std::log2(a); });
  if (base == "rcp") return unary<float, float>([](float a) { return 1.f / a; });
  if (base == "rsqrt") return unary<float, float>([](float a) { return 1.f / std::sqrt(a); });
  if (base == "sqrt") return unary<float, float>([](float a) { return std::sqrt(a); });
  if (base == "tanh") return unary<float, float>([](float a) { return std::tanh(a); });
  return nullptr;
}

// Rows p, a, b, or p, q, a, b where q is the opposite.
Run compare(Opcode const &opcode) {
  if (opcode.base() != "setp" || opcode.has("and") || opcode.has("or") || opcode.has("xor")) return nullptr;
  std::string_view const how = opcode.parts[1];
  bool const unordered = how.size() == 3 && how.back() == 'u';
  std::string_view const relation = unordered ? how.substr(0, 2) : how;
  bool const of_nan = unordered || relation == "nan";  // the names are the opcode's, which is gone when this runs
  return with_number(opcode.last(), [&](auto zero) -> Run {
    using T = decltype(zero);
    auto const with = [&](auto holds) -> Run {
      return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
        int const a = in.row_of(1), b = in.row_of(2);
        each_lane(mask, [&](int lane) {
          T const x = get<T>(warp.row(a)[lane]), y = get<T>(warp.row(b)[lane]);
          bool const result = x != x || y != y ? of_nan : holds(x, y);
          put<bool>(warp.row(in.rows[0])[lane], result);
          if (in.counts[0] == 2) put<bool>(warp.row(in.rows[1])[lane], !result);
        });
        return Outcome::kDone;
      };
    };
    if (relation == "eq") return with([](T a, T b) { return a == b; });
    if (relation == "ne") return with([](T a, T b) { return a != b; });
    if (relation == "lt" || relation == "lo") return with([](T a, T b) { return a < b; });
    if (relation == "le" || relation == "ls") return with([](T a, T b) { return a <= b; });
    if (relation == "gt" || relation == "hi") return with([](T a, T b) { return a > b; });
    if (relation == "ge" || relation == "hs") return with([](T a, T b) { return a >= b; });
    if (relation == "num") return with([](T, T) { return true; });
    if (relation == "nan") return with([](T, T) { return false; });
    return nullptr;
  });
}

Run jump(Opcode const &opcode) {
  if (opcode.base() == "bra") {
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      warp.jump(mask, in.target);
      return Outcome::kJumped;
    };
  }
  if (opcode.base() == "ret" || opcode.base() == "exit") {
    return [](Warp &warp, Instruction const &, std::uint32_t mask) {
      warp.exit(mask);
      return Outcome::kJumped;
    };
  }
  if (opcode.base() == "trap") {
    return [](Warp &, Instruction const &, std::uint32_t) -> Outcome { fail("the kernel has given up"); };
  }
  return nullptr;
}

}  // namespace

Run scalar(Opcode const &opcode) {
  std::string_view const base = opcode.base();
  if (base == "selp") {
    return ternary<std::uint64_t, std::uint64_t, std::uint64_t, bool>(
        [](std::uint64_t a, std::uint64_t b, bool first) { return first ? a : b; });
  }
  for (auto const find : {jump, compare, bits, function}) {
    if (Run run = find(opcode)) return run;
  }
  if (base == "add" || base == "sub" || base == "mul" || base == "mad" || base == "fma" || base == "div" ||
      base == "rem" || base == "neg" || base == "abs" || base == "min" || base == "max") {
    return arithmetic(opcode);
  }
  return logic(opcode);
}

}  // namespace emulator
