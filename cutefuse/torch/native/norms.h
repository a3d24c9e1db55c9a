// RMSNorm and LayerNorm over the last axis: kernels of a device, and their derivatives.
#pragma once

#include <ATen/ops/zeros_like.h>

#include <mutex>
#include <tuple>

#include "launch.h"
#include "node.h"

namespace cutefuse::native {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using RmsNorm = Three(Tensor const &, Maybe const &, Maybe const &, double);
using LayerNorm = Four(Tensor const &, Maybe const &, Maybe const &, Maybe const &, double);
using Backward = Three(Tensor const &, Maybe const &, Tensor const &, Maybe const &, Maybe const &, Tensor const &,
                       std::optional<at::ScalarType>);

// ------------------------------------------------------------------------------------------------------- the kernels

inline pybind11::dict attributes(double epsilon, bool layer) {
  using namespace pybind11::literals;
  return pybind11::dict("epsilon"_a = epsilon, "layer"_a = int(layer));
}

// Set while a caller asks for y alone: the empty sum that the operator's schema has is not made then.
inline thread_local bool only_y = false;

struct OnlyY {
  OnlyY() { only_y = is_quiet(); }
  ~OnlyY() { only_y = false; }
};

// (y, sum, mean, 1 / deviation); sum is empty without a residual, mean is absent for RMSNorm.
inline Four forward(Tensor const &x, Maybe const &residual, Maybe const &weight, Maybe const &bias, double epsilon,
                    bool layer) {
  Key key{layer ? 1 : 0, x.get_device(), bits_of(epsilon)};
  add_to(key, x);
  c10::MaybeOwned<Tensor> const x_dense = dense(x);
  std::array<c10::MaybeOwned<Tensor>, 3> more;
  void const *inputs[4] = {x_dense->const_data_ptr()};
  int at = 1;
  for (Maybe const *t : {&residual, &weight, &bias}) {
    add_to(key, *t);
    if (t->has_value()) {
      check_device(**t, x, at == 1 ? "the residual" : "a parameter");
      more[at - 1] = dense(**t);
      inputs[at] = more[at - 1]->const_data_ptr();
    } else {
      inputs[at] = nullptr;
    }
    ++at;
  }
  std::int64_t const columns = x.dim() > 0 ? x.size(-1) : 1, rows = x.numel() / std::max<std::int64_t>(1, columns);
  Tensor y = empty(x.sizes(), x.scalar_type(), x), mean, rstd = empty({rows}, at::kFloat, x);
  Tensor total;
  if (residual.has_value()) {
    total = empty(x.sizes(), x.scalar_type(), x);
  } else if (!only_y) {
    total = empty({0}, x.scalar_type(), x);
  }
  if (layer) mean = empty({rows}, at::kFloat, x);
  void *const outputs[4] = {y.data_ptr(), residual.has_value() ? total.data_ptr() : nullptr,
                            layer ? mean.data_ptr() : nullptr, rstd.data_ptr()};
  Kept const &kept = plan_of(key, [&] {
    auto const made = listed({y, residual.has_value() ? Maybe(total) : Maybe(), layer ? Maybe(mean) : Maybe(), rstd});
    return in_python<Planned>("plan_norm", "CuteRowNormForward", listed({x, residual, weight, bias}), made,
                              attributes(epsilon, layer));
  });
  enqueue(kept, inputs, outputs, x);
  return {std::move(y), std::move(total), std::move(mean), std::move(rstd)};
}

inline Three rms_norm(Tensor const &x, Maybe const &residual, Maybe const &weight, double epsilon) {
  if (!runs_in_library(x)) return in_python<Three>("rms_norm", x, residual, weight, epsilon);
  auto made = forward(x, residual, weight, std::nullopt, epsilon, false);
  return {std::move(std::get<0>(made)), std::move(std::get<1>(made)), std::move(std::get<3>(made))};
}

inline Four layer_norm(Tensor const &x, Maybe const &residual, Maybe const &weight, Maybe const &bias, double epsilon) {
  if (!runs_in_library(x)) return in_python<Four>("layer_norm", x, residual, weight, bias, epsilon);
  return forward(x, residual, weight, bias, epsilon, true);
}

// (dx, dweight, dbias) of the tensor that was normalised; a mean makes it LayerNorm; unwanted ones are empty.
inline Three backward(Tensor const &dy, Maybe const &dsum, Tensor const &x, Maybe const &weight, Maybe const &mean,
                      Tensor const &rstd, std::optional<at::ScalarType> bias_type) {
  if (!runs_in_library(x)) {
    return in_python<Three>("row_norm_backward", dy, dsum, x, weight, mean, rstd, bias_type);
  }
  bool const layer = mean.has_value();
  Key key{2, x.get_device(), bias_type.has_value() ? static_cast<std::int64_t>(*bias_type) : kAbsent};
  Maybe const given[6] = {dy, dsum, x, weight, mean, rstd};
  std::array<c10::MaybeOwned<Tensor>, 6> read;
  void const *inputs[6];
  for (int i = 0; i < 6; ++i) {
    add_to(key, given[i]);
    inputs[i] = nullptr;
    if (!given[i].has_value()) continue;
    check_device(*given[i], x, "an operand of the backward pass");
    read[i] = dense(*given[i]);
    inputs[i] = read[i]->const_data_ptr();
  }
  Tensor dx = empty(x.sizes(), x.scalar_type(), x), dweight, dbias;
  dweight = weight.has_value() ? empty(weight->sizes(), weight->scalar_type(), x) : empty({0}, x.scalar_type(), x);
  dbias = bias_type.has_value() ? empty({x.size(-1)}, *bias_type, x) : empty({0}, x.scalar_type(), x);
  void *const outputs[3] = {dx.data_ptr(), weight.has_value() ? dweight.data_ptr() : nullptr,
                            bias_type.has_value() ? dbias.data_ptr() : nullptr};
  Kept const &kept = plan_of(key, [&] {
    auto const made =
        listed({dx, weight.has_value() ? Maybe(dweight) : Maybe(), bias_type.has_value() ? Maybe(dbias) : Maybe()});
    return in_python<Planned>("plan_norm", "CuteRowNormBackward", listed({dy, dsum, x, weight, mean, rstd}), made,
                              attributes(0.0, layer));
  });
  enqueue(kept, inputs, outputs, x);
  return {std::move(dx), std::move(dweight), std::move(dbias)};
}

// ---------------------------------------------------------------------------------------------------- the derivatives

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline Maybe optional_of(Tensor t) { return t.defined() ? Maybe(std::move(t)) : Maybe(); }

// Gradients of x, of the residual, of the weight and (LayerNorm) of the bias, from those of y and of the sum.
struct NormBackward final : Node {
  SavedVariable x, weight, mean, rstd;
  std::optional<at::ScalarType> bias_type;
  bool layer = false, residual = false;

