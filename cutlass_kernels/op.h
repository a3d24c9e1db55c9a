// The interface that every operator of the library implements. Pure C++: no CUDA, TensorRT, ONNX or PyTorch header may
// be included here, so that the rewriter can ask an operator on a machine without nvcc.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "facts.h"

namespace cutefuse {

constexpr std::int32_t kMaxRank = 8;
constexpr std::int32_t kMaxTensors = 16;  // inputs and outputs of one call

enum class Type : std::int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt32 = 4, kFloat8 = 5 };

// kLinear: row-major in the order of `dims`. kChannelsLast: logical NCHW dims stored as NHWC pixels of `ld` elements
// (TensorRT's kHWC8 for 16-bit types: channels padded to 8; kHWC for float32: no padding; kHWC16 for int8: to 16).
// kBlocks32: logical NCHW dims stored as [N][ceil(C/32)][H][W][32] (TensorRT's kCHW32); int8 only, `ld` is 0.
enum class Layout : std::int32_t { kLinear = 0, kChannelsLast = 1, kBlocks32 = 2 };

struct Tensor {
  std::int64_t dims[kMaxRank];  // logical; -1 where a dynamic size is not known yet
  std::int64_t ld;              // elements between neighbouring pixels (kChannelsLast) or rows (kLinear); 0: dense
  Type type;
  Layout layout;
  std::int32_t rank;
  std::int32_t reserved;
};

enum class AttrKind : std::int32_t { kInts = 0, kFloats = 1 };

// One attribute. ONNX nodes, plugin fields, serialised engines and the C interface all use this name and kind.
// max_count == 1: a scalar.
struct AttrSpec {
  char const *name;
  AttrKind kind;
  std::int32_t min_count;
  std::int32_t max_count;
  std::int32_t default_count;  // 0: required
  double default_value;        // repeated default_count times
};

// The tile that a node asks the plugin to offer alone, by Config::id; 0, or a tile that is not legal there: all legal
// ones. Every operator that ONNX graphs hold has this attribute.
constexpr AttrSpec kTileAttr = {"tile", AttrKind::kInts, 1, 1, 1, 0.0};

// How the activations of a convolution's node lie. 0: logical NCHW tensors whose pixels are padded to whole vectors
// (TensorRT's kHWC8 and its like). 1: NHWC tensors whose pixels are dense, which TensorRT sees as kLINEAR. The tensors
// of a Call have logical NCHW dims either way.
constexpr AttrSpec kLayoutAttr = {"layout", AttrKind::kInts, 1, 1, 1, 0.0};

struct AttrValue {
  std::int64_t const *ints;  // set when the kind is kInts
  float const *floats;       // set when the kind is kFloats
  std::int32_t count;
  std::int32_t reserved;
};

// One ONNX op_type. Everything that changes the structure of its function body is part of its name.
struct Variant {
  char op_type[48];
  std::int32_t inputs;
  std::int32_t outputs;
  Facts facts;
};

// One tile of the table. `id` is positive, is the TensorRT tactic, and never changes: engines store it.
struct Config {
  std::int32_t id;
  char const *name;
  char const *kind;         // how the kernel works, in one word; tells tiles of the same size apart
  std::uint32_t type_mask;  // types of the activations that it takes, a bit_of() each
  std::uint32_t needs = 0;  // Features (architecture.h) that not every GPU has
};

constexpr std::uint32_t bit_of(Type type) { return 1u << static_cast<std::int32_t>(type); }
constexpr std::uint32_t kQuantisedTypes = bit_of(Type::kInt8) | bit_of(Type::kFloat8);
constexpr std::uint32_t kHalfTypes = bit_of(Type::kFloat16) | bit_of(Type::kBFloat16);
constexpr std::uint32_t kFloatTypes = kHalfTypes | bit_of(Type::kFloat32);

// A tile that left the table, and the tile that replaces it where an engine asks for it and that one can run the call.
// Where it cannot, the best guess replaces both.
struct Retired {
  std::int32_t id, heir;
};

