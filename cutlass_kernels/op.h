// What every operator of the library answers. Pure C++: no CUDA, TensorRT, ONNX or PyTorch header may be included here,
// so that the rewriter can ask an operator on a machine without a compiler for CUDA.
#pragma once

#include <cstdint>

#include "facts.h"

namespace cutefuse {

constexpr std::int32_t kMaxRank = 8;

enum class Type : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt32 = 4 };

// kLinear: row-major in the order of `dims`. kChannelsLast: logical NCHW dims stored as NHWC pixels of `ld` elements
// (TensorRT's kHWC8 for 16-bit types: channels padded to 8; kHWC for float32: no padding; kHWC16 for int8: to 16).
// kBlocks32: logical NCHW dims stored as [N][ceil(C/32)][H][W][32] (TensorRT's kCHW32); int8 only, `ld` is 0.
enum class Layout : std::int32_t { kLinear = 0, kChannelsLast = 1, kBlocks32 = 2 };

struct Tensor {
  void *data;                   // device pointer; null while only legality is asked
  std::int64_t dims[kMaxRank];  // logical; -1 where a dynamic size is not known yet
  std::int64_t ld;              // elements between neighbouring pixels (kChannelsLast) or rows (kLinear); 0: dense
  Type type;
  Layout layout;
  std::int32_t rank;
  std::int32_t reserved;
};

enum class AttrKind : std::int32_t { kInts = 0, kFloats = 1 };

// One attribute, the same at ONNX node, plugin field, serialised engine and C interface. max_count == 1: a scalar.
struct AttrSpec {
  char const *name;
  AttrKind kind;
  std::int32_t min_count;
  std::int32_t max_count;
  std::int32_t default_count;  // 0: required
  double default_value;        // repeated default_count times
};

struct AttrValue {
  std::int64_t const *ints;  // set when the kind is kInts
  float const *floats;       // set when the kind is kFloats
  std::int32_t count;
  std::int32_t reserved;
};

// One ONNX op_type: what changes the structure of the function body is in its name.
struct Variant {
  char op_type[48];
  std::int32_t inputs;
  std::int32_t outputs;
  Facts facts;
};

// One tile of the table: `id` is positive, stable for ever (engines store it) and also the TensorRT tactic.
struct Config {
  std::int32_t id;
  std::int32_t min_sm;  // compute capability * 10 from which it runs
  char const *name;
  char const *kind;         // how it works, one word: what tiles of an operator differ in beside their size
  std::uint32_t type_mask;  // of the activations it takes: bit of each Type
};

constexpr std::uint32_t bit_of(Type type) { return 1u << static_cast<std::int32_t>(type); }
constexpr std::uint32_t kFloatTypes = bit_of(Type::kFloat32) | bit_of(Type::kFloat16) | bit_of(Type::kBFloat16);

// A tile that left the table, and the one that takes its place where an engine asks for it.
struct Retired {
  std::int32_t id, heir;
};

struct Call {
  Tensor const *inputs;
  Tensor const *outputs;
  AttrValue const *attrs;  // in the order of Op::attrs
  void *workspace;         // at least workspace_bytes(call) bytes, 256-byte aligned; null when that is 0
  void *stream;            // cudaStream_t
  std::int32_t variant;    // index into Op::variants
  std::int32_t num_inputs;
  std::int32_t num_outputs;
  std::int32_t num_attrs;
  std::int32_t config;    // Config::id; 0: the first of configs(call)
  std::int32_t sm;        // compute capability * 10 of the device (90 for 9.0); 0: any
  std::int32_t sm_count;  // multiprocessors of the device; 0: unknown
  std::int32_t reserved;
};

template <class T>
struct Span {
  T const *data;
  std::int32_t size;
  constexpr T const *begin() const { return data; }
  constexpr T const *end() const { return data + size; }
  constexpr T const &operator[](std::int32_t i) const { return data[i]; }
};

// Every function is host code, thread-safe, and neither allocates device memory nor synchronises. A returned text is
// one sentence (given, allowed, what to do), valid until the same thread asks again; null means yes / done.
struct Op {
  char const *name;
  Span<Variant> variants;
  Span<AttrSpec> attrs;
  Span<Config> configs_table;
  Span<Retired> retired;
  char const *(*reject)(Call const &call);
  std::int64_t (*workspace_bytes)(Call const &call);
  // Writes the ids of the legal tiles, best guess first; returns how many there are (never more than configs_table).
  std::int32_t (*configs)(Call const &call, std::int32_t *ids, std::int32_t capacity);
  char const *(*run)(Call const &call);
};

// Formats a sentence into a buffer of the calling thread.
char const *sentence(char const *format, ...) __attribute__((format(printf, 1, 2)));

// The registry: all operators of the library, in the order of CMake's cutefuse_op() lines.
Span<Op const *> operators();

inline constexpr std::int32_t size_of(Type type) {
  switch (type) {
    case Type::kFloat32:
    case Type::kInt32:
      return 4;
    case Type::kFloat16:
    case Type::kBFloat16:
      return 2;
    case Type::kInt8:
      return 1;
  }
  return 0;
}

inline constexpr char const *name_of(Type type) {
  switch (type) {
    case Type::kFloat32:
      return "float32";
    case Type::kFloat16:
      return "float16";
    case Type::kBFloat16:
      return "bfloat16";
    case Type::kInt8:
      return "int8";
    case Type::kInt32:
      return "int32";
  }
  return "unknown type";
}

// Channels that one pixel of a dense kChannelsLast tensor occupies.
inline constexpr std::int64_t padded_channels(Type type, std::int64_t channels) {
  std::int64_t const step = size_of(type) == 2 ? 8 : type == Type::kInt8 ? 16 : 1;
  return (channels + step - 1) / step * step;
}

}  // namespace cutefuse
