#include "fused_plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>

#include "device.h"
#include "promise.h"
#include "tactics.h"
#include "tensor_types.h"

namespace cutefuse {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

void report(char const *who, char const *text) noexcept { std::fprintf(stderr, "cutefuse: %s: %s\n", who, text); }

namespace {

// Runs a method's body, which returns null or why it failed: no exception may reach TensorRT.
template <class Body>
std::int32_t guard(char const *who, Body &&body) noexcept {
  try {
    char const *reason = body();
    if (reason == nullptr) return 0;
    report(who, reason);
  } catch (std::exception const &error) {
    report(who, error.what());
  } catch (...) {
    report(who, "an unknown exception was thrown");
  }
  return 1;
}

PluginTensorDesc const &desc_of(PluginTensorDesc const &desc) { return desc; }
PluginTensorDesc const &desc_of(DynamicPluginTensorDesc const &desc) { return desc.desc; }

// What a node is, never changed after creation: clones share it.
struct Node {
  Attributes attributes;
  std::vector<AttrValue> values;  // points into `attributes`
  std::string identity;           // creation state in words: TensorRT's timing cache and layer information show it
};

class FusedPlugin final : public nvinfer1::IPluginV3,
                          public nvinfer1::IPluginV3OneCore,
                          public nvinfer1::IPluginV3OneBuild,
                          public nvinfer1::IPluginV3OneRuntime {
 public:
  FusedPlugin(PluginRules const &rules, std::int32_t variant, std::shared_ptr<Node const> node, Promise const &promise)
      : rules_(rules), op_(*rules.op), variant_index_(variant), node_(std::move(node)), promise_(promise) {}

  // IPluginV3
  nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore *>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild *>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3 *clone() noexcept override {
    nvinfer1::IPluginV3 *copy = nullptr;
    guard(name(), [&]() -> char const * {
      copy = new FusedPlugin(*this);
      return nullptr;
    });
    return copy;
  }

  // IPluginV3OneCore
  char const *getPluginName() const noexcept override { return name(); }
  char const *getPluginVersion() const noexcept override { return kPluginVersion; }
  char const *getPluginNamespace() const noexcept override { return kPluginNamespace; }

  // IPluginV3OneBuild
  std::int32_t getNbOutputs() const noexcept override { return variant().outputs; }
  char const *getTimingCacheID() noexcept override { return node_->identity.c_str(); }
  char const *getMetadataString() noexcept override { return node_->identity.c_str(); }

  std::int32_t getOutputDataTypes(DataType *out, std::int32_t num_out, DataType const *in,
                                  std::int32_t num_in) const noexcept override {
    return guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      if (!obeys(rules_.port(variant(), 0).type, in[0], in[0], in[0])) {
        bool const quantised = rules_.port(variant(), 0).type == TypeRule::kQuantised;
        return sentence("input 0 has TensorRT data type %d; use %s", int(in[0]),
                        quantised ? "int8 (2) or float8 (6)" : "float32 (0), float16 (1) or bfloat16 (7)");
      }
      for (std::int32_t i = 0; i < num_out; ++i) {
        TypeRule const rule = rules_.port(variant(), num_in + i).type;
        out[i] = rule == TypeRule::kFloat32 ? DataType::kFLOAT : rule == TypeRule::kNamed ? named_type() : in[leader()];
      }
      return nullptr;
    });
  }

