// The builder's part: from the ONNX parser's createPlugin to the serialised fields, in TensorRT's order.
#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "host.h"
#include "json.h"

namespace cutefuse::host {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

Build::Build(Creator const &creator, Fields fields, std::vector<Input> inputs, std::int32_t outputs,
             bool strongly_typed)
    : creator_(creator),
      fields_(std::move(fields)),
      inputs_(std::move(inputs)),
      outputs_(outputs),
      strongly_typed_(strongly_typed) {
  run();
}

void Build::run() {
  if (!create() || !find_outputs() || !find_shapes()) return;
  char const *id = faces_.build->getTimingCacheID();
  timing_cache_id_ = id ? id : "";
  char const *metadata = faces_.build->getMetadataString();
  metadata_ = metadata ? metadata : "";
  if (id == nullptr) report_.warning("getTimingCacheID", "it returns null: TensorRT times the plugin in every build");
  find_formats();
  if (combinations_.empty()) {
    report_.failure("supportsFormatCombination",
                    "no combination of types and formats is accepted; TensorRT stops here");
    return;
  }
  for (Combination &combination : combinations_) configure(combination);
  if (strongly_typed_) compile();  // Myelin takes no other networks
}

bool Build::create() {
  std::unique_ptr<IPluginV3> original;
  Fields after_creation;
  {
    FieldSet const set(fields_);
    original.reset(creator_.object->createPlugin("node", set.get(), nvinfer1::TensorRTPhase::kBUILD));
    if (original == nullptr) {
      report_.failure("createPlugin", "it returns null for these attributes; TensorRT's parser stops here");
      return false;
    }
    Faces const faces = faces_of(original.get(), true, "createPlugin", report_);
    if (faces.core == nullptr || faces.build == nullptr || faces.runtime == nullptr) return false;
    after_creation = serialise(faces.runtime, "getFieldsToSerialize", report_);
  }
  churn_heap();
  Faces const old = faces_of(original.get(), true, "createPlugin", report_);
  if (!(serialise(old.runtime, "getFieldsToSerialize", report_) == after_creation)) {
    report_.violation("createPlugin", "the plugin keeps pointers into the field collection, which the parser frees");
  }
  // The parser hands its object to the network, which clones it, and then deletes it.
  IPluginV3 *const copy = original->clone();
  if (copy == nullptr || copy == original.get()) {
    report_.violation("clone", copy ? "clone returns the object itself" : "clone returns null");
    return false;
  }
  plugin_.reset(copy);
  faces_ = faces_of(copy, true, "clone", report_);
  if (faces_.core == nullptr || faces_.build == nullptr || faces_.runtime == nullptr) return false;
  if (faces_.core == old.core || faces_.build == old.build || faces_.runtime == old.runtime) {
    report_.violation("clone", "the clone returns a capability of its original");
    return false;
  }
  original.reset();
  churn_heap();
  serialised_ = serialise(faces_.runtime, "getFieldsToSerialize", report_);
  if (!(serialised_ == after_creation)) {
    report_.violation("clone",
                      "the clone's fields change when its original is deleted; rebuild the pointers in clone()");
  }
  auto const same = [&](char const *value, std::string const &expected, char const *what) {
    if (value == nullptr || expected != value) {
      report_.violation("IPluginV3OneCore", std::string(what) + " is '" + (value ? value : "(null)") +
                                                "', the creator's is '" + expected + "'");
    }
  };
  same(faces_.core->getPluginName(), creator_.name, "getPluginName");
  same(faces_.core->getPluginVersion(), creator_.version, "getPluginVersion");
  same(faces_.core->getPluginNamespace(), creator_.name_space, "getPluginNamespace");
  return true;
}

bool Build::find_outputs() {
  std::int32_t const count = faces_.build->getNbOutputs();
  if (count < 1) {
    report_.violation("getNbOutputs", "it returns " + std::to_string(count) + "; a plugin has at least one output");
    return false;
  }
  if (count != outputs_) {
    report_.failure("getNbOutputs", "it returns " + std::to_string(count) + ", the ONNX node has " +
                                        std::to_string(outputs_) + " outputs");
    return false;
  }
  std::vector<DataType> types;
  for (Input const &input : inputs_) types.push_back(input.type);
  output_types_.assign(static_cast<std::size_t>(outputs_), static_cast<DataType>(-1));
  std::int32_t const code = faces_.build->getOutputDataTypes(output_types_.data(), outputs_, types.data(), inputs());
  if (code != 0) {
    report_.failure("getOutputDataTypes", "it returns " + std::to_string(code) + "; TensorRT stops here");
    return false;
  }
  bool valid = true;
  for (DataType type : output_types_) {
    bool const known = std::strcmp(name_of(type), "unknown") != 0;
    if (!known || type == DataType::kBOOL || type == DataType::kUINT8) {
      report_.violation("getOutputDataTypes", std::string("an output has the data type ") + name_of(type) + " (" +
                                                  std::to_string(static_cast<int>(type)) +
                                                  "), which TensorRT does not accept from a plugin");
      valid = false;
    }
  }
  return valid;
}

bool Build::find_shapes() {
  std::vector<DimsExprs> in(inputs_.size()), out(static_cast<std::size_t>(outputs_));
  for (std::size_t i = 0; i < in.size(); ++i) {
    in[i].nbDims = inputs_[i].dims.nbDims;
    for (std::int32_t d = 0; d < in[i].nbDims; ++d) {
      in[i].d[d] = expressions_.input(static_cast<std::int32_t>(i), d, inputs_[i].dims.d[d]);
    }
  }
  for (DimsExprs &o : out) o = {-1, {}};
  std::int32_t const code =
      faces_.build->getOutputShapes(in.data(), inputs(), nullptr, 0, out.data(), outputs_, expressions_);
  for (std::string const &misuse : expressions_.misuse()) report_.violation("getOutputShapes", misuse);
  if (code != 0) {
    report_.failure("getOutputShapes", "it returns " + std::to_string(code) + "; TensorRT stops here");
    return false;
  }
  Sizes bounds[3];
  for (Input const &input : inputs_) {
    bounds[0].push_back(input.min);
    bounds[1].push_back(input.opt);
    bounds[2].push_back(input.max);
  }
  for (std::size_t o = 0; o < out.size(); ++o) {
    std::string const which = "output " + std::to_string(o);
    if (out[o].nbDims < 0 || out[o].nbDims > Dims::MAX_DIMS) {
      report_.violation("getOutputShapes", which + " has " + std::to_string(out[o].nbDims) + " dimensions");
      return false;
    }
    shapes_.emplace_back();
    for (std::int32_t d = 0; d < out[o].nbDims; ++d) {
      shapes_[o].push_back(expressions_.find(out[o].d[d]));
      if (shapes_[o].back() == nullptr) {
        report_.violation("getOutputShapes", which + " has a size that the expression builder did not make");
        return false;
      }
    }
  }
  try {
    output_min_ = output_sizes(bounds[0]);
    output_opt_ = output_sizes(bounds[1]);
    output_max_ = output_sizes(bounds[2]);
  } catch (std::runtime_error const &error) {
    report_.failure("getOutputShapes", error.what());
    return false;
  }
  return true;
}

std::vector<Dims> Build::output_sizes(Sizes const &inputs) const {
  if (inputs.size() != inputs_.size()) {
    throw std::runtime_error(std::to_string(inputs.size()) + " input shapes were given, the node has " +
                             std::to_string(inputs_.size()) + " inputs");
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].nbDims == inputs_[i].dims.nbDims) continue;
    throw std::runtime_error("input " + std::to_string(i) + " was given " + std::to_string(inputs[i].nbDims) +
                             " axes, the engine was built for " + std::to_string(inputs_[i].dims.nbDims));
  }
  std::vector<Dims> sizes;
  for (std::size_t o = 0; o < shapes_.size(); ++o) {
    Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(shapes_[o].size());
    for (std::int32_t d = 0; d < dims.nbDims; ++d) {
      Expression const *expression = shapes_[o][static_cast<std::size_t>(d)];
      auto const value = expression->evaluate(inputs);
      if (!value || *value < 0) {
        throw std::runtime_error("output " + std::to_string(o) + ", dimension " + std::to_string(d) + ": " +
                                 expression->text() + " is " + (value ? std::to_string(*value) : "a division by zero") +
                                 " for these input sizes");
      }
      dims.d[d] = *value;
    }
    sizes.push_back(dims);
  }
  return sizes;
}

