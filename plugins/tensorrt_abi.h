// The slice of TensorRT's plugin interface that this project uses: same names, same order of virtual functions, same
// layout as NVIDIA's NvInferRuntime.h from TensorRT 10.0 to 11.1, so that the library builds beside a pip-installed
// TensorRT, which ships no headers. With TENSORRT_INCLUDE_DIR NVIDIA's own header is used; a test compares both.
// The interface may only grow by what those versions share: never declare the registry or the logger here, their
// layout differs between TensorRT 10 and 11.
#pragma once

#if CUTEFUSE_NVIDIA_HEADERS

#include <NvInferRuntime.h>

#else

#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st *;

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : std::int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
  kINT4 = 9,
};

enum class TensorFormat : std::int32_t {
  kLINEAR = 0,
  kCHW2 = 1,
  kHWC8 = 2,
  kCHW4 = 3,
  kCHW16 = 4,
  kCHW32 = 5,
  kDHWC8 = 6,
  kCDHW32 = 7,
  kHWC = 8,
  kDLA_LINEAR = 9,
  kDLA_HWC4 = 10,
  kHWC16 = 11,
  kDHWC = 12,
};

class Dims64 {
 public:
  static constexpr std::int32_t MAX_DIMS{8};
  std::int32_t nbDims;
  std::int64_t d[MAX_DIMS];
};
using Dims = Dims64;

class InterfaceInfo {
 public:
  char const *kind;
  std::int32_t major;
  std::int32_t minor;
};

enum class APILanguage : std::int32_t { kCPP = 0, kPYTHON = 1 };

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min;
  Dims max;
  Dims opt;
};

class INoCopy {
 protected:
  INoCopy() = default;
  virtual ~INoCopy() = default;
  INoCopy(INoCopy const &) = delete;
  INoCopy &operator=(INoCopy const &) = delete;
};

enum class DimensionOperation : std::int32_t {
  kSUM = 0,
  kPROD = 1,
  kMAX = 2,
  kMIN = 3,
  kSUB = 4,
  kEQUAL = 5,
  kLESS = 6,
  kFLOOR_DIV = 7,
  kCEIL_DIV = 8,
};

class IDimensionExpr;

// TensorRT's public expression classes forward to these; the plugin host implements them.
namespace apiv {

class VRoot {
 public:
  virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
 public:
  virtual bool isConstant() const = 0;
  virtual std::int64_t getConstantValue() const = 0;
  virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
 public:
  virtual IDimensionExpr const *constant(std::int64_t value) = 0;
  virtual IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &first,
                                          IDimensionExpr const &second) = 0;
  virtual IDimensionExpr const *declareSizeTensor(std::int32_t outputIndex, IDimensionExpr const &opt,
                                                  IDimensionExpr const &upper) = 0;
};

}  // namespace apiv

class IDimensionExpr : public INoCopy {
 public:
  bool isConstant() const noexcept { return mImpl->isConstant(); }
  std::int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }
  bool isSizeTensor() const noexcept { return mImpl->isSizeTensor(); }

 protected:
  apiv::VDimensionExpr *mImpl;
  virtual ~IDimensionExpr() noexcept = default;
};

class IExprBuilder : public INoCopy {
 public:
  IDimensionExpr const *constant(std::int64_t value) noexcept { return mImpl->constant(value); }
  IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &first,
                                  IDimensionExpr const &second) noexcept {
    return mImpl->operation(op, first, second);
  }
  IDimensionExpr const *declareSizeTensor(std::int32_t outputIndex, IDimensionExpr const &opt,
                                          IDimensionExpr const &upper) {
    return mImpl->declareSizeTensor(outputIndex, opt, upper);
  }

 protected:
  apiv::VExprBuilder *mImpl;
  virtual ~IExprBuilder() noexcept = default;
};

class DimsExprs {
 public:
  std::int32_t nbDims;
  IDimensionExpr const *d[Dims::MAX_DIMS];
};

enum class PluginFieldType : std::int32_t {
  kFLOAT16 = 0,
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT8 = 3,
  kINT16 = 4,
  kINT32 = 5,
  kCHAR = 6,
  kDIMS = 7,
  kUNKNOWN = 8,
  kBF16 = 9,
  kINT64 = 10,
  kFP8 = 11,
  kINT4 = 12,
};

class PluginField {
 public:
  AsciiChar const *name;
  void const *data;
  PluginFieldType type;
  std::int32_t length;

  PluginField(AsciiChar const *name_ = nullptr, void const *data_ = nullptr,
              PluginFieldType type_ = PluginFieldType::kUNKNOWN, std::int32_t length_ = 0) noexcept
      : name(name_), data(data_), type(type_), length(length_) {}
};

