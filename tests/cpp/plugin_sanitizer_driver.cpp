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
std::int32_t cutefuse_host_raw_supports(void *, std::int32_t, DynamicPluginTensorDesc const *, std::int32_t,
                                        std::int32_t);
std::int32_t cutefuse_host_raw_configure(void *, DynamicPluginTensorDesc const *, std::int32_t, std::int32_t);
std::int32_t cutefuse_host_raw_shape_change(void *, PluginTensorDesc const *, std::int32_t, std::int32_t);
std::int32_t cutefuse_host_raw_enqueue(void *, PluginTensorDesc const *, std::int32_t, void const *const *,
                                       void *const *, void *, void *);
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

// Random tensors around a legal node, with sizes that overflow whatever multiplies them: every call must come back.
void fuzz(void *library, std::int32_t creator, Node const &node, std::uint32_t seed) {
  constexpr std::int64_t kSizes[] = {-1,
                                     0,
                                     1,
                                     2,
                                     7,
                                     8,
                                     48,
                                     1 << 12,
                                     1 << 24,
                                     (std::int64_t(1) << 31) - 1,
                                     std::int64_t(1) << 31,
                                     std::int64_t(1) << 62};
  auto const random = [&](std::uint32_t below) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % below;
  };
  std::vector<Field> const fields = node.fields();
  void *plugin = cutefuse_host_raw_create(library, creator, fields.data(), 4, 0);
  for (int round = 0; plugin != nullptr && round < 400; ++round) {
    DataType const type = random(2) ? DataType::kHALF : DataType::kFLOAT;
    std::vector<DynamicPluginTensorDesc> all = node.inputs(type);
    auto const inputs = static_cast<std::int32_t>(all.size());
    all.push_back(all[0]);
    // The same sizes for every source, so that some get past the comparison and into the arithmetic.
    std::int64_t const n = kSizes[random(12)], h = kSizes[random(12)], w = kSizes[random(12)];
    for (std::int32_t i = 0; i <= inputs; ++i) {
      auto &desc = all[static_cast<std::size_t>(i)].desc;
      bool const pixels = i < inputs - 2 || i == inputs;
      desc.dims = all[static_cast<std::size_t>(i)].opt;
      if (pixels) desc.dims.d[0] = n, desc.dims.d[2] = h, desc.dims.d[3] = w;
      if (i == inputs) desc.dims.d[1] = 48;
      desc.format = !pixels                   ? TensorFormat::kLINEAR
                    : type == DataType::kHALF ? TensorFormat::kHWC8
                                              : TensorFormat::kHWC;
    }
    if (random(3) == 0) {
      auto &bent = all[random(static_cast<std::uint32_t>(inputs) + 1)].desc;
      if (random(2)) bent.dims.nbDims = static_cast<std::int32_t>(random(12)) - 2;
      if (random(2)) bent.dims.d[random(8)] = kSizes[random(12)];
      if (random(4) == 0) bent.type = static_cast<DataType>(random(14));
    }
    std::vector<PluginTensorDesc> fixed;
    for (auto &desc : all) {
      desc.min = desc.max = desc.opt = desc.desc.dims;
      fixed.push_back(desc.desc);
    }
    for (std::int32_t pos = 0; pos <= inputs; ++pos) {
      cutefuse_host_raw_supports(plugin, pos, all.data(), inputs, 1);
    }
    cutefuse_host_raw_configure(plugin, all.data(), inputs, 1);
    cutefuse_host_raw_shape_change(plugin, fixed.data(), inputs, 1);
    std::vector<void const *> const in(static_cast<std::size_t>(inputs), reinterpret_cast<void const *>(4096));
    void *const out[1] = {reinterpret_cast<void *>(4096)};
    cutefuse_host_raw_enqueue(plugin, fixed.data(), inputs, in.data(), out, nullptr, nullptr);
  }
  cutefuse_host_raw_free(plugin);
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
    fuzz(library, variant, node, 17u + static_cast<std::uint32_t>(variant));
    if (cutefuse_host_soak(library, variant, fields.data(), 4, 20) != 20) return fail("soak");
  }
  cutefuse_host_close(library);
  std::printf("%d plugins built\n", built);
}
