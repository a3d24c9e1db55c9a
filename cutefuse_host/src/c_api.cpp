// The flat C interface of the host, for ctypes and for C++ drivers. Handles are opaque; a null handle or a negative
// number means failure, whose sentence cutefuse_host_error() holds until the thread's next failure.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "host.h"

#define CUTEFUSE_HOST_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace cutefuse::host;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;

thread_local std::string error_text, result_text;

template <class Result, class Body>
Result attempt(Result failed, Body &&body) noexcept {
  try {
    return body();
  } catch (std::exception const &error) {
    error_text = error.what();
  } catch (...) {
    error_text = "an unknown exception was thrown";
  }
  return failed;
}

struct CField {
  char const *name;
  void const *data;
  std::int32_t type;
  std::int32_t length;
};

Fields copy_fields(CField const *fields, std::int32_t count) {
  Fields copies;
  for (std::int32_t i = 0; i < count; ++i) {
    auto const type = static_cast<nvinfer1::PluginFieldType>(fields[i].type);
    auto const *data = static_cast<char const *>(fields[i].data);
    std::size_t const bytes = data ? bytes_of(type, fields[i].length) : 0;
    copies.push_back(
        {fields[i].name, type, fields[i].length, bytes ? std::vector<char>(data, data + bytes) : std::vector<char>()});
  }
  return copies;
}

using LibraryHandle = Handle<Library>;
using BuildHandle = Handle<Build>;
using ContextHandle = Handle<Context>;

// A plugin outside of any build: for tests that break the rules.
struct Raw {
  std::shared_ptr<Library> library;
  std::unique_ptr<IPluginV3> plugin;
  Faces faces;
};

Creator const &creator_at(void *library, std::int32_t index) {
  return static_cast<LibraryHandle *>(library)->object->creators().at(static_cast<std::size_t>(index));
}

std::unique_ptr<Raw> make_raw(std::shared_ptr<Library> library, std::unique_ptr<IPluginV3> plugin) {
  Report report;
  Faces const faces = plugin ? faces_of(plugin.get(), false, "", report) : Faces{};
  if (faces.runtime == nullptr) throw std::runtime_error("there is no plugin, or it has no runtime capability");
  return std::make_unique<Raw>(Raw{std::move(library), std::move(plugin), faces});
}

}  // namespace

CUTEFUSE_HOST_EXPORT char const *cutefuse_host_error() { return error_text.c_str(); }

CUTEFUSE_HOST_EXPORT void *cutefuse_host_open(char const *path) {
  return attempt<void *>(nullptr, [&] { return new LibraryHandle{nullptr, std::make_shared<Library>(path)}; });
}
CUTEFUSE_HOST_EXPORT void cutefuse_host_close(void *library) { delete static_cast<LibraryHandle *>(library); }

// JSON: creators and findings. Valid until this thread's next call that returns JSON.
CUTEFUSE_HOST_EXPORT char const *cutefuse_host_library(void *library) {
  return attempt<char const *>(nullptr, [&] {
    result_text = static_cast<LibraryHandle *>(library)->object->json();
    return result_text.c_str();
  });
}

// `inputs` use DynamicPluginTensorDesc's desc.dims, desc.type, min, opt and max.
CUTEFUSE_HOST_EXPORT void *cutefuse_host_build(void *library, std::int32_t creator, CField const *fields,
                                               std::int32_t num_fields, DynamicPluginTensorDesc const *inputs,
                                               std::int32_t num_inputs, std::int32_t num_outputs,
                                               std::int32_t strongly_typed) {
  return attempt<void *>(nullptr, [&] {
    std::vector<Input> in;
    for (std::int32_t i = 0; i < num_inputs; ++i) {
      in.push_back({inputs[i].desc.dims, inputs[i].min, inputs[i].opt, inputs[i].max, inputs[i].desc.type});
    }
    auto build = std::make_shared<Build>(creator_at(library, creator), copy_fields(fields, num_fields), std::move(in),
                                         num_outputs, strongly_typed != 0);
    return new BuildHandle{static_cast<LibraryHandle *>(library)->object, std::move(build)};
  });
}
CUTEFUSE_HOST_EXPORT void cutefuse_host_free_build(void *build) { delete static_cast<BuildHandle *>(build); }

CUTEFUSE_HOST_EXPORT char const *cutefuse_host_report(void *build) {
  return attempt<char const *>(nullptr, [&] {
    result_text = static_cast<BuildHandle *>(build)->object->json();
    return result_text.c_str();
  });
}

CUTEFUSE_HOST_EXPORT void *cutefuse_host_context(void *build, std::int32_t combination, std::int32_t tactic) {
  return attempt<void *>(nullptr, [&] {
    auto const *from = static_cast<BuildHandle *>(build);
    auto keeps = std::make_shared<BuildHandle>(*from);
    return new ContextHandle{std::move(keeps), std::make_shared<Context>(*from->object, combination, tactic)};
  });
}
CUTEFUSE_HOST_EXPORT void cutefuse_host_free_context(void *context) { delete static_cast<ContextHandle *>(context); }

// Returns the plugin's code, or -1.
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_set_shapes(void *context, nvinfer1::Dims const *inputs,
                                                           std::int32_t num_inputs) {
  return attempt(
      -1, [&] { return static_cast<ContextHandle *>(context)->object->set_shapes({inputs, inputs + num_inputs}); });
}

CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_output_size(void *context, std::int32_t output, nvinfer1::Dims *dims) {
  return attempt(-1, [&] {
    *dims = static_cast<ContextHandle *>(context)->object->output_size(output);
    return 0;
  });
}

CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_enqueue(void *context, void const *const *inputs, void *const *outputs,
                                                        void *workspace, void *stream) {
  return attempt(-1, [&] {
    return static_cast<ContextHandle *>(context)->object->enqueue(inputs, outputs, workspace,
                                                                  static_cast<cudaStream_t>(stream));
  });
}

// createPlugin with exactly these fields, null collection when num_fields is -1. Null when the plugin is refused.
CUTEFUSE_HOST_EXPORT void *cutefuse_host_raw_create(void *library, std::int32_t creator, CField const *fields,
                                                    std::int32_t num_fields, std::int32_t phase) {
  return attempt<void *>(nullptr, [&]() -> void * {
    FieldSet const set(copy_fields(fields, std::max(0, num_fields)));
    std::unique_ptr<IPluginV3> plugin(creator_at(library, creator)
                                          .object->createPlugin("node", num_fields < 0 ? nullptr : set.get(),
                                                                static_cast<nvinfer1::TensorRTPhase>(phase)));
    return plugin ? make_raw(static_cast<LibraryHandle *>(library)->object, std::move(plugin)).release() : nullptr;
  });
}
CUTEFUSE_HOST_EXPORT void cutefuse_host_raw_free(void *raw) { delete static_cast<Raw *>(raw); }

CUTEFUSE_HOST_EXPORT void *cutefuse_host_raw_clone(void *raw, std::int32_t attach) {
  return attempt<void *>(nullptr, [&] {
    static ResourceContext resources;
    auto *from = static_cast<Raw *>(raw);
    std::unique_ptr<IPluginV3> copy(attach ? from->faces.runtime->attachToContext(&resources) : from->plugin->clone());
    return make_raw(from->library, std::move(copy)).release();
  });
}

// Each calls one method with descriptions that may be wrong on purpose and returns the plugin's own code; `tensors`
// are num_inputs + num_outputs long.
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_supports(void *raw, std::int32_t pos,
                                                             DynamicPluginTensorDesc const *tensors,
                                                             std::int32_t num_inputs, std::int32_t num_outputs) {
  return static_cast<Raw *>(raw)->faces.build->supportsFormatCombination(pos, tensors, num_inputs, num_outputs);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_configure(void *raw, DynamicPluginTensorDesc const *tensors,
                                                              std::int32_t num_inputs, std::int32_t num_outputs) {
  return static_cast<Raw *>(raw)->faces.build->configurePlugin(tensors, num_inputs, tensors + num_inputs, num_outputs);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_tactics(void *raw, std::int32_t *tactics, std::int32_t capacity) {
  auto *build = static_cast<Raw *>(raw)->faces.build;
  std::int32_t const count = build->getNbTactics();
  if (count <= capacity && build->getValidTactics(tactics, count) != 0) return -1;
  return count;
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_set_tactic(void *raw, std::int32_t tactic) {
  return static_cast<Raw *>(raw)->faces.runtime->setTactic(tactic);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_shape_change(void *raw, PluginTensorDesc const *tensors,
                                                                 std::int32_t num_inputs, std::int32_t num_outputs) {
  return static_cast<Raw *>(raw)->faces.runtime->onShapeChange(tensors, num_inputs, tensors + num_inputs, num_outputs);
}
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_raw_enqueue(void *raw, PluginTensorDesc const *tensors,
                                                            std::int32_t num_inputs, void const *const *inputs,
                                                            void *const *outputs, void *workspace, void *stream) {
  return static_cast<Raw *>(raw)->faces.runtime->enqueue(tensors, tensors + num_inputs, inputs, outputs, workspace,
                                                         static_cast<cudaStream_t>(stream));
}

// The whole life without shapes, `cycles` times: create, clone, serialise, deserialise, attach, destroy. Returns the
// number of cycles that went well.
CUTEFUSE_HOST_EXPORT std::int32_t cutefuse_host_soak(void *library, std::int32_t creator, CField const *fields,
                                                     std::int32_t num_fields, std::int32_t cycles) {
  return attempt(-1, [&] {
    Creator const &from = creator_at(library, creator);
    Fields const copies = copy_fields(fields, num_fields);
    ResourceContext resources;
    Report report;
    std::int32_t done = 0;
    for (; done < cycles; ++done) {
      FieldSet const set(copies);
      std::unique_ptr<IPluginV3> const made(from.object->createPlugin("n", set.get(), nvinfer1::TensorRTPhase::kBUILD));
      std::unique_ptr<IPluginV3> const network(made ? made->clone() : nullptr);
      if (network == nullptr) break;
      auto *const built = faces_of(network.get(), true, "", report).runtime;
      if (built == nullptr) break;
      FieldSet const engine(serialise(built, "", report));
      std::unique_ptr<IPluginV3> const live(
          from.object->createPlugin("n", engine.get(), nvinfer1::TensorRTPhase::kRUNTIME));
      if (live == nullptr) break;
      auto *const runtime = faces_of(live.get(), false, "", report).runtime;
      if (runtime == nullptr) break;
      std::unique_ptr<IPluginV3> const context(runtime->attachToContext(&resources));
      if (context == nullptr) break;
    }
    return done;
  });
}