  std::int32_t getOutputShapes(nvinfer1::DimsExprs const *in, std::int32_t num_in, nvinfer1::DimsExprs const *,
                               std::int32_t num_shape_in, nvinfer1::DimsExprs *out, std::int32_t num_out,
                               nvinfer1::IExprBuilder &builder) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      if (num_shape_in != 0) return sentence("%d shape inputs were given, there are none", num_shape_in);
      return rules_.shapes({{op_, node_->values.data()}, variant(), in, out, builder});
    });
  }

  bool supportsFormatCombination(std::int32_t pos, DynamicPluginTensorDesc const *tensors, std::int32_t num_in,
                                 std::int32_t num_out) noexcept override {
    bool supported = false;
    guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      if (pos < 0 || pos >= num_in + num_out) return sentence("tensor %d does not exist", pos);
      if (!fits(tensors[pos].desc, tensors[std::min(pos, leader())].desc, pos)) return nullptr;
      // The operator judges when all is known, which is at the last position; no document promises output sizes here.
      bool const known = pos + 1 == num_in + num_out && tensors[pos].desc.dims.nbDims > 0;
      char const *reason = known ? reject(tensors, tensors + num_in) : nullptr;
      supported = reason == nullptr;
      return reason;
    });
    return supported;
  }

  std::int32_t configurePlugin(DynamicPluginTensorDesc const *in, std::int32_t num_in,
                               DynamicPluginTensorDesc const *out, std::int32_t num_out) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      if (char const *reason = reject(in, out)) return reason;
      Tactics offered(op_);
      std::int64_t bytes = 0;
      // A tile must serve the whole profile; the order of the optimum shape is the best guess.
      char const *const reason = at_bounds(in, out, [&](Call const &call) {
        offered.serve(call);
        bytes = std::max(bytes, op_.workspace_bytes(call));
      });
      if (reason != nullptr) return reason;
      if (char const *remark = offered.pin(asked_tile(op_, node_->values.data()))) report(name(), remark);
      tactics_ = offered.ids();
      promise_.configured(formats_of(in, num_in) + formats_of(out, num_out), bytes);
      return nullptr;
    });
  }

  std::int32_t getNbTactics() noexcept override { return static_cast<std::int32_t>(tactics_.size()); }

  std::int32_t getValidTactics(std::int32_t *tactics, std::int32_t count) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (count != getNbTactics()) return sentence("%d tactics were asked for, there are %d", count, getNbTactics());
      std::copy(tactics_.begin(), tactics_.end(), tactics);
      return nullptr;
    });
  }

  std::size_t getWorkspaceSize(DynamicPluginTensorDesc const *in, std::int32_t num_in,
                               DynamicPluginTensorDesc const *out, std::int32_t num_out) const noexcept override {
    std::int64_t bytes = 0;
    guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      return at_bounds(in, out, [&](Call const &call) { bytes = std::max(bytes, op_.workspace_bytes(call)); });
    });
    return static_cast<std::size_t>(bytes);
  }

  // IPluginV3OneRuntime
  std::int32_t setTactic(std::int32_t tactic) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (tactic != 0 && living_config(op_, tactic) == 0) {
        return sentence("tactic %d is not in this library's table; rebuild the engine with this version", tactic);
      }
      tactic_ = tactic;
      return shape_.empty() ? nullptr : make_plan();
    });
  }

  std::int32_t onShapeChange(PluginTensorDesc const *in, std::int32_t num_in, PluginTensorDesc const *out,
                             std::int32_t num_out) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (char const *reason = bad_arity(num_in, num_out)) return reason;
      shape_.clear(), planned_ = false;
      if (char const *reason = bad_formats(in, out)) return reason;
      shape_.assign(in, in + num_in);
      shape_.insert(shape_.end(), out, out + num_out);
      return make_plan();
    });
  }

  std::int32_t enqueue(PluginTensorDesc const *in, PluginTensorDesc const *out, void const *const *inputs,
                       void *const *outputs, void *workspace, cudaStream_t stream) noexcept override {
    return guard(name(), [&]() -> char const * {
      if (in == nullptr || out == nullptr || inputs == nullptr || outputs == nullptr) {
        return "enqueue was given a null array of tensors";
      }
      if (!planned_) return "enqueue has no plan; call onShapeChange first, and see why it failed";
      return run(plan_, {inputs, outputs, workspace, promise_.bytes(), stream});
    });
  }

  nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *) noexcept override { return clone(); }

  PluginFieldCollection const *getFieldsToSerialize() noexcept override {
    std::int32_t const failed = guard(name(), [&]() -> char const * {
      fields_ = node_->attributes.serialise(op_);
      fields_.push_back(promise_.field());
      collection_.nbFields = static_cast<std::int32_t>(fields_.size());
      collection_.fields = fields_.data();
      return nullptr;
    });
    return failed ? nullptr : &collection_;
  }

 private:
  // A Call and its tensors, whose shapes come from TensorRT's descriptions.
  struct Bound {
    Tensor tensors[kMaxTensors];
    Call call;

    template <class Desc>
    Bound(FusedPlugin const &plugin, Desc const *in, Desc const *out) : call{} {
      Variant const &variant = plugin.variant();
      for (std::int32_t i = 0; i < variant.inputs + variant.outputs; ++i) {
        PluginTensorDesc const &desc = desc_of(i < variant.inputs ? in[i] : out[i - variant.inputs]);
        Tensor &t = tensors[i] = Tensor{};
        t.type = type_of(desc.type);
        bool const blocks = desc.format == TensorFormat::kCHW32;
        t.layout = blocks ? Layout::kBlocks32 : plugin.rules_.port(variant, i).layout;
        t.rank = desc.dims.nbDims;
        std::copy_n(desc.dims.d, std::clamp(t.rank, 0, kMaxRank), t.dims);
        if (t.layout == Layout::kChannelsLast && t.rank == 4) {
          for (int axis = 0; axis < 4; ++axis) t.dims[axis] = desc.dims.d[plugin.axes()[axis]];
        }
      }
      call.inputs = tensors;
      call.outputs = tensors + variant.inputs;
      call.attrs = plugin.node_->values.data();
      call.variant = plugin.variant_index_;
      call.num_inputs = variant.inputs;
      call.num_outputs = variant.outputs;
      call.num_attrs = plugin.op_.attrs.size;
      call.workspace_promise = -1;
      Device const device = current_device();
      call.sm = device.sm, call.sm_count = device.sm_count;
    }
    Bound(Bound const &) = delete;
    Bound &operator=(Bound const &) = delete;
  };

  std::int32_t const *axes() const { return AttrCall{op_, node_->values.data()}.axes(); }
  bool is_nhwc() const { return axes() != kAxes[0]; }
  // The input that has the activation type.
  std::int32_t leader() const { return variant().facts.image ? variant().facts.sources : 0; }

  Variant const &variant() const { return op_.variants[variant_index_]; }
  char const *name() const { return variant().op_type; }

  char const *bad_arity(std::int32_t num_in, std::int32_t num_out) const {
    if (num_in == variant().inputs && num_out == variant().outputs) return nullptr;
    return sentence("%d inputs and %d outputs were given, it takes %d and %d; pass the full list", num_in, num_out,
                    variant().inputs, variant().outputs);
  }

  bool fits(PluginTensorDesc const &desc, PluginTensorDesc const &first, std::int32_t pos) const {
    Port const port = rules_.port(variant(), pos);
    // Later tensors of that kind have the format of the first; float8 has one alone.
    Layout const layout = port.layout == Layout::kChannelsLast && is_nhwc() ? Layout::kLinear : port.layout;
    bool const blocks = port.or_blocks && !is_nhwc() && desc.type == DataType::kINT8 &&
                        (pos == 0 ? desc.format : first.format) == TensorFormat::kCHW32;
    return obeys(port.type, desc.type, first.type, port.type == TypeRule::kNamed ? named_type() : first.type) &&
           desc.format == format_of(blocks ? Layout::kBlocks32 : layout, desc.type);
  }

  DataType named_type() const { return data_type_of(rules_.named_type({op_, node_->values.data()})); }

  template <class Desc>
  char const *bad_formats(Desc const *in, Desc const *out) const {
    for (std::int32_t i = 0; i < variant().inputs + variant().outputs; ++i) {
      PluginTensorDesc const &desc = desc_of(i < variant().inputs ? in[i] : out[i - variant().inputs]);
      if (desc.dims.nbDims < 0 || desc.dims.nbDims > kMaxRank) {
        return sentence("tensor %d has rank %d, 0 to %d are allowed", i, desc.dims.nbDims, kMaxRank);
      }
      if (!fits(desc, desc_of(in[std::min(i, leader())]), i)) {
        return sentence("tensor %d has data type %d in format %d, which was never offered; rebuild the engine", i,
                        int(desc.type), int(desc.format));
      }
    }
    return nullptr;
  }

  template <class Desc>
  char const *reject(Desc const *in, Desc const *out) const {
    if (char const *reason = bad_formats(in, out)) return reason;
    return cutefuse::reject(op_, Bound(*this, in, out).call);
  }

  // Calls body(Call) for the bounds of a profile, the optimum first, until one of them is refused.
  template <class Body>
  char const *at_bounds(DynamicPluginTensorDesc const *in, DynamicPluginTensorDesc const *out, Body const &body) const {
    for (auto bound : {&DynamicPluginTensorDesc::opt, &DynamicPluginTensorDesc::min, &DynamicPluginTensorDesc::max}) {
      PluginTensorDesc shaped[kMaxTensors];
      for (std::int32_t i = 0; i < variant().inputs + variant().outputs; ++i) {
        DynamicPluginTensorDesc const &tensor = i < variant().inputs ? in[i] : out[i - variant().inputs];
        shaped[i] = tensor.desc;
        // A bound that was left empty belongs to a static tensor.
        if ((tensor.*bound).nbDims == tensor.desc.dims.nbDims) shaped[i].dims = tensor.*bound;
      }
      Bound const bound_call(*this, shaped, shaped + variant().inputs);
      if (char const *reason = cutefuse::reject(op_, bound_call.call)) return reason;
      body(bound_call.call);
    }
    return nullptr;
  }

  // For shape_ and tactic_ and within the promise. An engine built for several GPUs may carry a tile that this one
  // cannot run: then the best guess serves.
  char const *make_plan() {
    planned_ = false;  // also if something is thrown below
    Bound bound(*this, shape_.data(), shape_.data() + variant().inputs);
    bound.call.workspace_promise = promise_.bytes();
    bound.call.config = tactic_;
    char const *reason = plan(op_, bound.call, &plan_);
    if (reason != nullptr && tactic_ != 0) {
      bound.call.config = 0;
      reason = plan(op_, bound.call, &plan_);
    }
    planned_ = reason == nullptr;
    return reason;
  }

  PluginRules const &rules_;
  Op const &op_;
  std::int32_t variant_index_;
  std::shared_ptr<Node const> node_;
  Promise promise_;
  std::vector<std::int32_t> tactics_;
  std::int32_t tactic_ = 0;
  std::vector<PluginTensorDesc> shape_;  // of the last onShapeChange, inputs first
  bool planned_ = false;                 // plan_ is for shape_ and tactic_
  Plan plan_{};
  std::vector<PluginField> fields_;  // rebuilt with collection_ by every getFieldsToSerialize
  PluginFieldCollection collection_{};
};

}  // namespace

