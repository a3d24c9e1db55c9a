#include "tensor_ops.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace emulator {

// ---- matrices of 8 x 8 16-bit elements ------------------------------------------------------------------------------

namespace {

// PTX ISA, ldmatrix: lane l has the elements (l / 4, 2 * (l % 4)) and the next one of a matrix, which is transposed
// with .trans.
struct Place {
  int row, column;
  Place(int lane, int half, bool trans) : row(lane / 4), column(2 * (lane % 4) + half) {
    if (trans) std::swap(row, column);
  }
};

}  // namespace

void ldmatrix(int count, bool trans, uint8_t const *const rows[32], uint32_t (*out)[32]) {
  for (int i = 0; i < count; ++i) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], rows[8 * i + row], sizeof(matrix[row]));
    for (int lane = 0; lane < 32; ++lane) {
      Place const low(lane, 0, trans), high(lane, 1, trans);
      out[i][lane] = matrix[low.row][low.column] | static_cast<uint32_t>(matrix[high.row][high.column]) << 16;
    }
  }
}

void stmatrix(int count, bool trans, uint8_t *const rows[32], uint32_t const (*in)[32]) {
  for (int i = 0; i < count; ++i) {
    uint16_t matrix[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      Place const low(lane, 0, trans), high(lane, 1, trans);
      matrix[low.row][low.column] = static_cast<uint16_t>(in[i][lane]);
      matrix[high.row][high.column] = static_cast<uint16_t>(in[i][lane] >> 16);
    }
    for (int row = 0; row < 8; ++row) std::memcpy(rows[8 * i + row], matrix[row], sizeof(matrix[row]));
  }
}

void movmatrix(uint32_t const in[32], uint32_t out[32]) {
  uint8_t matrix[8][16];
  uint8_t *rows[32] = {};
  for (int row = 0; row < 8; ++row) rows[row] = matrix[row];
  uint32_t copy[1][32];
  std::copy(in, in + 32, copy[0]);
  stmatrix(1, false, rows, copy);
  ldmatrix(1, true, rows, copy);
  std::copy(copy[0], copy[0] + 32, out);
}

// ---- operands and sums, of mma and wgmma ----------------------------------------------------------------------------

namespace {

constexpr int kPanel = 8;  // columns of B that lie side by side
constexpr int kRows = 4;   // of A that are multiplied at once: their sums fill eight of SSE's sixteen registers
constexpr int kMaxK = 32;

using Vector = float __attribute__((vector_size(16)));  // g++ -O2 rarely vectorises by itself

// kRows rows of A, kMaxK floats apart, times a panel of B, (k,kPanel). Integers too: of 8 bits, 32 products of which
// add up to less than 2^24, where floats are exact.
void multiply(float const *a, float const *panel, int k, float (&products)[kRows][kPanel]) {
  Vector sums[kRows][2] = {};
  for (int i = 0; i < k; ++i) {
    Vector b[2];
    std::memcpy(b, panel + i * kPanel, sizeof(b));
#pragma GCC unroll 4  // without it g++ keeps the sums in memory
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] += a[row * kMaxK + i] * b[0];
      sums[row][1] += a[row * kMaxK + i] * b[1];
    }
  }
  std::memcpy(products, sums, sizeof(products));
}

uint32_t add(Number sum, bool saturate, uint32_t c, float products) {
  if (sum == Number::kF32) return bits_of_float(float_of_bits(c) + products);
  int64_t total = static_cast<int64_t>(static_cast<int32_t>(c)) + static_cast<int64_t>(products);
  if (saturate) total = std::clamp<int64_t>(total, INT32_MIN, INT32_MAX);
  return static_cast<uint32_t>(total);
}

// A sum of float8 products as the tensor cores of 8.9 make it: products and sum are shifted to the largest exponent
// among them and keep 13 bits behind that one, the others are cut off. b: a column of a panel. Measured by others: C
// alone by SageAttention2, arXiv 2411.10958, and the products of wgmma by DeepSeek-V3, arXiv 2412.19437, section 3.5.2.
float add_float8(float c, float const *a, float const *b, int k) {
  float products[kMaxK], largest = std::fabs(c), sum = c;
  for (int i = 0; i < k; ++i) {
    products[i] = a[i] * b[i * kPanel];
    largest = std::max(largest, std::fabs(products[i]));
    sum += products[i];
  }
  if (largest == 0 || !std::isfinite(sum)) return sum;
  float const power = float_of_bits(bits_of_float(largest) & 0x7F800000);
  float const to_units = 0x1p13f / power;
  int32_t units = static_cast<int32_t>(c * to_units);
  for (int i = 0; i < k; ++i) units += static_cast<int32_t>(products[i] * to_units);
  return float_of_bits(bits_of_float(static_cast<float>(units) / to_units) & ~0x3FFu);
}

