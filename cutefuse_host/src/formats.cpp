// The builder's search: every combination of types and formats, and what a plugin offers for each.
#include <algorithm>
#include <cstring>

#include "host.h"

namespace cutefuse::host {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

namespace {

// Formats that a type may have (NVIDIA's table "Data Type and Format"), for a GPU.
struct TypeFormats {
  TensorFormat format;
  std::int32_t min_rank;
  std::vector<DataType> types;
};

std::vector<TypeFormats> const &table() {
  static std::vector<TypeFormats> const kTable = {
      {TensorFormat::kLINEAR, 0, {}},
      {TensorFormat::kCHW2, 3, {DataType::kHALF, DataType::kBF16}},
      {TensorFormat::kHWC8, 3, {DataType::kHALF, DataType::kBF16}},
      {TensorFormat::kCHW4, 3, {DataType::kINT8, DataType::kHALF}},
      {TensorFormat::kCHW16, 3, {DataType::kHALF}},
      {TensorFormat::kCHW32, 3, {DataType::kFLOAT, DataType::kHALF, DataType::kINT8}},
      {TensorFormat::kDHWC8, 4, {DataType::kHALF, DataType::kBF16}},
      {TensorFormat::kCDHW32, 4, {DataType::kHALF, DataType::kINT8}},
      {TensorFormat::kHWC, 3, {DataType::kFLOAT, DataType::kUINT8}},
      {TensorFormat::kHWC16, 3, {DataType::kHALF, DataType::kINT8, DataType::kFP8}},
      {TensorFormat::kDHWC, 4, {DataType::kFLOAT}},
  };
  return kTable;
}

bool allowed(TypeFormats const &row, DataType type, std::int32_t rank) {
  return rank >= row.min_rank && (row.types.empty() || std::count(row.types.begin(), row.types.end(), type) != 0);
}

// In a weakly typed network the builder may also run a float32 tensor in float16 or bfloat16.
std::vector<DataType> candidates(DataType given, bool strongly_typed) {
  if (strongly_typed || given != DataType::kFLOAT) return {given};
  return {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
}

DynamicPluginTensorDesc poison(int value) {
  DynamicPluginTensorDesc desc;
  std::memset(static_cast<void *>(&desc), value, sizeof(desc));
  return desc;
}

constexpr std::int32_t kCanary = 0x5ca1ab1e;
constexpr std::int32_t kMostTactics = 1 << 16;

}  // namespace

void Build::find_formats() {
  limit_ = faces_.build->getFormatCombinationLimit();
  if (limit_ < 1) {
    report_.violation("getFormatCombinationLimit", "it returns " + std::to_string(limit_) + "; allow at least one");
    limit_ = nvinfer1::IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT;
  }
  trial_.assign(static_cast<std::size_t>(inputs() + outputs_), poison(0x7e));
  try_formats(0);
  if (static_cast<std::int32_t>(combinations_.size()) == limit_) {
    report_.warning("supportsFormatCombination",
                    "the limit of " + std::to_string(limit_) + " combinations is reached; TensorRT ignores the rest");
  }
}

void Build::try_formats(std::int32_t pos) {
  auto const p = static_cast<std::size_t>(pos);
  if (p == trial_.size()) {
    Combination found;
    for (auto const &tensor : trial_) {
      found.types.push_back(tensor.desc.type);
      found.formats.push_back(tensor.desc.format);
    }
    combinations_.push_back(std::move(found));
    return;
  }
  DataType const given = pos < inputs() ? inputs_[p].type : output_types_[static_cast<std::size_t>(pos - inputs())];
  for (DataType type : candidates(given, strongly_typed_)) {
    for (TypeFormats const &row : table()) {
      trial_[p] = desc(pos);
      trial_[p].desc.type = type;
      trial_[p].desc.format = row.format;
      if (!allowed(row, type, trial_[p].desc.dims.nbDims)) continue;
      if (static_cast<std::int32_t>(combinations_.size()) < limit_ && accepts(pos)) try_formats(pos + 1);
    }
  }
  trial_[p] = poison(0x7e);
}

bool Build::accepts(std::int32_t pos) {
  auto const answer = [&](int garbage) {
    for (auto i = static_cast<std::size_t>(pos) + 1; i < trial_.size(); ++i) trial_[i] = poison(garbage);
    return faces_.build->supportsFormatCombination(pos, trial_.data(), inputs(), outputs_);
  };
  // Ask with two different contents behind `pos`. One of them is plausible: zeros read as an empty float32 kLINEAR
  // tensor.
  bool const first = answer(0x7e), second = answer(0);
  if (first != second) {
    report_.violation("supportsFormatCombination", "the answer for tensor " + std::to_string(pos) +
                                                       " changes with what stands behind it; decide from "
                                                       "inOut[0..pos] only");
  }
  return first && second;
}

// The fields that creation alone decides. A plugin may also serialise how much workspace it asked for, since another
// GPU cannot compute that.
static Fields settled(Fields fields) {
  auto const promise = [](Field const &field) { return field.name == "workspace_bytes"; };
  fields.erase(std::remove_if(fields.begin(), fields.end(), promise), fields.end());
  return fields;
}

bool Build::offered_tactics(nvinfer1::IPluginV3OneBuild *build, std::vector<std::int32_t> *tactics) {
  std::int32_t const count = build->getNbTactics();
  if (count < 0 || count > kMostTactics) {
    report_.violation("getNbTactics", "it returns " + std::to_string(count));
    return false;
  }
  tactics->assign(static_cast<std::size_t>(count) + 1, kCanary);
  if (std::int32_t const code = count > 0 ? build->getValidTactics(tactics->data(), count) : 0; code != 0) {
    report_.failure("getValidTactics", "it returns " + std::to_string(code));
    return false;
  }
  if (tactics->back() != kCanary) report_.violation("getValidTactics", "it writes past the end of the array");
  tactics->pop_back();
  for (std::int32_t tactic : *tactics) {
    if (tactic > 0 && std::count(tactics->begin(), tactics->end(), tactic) == 1) continue;
    report_.violation("getValidTactics",
                      "tactic " + std::to_string(tactic) + " is not distinct and positive; 0 is the default tactic");
  }
  return true;
}

void Build::configure(Combination &combination) {
  // Each candidate is configured on a clone of its own, so that they do not disturb each other.
  std::unique_ptr<IPluginV3> const copy(plugin_->clone());
  Faces const faces = copy ? faces_of(copy.get(), true, "clone", report_) : Faces{};
  if (faces.build == nullptr || faces.runtime == nullptr) return report_.violation("clone", "the clone is not usable");
  std::vector<DynamicPluginTensorDesc> const all = descs(combination);
  DynamicPluginTensorDesc const *in = all.data(), *out = in + inputs();
  std::int32_t code = faces.build->configurePlugin(in, inputs(), out, outputs_);
  if (code != 0) {
    return report_.failure("configurePlugin", "it returns " + std::to_string(code) +
                                                  " for a combination that "
                                                  "supportsFormatCombination accepts");
  }
  char const *id = faces.build->getTimingCacheID();
  if (timing_cache_id_ != (id ? id : "")) {
    report_.violation("getTimingCacheID", "it changes when the plugin is configured; it may only depend on creation");
  }
  combination.serialised = serialise(faces.runtime, "getFieldsToSerialize", report_);
  if (!(settled(combination.serialised) == settled(serialised_))) {
    report_.warning("getFieldsToSerialize",
                    "the fields change with configurePlugin, so the engine depends on what was "
                    "configured last; shapes belong into onShapeChange");
  }
  if (!offered_tactics(faces.build, &combination.tactics)) return;
  combination.workspace_bytes = faces.build->getWorkspaceSize(in, inputs(), out, outputs_);
  std::vector<DynamicPluginTensorDesc> small = all;
  for (auto &tensor : small) tensor.max = tensor.desc.dims = tensor.opt;
  std::size_t const at_opt = faces.build->getWorkspaceSize(small.data(), inputs(), small.data() + inputs(), outputs_);
  if (at_opt > combination.workspace_bytes) {
    report_.violation("getWorkspaceSize", "it asks for " + std::to_string(at_opt) + " bytes at the optimum and " +
                                              std::to_string(combination.workspace_bytes) +
                                              " for the whole profile; use the max sizes");
  }
  combination.usable = true;
  try_shape(combination);
  check_runtime(combination);
}

void Build::try_shape(Combination const &combination) {
  std::unique_ptr<IPluginV3> const copy(plugin_->clone());
  Faces const faces = copy ? faces_of(copy.get(), true, "clone", report_) : Faces{};
  if (faces.runtime == nullptr) return;
  std::vector<PluginTensorDesc> shaped;
  for (auto const &tensor : descs(combination)) {
    shaped.push_back(tensor.desc);
    shaped.back().dims = tensor.opt;
  }
  std::int32_t code = faces.runtime->onShapeChange(shaped.data(), inputs(), shaped.data() + inputs(), outputs_);
  if (code != 0) report_.failure("onShapeChange", "it returns " + std::to_string(code) + " for the optimum shape");
  std::vector<std::int32_t> tactics = combination.tactics;
  tactics.push_back(0);
  for (std::int32_t tactic : tactics) {
    code = faces.runtime->setTactic(tactic);
    if (code != 0) {
      report_.violation("setTactic", "it returns " + std::to_string(code) + " for tactic " + std::to_string(tactic) +
                                         ", which the plugin offers itself");
    }
  }
}

}  // namespace cutefuse::host
