// A plugin that copies its input and breaks TensorRT's contract in one way, chosen by the attribute `fault` (a kCHAR
// field); faults of the library itself are chosen by the environment variable BROKEN_LIBRARY. Fault "" is a good
// plugin.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tensorrt_abi.h"

using namespace nvinfer1;

namespace {

std::string library_fault() {
  char const *fault = std::getenv("BROKEN_LIBRARY");
  return fault ? fault : "";
}

int shared_state = 0;

class Broken final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Broken(std::string fault, void const *given) : fault_(std::move(fault)), given_(given) { fill(); }
  Broken(Broken const &other)
      : IPluginV3(other),
        IPluginV3OneCore(other),
        IPluginV3OneBuild(other),
        IPluginV3OneRuntime(other),
        fault_(other.fault_),
        given_(other.given_),
        id_(other.id_) {
    fill();
    if (is("clone_shares_memory")) fields_ = other.fields_;
  }

  IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept override {
    if (type == PluginCapabilityType::kRUNTIME) {
      return is("no_runtime") ? nullptr : static_cast<IPluginV3OneRuntime *>(this);
    }
    if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild *>(this);
    if (is("wrong_core")) return static_cast<IPluginV3OneBuild *>(this);
    return static_cast<IPluginV3OneCore *>(this);
  }
  IPluginV3 *clone() noexcept override {
    if (is("clone_null")) return nullptr;
    if (is("clone_self")) return this;
    return new Broken(*this);
  }

  char const *getPluginName() const noexcept override { return is("other_name") ? "Other" : "Broken"; }
  char const *getPluginVersion() const noexcept override { return "1"; }
  char const *getPluginNamespace() const noexcept override { return is("null_namespace") ? nullptr : "tests"; }

  std::int32_t configurePlugin(DynamicPluginTensorDesc const *in, std::int32_t, DynamicPluginTensorDesc const *,
                               std::int32_t) noexcept override {
    if (is("timing_id_changes")) id_ += " configured";
    configured_ = true;
    if (is("refuses_minus_one") && in[0].desc.dims.d[0] < 0) return 4;
    if (is("serialises_shapes")) state_ = static_cast<std::int32_t>(in[0].max.d[0]);
    return is("configure_fails") ? 7 : 0;
  }
  std::int32_t getOutputDataTypes(DataType *out, std::int32_t, DataType const *in,
                                  std::int32_t) const noexcept override {
    out[0] = is("bool_output") ? DataType::kBOOL : is("unknown_output") ? static_cast<DataType>(77) : in[0];
    if (is("types_change") && ++shared_state > 1) out[0] = DataType::kHALF;
    return is("types_fail") ? 1 : 0;
  }
  std::int32_t getOutputShapes(DimsExprs const *in, std::int32_t, DimsExprs const *, std::int32_t, DimsExprs *out,
                               std::int32_t, IExprBuilder &builder) noexcept override {
    out[0] = in[0];
    if (is("nine_dims")) out[0].nbDims = 9;
    if (is("no_dims")) out[0].nbDims = -1;
    if (is("null_size")) out[0].d[0] = nullptr;
    if (is("foreign_size")) out[0].d[0] = reinterpret_cast<IDimensionExpr const *>(this);
    if (is("divides_by_zero")) {
      out[0].d[0] = builder.operation(DimensionOperation::kFLOOR_DIV, *in[0].d[0], *builder.constant(0));
    }
    if (is("negative_size")) {
      out[0].d[0] = builder.operation(DimensionOperation::kSUB, *in[0].d[0], *builder.constant(1000));
    }
    if (is("shapes_change") && ++shared_state > 1) out[0].d[1] = builder.constant(4);
    if (is("unknown_operation")) {
      builder.operation(static_cast<DimensionOperation>(99), *in[0].d[0], *builder.constant(1));
    }
    return is("shapes_fail") ? 1 : 0;
  }
  bool supportsFormatCombination(std::int32_t pos, DynamicPluginTensorDesc const *tensors, std::int32_t,
                                 std::int32_t) noexcept override {
    if (is("no_format")) return false;
    if (is("format_of_no_myelin")) return tensors[pos].desc.format == TensorFormat::kDHWC;
    if (is("looks_ahead") && pos == 0 && tensors[1].desc.format != TensorFormat::kLINEAR) return false;
    if (is("many_formats")) return true;
    return tensors[pos].desc.format == TensorFormat::kLINEAR && tensors[pos].desc.type == tensors[0].desc.type;
  }
  std::int32_t getNbOutputs() const noexcept override { return is("no_output") ? 0 : is("two_outputs") ? 2 : 1; }
  std::size_t getWorkspaceSize(DynamicPluginTensorDesc const *in, std::int32_t, DynamicPluginTensorDesc const *,
                               std::int32_t) const noexcept override {
    if (!is("workspace_shrinks")) return 1024;
    return in[0].max.d[0] == in[0].opt.d[0] ? 4096 : 1024;
  }
  std::int32_t getValidTactics(std::int32_t *tactics, std::int32_t count) noexcept override {
    for (std::int32_t i = 0; i < count; ++i) tactics[i] = i + 1;
    if (is("zero_tactic")) tactics[0] = 0;
    if (is("negative_tactic")) tactics[0] = -3;
    if (is("double_tactic")) tactics[1] = tactics[0];
    if (is("too_many_tactics")) tactics[count] = count + 1;
    return is("tactics_fail") ? 1 : 0;
  }
  std::int32_t getNbTactics() noexcept override { return is("negative_tactics") ? -1 : 2; }
  char const *getTimingCacheID() noexcept override { return is("no_timing_id") ? nullptr : id_.c_str(); }
  std::int32_t getFormatCombinationLimit() noexcept override {
    return is("limit_zero") ? 0 : is("many_formats") ? 3 : kDEFAULT_FORMAT_COMBINATION_LIMIT;
  }