  std::string name() const override { return layer ? "CutefuseLayerNormBackward" : "CutefuseRmsNormBackward"; }

  variable_list apply(variable_list &&grads) override {
    std::lock_guard<std::mutex> const lock(mutex_);
    variable_list found(4);
    Tensor dy = grads[0];
    Maybe const dsum = residual ? optional_of(grads[1]) : Maybe();
    if (!dy.defined() && !dsum.has_value()) return found;
    Tensor const normalised = residual ? x.unpack(pointer_to(this)) : x.unpack();
    if (!dy.defined()) dy = at::zeros_like(normalised);
    auto made = [&] {
      // Nothing records a first derivative; the guard saves the way through autograd.
      std::optional<at::AutoDispatchBelowADInplaceOrView> below;
      if (!at::GradMode::is_enabled() && is_quiet()) below.emplace();
      return operator_named<Backward>("cutefuse::row_norm_backward")
          .call(dy, dsum, normalised, optional_of(weight.unpack()), optional_of(mean.unpack()), rstd.unpack(),
                bias_type);
    }();
    found[0] = std::get<0>(made);
    if (residual) found[1] = std::get<0>(made);
    if (task_should_compute_output(2)) found[2] = std::get<1>(made);
    if (layer && task_should_compute_output(3)) found[3] = std::get<2>(made);
    return found;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> const lock(mutex_);
    for (SavedVariable *saved : {&x, &weight, &mean, &rstd}) saved->reset_data();
  }
};

inline Tensor or_none(Maybe const &t) { return t.has_value() ? *t : Tensor(); }

// The results of a forward pass, `call`, connected to a node that saves what its backward reads where an input needs a
// gradient.
template <class Call>
auto with_derivative(char const *what, Tensor const &x, Maybe const &residual, Maybe const &weight, Maybe const &bias,
                     Call const &call) {
  Tensor const more[3] = {or_none(residual), or_none(weight), or_none(bias)};
  for (Tensor const *t : {&x, &more[0], &more[1], &more[2]}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(*t), "cutefuse::", what,
                                " has no forward-mode derivative; use backward, or torch.nn");
  }
  NormBackward *node = nullptr;
  NodePointer owner;
  if (torch::autograd::compute_requires_grad(x, more[0], more[1], more[2])) {
    owner = owned(node = new NormBackward());
    node->set_next_edges(torch::autograd::collect_next_edges(x, more[0], more[1], more[2]));
    node->residual = residual.has_value();
    if (bias.has_value()) node->bias_type = bias->scalar_type();
  }
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView const below;
    return call();
  }();
  if (node == nullptr) return made;
  constexpr std::size_t kLast = std::tuple_size_v<decltype(made)> - 1;  // 1 / deviation; LayerNorm's mean before it
  node->layer = kLast == 3;
  auto &total = std::get<1>(made);
  torch::autograd::set_history(std::get<0>(made), owner);
  if (node->residual) torch::autograd::set_history(total, owner);
  node->x = SavedVariable(node->residual ? total : x, node->residual);
  node->weight = SavedVariable(more[1], false);
  node->mean = SavedVariable(kLast == 3 ? std::get<2>(made) : Tensor(), false);
  node->rstd = SavedVariable(std::get<kLast>(made), false);
  return made;
}

