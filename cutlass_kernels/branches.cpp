#include "branches.h"

#include <algorithm>

namespace cutefuse {

namespace {

bool conflict(std::vector<Memory> const &a, std::vector<Memory> const &b) {
  return std::any_of(a.begin(), a.end(), [&](Memory const &x) {
    return std::any_of(b.begin(), b.end(),
                       [&](Memory const &y) { return (x.written || y.written) && x.begin < y.end && y.begin < x.end; });
  });
}

}  // namespace

std::vector<Branches::Node> Branches::wait_for(std::vector<Memory> memory) {
  next_ = {nullptr, false, std::move(memory), std::vector<bool>(kernels_.size())};
  std::vector<Node> nodes;
  for (std::size_t i = kernels_.size(); i-- > 0;) {
    Kernel const &earlier = kernels_[i];
    if (next_.after[i] || !conflict(earlier.memory, next_.memory)) continue;
    nodes.push_back(earlier.node);
    next_.after[i] = true;
    for (std::size_t j = 0; j < i; ++j) next_.after[j] = next_.after[j] || earlier.after[j];
  }
  return nodes.empty() ? before_ : nodes;
}

void Branches::add(Node node) {
  for (std::size_t i = 0; i < kernels_.size(); ++i) kernels_[i].awaited = kernels_[i].awaited || next_.after[i];
  next_.node = node;
  kernels_.push_back(std::move(next_));
}

std::vector<Branches::Node> Branches::ends() const {
  std::vector<Node> nodes;
  for (Kernel const &kernel : kernels_) {
    if (!kernel.awaited) nodes.push_back(kernel.node);
  }
  return kernels_.empty() ? before_ : nodes;
}

}  // namespace cutefuse
