// The calls of a builder that gives the whole network to Myelin (TensorRT for RTX, TensorRT on Blackwell): types and
// shapes are asked again, each tensor's formats in turn while those before it stay as they were accepted, and what was
// accepted is configured once. No GPU is there, and nothing is enqueued.
#include "host.h"

namespace cutefuse::host {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::TensorFormat;

namespace {

// In the order in which they are asked, whatever the type and rank of the tensor.
constexpr TensorFormat kAsked[] = {TensorFormat::kLINEAR, TensorFormat::kCHW2,  TensorFormat::kHWC8,
                                   TensorFormat::kCHW32,  TensorFormat::kCHW4,  TensorFormat::kDHWC8,
                                   TensorFormat::kCDHW32, TensorFormat::kHWC16, TensorFormat::kHWC};
constexpr int kSerialisations = 3;

}  // namespace

// Outputs have the types and shapes that they had when they were asked first.
bool Build::ask_again(nvinfer1::IPluginV3OneBuild *build) {
  std::vector<DataType> in, out(static_cast<std::size_t>(outputs_));
  for (Input const &input : inputs_) in.push_back(input.type);
  if (build->getOutputDataTypes(out.data(), outputs_, in.data(), inputs()) != 0 || out != output_types_) {
    report_.violation("getOutputDataTypes", "asked again, it gives other types");
    return false;
  }
  ExprBuilder expressions;
  std::vector<DimsExprs> sizes(inputs_.size()), made(static_cast<std::size_t>(outputs_));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sizes[i].nbDims = inputs_[i].dims.nbDims;
    for (std::int32_t d = 0; d < sizes[i].nbDims; ++d) {
      sizes[i].d[d] = expressions.input(static_cast<std::int32_t>(i), d, inputs_[i].dims.d[d]);
    }
  }
  bool same = build->getOutputShapes(sizes.data(), inputs(), nullptr, 0, made.data(), outputs_, expressions) == 0;
  for (std::size_t o = 0; same && o < made.size(); ++o) {
    same = made[o].nbDims == static_cast<std::int32_t>(shapes_[o].size());
    for (std::int32_t d = 0; same && d < made[o].nbDims; ++d) {
      Expression const *e = expressions.find(made[o].d[d]);
      same = e != nullptr && e->text() == shapes_[o][static_cast<std::size_t>(d)]->text();
    }
  }
  if (!same) report_.violation("getOutputShapes", "asked again, it gives other shapes");
  return same;
}

void Build::compile() {
  std::unique_ptr<IPluginV3> const copy(plugin_->clone());
  Faces const faces = copy ? faces_of(copy.get(), true, "clone", report_) : Faces{};
  if (faces.build == nullptr || faces.runtime == nullptr || !ask_again(faces.build)) return;
  std::vector<DynamicPluginTensorDesc> all;
  for (std::int32_t i = 0; i < inputs() + outputs_; ++i) {
    all.push_back(desc(i));  // sizes that are dynamic are -1
    auto &asked = all.back().desc;
    asked.type = i < inputs() ? inputs_[static_cast<std::size_t>(i)].type
                              : output_types_[static_cast<std::size_t>(i - inputs())];
    bool accepted = false;
    TensorFormat first{};
    for (TensorFormat format : kAsked) {
      asked.format = format;
      if (!faces.build->supportsFormatCombination(i, all.data(), inputs(), outputs_) || accepted) continue;
      accepted = true, first = format;
    }
    if (!accepted) {
      return report_.warning("supportsFormatCombination", "tensor " + std::to_string(i) + " has no format that " +
                                                              "Myelin asks for beside those accepted before it");
    }
    asked.format = first;
  }
  DynamicPluginTensorDesc const *in = all.data(), *out = in + inputs();
  if (std::int32_t const code = faces.build->configurePlugin(in, inputs(), out, outputs_); code != 0) {
    return report_.failure("configurePlugin",
                           "it returns " + std::to_string(code) + " for sizes of -1, which Myelin gives");
  }
  compiled_.workspace_bytes = faces.build->getWorkspaceSize(in, inputs(), out, outputs_);
  if (!offered_tactics(faces.build, &compiled_.tactics)) return;
  compiled_.serialised = serialise(faces.runtime, "getFieldsToSerialize", report_);
  for (int i = 1; i < kSerialisations; ++i) {
    if (serialise(faces.runtime, "getFieldsToSerialize", report_) == compiled_.serialised) continue;
    report_.violation("getFieldsToSerialize", "asked again, it gives other fields");
  }
  for (auto const &tensor : all) {
    compiled_.types.push_back(tensor.desc.type);
    compiled_.formats.push_back(tensor.desc.format);
  }
  compiled_.usable = true;
}

}  // namespace cutefuse::host