FusedCreator::FusedCreator(PluginRules const &rules, std::int32_t variant) : rules_(rules), variant_(variant) {
  Variant const &made = rules.op->variants[variant];
  if (made.inputs + made.outputs > kMaxTensors) {
    throw std::length_error(std::string(made.op_type) + " has more tensors than kMaxTensors");
  }
  for (AttrSpec const &spec : rules.op->attrs) {
    fields_.emplace_back(spec.name, nullptr, field_type(spec), spec.max_count);
  }
  collection_.nbFields = static_cast<std::int32_t>(fields_.size());
  collection_.fields = fields_.data();
}

char const *FusedCreator::getPluginName() const noexcept { return rules_.op->variants[variant_].op_type; }

nvinfer1::IPluginV3 *FusedCreator::createPlugin(char const *, PluginFieldCollection const *fields,
                                                nvinfer1::TensorRTPhase phase) noexcept {
  nvinfer1::IPluginV3 *plugin = nullptr;
  guard(getPluginName(), [&]() -> char const * {
    if (fields == nullptr) return "createPlugin was given no field collection";
    auto node = std::make_shared<Node>();
    Promise promise;
    std::vector<PluginField> others;
    PluginFieldCollection attributes = *fields;
    if (phase == nvinfer1::TensorRTPhase::kRUNTIME && fields->fields != nullptr) {
      if (char const *reason = promise.read(*fields, &others)) return reason;
      attributes = {static_cast<std::int32_t>(others.size()), others.data()};
    }
    if (char const *reason = node->attributes.parse(*rules_.op, attributes)) return reason;
    node->values = node->attributes.view(*rules_.op);
    node->identity = std::string(getPluginName()) + " " CUTEFUSE_VERSION " " + node->attributes.text(*rules_.op);
    plugin = new FusedPlugin(rules_, variant_, std::move(node), promise);
    return nullptr;
  });
  return plugin;
}

}  // namespace cutefuse
