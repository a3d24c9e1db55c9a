// The runtime's part: from serialised fields to enqueue, in TensorRT's order.
#include <stdexcept>

#include "host.h"

namespace cutefuse::host {

using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;

namespace {

std::unique_ptr<IPluginV3> deserialise(Build const &build, Combination const &combination) {
  FieldSet const set(combination.serialised);
  return std::unique_ptr<IPluginV3>(
      build.creator().object->createPlugin("node", set.get(), nvinfer1::TensorRTPhase::kRUNTIME));
}

}  // namespace

// A deserialised engine: both contexts must be objects of their own and hold what was serialised.
void Build::check_runtime(Combination const &combination) {
  std::unique_ptr<IPluginV3> plugin = deserialise(*this, combination);
  if (plugin == nullptr) {
    return report_.violation("createPlugin (runtime)", "it returns null for the fields that the plugin serialised");
  }
  churn_heap();
  Faces const faces = faces_of(plugin.get(), false, "createPlugin (runtime)", report_);
  if (faces.core == nullptr || faces.runtime == nullptr) return;
  if (!(serialise(faces.runtime, "createPlugin (runtime)", report_) == combination.serialised)) {
    report_.violation("createPlugin (runtime)", "a deserialised plugin serialises other fields than it was made from");
  }
  ResourceContext resources[2];
  std::unique_ptr<IPluginV3> const first(faces.runtime->attachToContext(&resources[0]));
  IPluginV3 *const second = faces.runtime->attachToContext(&resources[1]);
  if (first == nullptr || second == nullptr) {
    delete second;
    return report_.violation("attachToContext", "it returns null");
  }
  if (first.get() == plugin.get() || first.get() == second) {
    // Deleting twice would end the host.
    if (first.get() == plugin.get()) plugin.release();
    return report_.violation("attachToContext", "it does not return a new object for each context");
  }
  std::unique_ptr<IPluginV3> const owned(second);
  for (IPluginV3 *attached : {first.get(), second}) {
    Faces const own = faces_of(attached, false, "attachToContext", report_);
    if (own.runtime == nullptr) return;
    if (own.runtime == faces.runtime) {
      report_.violation("attachToContext", "the attached object returns a capability of its original");
    } else if (!(serialise(own.runtime, "attachToContext", report_) == combination.serialised)) {
      report_.violation("attachToContext", "the attached object serialises other fields than its original");
    }
  }
}

Context::Context(Build const &build, std::int32_t combination, std::int32_t tactic)
    : build_(build),
      combination_(build.combinations().at(static_cast<std::size_t>(combination))),
      tactic_(tactic),
      deserialised_(deserialise(build, combination_)) {
  Report report;
  if (deserialised_ == nullptr) throw std::runtime_error("createPlugin returns null in the runtime phase");
  Faces const faces = faces_of(deserialised_.get(), false, "createPlugin (runtime)", report);
  if (faces.runtime == nullptr) throw std::runtime_error("the deserialised plugin has no runtime capability");
  static ResourceContext resources;
  IPluginV3 *const attached = faces.runtime->attachToContext(&resources);
  if (attached == nullptr || attached == deserialised_.get()) {
    throw std::runtime_error("attachToContext does not return a new object");
  }
  attached_.reset(attached);
  runtime_ = faces_of(attached_.get(), false, "attachToContext", report).runtime;
  if (runtime_ == nullptr) throw std::runtime_error("the attached plugin has no runtime capability");
}

Context::~Context() = default;

std::int32_t Context::set_shapes(Sizes const &inputs) {
  std::vector<nvinfer1::Dims> const outputs = build_.output_sizes(inputs);
  in_.clear();
  out_.clear();
  for (std::size_t i = 0; i < combination_.types.size(); ++i) {
    bool const input = i < inputs.size();
    PluginTensorDesc desc{};
    desc.dims = input ? inputs[i] : outputs[i - inputs.size()];
    desc.type = combination_.types[i];
    desc.format = combination_.formats[i];
    (input ? in_ : out_).push_back(desc);
  }
  if (std::int32_t const code = runtime_->setTactic(tactic_)) return code;
  return runtime_->onShapeChange(in_.data(), static_cast<std::int32_t>(in_.size()), out_.data(),
                                 static_cast<std::int32_t>(out_.size()));
}

std::int32_t Context::enqueue(void const *const *inputs, void *const *outputs, void *workspace, cudaStream_t stream) {
  return runtime_->enqueue(in_.data(), out_.data(), inputs, outputs, workspace, stream);
}

}  // namespace cutefuse::host
