// The workspace that a builder was told a node needs, which is all that its engine will ever be given, on whichever GPU
// it runs. Written into the engine as one more plugin field.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tensorrt_abi.h"

namespace cutefuse {

class Promise {
 public:
  static constexpr char const *kField = "workspace_bytes";

  // A node configured for other formats starts anew; for another optimisation profile the smaller workspace counts, as
  // nobody says which profile will run.
  void configured(std::string const &formats, std::int64_t bytes) {
    auto const found = told_.try_emplace(formats, bytes).first;
    found->second = std::min(found->second, bytes);
    value_ = field_ = static_cast<std::int32_t>(std::min<std::int64_t>(found->second, kMost));
  }

  // Reads the promise from an engine's fields and copies the other fields. An engine that was written before this field
  // existed promises 0 bytes: its library computed the size from the multiprocessors of the GPU that built it, so it is
  // not known how many bytes TensorRT will pass, and no plan may write any. Null when done, else one sentence.
  char const *read(nvinfer1::PluginFieldCollection const &fields, std::vector<nvinfer1::PluginField> *others) {
    for (std::int32_t i = 0; fields.fields != nullptr && i < fields.nbFields; ++i) {
      nvinfer1::PluginField const &field = fields.fields[i];
      if (field.name == nullptr || std::strcmp(field.name, kField) != 0) {
        others->push_back(field);
        continue;
      }
      auto const *const bytes = static_cast<std::int32_t const *>(field.data);
      if (field.type != nvinfer1::PluginFieldType::kINT32 || field.length != 1 || bytes == nullptr || *bytes < 0) {
        return "field workspace_bytes must be one number of bytes in 32 bits; rebuild the engine";
      }
      value_ = field_ = *bytes;
    }
    return nullptr;
  }

  std::int64_t bytes() const { return value_; }

  nvinfer1::PluginField field() const { return {kField, &field_, nvinfer1::PluginFieldType::kINT32, 1}; }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::map<std::string, std::int64_t> told_;
  std::int64_t value_ = 0;
  std::int32_t field_ = 0;  // TensorRT reads it through a pointer
};

}  // namespace cutefuse
