// A libnvinfer.so with nothing but a plugin registry, whose virtual table has registerCreator where TensorRT MAJOR has
// it. Every other place ends the process: a call that misses shows.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "register/slots.h"
#include "tensorrt_abi.h"

using namespace nvinfer1;

namespace {

std::set<std::string> names;

bool register_creator(void *, IPluginCreatorInterface &creator, char const *name_space) {
  auto &made = static_cast<IPluginCreatorV3One &>(creator);
  return names.insert(std::string(name_space) + "/" + made.getPluginName() + "/" + made.getPluginVersion()).second;
}

void wrong_place() {
  std::fprintf(stderr, "a virtual function at the wrong place was called\n");
  std::abort();
}

void *table[32];
struct {
  void **vptr;
} registry;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT std::int32_t getInferLibMajorVersion() { return MAJOR; }
EXPORT std::int32_t getInferLibVersion() { return VERSION; }
EXPORT void *getPluginRegistry() {
  for (void *&slot : table) slot = reinterpret_cast<void *>(&wrong_place);
  table[SLOT] = REGISTERS ? reinterpret_cast<void *>(&register_creator) : reinterpret_cast<void *>(&std::malloc);
  registry.vptr = table;
  return &registry;
}
EXPORT std::int32_t fake_registered(char const *name) { return static_cast<std::int32_t>(names.count(name)); }
EXPORT std::int32_t fake_count() { return static_cast<std::int32_t>(names.size()); }
