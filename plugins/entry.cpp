// What TensorRT looks up in the library: getCreators and setLoggerFinder, the only way its plugins are registered.
#include <exception>
#include <memory>
#include <vector>

#include "fused_plugin.h"

namespace cutefuse {

#define CUTEFUSE_OP(stem)          \
  namespace stem {                 \
  extern PluginRules const plugin; \
  }
#include "plugin_list.inc"
#undef CUTEFUSE_OP

namespace {

struct Creators {
  std::vector<std::unique_ptr<FusedCreator>> owned;
  std::vector<nvinfer1::IPluginCreatorInterface *> list;
};

// One creator for each variant of each operator, made on first use and kept until the library is unloaded.
Creators const &creators() {
  static Creators const kCreators = [] {
    Creators creators;
#define CUTEFUSE_OP(stem) &stem::plugin,
    for (PluginRules const *rules : {
#include "plugin_list.inc"
         }) {
      for (std::int32_t v = 0; v < rules->op->variants.size; ++v) {
        creators.owned.push_back(std::make_unique<FusedCreator>(*rules, v));
        creators.list.push_back(creators.owned.back().get());
      }
    }
#undef CUTEFUSE_OP
    return creators;
  }();
  return kCreators;
}

}  // namespace
}  // namespace cutefuse

#define CUTEFUSE_ENTRY extern "C" __attribute__((visibility("default")))

CUTEFUSE_ENTRY nvinfer1::IPluginCreatorInterface *const *getCreators(std::int32_t &count) noexcept {
  count = 0;
  try {
    auto const &list = cutefuse::creators().list;
    count = static_cast<std::int32_t>(list.size());
    return list.data();
  } catch (std::exception const &error) {
    cutefuse::report("getCreators", error.what());
  }
  return nullptr;
}

// TensorRT wants this symbol; the finder stays unused, see report().
CUTEFUSE_ENTRY void setLoggerFinder(nvinfer1::ILoggerFinder *) noexcept {}
