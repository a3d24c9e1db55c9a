// TensorRT's types and formats in terms of the operators' own.
#pragma once

#include "fused_plugin.h"

namespace cutefuse {

using nvinfer1::DataType;
using nvinfer1::TensorFormat;

inline bool type_of(DataType given, Type *type) {
  switch (given) {
    case DataType::kFLOAT:
      *type = Type::kFloat32;
      return true;
    case DataType::kHALF:
      *type = Type::kFloat16;
      return true;
    case DataType::kBF16:
      *type = Type::kBFloat16;
      return true;
    case DataType::kINT8:
      *type = Type::kInt8;
      return true;
    case DataType::kFP8:
      *type = Type::kFloat8;
      return true;
    default:
      return false;
  }
}

inline DataType data_type_of(Type type) {
  switch (type) {
    case Type::kFloat16:
      return DataType::kHALF;
    case Type::kBFloat16:
      return DataType::kBF16;
    case Type::kInt8:
      return DataType::kINT8;
    case Type::kFloat8:
      return DataType::kFP8;
    default:
      return DataType::kFLOAT;
  }
}

inline TensorFormat format_of(Layout layout, DataType type) {
  if (layout == Layout::kLinear) return TensorFormat::kLINEAR;
  if (layout == Layout::kBlocks32) return TensorFormat::kCHW32;
  return type == DataType::kFLOAT                            ? TensorFormat::kHWC
         : type == DataType::kINT8 || type == DataType::kFP8 ? TensorFormat::kHWC16
                                                             : TensorFormat::kHWC8;
}

// Types and formats in a text that can be compared.
inline std::string formats_of(nvinfer1::DynamicPluginTensorDesc const *tensors, std::int32_t count) {
  std::string text;
  for (std::int32_t i = 0; i < count; ++i) {
    text += std::to_string(int(tensors[i].desc.type)) + "/" + std::to_string(int(tensors[i].desc.format)) + " ";
  }
  return text;
}

// Whether a tensor of type `given` obeys a port; `first` is the type of the first input, `named` that of kNamed ports.
inline bool obeys(TypeRule rule, DataType given, DataType first, DataType named) {
  bool const float32 = given == DataType::kFLOAT;
  bool const activation = given == first && (float32 || given == DataType::kHALF || given == DataType::kBF16);
  switch (rule) {
    case TypeRule::kFloat32:
      return float32;
    case TypeRule::kActivation:
      return activation;
    case TypeRule::kActivationOrFloat32:
      return float32 || activation;
    case TypeRule::kQuantised:
      return given == first && (given == DataType::kINT8 || given == DataType::kFP8);
    case TypeRule::kNamed:
      return given == named;
  }
  return false;
}

}  // namespace cutefuse