// 16 bytes of a row, to floats that are `step` apart. The number is known here at compile time because this is hot.
template <Number kNumber, class Element>
void decode_as(void const *from, float scale, float *to, int step) {
  constexpr int kCount = 16 / sizeof(Element);
  Element elements[kCount];
  std::memcpy(elements, from, sizeof(elements));
  for (int i = 0; i < kCount; ++i) to[i * step] = to_float(kNumber, elements[i]) * scale;
}

using Decode = void (*)(void const *from, float scale, float *to, int step);

Decode decoder(Number number) {
  switch (number) {
    case Number::kF16:
      return decode_as<Number::kF16, uint16_t>;
    case Number::kBF16:
      return decode_as<Number::kBF16, uint16_t>;
    case Number::kS8:
      return decode_as<Number::kS8, uint8_t>;
    case Number::kU8:
      return decode_as<Number::kU8, uint8_t>;
    case Number::kE4M3:
      return decode_as<Number::kE4M3, uint8_t>;
    case Number::kE5M2:
      return decode_as<Number::kE5M2, uint8_t>;
    case Number::kTF32:
    case Number::kF32:
    case Number::kS32:
      break;
  }
  return decode_as<Number::kTF32, uint32_t>;  // the only number of 32 bits that check_numbers lets through
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16" and its neighbours, "Register Fragments for wgmma": whatever the
// element, a register holds 32 bits of a row of A, thread l that of row l / 4 (+ 8 in odd registers) and of word l % 4
// (+ 4 from the third register on); of B, word l % 4 + 4 * register of column l / 4.
int a_row(int lane, int i) { return lane / 4 + 8 * (i % 2); }
int a_word(int lane, int i) { return lane % 4 + 4 * (i / 2); }

void check_numbers(Number a, Number b, Number sum) {
  bool const integers = sum == Number::kS32;
  auto const fits = [&](Number number) {
    bool const integer = number == Number::kS8 || number == Number::kU8;
    return integers ? integer : !integer && number != Number::kF32 && number != Number::kS32;
  };
  if ((!integers && sum != Number::kF32) || !fits(a) || !fits(b) || bits_of(a) != bits_of(b)) {
    throw std::runtime_error("The emulator's tensor cores add floats up in f32 and int8 in s32, nothing else.");
  }
}

}  // namespace

void mma_sync(MmaShape shape, uint32_t const (*a)[32], uint32_t const (*b)[32], uint32_t const (*c)[32],
              uint32_t (*d)[32]) {
  check_numbers(shape.a, shape.b, shape.sum);
  int const per_word = 32 / bits_of(shape.a), words = shape.k / per_word;
  if (shape.m != 16 || shape.n != 8 || (shape.k != 4 * per_word && shape.k != 8 * per_word)) {
    throw std::runtime_error("The emulator knows no mma.sync.m" + std::to_string(shape.m) + "n" +
                             std::to_string(shape.n) + "k" + std::to_string(shape.k) + " of this type.");
  }
  Decode const decode_a = decoder(shape.a), decode_b = decoder(shape.b);
  uint32_t words_a[16][8], words_b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < words / 2; ++i) words_a[a_row(lane, i)][a_word(lane, i)] = a[i][lane];
    for (int i = 0; i < words / 4; ++i) words_b[lane / 4][lane % 4 + 4 * i] = b[i][lane];
  }
  float rows[16 * kMaxK], panel[kMaxK * kPanel];
  for (int i = 0; i < words; i += 4) {
    for (int row = 0; row < 16; ++row) decode_a(&words_a[row][i], 1.f, rows + row * kMaxK + i * per_word, 1);
    for (int column = 0; column < 8; ++column) {
      decode_b(&words_b[column][i], 1.f, panel + i * per_word * kPanel + column, kPanel);
    }
  }
  if (bits_of(shape.a) == 8 && shape.sum == Number::kF32) {
    for (int i = 0; i < 16 * 8; ++i) {
      int const row = i / 8, column = i % 8, word = row / 8 * 2 + column % 2, lane = row % 8 * 4 + column / 2;
      float const sum = float_of_bits(c[word][lane]);
      d[word][lane] = bits_of_float(add_float8(sum, rows + row * kMaxK, panel + column, shape.k));
    }
    return;
  }
  for (int row = 0; row < 16; row += kRows) {
    float products[kRows][kPanel];
    multiply(rows + row * kMaxK, panel, shape.k, products);
    for (int i = 0; i < kRows * kPanel; ++i) {
      int const lane = (row + i / kPanel) % 8 * 4 + i % kPanel / 2, word = row / 8 * 2 + i % 2;
      d[word][lane] = add(shape.sum, shape.saturate, c[word][lane], products[i / kPanel][i % kPanel]);
    }
  }
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

