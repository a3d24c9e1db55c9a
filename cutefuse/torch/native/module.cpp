// The compiled half of cutefuse.torch: kernels and derivatives of the operators that Python has defined, for tensors on
// a GPU, and calls of them that cost no Python.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "conv.h"
#include "norms.h"

namespace cutefuse::native {
namespace {

std::vector<torch::Library> registered;

// ------------------------------------------------------------------------------------- calls without an OpOverload

PyObject *slow_norm[2];  // of RMSNorm and LayerNorm: the operators, for whatever is no plain tensor

bool is_plain(PyObject *object) { return object == Py_None || THPVariable_CheckExact(object); }

Maybe maybe_tensor(PyObject *object) { return object == Py_None ? Maybe() : Maybe(THPVariable_Unpack(object)); }

// Whether the arguments are `tensors` tensors or None, the first of them a tensor, and a number; and nobody listens to
// calls of functions.
bool is_fast(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t tensors) {
  if (count != tensors + 1 || at::impl::torch_function_mode_enabled()) return false;
  for (Py_ssize_t i = 0; i < tensors; ++i) {
    if (!is_plain(arguments[i])) return false;
  }
  return arguments[0] != Py_None && PyFloat_CheckExact(arguments[tensors]);
}

// (x, weight, bias where it is LayerNorm, epsilon) -> y
template <bool kLayer>
PyObject *call_norm(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kTensors = kLayer ? 3 : 2;
  if (!is_fast(arguments, count, kTensors)) return PyObject_Vectorcall(slow_norm[kLayer], arguments, count, nullptr);
  Tensor const &x = THPVariable_Unpack(arguments[0]);
  Maybe const weight = maybe_tensor(arguments[1]), bias = kLayer ? maybe_tensor(arguments[2]) : Maybe();
  double const epsilon = PyFloat_AS_DOUBLE(arguments[kTensors]);
  Tensor y = [&] {
    pybind11::gil_scoped_release const released;
    OnlyY const wanted;
    if constexpr (kLayer) {
      return std::get<0>(
          operator_named<LayerNorm>("cutefuse::layer_norm").call(x, std::nullopt, weight, bias, epsilon));
    } else {
      return std::get<0>(operator_named<RmsNorm>("cutefuse::rms_norm").call(x, std::nullopt, weight, epsilon));
    }
  }();
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"rms_norm", as_method(call_norm<false>), METH_FASTCALL, "(x, weight or None, epsilon) -> y"},
    {"layer_norm", as_method(call_norm<true>), METH_FASTCALL, "(x, weight or None, bias or None, epsilon) -> y"},
    {nullptr, nullptr, 0, nullptr},
};

// -------------------------------------------------------------------------------------------------------- registration

// Takes over the operators for tensors of a device ("cuda"; tests take "cpu"). run, current_stream: addresses of
// cutefuse_run and of PyTorch's aoti_torch_get_current_cuda_stream. python: `loaded.python` of compiled.py, which stays
// for good.
void enable(std::string const &device, std::uintptr_t run, std::uintptr_t current_stream, pybind11::object python) {
  at::DeviceType const type = c10::Device(device).type();
  library = {reinterpret_cast<decltype(Library::run)>(run),
             reinterpret_cast<decltype(Library::current_stream)>(current_stream), python.inc_ref().ptr(),
             library.generation + 1};
  slow_norm[false] = pybind11::object(python.attr("call_rms_norm")).release().ptr();
  slow_norm[true] = pybind11::object(python.attr("call_layer_norm")).release().ptr();
  bool const gpu = type == at::kCUDA;
  torch::Library &kernels = registered.emplace_back(
      torch::Library::IMPL, "cutefuse", gpu ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernels.impl("rms_norm", TORCH_FN(rms_norm));
  kernels.impl("layer_norm", TORCH_FN(layer_norm));
  kernels.impl("row_norm_backward", TORCH_FN(backward));
  kernels.impl("packed_conv", TORCH_FN(packed_conv));
  torch::Library &derivatives =
      registered.emplace_back(torch::Library::IMPL, "cutefuse",
                              gpu ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
  derivatives.impl("rms_norm", TORCH_FN(rms_norm_autograd));
  derivatives.impl("layer_norm", TORCH_FN(layer_norm_autograd));
  derivatives.impl("row_norm_backward", TORCH_FN(backward_autograd));
  derivatives.impl("packed_conv", TORCH_FN(packed_conv_autograd));
}

// Gives the operators back to Python.
void disable() { registered.clear(); }

}  // namespace
}  // namespace cutefuse::native

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("enable", &cutefuse::native::enable);
  module.def("disable", &cutefuse::native::disable);
  PyModule_AddFunctions(module.ptr(), cutefuse::native::methods);
}
