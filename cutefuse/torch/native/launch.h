// How tensors of PyTorch reach the kernel library: plans kept by what they depend on, memory, the current stream.
// The library is reached through the addresses of its C functions alone; nothing here links to it, nor it to PyTorch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cutefuse::native {

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr std::uintptr_t kAlignment = 16;  // bytes that a kernel loads at once
constexpr std::size_t kMostPlans = 1024;   // shapes that never come back must not fill the memory
constexpr std::int64_t kAbsent = -1;       // in a key, instead of a tensor

// As cutefuse::Operands in cutlass_kernels/op.h.
struct Operands {
  void const *const *inputs;
  void *const *outputs;
  void *workspace;
  std::int64_t workspace_bytes;
  void *stream;
};

// What Python handed over when it loaded this extension.
struct Library {
  char const *(*run)(void const *plan, Operands const *operands);
  std::int32_t (*current_stream)(std::int32_t device, void **stream);
  PyObject *python;  // `loaded.python` of compiled.py: plans, and the operators on types that no kernel takes
  int generation;    // counts the libraries that were handed over: plans of another one are no good
};
inline Library library{};

// Everything that a plan depends on, as numbers.
using Key = c10::SmallVector<std::int64_t, 128>;

struct HashOfKey {
  std::size_t operator()(Key const &key) const {
    std::uint64_t hash = 14695981039346656037ull;
    for (std::int64_t number : key) {
      hash = (hash ^ static_cast<std::uint64_t>(number)) * 1099511628211ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// What Python plans: the plan, which is plain data, the workspace that it needs, and of a convolution what lies where.
struct Kept {
  std::string plan;
  std::int64_t workspace_bytes;
  std::vector<std::int64_t> copies;                  // of each input: as `readable` takes it
  std::vector<std::array<std::int64_t, 5>> outputs;  // N, K, P, Q, elements of a pixel
};

inline bool runs_in_library(Tensor const &x) {
  auto const type = x.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

inline std::int64_t bits_of(double number) {
  std::int64_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

inline void add_to(Key &key, Tensor const &t) {
  key.push_back(static_cast<std::int64_t>(t.scalar_type()));
  key.push_back(t.dim());
  key.append(t.sizes().begin(), t.sizes().end());
}

inline void add_to(Key &key, Maybe const &t) {
  if (t.has_value()) {
    add_to(key, *t);
  } else {
    key.push_back(kAbsent);
  }
}

// Straight to the backend: we stand below everything that could want to see the call.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType type, Tensor const &beside) {
  c10::DispatchKeySet const backend(beside.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  return at::_ops::empty_memory_format::redispatch(backend, c10::fromIntArrayRefSlow(sizes), type, c10::kStrided,
                                                   beside.device(), std::nullopt, std::nullopt);
}

// As planners of Python return it.
using Planned = std::tuple<std::string, std::int64_t, decltype(Kept::copies), decltype(Kept::outputs)>;

// Whether nobody listens to operators on this thread: no dispatch mode of Python, no transform of torch.func.
inline bool is_quiet() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

inline bool is_aligned(Tensor const &t) {
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % kAlignment == 0;
}

// The tensor without gaps and at an address that 16-byte loads can take.
inline c10::MaybeOwned<Tensor> dense(Tensor const &t) {
  if (t.is_contiguous() && is_aligned(t)) return c10::MaybeOwned<Tensor>::borrowed(t);
  Tensor made = t.contiguous();
  return c10::MaybeOwned<Tensor>::owned(is_aligned(made) ? std::move(made) : made.clone());
}

// Calls a function of Python's half with the GIL; its exception passes through PyTorch as it is.
template <class Result, class... Arguments>
Result in_python(char const *what, Arguments const &...arguments) {
  pybind11::gil_scoped_acquire const gil;
  try {
    return pybind11::handle(library.python).attr(what)(arguments...).template cast<Result>();
  } catch (pybind11::error_already_set &error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

// The plan of a key, made by `make`, a call of Python, when it is new to the thread.
template <class Make>
Kept const &plan_of(Key const &key, Make const &make) {
  thread_local std::unordered_map<Key, Kept, HashOfKey> plans;
  thread_local int generation = 0;
  if (std::exchange(generation, library.generation) != library.generation) plans.clear();
  auto const found = plans.find(key);
  if (found != plans.end()) return found->second;
  pybind11::gil_scoped_acquire const gil;
  auto [plan, workspace_bytes, copies, outputs] = make();
  if (plans.size() >= kMostPlans) plans.clear();
  return plans[key] = Kept{std::move(plan), workspace_bytes, std::move(copies), std::move(outputs)};
}

// Enqueues a plan over addresses on the stream that is current on the device of `beside`.
inline void enqueue(Kept const &kept, void const *const *inputs, void *const *outputs, Tensor const &beside) {
  Operands operands{inputs, outputs, nullptr, kept.workspace_bytes, nullptr};
  Tensor workspace;
  if (kept.workspace_bytes > 0) {
    workspace = empty({kept.workspace_bytes}, at::kByte, beside);
    operands.workspace = workspace.data_ptr();
  }
  TORCH_CHECK(library.current_stream(beside.get_device(), &operands.stream) == 0, "cutefuse: PyTorch has no current ",
              "stream on device ", beside.device(), "; use a GPU that torch.cuda.is_available() knows");
  if (char const *reason = library.run(kept.plan.data(), &operands)) TORCH_CHECK(false, reason);
}

inline std::vector<Maybe> listed(std::initializer_list<Maybe> tensors) { return tensors; }

// The operator of this name, found once; every operator of ours has a signature of its own.
template <class Signature>
auto const &operator_named(char const *name) {
  static auto const found = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return found;
}

inline void check_device(Tensor const &t, Tensor const &x, char const *what) {
  TORCH_CHECK(t.device() == x.device(), "cutefuse: ", what, " is on ", t.device(), ", the input on ", x.device(),
              "; move both to one device");
}

}  // namespace cutefuse::native
