// Says how a compiler lays out TensorRT's plugin interface: compiled against plugins/tensorrt_abi.h and against
// NVIDIA's headers, both programs must print the same and show the same virtual tables for the Probe classes, which
// override every virtual function so that each shows its name at its place.
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "tensorrt_abi.h"

using namespace nvinfer1;

struct ProbeExpr : IDimensionExpr {
  static void print();
};
struct ProbeBuilder : IExprBuilder {
  static void print();
};

struct ProbeVDimensionExpr : apiv::VDimensionExpr {
  bool isConstant() const override { return true; }
  std::int64_t getConstantValue() const override { return 0; }
  bool isSizeTensor() const override { return false; }
};
struct ProbeVExprBuilder : apiv::VExprBuilder {
  IDimensionExpr const *constant(std::int64_t) override { return nullptr; }
  IDimensionExpr const *operation(DimensionOperation, IDimensionExpr const &, IDimensionExpr const &) override {
    return nullptr;
  }
  IDimensionExpr const *declareSizeTensor(std::int32_t, IDimensionExpr const &, IDimensionExpr const &) override {
    return nullptr;
  }
};
struct ProbeContext : IPluginResourceContext {
  IGpuAllocator *getGpuAllocator() const noexcept override { return nullptr; }
  IErrorRecorder *getErrorRecorder() const noexcept override { return nullptr; }
};
struct ProbePlugin : IPluginV3 {
  InterfaceInfo getInterfaceInfo() const noexcept override { return {}; }
  APILanguage getAPILanguage() const noexcept override { return APILanguage::kCPP; }
  IPluginCapability *getCapabilityInterface(PluginCapabilityType) noexcept override { return nullptr; }
  IPluginV3 *clone() noexcept override { return nullptr; }
};
struct ProbeCore : IPluginV3OneCore {
  InterfaceInfo getInterfaceInfo() const noexcept override { return {}; }
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};
struct ProbeBuild : IPluginV3OneBuild {
  InterfaceInfo getInterfaceInfo() const noexcept override { return {}; }
  std::int32_t configurePlugin(DynamicPluginTensorDesc const *, std::int32_t, DynamicPluginTensorDesc const *,
                               std::int32_t) noexcept override {
    return 0;
  }
  std::int32_t getOutputDataTypes(DataType *, std::int32_t, DataType const *, std::int32_t) const noexcept override {
    return 0;
  }
  std::int32_t getOutputShapes(DimsExprs const *, std::int32_t, DimsExprs const *, std::int32_t, DimsExprs *,
                               std::int32_t, IExprBuilder &) noexcept override {
    return 0;
  }
  bool supportsFormatCombination(std::int32_t, DynamicPluginTensorDesc const *, std::int32_t,
                                 std::int32_t) noexcept override {
    return false;
  }
  std::int32_t getNbOutputs() const noexcept override { return 0; }
  std::size_t getWorkspaceSize(DynamicPluginTensorDesc const *, std::int32_t, DynamicPluginTensorDesc const *,
                               std::int32_t) const noexcept override {
    return 0;
  }
  std::int32_t getValidTactics(std::int32_t *, std::int32_t) noexcept override { return 0; }
  std::int32_t getNbTactics() noexcept override { return 0; }
  char const *getTimingCacheID() noexcept override { return ""; }
  std::int32_t getFormatCombinationLimit() noexcept override { return 0; }
  char const *getMetadataString() noexcept override { return ""; }
};
struct ProbeRuntime : IPluginV3OneRuntime {
  InterfaceInfo getInterfaceInfo() const noexcept override { return {}; }
  std::int32_t setTactic(std::int32_t) noexcept override { return 0; }
  std::int32_t onShapeChange(PluginTensorDesc const *, std::int32_t, PluginTensorDesc const *,
                             std::int32_t) noexcept override {
    return 0;
  }
  std::int32_t enqueue(PluginTensorDesc const *, PluginTensorDesc const *, void const *const *, void *const *, void *,
                       cudaStream_t) noexcept override {
    return 0;
  }
  IPluginV3 *attachToContext(IPluginResourceContext *) noexcept override { return nullptr; }
  PluginFieldCollection const *getFieldsToSerialize() noexcept override { return nullptr; }
};
struct ProbeCreator : IPluginCreatorV3One {
  InterfaceInfo getInterfaceInfo() const noexcept override { return {}; }
  IPluginV3 *createPlugin(char const *, PluginFieldCollection const *, TensorRTPhase) noexcept override {
    return nullptr;
  }
  PluginFieldCollection const *getFieldNames() noexcept override { return nullptr; }
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};
// One plugin object with all four bases, as FusedPlugin derives them: where each face lies.
struct ProbeAll : ProbePlugin, ProbeCore, ProbeBuild, ProbeRuntime {};

#define SIZE(type) std::printf("%s %zu %zu\n", #type, sizeof(type), alignof(type))
#define PLACE(type, member) std::printf("%s.%s %zu %zu\n", #type, #member, offsetof(type, member), sizeof(type::member))
#define VALUE(name) std::printf("%s %lld\n", #name, static_cast<long long>(name))

