// libcutefuse_register.so, for tools that only dlopen a plugin library and expect it to register itself (trtexec
// --staticPlugins, polygraphy --plugins). Loading it registers the plugins of the libcutefuse.so beside it with the
// TensorRT that the process has loaded already; libcutefuse.so itself never touches a registry.
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "slots.h"
#include "tensorrt_abi.h"

namespace {

using nvinfer1::IPluginCreatorInterface;
using GetCreators = IPluginCreatorInterface *const *(*)(std::int32_t &);
using RegisterCreator = bool (*)(void *registry, IPluginCreatorInterface &creator, char const *name_space);

void say(std::string const &text) { std::fprintf(stderr, "cutefuse: register: %s\n", text.c_str()); }

// RTLD_NOLOAD: nothing would read the registry of a second TensorRT in the process.
void *loaded_tensorrt() {
  for (char const *name : {"libnvinfer.so.11", "libnvinfer.so.10"}) {
    if (void *handle = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) return handle;
  }
  return nullptr;
}

// TensorRT's version as its two functions say it, where they agree.
struct Version {
  int major = -1, minor = -1;
  std::string text = "unknown version";

  explicit Version(void *tensorrt) {
    auto const whole = reinterpret_cast<std::int32_t (*)()>(dlsym(tensorrt, "getInferLibVersion"));
    auto const first = reinterpret_cast<std::int32_t (*)()>(dlsym(tensorrt, "getInferLibMajorVersion"));
    int const number = whole ? whole() : 0;  // major * 10000 + minor * 100 + patch
    if (first == nullptr || number / 10000 != first()) return;
    major = number / 10000, minor = number / 100 % 100;
    text = std::to_string(major) + "." + std::to_string(minor);
  }
};

// Whether code at an address belongs to the library that `symbol` is of: a place in the virtual table that holds
// anything else is not what it is taken for.
bool lies_in(void const *code, void const *symbol) {
  Dl_info of_code, of_symbol;
  return code != nullptr && dladdr(code, &of_code) != 0 && dladdr(symbol, &of_symbol) != 0 &&
         of_code.dli_fbase == of_symbol.dli_fbase;
}

// The library beside this one; it stays loaded, because the registry keeps its creators.
void *plugin_library(std::string *path) {
  Dl_info self;
  if (dladdr(reinterpret_cast<void const *>(&loaded_tensorrt), &self) == 0 || self.dli_fname == nullptr) return nullptr;
  std::string const own = self.dli_fname;
  std::size_t const slash = own.rfind('/');
  *path = (slash == std::string::npos ? std::string() : own.substr(0, slash + 1)) + "libcutefuse.so";
  return dlopen(path->c_str(), RTLD_NOW | RTLD_LOCAL);
}

void register_all() {
  void *tensorrt = loaded_tensorrt();
  if (tensorrt == nullptr) {
    return say(
        "TensorRT 10 or 11 is not loaded in this process yet, so nothing was registered; load it first "
        "(LD_PRELOAD=libnvinfer.so.10), or pass libcutefuse.so to trtexec --dynamicPlugins");
  }
  Version const version(tensorrt);
  auto const registry_of = reinterpret_cast<void *(*)()>(dlsym(tensorrt, "getPluginRegistry"));
  int const slot = cutefuse::register_creator_slot(version.major, version.minor);
  void *registry = slot >= 0 && registry_of ? registry_of() : nullptr;
  auto const register_creator = registry ? (*static_cast<RegisterCreator **>(registry))[slot] : nullptr;
  if (!lies_in(reinterpret_cast<void const *>(register_creator), reinterpret_cast<void const *>(registry_of))) {
    return say("the plugin registry of this TensorRT (" + version.text +
               ") is not known, 10.0 to 10.16 and 11.0 to 11.1 are, so nothing was registered; pass libcutefuse.so to "
               "trtexec --dynamicPlugins, which needs no registry, or update cutefuse");
  }
  std::string path;
  void *library = plugin_library(&path);
  auto const get_creators = library ? reinterpret_cast<GetCreators>(dlsym(library, "getCreators")) : nullptr;
  if (get_creators == nullptr) {
    return say("libcutefuse.so was not found beside this library (" + path + "), so nothing was registered");
  }
  std::int32_t count = 0, done = 0;
  IPluginCreatorInterface *const *creators = get_creators(count);
  for (std::int32_t i = 0; i < count; ++i) {
    // All of them are V3 creators: this library serves no other.
    auto *creator = static_cast<nvinfer1::IPluginCreatorV3One *>(creators[i]);
    done += register_creator(registry, *creator, creator->getPluginNamespace()) ? 1 : 0;
  }
  if (done != count) {
    say(std::to_string(count - done) + " of " + std::to_string(count) +
        " plugins were registered before; load the library once only");
  }
}

// A constructor must not let an exception reach dlopen's caller.
__attribute__((constructor)) void on_load() noexcept {
  try {
    register_all();
  } catch (...) {
    std::fprintf(stderr, "cutefuse: register: out of memory, so nothing was registered\n");
  }
}

}  // namespace
