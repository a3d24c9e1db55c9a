// Just enough JSON to hand findings to Python.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace cutefuse::host::json {

inline std::string quote(std::string const &text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

template <class Items, class Format>
std::string list(Items const &items, Format &&format) {
  std::string out = "[";
  for (auto const &item : items) out += (out.size() > 1 ? ", " : "") + std::string(format(item));
  return out + "]";
}

inline std::string object(std::initializer_list<std::pair<char const *, std::string>> members) {
  std::string out = "{";
  for (auto const &[key, value] : members) out += (out.size() > 1 ? ", " : "") + quote(key) + ": " + value;
  return out + "}";
}

}  // namespace cutefuse::host::json