struct PluginFieldCollection {
  std::int32_t nbFields{};
  PluginField const *fields{};
};

enum class TensorRTPhase : std::int32_t { kBUILD = 0, kRUNTIME = 1 };

enum class PluginCapabilityType : std::int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

class ILoggerFinder;

namespace v_1_0 {

class IGpuAllocator;
class IErrorRecorder;

class IPluginCapability : public IVersionedInterface {};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return InterfaceInfo{"PLUGIN", 1, 0}; }
  virtual IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3 *clone() noexcept = 0;
};

}  // namespace v_1_0

using IGpuAllocator = v_1_0::IGpuAllocator;
using IErrorRecorder = v_1_0::IErrorRecorder;
using IPluginCapability = v_1_0::IPluginCapability;
using IPluginCreatorInterface = v_1_0::IPluginCreatorInterface;
using IPluginV3 = v_1_0::IPluginV3;

class IPluginResourceContext {
 public:
  virtual IGpuAllocator *getGpuAllocator() const noexcept = 0;
  virtual IErrorRecorder *getErrorRecorder() const noexcept = 0;
  virtual ~IPluginResourceContext() noexcept = default;
};

namespace v_1_0 {

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return InterfaceInfo{"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual AsciiChar const *getPluginName() const noexcept = 0;
  virtual AsciiChar const *getPluginVersion() const noexcept = 0;
  virtual AsciiChar const *getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  static constexpr std::int32_t kDEFAULT_FORMAT_COMBINATION_LIMIT = 100;

  InterfaceInfo getInterfaceInfo() const noexcept override { return InterfaceInfo{"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual std::int32_t configurePlugin(DynamicPluginTensorDesc const *in, std::int32_t nbInputs,
                                       DynamicPluginTensorDesc const *out, std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t getOutputDataTypes(DataType *outputTypes, std::int32_t nbOutputs, DataType const *inputTypes,
                                          std::int32_t nbInputs) const noexcept = 0;
  virtual std::int32_t getOutputShapes(DimsExprs const *inputs, std::int32_t nbInputs, DimsExprs const *shapeInputs,
                                       std::int32_t nbShapeInputs, DimsExprs *outputs, std::int32_t nbOutputs,
                                       IExprBuilder &exprBuilder) noexcept = 0;
  virtual bool supportsFormatCombination(std::int32_t pos, DynamicPluginTensorDesc const *inOut, std::int32_t nbInputs,
                                         std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t getNbOutputs() const noexcept = 0;
  virtual std::size_t getWorkspaceSize(DynamicPluginTensorDesc const *, std::int32_t, DynamicPluginTensorDesc const *,
                                       std::int32_t) const noexcept {
    return 0;
  }
  virtual std::int32_t getValidTactics(std::int32_t *, std::int32_t) noexcept { return 0; }
  virtual std::int32_t getNbTactics() noexcept { return 0; }
  virtual char const *getTimingCacheID() noexcept { return nullptr; }
  virtual std::int32_t getFormatCombinationLimit() noexcept { return kDEFAULT_FORMAT_COMBINATION_LIMIT; }
  virtual char const *getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return InterfaceInfo{"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual std::int32_t setTactic(std::int32_t) noexcept { return 0; }
  virtual std::int32_t onShapeChange(PluginTensorDesc const *in, std::int32_t nbInputs, PluginTensorDesc const *out,
                                     std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t enqueue(PluginTensorDesc const *inputDesc, PluginTensorDesc const *outputDesc,
                               void const *const *inputs, void *const *outputs, void *workspace,
                               cudaStream_t stream) noexcept = 0;
  virtual IPluginV3 *attachToContext(IPluginResourceContext *context) noexcept = 0;
  virtual PluginFieldCollection const *getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return InterfaceInfo{"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3 *createPlugin(AsciiChar const *name, PluginFieldCollection const *fc,
                                  TensorRTPhase phase) noexcept = 0;
  virtual PluginFieldCollection const *getFieldNames() noexcept = 0;
  virtual AsciiChar const *getPluginName() const noexcept = 0;
  virtual AsciiChar const *getPluginVersion() const noexcept = 0;
  virtual AsciiChar const *getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

using IPluginV3OneCore = v_1_0::IPluginV3OneCore;
using IPluginV3OneBuild = v_1_0::IPluginV3OneBuild;
using IPluginV3OneRuntime = v_1_0::IPluginV3OneRuntime;
using IPluginCreatorV3One = v_1_0::IPluginCreatorV3One;

}  // namespace nvinfer1

#endif