  std::int32_t setTactic(std::int32_t tactic) noexcept override { return is("refuses_tactic") && tactic == 2 ? 1 : 0; }
  std::int32_t onShapeChange(PluginTensorDesc const *, std::int32_t, PluginTensorDesc const *,
                             std::int32_t) noexcept override {
    return is("shape_change_fails") ? 3 : 0;
  }
  std::int32_t enqueue(PluginTensorDesc const *, PluginTensorDesc const *, void const *const *, void *const *, void *,
                       cudaStream_t) noexcept override {
    return 5;
  }
  IPluginV3 *attachToContext(IPluginResourceContext *) noexcept override {
    if (is("attach_null")) return nullptr;
    if (is("attach_self")) return this;
    Broken *copy = new Broken(*this);
    if (is("attach_forgets")) copy->state_ = 1;
    return copy;
  }
  PluginFieldCollection const *getFieldsToSerialize() noexcept override {
    if (is("fields_null")) return nullptr;
    if (is("fields_change") && configured_) ++state_;
    if (!is("clone_shares_memory")) fill();
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  }

 private:
  bool is(char const *fault) const { return fault_ == fault; }
  void fill() {
    fields_.clear();
    char const *text = fault_.c_str();
    if (is("keeps_field_pointers")) text = static_cast<char const *>(given_);
    fields_.emplace_back("fault", text, PluginFieldType::kCHAR, static_cast<std::int32_t>(fault_.size()) + 1);
    if (is("shared_state")) state_ = ++shared_state;
    fields_.emplace_back(is("double_field") ? "fault" : "state", &state_, PluginFieldType::kINT32, 1);
    if (is("field_without_data")) fields_.emplace_back("empty", nullptr, PluginFieldType::kFLOAT32, 4);
  }

  std::string fault_;
  void const *given_;
  std::string id_ = "id";
  std::int32_t state_ = 0;
  bool configured_ = false;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(char const *name) : name_(name) {
    fields_ = {PluginField("fault", nullptr, PluginFieldType::kCHAR, 1),
               PluginField("state", nullptr, PluginFieldType::kINT32, 1)};
    if (library_fault() == "double_field_name") fields_.push_back(fields_[0]);
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
  }
  IPluginV3 *createPlugin(char const *, PluginFieldCollection const *given, TensorRTPhase phase) noexcept override {
    for (std::int32_t i = 0; i < given->nbFields; ++i) {
      PluginField const &field = given->fields[i];
      if (std::strcmp(field.name, "fault") != 0) continue;
      std::string const fault = static_cast<char const *>(field.data);
      if (fault == "create_null") return nullptr;
      if (fault == "runtime_null" && phase == TensorRTPhase::kRUNTIME) return nullptr;
      if (fault == "runtime_forgets" && phase == TensorRTPhase::kRUNTIME) return new Broken("", field.data);
      return new Broken(fault, field.data);
    }
    return nullptr;
  }
  PluginFieldCollection const *getFieldNames() noexcept override {
    return library_fault() == "no_field_names" ? nullptr : &collection_;
  }
  char const *getPluginName() const noexcept override { return name_; }
  char const *getPluginVersion() const noexcept override { return library_fault() == "no_version" ? nullptr : "1"; }
  char const *getPluginNamespace() const noexcept override { return "tests"; }

 private:
  char const *name_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

class OldCreator final : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V1", 1, 0}; }
};

std::vector<IPluginCreatorInterface *> list;

}  // namespace

extern "C" __attribute__((visibility("default"))) IPluginCreatorInterface *const *getCreators(std::int32_t &count) {
  std::string const fault = library_fault();
  if (list.empty() || fault == "unstable_creators") {
    list.clear();
    if (fault == "null_creator") list.push_back(nullptr);
    if (fault == "old_creator") list.push_back(new OldCreator());
    list.push_back(new Creator(fault == "no_name" ? "" : "Broken"));
    if (fault == "double_creator") list.push_back(new Creator("Broken"));
  }
  count = fault == "negative_count" ? -1 : static_cast<std::int32_t>(list.size());
  return fault == "no_list" ? nullptr : list.data();
}

#if !NO_LOGGER_FINDER
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(ILoggerFinder *finder) {
  if (library_fault() != "uses_logger") return;
  // What findLogger() compiles to with TensorRT 10's headers: the first virtual function.
  using Call = void *(*)(void *);
  (*reinterpret_cast<Call **>(finder))[0](finder);
}
#endif
