// Drives the plugin library through the plugin host under AddressSanitizer and UndefinedBehaviorSanitizer: every
// variant in every type, malformed fields, wrong tensors, and many lives. Prints the number of plugins that were built.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tensorrt_abi.h"

using namespace nvinfer1;

struct Field {
  char const *name;
  void const *data;
  std::int32_t type;
  std::int32_t length;
};

extern "C" {
char const *cutefuse_host_error();
void *cutefuse_host_open(char const *);
void cutefuse_host_close(void *);
char const *cutefuse_host_library(void *);
void *cutefuse_host_build(void *, std::int32_t, Field const *, std::int32_t, DynamicPluginTensorDesc const *,
                          std::int32_t, std::int32_t, std::int32_t);
char const *cutefuse_host_report(void *);
void cutefuse_host_free_build(void *);
void *cutefuse_host_context(void *, std::int32_t, std::int32_t);
void cutefuse_host_free_context(void *);
std::int32_t cutefuse_host_set_shapes(void *, Dims const *, std::int32_t);
std::int32_t cutefuse_host_enqueue(void *, void const *const *, void *const *, void *, void *);
void *cutefuse_host_raw_create(void *, std::int32_t, Field const *, std::int32_t, std::int32_t);
void cutefuse_host_raw_free(void *);
std::int32_t cutefuse_host_soak(void *, std::int32_t, Field const *, std::int32_t, std::int32_t);
}

namespace {

constexpr std::int64_t kChannels[8] = {64, 24, 8, 72, 16, 40, 136, 32};
constexpr std::int32_t kInt32 = 5, kFloat32 = 1;

struct Node {
  std::vector<std::int32_t> channels, packed, kernel{3, 3};
  float alpha = 0.1f;

  explicit Node(int sources) {
    for (int i = 0; i < sources; ++i) {
      channels.push_back(static_cast<std::int32_t>(kChannels[i]));
      packed.push_back((channels.back() + 63) / 64 * 9 * 64);
    }
  }
  std::vector<Field> fields() const {
    auto const count = static_cast<std::int32_t>(channels.size());
    return {{"channels", channels.data(), kInt32, count},
            {"kernel_shape", kernel.data(), kInt32, 2},
            {"packed_sizes", packed.data(), kInt32, count},
            {"alpha", &alpha, kFloat32, 1}};
  }
  std::vector<DynamicPluginTensorDesc> inputs(DataType type) const {
    std::vector<DynamicPluginTensorDesc> all;
    auto const add = [&](DataType t, std::vector<std::int64_t> const &sizes, bool dynamic) {
      DynamicPluginTensorDesc desc{};
      desc.desc.type = t;
      desc.desc.dims.nbDims = static_cast<std::int32_t>(sizes.size());
      for (std::size_t d = 0; d < sizes.size(); ++d) desc.desc.dims.d[d] = sizes[d];
      desc.min = desc.max = desc.opt = desc.desc.dims;
      if (dynamic) desc.desc.dims.d[0] = desc.desc.dims.d[2] = -1;
      all.push_back(desc);
    };
    std::int64_t columns = 0;
    for (std::size_t i = 0; i < channels.size(); ++i) {
      add(type, {2, channels[i], 20, 12}, true);
      columns += packed[i];
    }
    add(type, {48, columns}, false);
    add(DataType::kFLOAT, {48}, false);
    return all;
  }
};

int fail(char const *what) {
  std::printf("%s: %s\n", what, cutefuse_host_error());
  return 1;
}

// The same fields with one bent: any of them may be refused, none may be read out of bounds.
void malformed(void *library, std::int32_t creator, Node const &node) {
  std::vector<Field> const good = node.fields();
  std::vector<std::int64_t> const large(512, std::int64_t(1) << 40);
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (std::int32_t type = -1; type <= 13; ++type) {
      for (std::int32_t length : {-1, 0, 1, 2, 3, 8, 9, 31}) {
        std::vector<Field> bent = good;
        bent[i] = {good[i].name, large.data(), type, length};
        cutefuse_host_raw_free(cutefuse_host_raw_create(library, creator, bent.data(), 4, type & 1));
      }
    }
    std::vector<Field> fewer = good;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    cutefuse_host_raw_free(cutefuse_host_raw_create(library, creator, fewer.data(), 3, 0));
  }
}

}  // namespace

int main(int, char **argv) {
  void *library = cutefuse_host_open(argv[1]);
  if (library == nullptr) return fail("open");
  int built = 0;
  for (int variant = 0; variant < 64; ++variant) {
    Node const node(variant / 8 + 1);
    std::vector<Field> const fields = node.fields();
    for (DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8}) {
      std::vector<DynamicPluginTensorDesc> const inputs = node.inputs(type);
      auto const count = static_cast<std::int32_t>(inputs.size());
      for (std::int32_t given = count; given >= 0; given -= count) {
        void *build = cutefuse_host_build(library, variant, fields.data(), 4, inputs.data(), given, 1, variant & 1);
        if (build == nullptr) return fail("build");
        bool const good = type != DataType::kINT8 && given == count;
        bool const usable = std::strstr(cutefuse_host_report(build), "\"usable\": true") != nullptr;
        if (good != usable) return fail(cutefuse_host_report(build));
        if (usable) {
          void *context = cutefuse_host_context(build, 0, 0);
          if (context == nullptr) return fail("context");
          std::vector<Dims> sizes;
          for (auto const &input : inputs) sizes.push_back(input.opt);
          if (cutefuse_host_set_shapes(context, sizes.data(), count) != 0) return fail("set_shapes");
          for (auto &size : sizes) size.d[0] = std::int64_t(1) << 60;
          if (cutefuse_host_set_shapes(context, sizes.data(), count) == 0) return fail("huge sizes were accepted");
          std::vector<void const *> const null(static_cast<std::size_t>(count), nullptr);
          void *const out[1] = {nullptr};
          if (cutefuse_host_enqueue(context, null.data(), out, nullptr, nullptr) == 0) return fail("null was accepted");
          cutefuse_host_free_build(build);  // before its context, as a garbage collector may
          cutefuse_host_free_context(context);
          ++built;
        } else {
          cutefuse_host_free_build(build);
        }
      }
    }
    if (variant % 9 == 0) malformed(library, variant, node);
    if (cutefuse_host_soak(library, variant, fields.data(), 4, 20) != 20) return fail("soak");
  }
  cutefuse_host_close(library);
  std::printf("%d plugins built\n", built);
}