DynamicPluginTensorDesc Build::desc(std::int32_t tensor) const {
  DynamicPluginTensorDesc desc{};
  desc.desc.scale = 0;
  if (tensor < inputs()) {
    Input const &input = inputs_[static_cast<std::size_t>(tensor)];
    desc.desc.dims = input.dims;
    desc.min = input.min, desc.max = input.max, desc.opt = input.opt;
  } else {
    auto const o = static_cast<std::size_t>(tensor - inputs());
    desc.min = output_min_[o], desc.max = output_max_[o], desc.opt = output_opt_[o];
    desc.desc.dims = desc.opt;
    for (std::size_t d = 0; d < shapes_[o].size(); ++d) {
      if (shapes_[o][d]->kind != Expression::Kind::kConstant) desc.desc.dims.d[d] = -1;
    }
  }
  return desc;
}

std::vector<DynamicPluginTensorDesc> Build::descs(Combination const &combination) const {
  std::vector<DynamicPluginTensorDesc> all;
  for (std::int32_t i = 0; i < inputs() + outputs_; ++i) {
    all.push_back(desc(i));
    all.back().desc.type = combination.types[static_cast<std::size_t>(i)];
    all.back().desc.format = combination.formats[static_cast<std::size_t>(i)];
  }
  return all;
}

std::string Build::json() const {
  auto const name = [](auto value) { return json::quote(name_of(value)); };
  auto const dims = [](Dims const &d) { return json_of(d); };
  auto const number = [](std::int32_t value) { return std::to_string(value); };
  auto const shape = [](std::vector<Expression const *> const &sizes) {
    return json::list(sizes, [](Expression const *e) { return json::quote(e ? e->text() : "?"); });
  };
  auto const combination = [&](Combination const &c) {
    return json::object({{"types", json::list(c.types, name)},
                         {"formats", json::list(c.formats, name)},
                         {"tactics", json::list(c.tactics, number)},
                         {"workspace_bytes", std::to_string(c.workspace_bytes)},
                         {"usable", c.usable ? "true" : "false"}});
  };
  return json::object({{"name", json::quote(creator_.name)},
                       {"output_types", json::list(output_types_, name)},
                       {"output_shapes", json::list(shapes_, shape)},
                       {"output_min", json::list(output_min_, dims)},
                       {"output_opt", json::list(output_opt_, dims)},
                       {"output_max", json::list(output_max_, dims)},
                       {"combinations", json::list(combinations_, combination)},
                       {"compiled", combination(compiled_)},
                       {"timing_cache_id", json::quote(timing_cache_id_)},
                       {"metadata", json::quote(metadata_)},
                       {"serialized", json::list(serialised_, [](Field const &f) { return json_of(f); })},
                       {"findings", report_.json()}});
}

}  // namespace cutefuse::host