// What an operator is asked about: everything but addresses.
struct Call {
  Tensor const *inputs;
  Tensor const *outputs;
  AttrValue const *attrs;          // in the order of Op::attrs
  std::int64_t workspace_promise;  // bytes of workspace that run() will be given; negative: no limit
  std::int32_t variant;            // index into Op::variants
  std::int32_t num_inputs;
  std::int32_t num_outputs;
  std::int32_t num_attrs;
  std::int32_t config;    // Config::id, or that of a retired tile; 0: the first of configs(call)
  std::int32_t sm;        // compute capability * 10 of the device (90 for 9.0); 0: any, in plan() the current device's
  std::int32_t sm_count;  // multiprocessors of the device; 0: unknown, in plan() the current device's
  std::int32_t reserved;
};

// Tensor i of a call, inputs first.
constexpr Tensor const &tensor_of(Call const &call, std::int32_t i) {
  return i < call.num_inputs ? call.inputs[i] : call.outputs[i - call.num_inputs];
}

// The result of planning a call: its tile, how its reduction is divided, every launch. Plain data without a destructor,
// so that callers may keep it by value and copy it with memcpy. It is valid in the process that made it, for the device
// that was current then.
struct Plan {
  std::int64_t workspace_bytes;  // that run() needs, never more than Call::workspace_promise
  std::int32_t op;               // index into operators()
  std::int32_t variant;          // index into Op::variants
  std::int32_t config;           // Config::id; 0 where the operator has no tiles
  std::int32_t splits;           // parts into which the reduction is divided; 1: it is not
  std::int32_t device;           // on which run() launches; -1: the GPU that the call names was not current
  std::int32_t sm, sm_count;
  std::int32_t num_inputs, num_outputs, launches;  // launches 0: there is nothing to compute
  std::uint32_t operands;             // bit of each tensor, inputs first, that must be set and aligned to 16 bytes
  std::int64_t extents[kMaxTensors];  // bytes of each tensor, inputs first, with its gaps and padding
  unsigned char state[10240];         // the operator's own parameters and launches
};

struct Operands {
  void const *const *inputs;  // device addresses in the order of the call; null for a tensor without elements
  void *const *outputs;
  void *workspace;  // 16-byte aligned; null when the plan needs none
  std::int64_t workspace_bytes;
  void *stream;  // cudaStream_t
};

// A view of an array or std::array that outlives it.
template <class T>
struct Span {
  T const *data;
  std::int32_t size;
  template <class Table>
  constexpr Span(Table const &table) : data(std::data(table)), size(static_cast<std::int32_t>(std::size(table))) {}
  constexpr T const *begin() const { return data; }
  constexpr T const *end() const { return data + size; }
  constexpr T const &operator[](std::int32_t i) const { return data[i]; }
};

// The row of a table that has this id; null where none has.
template <class Table>
constexpr auto find_id(Table const &table, std::int32_t id) -> decltype(&*std::begin(table)) {
  for (auto const &row : table) {
    if (row.id == id) return &row;
  }
  return nullptr;
}

// Tables of tiles as callers read them: config_of() of every row.
template <class... Tables>
constexpr auto configs_of(Tables const &...tables) {
  std::array<Config, (std::extent_v<Tables> + ...)> all{};
  std::size_t i = 0;
  auto const add = [&](auto const &table) {
    for (auto const &row : table) all[i++] = config_of(row);
  };
  (add(tables), ...);
  return all;
}

// Every function is host code, thread-safe, without global state, and neither allocates device memory nor synchronises.
// A returned text is one sentence that says what was given, what is allowed and what to do; it is valid until the same
// thread's next call. Null means success. Callers use the functions below the struct, which also check what all
// operators have in common.
struct Op {
  char const *name;
  Span<Variant> variants;
  Span<AttrSpec> attrs;
  Span<Config> configs_table;
  Span<Retired> retired;
  char const *(*reject)(Call const &call);
  // What a builder promises: bytes with which every tile does its best, for this image and every larger one. Where no
  // device is named and every size is known, those of the tile that is ranked first, for this image.
  std::int64_t (*workspace_bytes)(Call const &call);
  // Writes the ids of the legal tiles, best guess first; returns how many there are (never more than configs_table).
  std::int32_t (*configs)(Call const &call, std::int32_t *ids, std::int32_t capacity);
  // The part of the call that a tile of the table cannot run, worded to follow "cannot run". The caller has judged the
  // tile's device and types before.
  char const *(*obstacle)(Call const &call, std::int32_t config);
  // Microseconds that the call should take; negative: there is no model. Every size is known, config is a legal tile.
  double (*predicted_us)(Call const &call);
  // Fills workspace_bytes, splits, launches, operands and state. Every size is known, sm and sm_count are the device's,
  // and config is a legal tile, or 0 where there is none.
  char const *(*plan)(Call const &call, Plan &plan);
  // Enqueues. The operands named by the plan are set and aligned, and the workspace is as large as it says.
  char const *(*launch)(Plan const &plan, Operands const &operands);
};

