// Attributes of a node: one code path reads them from the ONNX parser's fields and from a serialised engine's.
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "fused_plugin.h"

namespace cutefuse {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

char const *bad_field(Op const &op, AttrSpec const &spec, PluginField const &field) {
  bool const typed = spec.kind == AttrKind::kFloats
                         ? field.type == PluginFieldType::kFLOAT32
                         : field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64;
  if (!typed) {
    return sentence("%s: attribute '%s' has plugin field type %d; write it as %s", op.name, spec.name, int(field.type),
                    spec.kind == AttrKind::kFloats ? "FLOAT or FLOATS" : "INT or INTS");
  }
  if (field.length < spec.min_count || field.length > spec.max_count || field.data == nullptr) {
    return sentence("%s: attribute '%s' has %d values, %d to %d are allowed", op.name, spec.name, field.length,
                    spec.min_count, spec.max_count);
  }
  return nullptr;
}

}  // namespace

char const *Attributes::parse(Op const &op, nvinfer1::PluginFieldCollection const &fields) {
  values_.assign(static_cast<std::size_t>(op.attrs.size), {});
  std::vector<bool> given(values_.size(), false);
  if (fields.nbFields < 0 || (fields.nbFields > 0 && fields.fields == nullptr)) {
    return sentence("%s: the field collection says %d fields and holds none", op.name, fields.nbFields);
  }
  for (std::int32_t f = 0; f < fields.nbFields; ++f) {
    PluginField const &field = fields.fields[f];
    std::int32_t const i = field.name == nullptr ? -1 : find_attribute(op, field.name);
    if (i < 0) {
      return sentence("%s: attribute '%s' does not exist; remove it", op.name, field.name ? field.name : "(no name)");
    }
    if (given[i]) return sentence("%s: attribute '%s' is given twice", op.name, field.name);
    given[i] = true;
    AttrSpec const &spec = op.attrs[i];
    if (char const *reason = bad_field(op, spec, field)) return reason;
    Values &values = values_[i];
    for (std::int32_t k = 0; k < field.length; ++k) {
      if (spec.kind == AttrKind::kFloats) {
        values.floats.push_back(static_cast<float const *>(field.data)[k]);
        continue;
      }
      std::int64_t const value = field.type == PluginFieldType::kINT32
                                     ? static_cast<std::int32_t const *>(field.data)[k]
                                     : static_cast<std::int64_t const *>(field.data)[k];
      if (value != static_cast<std::int32_t>(value)) {
        return sentence("%s: attribute '%s' holds %lld, which is outside of 32 bits", op.name, spec.name,
                        (long long)value);
      }
      values.ints.push_back(value);
    }
  }
  for (std::int32_t i = 0; i < op.attrs.size; ++i) {
    AttrSpec const &spec = op.attrs[i];
    std::size_t const count = static_cast<std::size_t>(spec.default_count);
    if (!given[i] && count == 0) {
      return sentence("%s: attribute '%s' is required; write it on the node", op.name, spec.name);
    }
    if (!given[i] && spec.kind == AttrKind::kFloats) {
      values_[i].floats.assign(count, static_cast<float>(spec.default_value));
    } else if (!given[i]) {
      values_[i].ints.assign(count, static_cast<std::int64_t>(spec.default_value));
    }
    values_[i].ints32.assign(values_[i].ints.begin(), values_[i].ints.end());
  }
  return nullptr;
}

std::int64_t const *AttrCall::ints(char const *attribute) const {
  std::int32_t const i = find_attribute(op, attribute);
  if (i >= 0 && attrs[i].ints != nullptr) return attrs[i].ints;
  throw std::out_of_range(std::string(op.name) + " has no integer attribute '" + attribute + "'");
}

std::int32_t const *AttrCall::axes() const {
  std::int32_t const layout = find_attribute(op, kLayoutAttr.name);
  return kAxes[layout >= 0 && attrs[layout].ints[0] == 1];
}

std::vector<AttrValue> Attributes::view(Op const &op) const {
  std::vector<AttrValue> view;
  for (std::int32_t i = 0; i < op.attrs.size; ++i) {
    Values const &v = values_[i];
    bool const floats = op.attrs[i].kind == AttrKind::kFloats;
    view.push_back({floats ? nullptr : v.ints.data(), floats ? v.floats.data() : nullptr, v.count(), 0});
  }
  return view;
}

std::vector<PluginField> Attributes::serialise(Op const &op) const {
  std::vector<PluginField> fields;
  for (std::int32_t i = 0; i < op.attrs.size; ++i) {
    Values const &v = values_[i];
    bool const floats = op.attrs[i].kind == AttrKind::kFloats;
    void const *const data = floats ? static_cast<void const *>(v.floats.data()) : v.ints32.data();
    fields.emplace_back(op.attrs[i].name, data, field_type(op.attrs[i]), v.count());
  }
  return fields;
}

std::string Attributes::text(Op const &op) const {
  std::string text;
  for (std::int32_t i = 0; i < op.attrs.size; ++i) {
    text += (i == 0 ? "" : " ") + std::string(op.attrs[i].name) + "=";
    Values const &v = values_[i];
    for (std::int32_t k = 0; k < v.count(); ++k) {
      char number[32];
      if (v.ints.empty()) {
        std::snprintf(number, sizeof(number), "%.9g", double(v.floats[k]));
      } else {
        std::snprintf(number, sizeof(number), "%lld", (long long)v.ints[k]);
      }
      text += (k == 0 ? "" : ",") + std::string(number);
    }
  }
  return text;
}

}  // namespace cutefuse
