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

// RTLD_NOLOAD: a second TensorRT in the process would have a registry that nobody reads.
void *loaded_tensorrt() {
  for (char const *name : {"libnvinfer.so.11", "libnvinfer.so.10"}) {
    if (void *handle = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) return handle;
  }
  return nullptr;
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
  auto const major = reinterpret_cast<std::int32_t (*)()>(dlsym(tensorrt, "getInferLibMajorVersion"));
  auto const registry_of = reinterpret_cast<void *(*)()>(dlsym(tensorrt, "getPluginRegistry"));
  int const slot = major ? cutefuse::register_creator_slot(major()) : -1;
  void *registry = slot >= 0 && registry_of ? registry_of() : nullptr;
  if (registry == nullptr) {
    return say("this TensorRT (" + (major ? std::to_string(major()) : std::string("unknown version")) +
               ") is not 10 or 11, so nothing was registered; update cutefuse");
  }
  std::string path;
  void *library = plugin_library(&path);
  auto const get_creators = library ? reinterpret_cast<GetCreators>(dlsym(library, "getCreators")) : nullptr;
  if (get_creators == nullptr) {
    return say("libcutefuse.so was not found beside this library (" + path + "), so nothing was registered");
  }
  std::int32_t count = 0, done = 0;
  IPluginCreatorInterface *const *creators = get_creators(count);
  auto const register_creator = (*static_cast<RegisterCreator **>(registry))[slot];
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
