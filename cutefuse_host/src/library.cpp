// Loads a plugin library the way TensorRT's loadLibrary does: getCreators and setLoggerFinder, nothing else.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "host.h"
#include "json.h"

namespace cutefuse::host {

using nvinfer1::IPluginCreatorInterface;

// Takes the place of TensorRT's logger finder. Its layout differs between TensorRT 10 and 11, so a library that uses it
// works with one of them only: the host records a call of any of its virtual functions.
class LoggerTrap {
 public:
  virtual void *slot0() { return touch(); }
  virtual void *slot1() { return touch(); }
  virtual void *slot2() { return touch(); }
  virtual void *slot3() { return touch(); }
  virtual void *slot4() { return touch(); }
  virtual void *slot5() { return touch(); }
  virtual ~LoggerTrap() = default;
  bool touched = false;

 private:
  void *touch() {
    touched = true;
    return nullptr;
  }
};

namespace {

constexpr std::size_t kLongestName = 1023;

}  // namespace

Library::Library(char const *path)
    : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)), trap_(std::make_unique<LoggerTrap>()) {
  if (handle_ == nullptr) throw std::runtime_error(dlerror());
  using GetCreators = IPluginCreatorInterface *const *(*)(std::int32_t &);
  using SetLoggerFinder = void (*)(void *);
  auto const get_creators = reinterpret_cast<GetCreators>(dlsym(handle_, "getCreators"));
  auto const set_finder = reinterpret_cast<SetLoggerFinder>(dlsym(handle_, "setLoggerFinder"));
  if (get_creators == nullptr) {
    dlclose(handle_);
    throw std::runtime_error(std::string(path) +
                             " does not export getCreators; TensorRT cannot load V3 plugins from it");
  }
  if (set_finder == nullptr) {
    report_.warning("loadLibrary", "setLoggerFinder is not exported; TensorRT's own plugin library exports it");
  } else {
    set_finder(trap_.get());
  }
  std::int32_t count = -1, again = -1;
  IPluginCreatorInterface *const *list = get_creators(count);
  if (count < 0 || (count > 0 && list == nullptr)) {
    report_.violation("getCreators", "it returns " + std::to_string(count) + " creators and no list");
    return;
  }
  std::vector<IPluginCreatorInterface *> const first(list, list + count);
  IPluginCreatorInterface *const *second = get_creators(again);
  if (again != count || !std::equal(first.begin(), first.end(), second)) {
    report_.violation("getCreators", "two calls return different creators; make them once and keep them");
  }
  for (std::int32_t i = 0; i < count; ++i) add(first[static_cast<std::size_t>(i)], i);
  if (creators_.empty()) report_.violation("getCreators", "the library has no V3 plugin creator");
}

Library::~Library() { dlclose(handle_); }

void Library::add(IPluginCreatorInterface *creator, std::int32_t index) {
  std::string const which = "creator " + std::to_string(index);
  if (creator == nullptr) return report_.violation("getCreators", which + " is null");
  auto const info = creator->getInterfaceInfo();
  if (info.kind == nullptr || std::strcmp(info.kind, "PLUGIN CREATOR_V3ONE") != 0 || info.major != 1) {
    return report_.violation("getCreators", which + " has the interface '" + (info.kind ? info.kind : "(null)") +
                                                "'; only IPluginCreatorV3One ('PLUGIN CREATOR_V3ONE' 1) can be used");
  }
  Creator made{static_cast<nvinfer1::IPluginCreatorV3One *>(creator), "", "", "", {}, ""};
  if (creator->getAPILanguage() != nvinfer1::APILanguage::kCPP) {
    report_.violation("getCreators", which + " says that it is written in Python");
  }
  auto const text = [&](char const *value, char const *what, bool may_be_empty) {
    std::string const copy = value ? value : "";
    if (value == nullptr || (copy.empty() && !may_be_empty) || copy.size() > kLongestName) {
      report_.violation("getCreators", which + " has no usable " + what + "; it must hold 1 to 1023 characters");
    }
    return copy;
  };
  made.name = text(made.object->getPluginName(), "name", false);
  made.version = text(made.object->getPluginVersion(), "version", false);
  made.name_space = text(made.object->getPluginNamespace(), "namespace", true);
  auto const same = [&](Creator const &other) {
    return other.name == made.name && other.version == made.version && other.name_space == made.name_space;
  };
  if (std::any_of(creators_.begin(), creators_.end(), same)) {
    report_.violation("getCreators", made.name + " " + made.version + " is there twice; TensorRT refuses the library");
  }
  nvinfer1::PluginFieldCollection const *fields = made.object->getFieldNames();
  if (fields == nullptr || fields->nbFields < 0 || (fields->nbFields > 0 && fields->fields == nullptr)) {
    report_.violation("getFieldNames", made.name + " returns no valid field collection");
  } else {
    std::vector<std::string> described;
    for (std::int32_t i = 0; i < fields->nbFields; ++i) {
      nvinfer1::PluginField const &field = fields->fields[i];
      std::string const name = field.name ? field.name : "";
      if (name.empty() || std::count(made.field_names.begin(), made.field_names.end(), name) != 0) {
        report_.violation("getFieldNames", made.name + " lists the field name '" + name + "' which is empty or double");
        continue;
      }
      made.field_names.push_back(name);
      described.push_back(json::object({{"name", json::quote(name)},
                                        {"type", std::to_string(static_cast<int>(field.type))},
                                        {"length", std::to_string(field.length)}}));
    }
    made.json = json::list(described, [](std::string const &item) { return item; });
  }
  creators_.push_back(std::move(made));
}

std::string Library::json() const {
  Report report = report_;
  if (trap_->touched) {
    report.violation("setLoggerFinder",
                     "the library calls the logger finder, whose layout differs between TensorRT 10 "
                     "and 11; one binary cannot serve both");
  }
  return json::object({{"creators", json::list(creators_,
                                               [](Creator const &c) {
                                                 return json::object({{"name", json::quote(c.name)},
                                                                      {"version", json::quote(c.version)},
                                                                      {"namespace", json::quote(c.name_space)},
                                                                      {"fields", c.json.empty() ? "[]" : c.json}});
                                               })},
                       {"findings", report.json()}});
}

}  // namespace cutefuse::host
