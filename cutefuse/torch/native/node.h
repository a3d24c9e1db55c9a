// Nodes of the autograd graph, whatever pointer this PyTorch holds them by: std::shared_ptr up to 2.12 or so, later
// c10::intrusive_ptr.
#pragma once

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace cutefuse::native {

using torch::autograd::Node;
using NodePointer = std::decay_t<decltype(std::declval<at::Tensor const &>().grad_fn())>;

// The pointer that owns a new node. What only one kind of pointer has depends on a parameter, so that the other kind
// never looks for it.
template <class T, class Pointer = NodePointer>
Pointer owned(T *node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(node, [](T *last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// The pointer to a node that is owned already.
template <class T, class Pointer = NodePointer>
Pointer pointer_to(T *node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return node->shared_from_this();
  } else {
    return Pointer::reclaim_copy(node);
  }
}

// What says why, when someone asks for a derivative by these inputs.
template <class... Inputs>
NodePointer refusal(char const *why, Inputs const &...inputs) {
  return owned(static_cast<Node *>(new torch::autograd::Error(why, torch::autograd::collect_next_edges(inputs...))));
}

}  // namespace cutefuse::native
