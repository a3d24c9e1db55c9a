// TensorRT's types and formats in terms of the operators' own.
#pragma once

#include "fused_plugin.h"

namespace cutefuse {

using nvinfer1::DataType;
using nvinfer1::TensorFormat;

struct SameType {
  Type ours;
  DataType theirs;
};
constexpr SameType kTypes[] = {{Type::kFloat32, DataType::kFLOAT},
                               {Type::kFloat16, DataType::kHALF},
                               {Type::kBFloat16, DataType::kBF16},
                               {Type::kInt8, DataType::kINT8},
                               {Type::kFloat8, DataType::kFP8}};

// Of a type that no port allows: float32.
inline Type type_of(DataType given) {
  for (SameType const &row : kTypes) {
    if (row.theirs == given) return row.ours;
  }
  return Type::kFloat32;
}

inline DataType data_type_of(Type type) {
  for (SameType const &row : kTypes) {
    if (row.ours == type) return row.theirs;
  }
  return DataType::kFLOAT;
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
