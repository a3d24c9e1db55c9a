#include "c_api.h"

#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

namespace cutefuse {

#define CUTEFUSE_OP(stem) \
  namespace stem {        \
  extern Op const op;     \
  }
#include "op_list.inc"
#undef CUTEFUSE_OP

Span<Op const *> operators() {
#define CUTEFUSE_OP(stem) &stem::op,
  static Op const *const kOps[] = {
#include "op_list.inc"
  };
#undef CUTEFUSE_OP
  return {kOps, static_cast<std::int32_t>(sizeof(kOps) / sizeof(kOps[0]))};
}

char const *sentence(char const *format, ...) {
  thread_local char text[512];
  std::va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return text;
}

namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string describe_op(Op const &op) {
  std::string json = std::string("{\"name\": \"") + op.name + "\", \"attributes\": [";
  for (AttrSpec const &a : op.attrs) {
    json += (&a == op.attrs.begin() ? "" : ", ") + std::string("{\"name\": \"") + a.name + "\", \"kind\": \"" +
            (a.kind == AttrKind::kInts ? "ints" : "floats") + "\", \"min_count\": " + std::to_string(a.min_count) +
            ", \"max_count\": " + std::to_string(a.max_count) +
            ", \"default_count\": " + std::to_string(a.default_count) +
            ", \"default_value\": " + number(a.default_value) + "}";
  }
  json += "], \"variants\": [";
  for (Variant const &v : op.variants) {
    json += (&v == op.variants.begin() ? "" : ", ") + std::string("{\"op_type\": \"") + v.op_type +
            "\", \"inputs\": " + std::to_string(v.inputs) + ", \"outputs\": " + std::to_string(v.outputs) + "}";
  }
  json += "], \"configs\": [";
  for (Config const &c : op.configs_table) {
    json += (&c == op.configs_table.begin() ? "" : ", ") + std::string("{\"id\": ") + std::to_string(c.id) +
            ", \"name\": \"" + c.name + "\", \"min_sm\": " + std::to_string(c.min_sm) + "}";
  }
  return json + "]}";
}

// Shared checks of the interface itself, so that an operator may index its arrays without fear.
char const *bad_call(std::int32_t op, Call const *call) {
  if (op < 0 || op >= operators().size || call == nullptr) {
    return sentence("cutefuse: operator id %d is not one of 0..%d; ask cutefuse_find first", op, operators().size - 1);
  }
  Op const &o = *operators()[op];
  if (call->variant < 0 || call->variant >= o.variants.size) {
    return sentence("%s: variant %d is not one of 0..%d; ask cutefuse_find first", o.name, call->variant,
                    o.variants.size - 1);
  }
  Variant const &v = o.variants[call->variant];
  if (call->num_inputs != v.inputs || call->num_outputs != v.outputs) {
    return sentence("%s: %s takes %d inputs and %d outputs, %d and %d were given; pass the full list", o.name,
                    v.op_type, v.inputs, v.outputs, call->num_inputs, call->num_outputs);
  }
  if (call->num_attrs != o.attrs.size) {
    return sentence("%s: %d attributes were given, the operator has %d; pass all of them in order", o.name,
                    call->num_attrs, o.attrs.size);
  }
  for (std::int32_t i = 0; i < o.attrs.size; ++i) {
    AttrSpec const &spec = o.attrs[i];
    AttrValue const &value = call->attrs[i];
    bool const has_data = spec.kind == AttrKind::kInts ? value.ints != nullptr : value.floats != nullptr;
    if (value.count < spec.min_count || value.count > spec.max_count || !has_data) {
      return sentence("%s: attribute '%s' has %d values, %d to %d are allowed; write every attribute on the node",
                      o.name, spec.name, value.count, spec.min_count, spec.max_count);
    }
  }
  for (std::int32_t i = 0; i < call->num_inputs + call->num_outputs; ++i) {
    Tensor const &t = i < call->num_inputs ? call->inputs[i] : call->outputs[i - call->num_inputs];
    if (t.rank < 0 || t.rank > kMaxRank) {
      return sentence("%s: tensor %d has rank %d, 0 to %d are allowed", o.name, i, t.rank, kMaxRank);
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace cutefuse

using cutefuse::bad_call;
using cutefuse::Call;
using cutefuse::operators;

char const *cutefuse_describe() {
  static std::string const kText = [] {
    std::string json = "{\"abi\": 1, \"version\": \"" CUTEFUSE_VERSION "\", \"cuda\": " CUTEFUSE_HAS_CUDA
                       ", \"archs\": \"" CUTEFUSE_ARCHS "\", \"ops\": [";
    for (cutefuse::Op const *const &op : operators()) {
      json += (&op == operators().begin() ? "" : ", ") + cutefuse::describe_op(*op);
    }
    return json + "]}";
  }();
  return kText.c_str();
}

std::int32_t cutefuse_find(char const *op_type, std::int32_t *variant) {
  for (std::int32_t i = 0; i < operators().size; ++i) {
    for (std::int32_t v = 0; v < operators()[i]->variants.size; ++v) {
      if (std::strcmp(op_type, operators()[i]->variants[v].op_type) == 0) {
        *variant = v;
        return i;
      }
    }
  }
  return -1;
}

char const *cutefuse_reject(std::int32_t op, Call const *call) {
  if (char const *reason = bad_call(op, call)) return reason;
  return operators()[op]->reject(*call);
}

std::int64_t cutefuse_workspace_bytes(std::int32_t op, Call const *call) {
  if (cutefuse_reject(op, call) != nullptr) return -1;
  return operators()[op]->workspace_bytes(*call);
}

std::int32_t cutefuse_configs(std::int32_t op, Call const *call, std::int32_t *ids, std::int32_t capacity) {
  if (cutefuse_reject(op, call) != nullptr) return 0;
  return operators()[op]->configs(*call, ids, capacity);
}

char const *cutefuse_run(std::int32_t op, Call const *call) {
  if (char const *reason = cutefuse_reject(op, call)) return reason;
  return operators()[op]->run(*call);
}