namespace {

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout": a K-major operand, of which one instruction
// takes two chunks of 16 bytes from every row. Swizzled rows lie a span apart; without swizzle a chunk of 8 rows is a
// core matrix of 128 bytes. 8-row groups are `stride` apart, and without swizzle the two chunks `leading`.
class Operand {
 public:
  Operand(uint64_t descriptor, uint8_t const *shared, uint32_t shared_bytes)
      : shared_(shared),
        shared_bytes_(shared_bytes),
        start_((descriptor & 0x3FFF) << 4),
        leading_((descriptor >> 16 & 0x3FFF) << 4),
        stride_((descriptor >> 32 & 0x3FFF) << 4),
        span_(256 >> (descriptor >> 62)) {
    // What the hardware makes of a base offset has not been measured, and our kernels need none.
    if ((descriptor >> 49 & 7) != 0) throw std::runtime_error("A wgmma descriptor has a base offset.");
    if (span_ == 256) span_ = 16;
  }

  uint8_t const *chunk(int row, int i) const {
    uint32_t const group = static_cast<uint32_t>(row / 8), in_group = static_cast<uint32_t>(row % 8);
    uint32_t const right = static_cast<uint32_t>(i) * (span_ == 16 ? leading_ : 16);
    uint32_t const linear = start_ + group * stride_ + in_group * static_cast<uint32_t>(span_) + right;
    uint32_t const address = swizzled(linear, span_);
    if (address + 16 > shared_bytes_) {
      throw std::runtime_error("wgmma reads shared memory at " + std::to_string(address) + " of " +
                               std::to_string(shared_bytes_) + " bytes.");
    }
    return shared_ + address;
  }

 private:
  uint8_t const *shared_;
  uint32_t shared_bytes_, start_, leading_, stride_;
  int span_;
};

// Not on the stack: the interpreter's threads may have small ones.
struct Decoded {
  uint32_t words[16][8];             // of A in registers, (row,word)
  float a[16 * kMaxK];               // (row,k)
  float b[256 / 8][kMaxK * kPanel];  // (panel,k,column)
};
thread_local Decoded decoded;

}  // namespace

void wgmma(Wgmma const &op, int warp, uint64_t a_desc, uint64_t b_desc, uint32_t const (*a_registers)[32],
           uint8_t const *shared, uint32_t shared_bytes, uint32_t (*d)[32]) {
  check_numbers(op.a, op.b, op.sum);
  if (op.trans_a || op.trans_b) throw std::runtime_error("The emulator's wgmma takes K-major operands only.");
  int const bits = bits_of(op.a), per_chunk = 128 / bits;
  if (op.k * bits != 256 || op.n % 8 != 0 || op.n < 8 || op.n > 256) {
    throw std::runtime_error("The emulator knows no wgmma.m64n" + std::to_string(op.n) + "k" + std::to_string(op.k) +
                             " of this type.");
  }
  Decode const decode_a = decoder(op.a), decode_b = decoder(op.b);
  if (op.a_in_registers) {
    for (int i = 0; i < 4 * 32; ++i) {
      decoded.words[a_row(i % 32, i / 32)][a_word(i % 32, i / 32)] = a_registers[i / 32][i % 32];
    }
    for (int i = 0; i < 2 * 16; ++i) {
      decode_a(&decoded.words[i / 2][i % 2 * 4], op.scale_a, decoded.a + i / 2 * kMaxK + i % 2 * per_chunk, 1);
    }
  } else {
    Operand const a(a_desc, shared, shared_bytes);
    for (int i = 0; i < 2 * 16; ++i) {
      decode_a(a.chunk(16 * warp + i / 2, i % 2), op.scale_a, decoded.a + i / 2 * kMaxK + i % 2 * per_chunk, 1);
    }
  }
  Operand const b(b_desc, shared, shared_bytes);
  for (int i = 0; i < 2 * op.n; ++i) {
    float *const to = decoded.b[i / 2 / kPanel] + i % 2 * per_chunk * kPanel + i / 2 % kPanel;
    decode_b(b.chunk(i / 2, i % 2), op.scale_b, to, kPanel);
  }
  // PTX ISA, "Register Fragments for wgmma", accumulator: the lanes are placed as in mma's.
  for (int panel = 0; panel < op.n / kPanel; ++panel) {
    for (int row = 0; row < 16; row += kRows) {
      float products[kRows][kPanel];
      multiply(decoded.a + row * kMaxK, decoded.b[panel], op.k, products);
      for (int i = 0; i < kRows; ++i) {
        int const lane = (row + i) % 8 * 4;
        uint32_t (*const sums)[32] = d + 4 * panel + (row + i) / 8 * 2;
#pragma GCC unroll 8  // as much time goes into this as into the products
        for (int column = 0; column < kPanel; ++column) {
          uint32_t &sum = sums[column % 2][lane + column / 2];
          sum = add(op.sum, false, op.scale_d ? sum : 0, products[i][column]);
        }
      }
    }
  }
}

}  // namespace emulator