inline Three rms_norm_autograd(c10::DispatchKeySet keys, Tensor const &x, Maybe const &residual, Maybe const &weight,
                               double epsilon) {
  return with_derivative("rms_norm", x, residual, weight, std::nullopt, [&] {
    return operator_named<RmsNorm>("cutefuse::rms_norm")
        .redispatch(keys & c10::after_autograd_keyset, x, residual, weight, epsilon);
  });
}

inline Four layer_norm_autograd(c10::DispatchKeySet keys, Tensor const &x, Maybe const &residual, Maybe const &weight,
                                Maybe const &bias, double epsilon) {
  return with_derivative("layer_norm", x, residual, weight, bias, [&] {
    return operator_named<LayerNorm>("cutefuse::layer_norm")
        .redispatch(keys & c10::after_autograd_keyset, x, residual, weight, bias, epsilon);
  });
}

// A second derivative is refused when someone asks for it, not before.
inline Three backward_autograd(c10::DispatchKeySet keys, Tensor const &dy, Maybe const &dsum, Tensor const &x,
                               Maybe const &weight, Maybe const &mean, Tensor const &rstd,
                               std::optional<at::ScalarType> bias_type) {
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView const below;
    return operator_named<Backward>("cutefuse::row_norm_backward")
        .redispatch(keys & c10::after_autograd_keyset, dy, dsum, x, weight, mean, rstd, bias_type);
  }();
  if (torch::autograd::compute_requires_grad(dy, or_none(dsum), x, or_none(weight))) {
    NodePointer const owner = refusal("cutefuse's norms have no second derivative; use torch.nn where one is needed",
                                      dy, or_none(dsum), x, or_none(weight));
    for (Tensor *t : {&std::get<0>(made), &std::get<1>(made), &std::get<2>(made)}) {
      torch::autograd::set_history(*t, owner);
    }
  }
  return made;
}

}  // namespace cutefuse::native
