#include "c_api.h"

#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "architecture.h"
#include "capture.h"

namespace cutefuse {
namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string quoted(char const *text) { return std::string("\"") + text + "\""; }

// A JSON list of the items' texts.
template <class Items, class Text>
std::string joined(Items const &items, Text const &text) {
  std::string list;
  for (auto const &item : items) list += (list.empty() ? "" : ", ") + text(item);
  return "[" + list + "]";
}

std::string types_of(std::uint32_t mask) {
  std::vector<Type> types;
  for (Type type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16, Type::kInt8, Type::kFloat8}) {
    if (mask & bit_of(type)) types.push_back(type);
  }
  return joined(types, [](Type type) { return quoted(name_of(type)); });
}

std::string describe_variant(Variant const &v) {
  Facts const &f = v.facts;
  constexpr char const *kKinds[] = {"convolution", "norm", "norm_backward", "window"};
  constexpr char const *kResiduals[] = {"null", "\"before\"", "\"after\""};
  auto const yes = [](bool value) { return value ? "true" : "false"; };
  std::string const types = types_of(f.quantised                              ? kQuantisedTypes
                                     : f.image || f.depthwise || f.spread > 1 ? kHalfTypes
                                                                              : kFloatTypes);
  std::string const output_types = types_of(f.quantised_output ? kQuantisedTypes : kFloatTypes);
  return "{\"op_type\": " + quoted(v.op_type) + ", \"inputs\": " + std::to_string(v.inputs) +
         ", \"outputs\": " + std::to_string(v.outputs) + ", \"kind\": " + quoted(kKinds[static_cast<int>(f.kind)]) +
         ", \"sources\": " + std::to_string(f.sources) +
         ", \"activation\": " + quoted(kActivationNames[static_cast<int>(f.activation)]) +
         ", \"residual\": " + kResiduals[static_cast<int>(f.residual)] + ", \"view\": " + yes(f.view) +
         ", \"quantised\": " + yes(f.quantised) + ", \"layer\": " + yes(f.layer) +
         ", \"pre_activated\": " + yes(f.pre_activated) + ", \"image\": " + yes(f.image) +
         ", \"depthwise\": " + yes(f.depthwise) + ", \"spread\": " + std::to_string(f.spread) +
         ", \"types\": " + types + ", \"output_types\": " + output_types + "}";
}

std::string features_of(std::uint32_t mask) {
  std::vector<char const *> names;
  for (std::size_t i = 0; i < std::size(kFeatureNames); ++i) {
    if (mask >> i & 1) names.push_back(kFeatureNames[i]);
  }
  return joined(names, quoted);
}

std::string describe_architecture(Architecture const &a) {
  char const *const code = code_for(a.sm);
  return "{\"sm\": " + std::to_string(a.sm) + ", \"board\": " + quoted(a.board) +
         ", \"shared_bytes\": " + std::to_string(shared_limit(a.sm)) +
         ", \"multiprocessors\": " + std::to_string(a.sm_count) + ", \"features\": " + features_of(a.features) +
         ", \"code\": " + (code == nullptr ? "null" : quoted(code)) + "}";
}

std::string describe_config(Config const &c) {
  return "{\"id\": " + std::to_string(c.id) + ", \"name\": " + quoted(c.name) +
         ", \"min_sm\": " + std::to_string(oldest(c.needs)) + ", \"kind\": " + quoted(c.kind) +
         ", \"needs\": " + features_of(c.needs) + ", \"types\": " + types_of(c.type_mask) + "}";
}

std::string describe_retired(Retired const &r) {
  return "{\"id\": " + std::to_string(r.id) + ", \"heir\": " + std::to_string(r.heir) + "}";
}

std::string describe_attribute(AttrSpec const &a) {
  return "{\"name\": " + quoted(a.name) + ", \"kind\": " + quoted(a.kind == AttrKind::kInts ? "ints" : "floats") +
         ", \"min_count\": " + std::to_string(a.min_count) + ", \"max_count\": " + std::to_string(a.max_count) +
         ", \"default_count\": " + std::to_string(a.default_count) + ", \"default_value\": " + number(a.default_value) +
         "}";
}

std::string describe_op(Op const &op) {
  return "{\"name\": " + quoted(op.name) + ", \"attributes\": " + joined(op.attrs, describe_attribute) +
         ", \"variants\": " + joined(op.variants, describe_variant) +
         ", \"configs\": " + joined(op.configs_table, describe_config) +
         ", \"retired\": " + joined(op.retired, describe_retired) + "}";
}

// Checks the arrays of a call, so that an operator may index them safely.
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
    Tensor const &t = tensor_of(*call, i);
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
    return "{\"abi\": 2, \"version\": \"" CUTEFUSE_VERSION "\", \"cuda\": " CUTEFUSE_HAS_CUDA
           ", \"cuda_version\": \"" CUTEFUSE_CUDA_VERSION "\", \"archs\": \"" CUTEFUSE_ARCHS
           "\", \"targets\": \"" CUTEFUSE_TARGETS "\", \"architectures\": " +
           cutefuse::joined(cutefuse::kArchitectures, cutefuse::describe_architecture) +
           ", \"activations\": " + cutefuse::joined(cutefuse::kActivationNames, cutefuse::quoted) + ", \"ops\": " +
           cutefuse::joined(operators(), [](cutefuse::Op const *op) { return cutefuse::describe_op(*op); }) + "}";
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
  return reject(*operators()[op], *call);
}

char const *cutefuse_reject_device(std::int32_t sm) { return cutefuse::reject_device(sm); }

std::int64_t cutefuse_workspace_bytes(std::int32_t op, Call const *call) {
  if (cutefuse_reject(op, call) != nullptr) return -1;
  return operators()[op]->workspace_bytes(*call);
}

std::int32_t cutefuse_configs(std::int32_t op, Call const *call, std::int32_t *ids, std::int32_t capacity) {
  if (cutefuse_reject(op, call) != nullptr) return 0;
  return operators()[op]->configs(*call, ids, capacity);
}

double cutefuse_predicted_us(std::int32_t op, Call const *call) {
  if (cutefuse_reject(op, call) != nullptr) return -1;
  return cutefuse::predicted_us(*operators()[op], *call);
}

char const *cutefuse_plan(std::int32_t op, Call const *call, cutefuse::Plan *plan) {
  if (char const *reason = bad_call(op, call)) return reason;
  if (plan == nullptr) return "cutefuse: no plan was given to fill; pass cutefuse_plan_bytes() bytes";
  return cutefuse::plan(*operators()[op], *call, plan);
}

std::int64_t cutefuse_plan_bytes() { return sizeof(cutefuse::Plan); }

char const *cutefuse_run(cutefuse::Plan const *plan, cutefuse::Operands const *operands) {
  if (plan == nullptr || operands == nullptr || operands->inputs == nullptr || operands->outputs == nullptr) {
    return "cutefuse: run needs a plan and the addresses of all inputs and outputs; plan first";
  }
  return cutefuse::run(*plan, *operands);
}

std::int32_t cutefuse_side_by_side(std::int32_t allowed) { return cutefuse::let_side_by_side(allowed != 0); }
