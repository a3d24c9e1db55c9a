// A plugin host: loads any library of TensorRT V3 plugins, makes the calls of TensorRT's builder and runtime in the
// documented order, and checks what TensorRT demands of a plugin. It replaces TensorRT's calls, not its optimiser: a
// plugin that passes here keeps the interface's contract.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "expr.h"
#include "tensorrt_abi.h"

namespace cutefuse::host {

// violation: the plugin breaks the interface's contract. failure: it refused, and TensorRT would stop there. warning:
// legal, but likely to surprise TensorRT or a user.
struct Finding {
  char const *kind;
  std::string step, text;
};

class Report {
 public:
  void violation(char const *step, std::string const &text) { add("violation", step, text); }
  void failure(char const *step, std::string const &text) { add("failure", step, text); }
  void warning(char const *step, std::string const &text) { add("warning", step, text); }
  std::string json() const;

 private:
  void add(char const *kind, char const *step, std::string const &text);
  std::vector<Finding> findings_;
};

// A plugin field that owns its data.
struct Field {
  std::string name;
  nvinfer1::PluginFieldType type;
  std::int32_t length;
  std::vector<char> bytes;
  bool operator==(Field const &other) const {
    return name == other.name && type == other.type && length == other.length && bytes == other.bytes;
  }
};
using Fields = std::vector<Field>;

std::size_t bytes_of(nvinfer1::PluginFieldType type, std::int32_t length);
std::string json_of(Field const &field);
std::string json_of(nvinfer1::Dims const &dims);
char const *name_of(nvinfer1::DataType type);
char const *name_of(nvinfer1::TensorFormat format);

// What createPlugin sees. The memory is overwritten when it ends, as the parser's is freed.
class FieldSet {
 public:
  explicit FieldSet(Fields const &fields);
  ~FieldSet();
  FieldSet(FieldSet const &) = delete;
  FieldSet &operator=(FieldSet const &) = delete;
  nvinfer1::PluginFieldCollection const *get() const { return &collection_; }

 private:
  Fields copies_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

// Overwrites what the allocator would hand out next, so that a dangling pointer shows.
void churn_heap();

struct Creator {
  nvinfer1::IPluginCreatorV3One *object;
  std::string name, version, name_space;
  std::vector<std::string> field_names;
  std::string json;
};

class LoggerTrap;

class Library {
 public:
  // Throws std::runtime_error when the library cannot be loaded at all.
  explicit Library(char const *path);
  ~Library();
  Library(Library const &) = delete;
  Library &operator=(Library const &) = delete;
  std::vector<Creator> const &creators() const { return creators_; }
  std::string json() const;

 private:
  void add(nvinfer1::IPluginCreatorInterface *creator, std::int32_t index);

  void *handle_;
  std::unique_ptr<LoggerTrap> trap_;
  std::vector<Creator> creators_;
  Report report_;
};

// The three faces of a plugin object; null where it has none.
struct Faces {
  nvinfer1::IPluginV3OneCore *core = nullptr;
  nvinfer1::IPluginV3OneBuild *build = nullptr;
  nvinfer1::IPluginV3OneRuntime *runtime = nullptr;
};
Faces faces_of(nvinfer1::IPluginV3 *plugin, bool need_build, char const *step, Report &report);

// Copies what getFieldsToSerialize returns; reports what TensorRT could not serialise.
Fields serialise(nvinfer1::IPluginV3OneRuntime *runtime, char const *step, Report &report);

// An input of the network: sizes of -1 are dynamic and lie within min..max.
struct Input {
  nvinfer1::Dims dims, min, opt, max;
  nvinfer1::DataType type;
};

struct Combination {
  std::vector<nvinfer1::DataType> types;
  std::vector<nvinfer1::TensorFormat> formats;
  std::vector<std::int32_t> tactics;
  std::size_t workspace_bytes = 0;
  Fields serialised;
  bool usable = false;  // configured without failure
};

// One node from the parser to a serialised engine.
class Build {
 public:
  Build(Creator const &creator, Fields fields, std::vector<Input> inputs, std::int32_t outputs, bool strongly_typed);

  Creator const &creator() const { return creator_; }
  std::vector<Combination> const &combinations() const { return combinations_; }
  std::int32_t inputs() const { return static_cast<std::int32_t>(inputs_.size()); }
  std::int32_t outputs() const { return outputs_; }
  // Sizes of every output for the given input sizes. Throws std::runtime_error where there are none.
  std::vector<nvinfer1::Dims> output_sizes(Sizes const &inputs) const;
  std::string json() const;

 private:
  void run();
  bool create();
  bool find_outputs();
  bool find_shapes();
  void find_formats();
  void try_formats(std::int32_t pos);
  bool accepts(std::int32_t pos);
  void configure(Combination &combination);
  bool offered_tactics(nvinfer1::IPluginV3OneBuild *build, std::vector<std::int32_t> *tactics);
  bool ask_again(nvinfer1::IPluginV3OneBuild *build);
  void compile();
  void try_shape(Combination const &combination);
  void check_runtime(Combination const &combination);
  nvinfer1::DynamicPluginTensorDesc desc(std::int32_t tensor) const;
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(Combination const &combination) const;

  Creator const &creator_;
  Fields fields_;
  std::vector<Input> inputs_;
  std::int32_t outputs_;
  bool strongly_typed_;

  std::unique_ptr<nvinfer1::IPluginV3> plugin_;
  Faces faces_;
  std::vector<nvinfer1::DataType> output_types_;
  ExprBuilder expressions_;
  std::vector<std::vector<Expression const *>> shapes_;
  std::vector<nvinfer1::Dims> output_min_, output_opt_, output_max_;
  std::vector<nvinfer1::DynamicPluginTensorDesc> trial_;
  std::int32_t limit_ = 0;
  std::vector<Combination> combinations_;
  Combination compiled_;  // what a builder that compiles the whole network gets
  Fields serialised_;
  std::string timing_cache_id_, metadata_;
  mutable Report report_;
};

// One execution context: a deserialised plugin, attached, with its own shapes and tactic.
class Context {
 public:
  // Throws std::runtime_error when the plugin cannot be created.
  Context(Build const &build, std::int32_t combination, std::int32_t tactic);
  ~Context();
  Context(Context const &) = delete;
  Context &operator=(Context const &) = delete;

  // onShapeChange and setTactic; returns the plugin's first non-zero code.
  std::int32_t set_shapes(Sizes const &inputs);
  nvinfer1::Dims output_size(std::int32_t output) const { return out_.at(static_cast<std::size_t>(output)).dims; }
  std::int32_t enqueue(void const *const *inputs, void *const *outputs, void *workspace, cudaStream_t stream);

 private:
  Build const &build_;
  Combination const &combination_;
  std::int32_t tactic_;
  std::unique_ptr<nvinfer1::IPluginV3> deserialised_, attached_;
  nvinfer1::IPluginV3OneRuntime *runtime_;
  std::vector<nvinfer1::PluginTensorDesc> in_, out_;
};

// What a context offers; both of its pointers are null, which the interface allows.
class ResourceContext final : public nvinfer1::IPluginResourceContext {
 public:
  nvinfer1::IGpuAllocator *getGpuAllocator() const noexcept override { return nullptr; }
  nvinfer1::IErrorRecorder *getErrorRecorder() const noexcept override { return nullptr; }
};

// What the C interface hands out. A context keeps its build, and that its library, so that they may be freed in any
// order.
template <class T>
struct Handle {
  std::shared_ptr<void const> keeps;
  std::shared_ptr<T> object;
};

}  // namespace cutefuse::host