// The Op of an operator whose family, convolutions or row norms, implements these functions once. kFamily holds what
// differs between the family's operators, and is the first argument of each function.
template <auto const &kFamily>
constexpr Op op_of(char const *name, Span<Variant> variants, Span<AttrSpec> attrs, Span<Config> configs_table,
                   Span<Retired> retired) {
  return {
      name,
      variants,
      attrs,
      configs_table,
      retired,
      [](Call const &call) { return reject(kFamily, call); },
      [](Call const &call) { return workspace_bytes(kFamily, call); },
      [](Call const &call, std::int32_t *ids, std::int32_t capacity) { return configs(kFamily, call, ids, capacity); },
      [](Call const &call, std::int32_t config) { return obstacle(kFamily, call, config); },
      [](Call const &call) { return predicted_us(kFamily, call); },
      [](Call const &call, Plan &to) { return plan(kFamily, call, to); },
      [](Plan const &from, Operands const &operands) { return launch(kFamily, from, operands); }};
}

// Where an attribute stands in Op::attrs, -1 where the operator does not have it.
std::int32_t find_attribute(Op const &op, char const *name);
// Whether the call is legal on its device.
char const *reject(Op const &op, Call const &call);
// The tile that runs where tile `id` is asked for: itself, or its heir when it has been retired; 0 for an unknown id.
std::int32_t living_config(Op const &op, std::int32_t id);
// The tile that a node asks for by kTileAttr, or the heir of a retired one; 0 where it asks for none, or for a number
// that is no tile, which reject() refuses. `attrs`: in the order of Op::attrs.
std::int32_t asked_tile(Op const &op, AttrValue const *attrs);
// Predicted microseconds of a legal call with its tile or, where config is 0, with the best guess. Negative where a
// size is not known, the operator has no model, or the tile cannot run the call. The time is that inside a network,
// where operands lie in the L2 cache; the constants are an H200's.
double predicted_us(Op const &op, Call const &call);
// Does everything that costs host time, once for each shape: judging, the choice of a tile, dividers, the kernels'
// parameters and attributes.
char const *plan(Op const &op, Call const &call, Plan *plan);
// Fills in the addresses and enqueues. Refuses a workspace smaller than the plan's.
char const *run(Plan const &plan, Operands const &operands);

// Formats a sentence into a buffer of the calling thread.
char const *sentence(char const *format, ...) __attribute__((format(printf, 1, 2)));

// The registry: all operators of the library, in the order of CMake's cutefuse_op() lines.
Span<Op const *> operators();

inline constexpr std::int32_t size_of(Type type) {
  switch (type) {
    case Type::kInt8:
    case Type::kFloat8:
      return 1;
    case Type::kFloat16:
    case Type::kBFloat16:
      return 2;
    default:
      return 4;
  }
}

inline constexpr char const *name_of(Type type) {
  constexpr char const *kNames[] = {"float32", "float16", "bfloat16", "int8", "int32", "float8_e4m3fn"};
  auto const i = static_cast<std::uint32_t>(type);
  return i < std::size(kNames) ? kNames[i] : "unknown type";
}

// Channels that one pixel of a dense kChannelsLast tensor occupies.
inline constexpr std::int64_t padded_channels(Type type, std::int64_t channels) {
  std::int64_t const step = size_of(type) == 2 ? 8 : size_of(type) == 1 ? 16 : 1;
  return (channels + step - 1) / step * step;
}

}  // namespace cutefuse