void ProbeExpr::print() { std::printf("mImpl %zu %zu\n", offsetof(ProbeExpr, mImpl), sizeof(ProbeExpr)); }
void ProbeBuilder::print() { std::printf("mImpl %zu %zu\n", offsetof(ProbeBuilder, mImpl), sizeof(ProbeBuilder)); }

int main() {
  SIZE(Dims), PLACE(Dims, nbDims), PLACE(Dims, d), VALUE(Dims::MAX_DIMS);
  SIZE(PluginTensorDesc), PLACE(PluginTensorDesc, dims), PLACE(PluginTensorDesc, type);
  PLACE(PluginTensorDesc, format), PLACE(PluginTensorDesc, scale);
  SIZE(DynamicPluginTensorDesc), PLACE(DynamicPluginTensorDesc, desc), PLACE(DynamicPluginTensorDesc, min);
  PLACE(DynamicPluginTensorDesc, max), PLACE(DynamicPluginTensorDesc, opt);
  SIZE(DimsExprs), PLACE(DimsExprs, nbDims), PLACE(DimsExprs, d);
  SIZE(InterfaceInfo), PLACE(InterfaceInfo, kind), PLACE(InterfaceInfo, major), PLACE(InterfaceInfo, minor);
  SIZE(PluginField), PLACE(PluginField, name), PLACE(PluginField, data), PLACE(PluginField, type);
  PLACE(PluginField, length);
  SIZE(PluginFieldCollection), PLACE(PluginFieldCollection, nbFields), PLACE(PluginFieldCollection, fields);
  ProbeExpr::print(), ProbeBuilder::print();
  SIZE(ProbeAll), SIZE(cudaStream_t);
  VALUE(DataType::kFLOAT), VALUE(DataType::kHALF), VALUE(DataType::kINT8), VALUE(DataType::kINT32);
  VALUE(DataType::kBOOL), VALUE(DataType::kUINT8), VALUE(DataType::kFP8), VALUE(DataType::kBF16);
  VALUE(DataType::kINT64), VALUE(DataType::kINT4);
  VALUE(TensorFormat::kLINEAR), VALUE(TensorFormat::kCHW2), VALUE(TensorFormat::kHWC8), VALUE(TensorFormat::kCHW4);
  VALUE(TensorFormat::kCHW16), VALUE(TensorFormat::kCHW32), VALUE(TensorFormat::kDHWC8);
  VALUE(TensorFormat::kCDHW32), VALUE(TensorFormat::kHWC), VALUE(TensorFormat::kDLA_LINEAR);
  VALUE(TensorFormat::kDLA_HWC4), VALUE(TensorFormat::kHWC16), VALUE(TensorFormat::kDHWC);
  VALUE(DimensionOperation::kSUM), VALUE(DimensionOperation::kPROD), VALUE(DimensionOperation::kMAX);
  VALUE(DimensionOperation::kMIN), VALUE(DimensionOperation::kSUB), VALUE(DimensionOperation::kEQUAL);
  VALUE(DimensionOperation::kLESS), VALUE(DimensionOperation::kFLOOR_DIV), VALUE(DimensionOperation::kCEIL_DIV);
  VALUE(PluginFieldType::kFLOAT16), VALUE(PluginFieldType::kFLOAT32), VALUE(PluginFieldType::kFLOAT64);
  VALUE(PluginFieldType::kINT8), VALUE(PluginFieldType::kINT16), VALUE(PluginFieldType::kINT32);
  VALUE(PluginFieldType::kCHAR), VALUE(PluginFieldType::kDIMS), VALUE(PluginFieldType::kUNKNOWN);
  VALUE(PluginFieldType::kBF16), VALUE(PluginFieldType::kINT64), VALUE(PluginFieldType::kFP8);
  VALUE(TensorRTPhase::kBUILD), VALUE(TensorRTPhase::kRUNTIME);
  VALUE(PluginCapabilityType::kCORE), VALUE(PluginCapabilityType::kBUILD), VALUE(PluginCapabilityType::kRUNTIME);
  VALUE(APILanguage::kCPP), VALUE(IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT);
  // The names by which TensorRT knows the interfaces, asked of the base classes themselves.
  auto const info = [](char const *name, InterfaceInfo i) { std::printf("%s '%s' %d\n", name, i.kind, i.major); };
  ProbeAll all;
  info("IPluginV3", all.IPluginV3::getInterfaceInfo());
  info("IPluginV3OneCore", all.IPluginV3OneCore::getInterfaceInfo());
  info("IPluginV3OneBuild", all.IPluginV3OneBuild::getInterfaceInfo());
  info("IPluginV3OneRuntime", all.IPluginV3OneRuntime::getInterfaceInfo());
  info("IPluginCreatorV3One", ProbeCreator().IPluginCreatorV3One::getInterfaceInfo());
  auto const face = [&](char const *name, void const *at) {
    std::printf("%s at %zd\n", name, static_cast<char const *>(at) - reinterpret_cast<char const *>(&all));
  };
  face("core", static_cast<IPluginV3OneCore *>(&all)), face("build", static_cast<IPluginV3OneBuild *>(&all));
  face("runtime", static_cast<IPluginV3OneRuntime *>(&all));
}
