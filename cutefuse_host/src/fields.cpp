// Reports, plugin fields and names: what the builder's and the runtime's part share.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>

#include "host.h"
#include "json.h"

namespace cutefuse::host {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorFormat;

void Report::add(char const *kind, char const *step, std::string const &text) {
  auto const same = [&](Finding const &f) { return f.kind == kind && f.step == step && f.text == text; };
  if (std::none_of(findings_.begin(), findings_.end(), same)) findings_.push_back({kind, step, text});
}

std::string Report::json() const {
  return json::list(findings_, [](Finding const &f) {
    return json::object({{"kind", json::quote(f.kind)}, {"step", json::quote(f.step)}, {"text", json::quote(f.text)}});
  });
}

std::size_t bytes_of(PluginFieldType type, std::int32_t length) {
  std::size_t const count = length > 0 ? static_cast<std::size_t>(length) : 0;
  switch (type) {
    case PluginFieldType::kFLOAT64:
    case PluginFieldType::kINT64:
      return 8 * count;
    case PluginFieldType::kFLOAT32:
    case PluginFieldType::kINT32:
      return 4 * count;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
    case PluginFieldType::kINT16:
      return 2 * count;
    case PluginFieldType::kDIMS:
      return sizeof(nvinfer1::Dims) * count;
    case PluginFieldType::kINT4:
      return (count + 1) / 2;
    default:
      return count;
  }
}

namespace {

template <class T>
std::string numbers(Field const &field) {
  std::string out = "[";
  for (std::size_t i = 0; i < field.bytes.size() / sizeof(T); ++i) {
    T value;
    std::memcpy(&value, field.bytes.data() + i * sizeof(T), sizeof(T));
    out += i == 0 ? "" : ", ";
    if constexpr (std::is_integral_v<T>) {
      out += std::to_string(value);
    } else {
      char text[40];
      std::snprintf(text, sizeof(text), "%.17g", static_cast<double>(value));
      out += std::isfinite(value) ? std::string(text) : json::quote(text);  // JSON has no name for the others
    }
  }
  return out + "]";
}

}  // namespace

std::string json_of(Field const &field) {
  std::string values = "null";
  switch (field.type) {
    case PluginFieldType::kINT32:
      values = numbers<std::int32_t>(field);
      break;
    case PluginFieldType::kINT64:
      values = numbers<std::int64_t>(field);
      break;
    case PluginFieldType::kFLOAT32:
      values = numbers<float>(field);
      break;
    case PluginFieldType::kFLOAT64:
      values = numbers<double>(field);
      break;
    case PluginFieldType::kCHAR:
      values = json::quote(std::string(field.bytes.data(), strnlen(field.bytes.data(), field.bytes.size())));
      break;
    default:
      break;
  }
  return json::object({{"name", json::quote(field.name)},
                       {"type", std::to_string(static_cast<int>(field.type))},
                       {"length", std::to_string(field.length)},
                       {"values", values}});
}

std::string json_of(nvinfer1::Dims const &dims) {
  std::vector<std::int64_t> const sizes(dims.d, dims.d + std::max(0, dims.nbDims));
  return json::list(sizes, [](std::int64_t size) { return std::to_string(size); });
}

char const *name_of(DataType type) {
  constexpr char const *kNames[] = {"float32", "float16", "int8",     "int32", "bool",
                                    "uint8",   "fp8",     "bfloat16", "int64", "int4"};
  auto const i = static_cast<std::uint32_t>(type);
  return i < sizeof(kNames) / sizeof(kNames[0]) ? kNames[i] : "unknown";
}

char const *name_of(TensorFormat format) {
  constexpr char const *kNames[] = {"kLINEAR", "kCHW2", "kHWC8",       "kCHW4",     "kCHW16", "kCHW32", "kDHWC8",
                                    "kCDHW32", "kHWC",  "kDLA_LINEAR", "kDLA_HWC4", "kHWC16", "kDHWC"};
  auto const i = static_cast<std::uint32_t>(format);
  return i < sizeof(kNames) / sizeof(kNames[0]) ? kNames[i] : "unknown";
}

FieldSet::FieldSet(Fields const &fields) : copies_(fields) {
  for (Field const &field : copies_) {
    fields_.emplace_back(field.name.c_str(), field.bytes.empty() ? nullptr : field.bytes.data(), field.type,
                         field.length);
  }
  collection_.nbFields = static_cast<std::int32_t>(fields_.size());
  collection_.fields = fields_.data();
}

FieldSet::~FieldSet() {
  // Through volatile, or the compiler drops stores to memory that is freed next.
  for (Field &field : copies_) {
    for (char &c : field.bytes) *const_cast<char volatile *>(&c) = '\x5a';
    for (char &c : field.name) *const_cast<char volatile *>(&c) = '?';
  }
}

void churn_heap() {
  std::vector<void *> blocks;
  for (std::size_t size = 16; size <= 1024; size += 16) {
    for (int i = 0; i < 8; ++i) {
      void *block = ::operator new(size);
      std::memset(block, 0x5a, size);
      // The compiler must not see through the allocation.
      asm volatile("" : : "r"(block) : "memory");
      blocks.push_back(block);
    }
  }
  for (void *block : blocks) ::operator delete(block);
}

Faces faces_of(nvinfer1::IPluginV3 *plugin, bool need_build, char const *step, Report &report) {
  using nvinfer1::PluginCapabilityType;
  struct Expected {
    PluginCapabilityType type;
    char const *kind;
    std::int32_t newest;
  };
  Expected const expected[] = {{PluginCapabilityType::kCORE, "PLUGIN_V3ONE_CORE", 1},
                               {PluginCapabilityType::kBUILD, "PLUGIN_V3ONE_BUILD", 2},
                               {PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME", 1}};
  Faces faces;
  auto const own = plugin->getInterfaceInfo();
  if (own.kind == nullptr || std::strcmp(own.kind, "PLUGIN") != 0 || own.major != 1) {
    report.violation(step, std::string("the plugin's interface is '") + (own.kind ? own.kind : "(null)") + "' " +
                               std::to_string(own.major) + ", 'PLUGIN' 1 is expected; derive from IPluginV3");
    return faces;
  }
  for (Expected const &e : expected) {
    nvinfer1::IPluginCapability *face = plugin->getCapabilityInterface(e.type);
    if (face == nullptr) {
      if (need_build || e.type != PluginCapabilityType::kBUILD) {
        report.violation(step, std::string("getCapabilityInterface returns null for ") + e.kind);
      }
      continue;
    }
    auto const info = face->getInterfaceInfo();
    if (info.kind == nullptr || std::strcmp(info.kind, e.kind) != 0 || info.major < 1 || info.major > e.newest) {
      report.violation(step, std::string("the capability asked for as ") + e.kind + " says that it is '" +
                                 (info.kind ? info.kind : "(null)") + "' " + std::to_string(info.major) +
                                 "; cast `this` to the capability's own base class");
      continue;
    }
    if (e.type == PluginCapabilityType::kCORE) faces.core = static_cast<nvinfer1::IPluginV3OneCore *>(face);
    if (e.type == PluginCapabilityType::kBUILD) faces.build = static_cast<nvinfer1::IPluginV3OneBuild *>(face);
    if (e.type == PluginCapabilityType::kRUNTIME) faces.runtime = static_cast<nvinfer1::IPluginV3OneRuntime *>(face);
  }
  return faces;
}

Fields serialise(nvinfer1::IPluginV3OneRuntime *runtime, char const *step, Report &report) {
  nvinfer1::PluginFieldCollection const *collection = runtime->getFieldsToSerialize();
  Fields fields;
  if (collection == nullptr || collection->nbFields < 0 ||
      (collection->nbFields > 0 && collection->fields == nullptr)) {
    report.violation(step, "getFieldsToSerialize returns no valid field collection; return an empty one for no fields");
    return fields;
  }
  for (std::int32_t i = 0; i < collection->nbFields; ++i) {
    nvinfer1::PluginField const &field = collection->fields[i];
    std::string const name = field.name ? field.name : "";
    auto const same = [&](Field const &other) { return other.name == name; };
    if (name.empty() || std::any_of(fields.begin(), fields.end(), same)) {
      report.violation(step, "serialised field " + std::to_string(i) + " has the name '" + name +
                                 "'; names must be there and distinct");
      continue;
    }
    if (field.length < 0 || (field.length > 0 && field.data == nullptr)) {
      report.violation(step,
                       "serialised field '" + name + "' has length " + std::to_string(field.length) + " and no data");
      continue;
    }
    auto const *data = static_cast<char const *>(field.data);
    std::size_t const bytes = bytes_of(field.type, field.length);
    fields.push_back(
        {name, field.type, field.length, bytes ? std::vector<char>(data, data + bytes) : std::vector<char>()});
  }
  return fields;
}

}  // namespace cutefuse::host
