// The numbers of the tensor cores, as bits and as floats. Bit code instead of _Float16, which not every g++ has on
// every machine; all of it is branch-free enough for wgmma's operands, a few thousand at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

enum class Number { kF16, kBF16, kTF32, kF32, kS8, kU8, kE4M3, kE5M2, kS32 };

inline int bits_of(Number number) {
  switch (number) {
    case Number::kF16:
    case Number::kBF16:
      return 16;
    case Number::kS8:
    case Number::kU8:
    case Number::kE4M3:
    case Number::kE5M2:
      return 8;
    case Number::kTF32:
    case Number::kF32:
    case Number::kS32:
      break;
  }
  return 32;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// ---- to float, exact ------------------------------------------------------------------------------------------------

// Exponent and mantissa are shifted to where a float has them; the product corrects the bias, of subnormals too.
inline float float_of_half(uint32_t bits) {
  float const magnitude = float_of_bits((bits & 0x7FFF) << 13) * 0x1p112f;
  uint32_t const special = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
  return float_of_bits(bits_of_float(magnitude) | special | (bits & 0x8000) << 16);
}

inline float float_of_e4m3(uint32_t bits) {
  float const magnitude = float_of_bits((bits & 0x7F) << 20) * 0x1p120f;
  uint32_t const special = (bits & 0x7F) == 0x7F ? 0x7FC00000 : 0;  // the only NaN; there are no infinities
  return float_of_bits(bits_of_float(magnitude) | special | (bits & 0x80) << 24);
}

// Higher bits than the number has are ignored.
inline float to_float(Number number, uint32_t bits) {
  switch (number) {
    case Number::kF16:
      return float_of_half(bits);
    case Number::kBF16:
      return float_of_bits(bits << 16);
    case Number::kTF32:
      return float_of_bits(bits & ~0x1FFFu);  // mma does not look at the 13 low bits
    case Number::kS8:
      return static_cast<float>(static_cast<int8_t>(bits));
    case Number::kU8:
      return static_cast<float>(static_cast<uint8_t>(bits));
    case Number::kE4M3:
      return float_of_e4m3(bits);
    case Number::kE5M2:
      return float_of_half((bits & 0xFF) << 8);  // the upper byte of a half
    case Number::kS32:
      return static_cast<float>(static_cast<int32_t>(bits));
    case Number::kF32:
      break;
  }
  return float_of_bits(bits);
}

// ---- from float -----------------------------------------------------------------------------------------------------

// value / 2^shift to nearest even.
inline uint32_t shift_and_round(uint32_t value, int shift) {
  uint32_t const half = 1u << (shift - 1);
  return (value + half - 1 + (value >> shift & 1)) >> shift;
}

// The magnitude of a finite float with fewer exponent bits (their bias is given) and mantissa bits. The exponent may be
// larger than the format allows: callers make an infinity or the largest number of it.
inline uint32_t narrow_magnitude(uint32_t magnitude, int bias, int mantissa_bits) {
  int const exponent = static_cast<int>(magnitude >> 23) - 127 + bias, drop = 23 - mantissa_bits;
  uint32_t const mantissa = magnitude & 0x7FFFFF;
  if (exponent > 0) return shift_and_round(static_cast<uint32_t>(exponent) << 23 | mantissa, drop);
  int const shift = drop + 1 - exponent;  // a subnormal number, of which the leading one is written out
  return shift > 25 ? 0 : shift_and_round(mantissa | 0x800000, shift);
}

// As cvt.rni.sat: NaN is 0.
inline uint32_t nearest_integer(float value, double least, double most) {
  if (std::isnan(value)) return 0;
  double const rounded = std::fmin(std::fmax(std::nearbyint(static_cast<double>(value)), least), most);
  return static_cast<uint32_t>(static_cast<int64_t>(rounded));
}

// To nearest even as PTX cvt.rn does, cvt.rn.satfinite for the 8-bit floats; in the low bits of the result.
inline uint32_t from_float(Number number, float value) {
  uint32_t const bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
  bool const nan = magnitude > 0x7F800000;
  auto const small = [&](int bias, int mantissa_bits, uint32_t largest, uint32_t canonical_nan, int sign_bit) {
    if (nan) return canonical_nan;
    uint32_t const narrow = magnitude == 0x7F800000 ? largest : narrow_magnitude(magnitude, bias, mantissa_bits);
    return (narrow < largest ? narrow : largest) | bits >> 31 << sign_bit;
  };
  switch (number) {
    case Number::kF16:
      return small(15, 10, 0x7C00, 0x7FFF, 15);
    case Number::kE4M3:
      return small(7, 3, 0x7E, 0x7F, 7);
    case Number::kE5M2:
      return small(15, 2, 0x7B, 0x7F, 7);
    case Number::kBF16:
      return nan ? 0x7FFF : shift_and_round(magnitude, 16) | bits >> 31 << 15;
    case Number::kTF32:
      return nan ? 0x7FFFFFFF : shift_and_round(magnitude, 13) << 13 | (bits & 0x80000000);
    case Number::kS8:
      return nearest_integer(value, -128, 127) & 0xFF;
    case Number::kU8:
      return nearest_integer(value, 0, 255);
    case Number::kS32:
      return nearest_integer(value, -0x1p31, 0x1p31 - 1);
    case Number::kF32:
      break;
  }
  return bits;
}

}  // namespace emulator
