// Which kernels of a captured graph have to wait for each other: those that touch the same memory.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace cutefuse {

// The addresses [begin, end) that a kernel reads, or also writes.
struct Memory {
  std::uintptr_t begin, end;
  bool written;
};

// Kernels that a capture recorded one behind the other. Each comes after what was recorded `before` all of them.
class Branches {
 public:
  using Node = void *;  // a cudaGraphNode_t

  Branches() = default;
  explicit Branches(std::vector<Node> before) : before_(std::move(before)) {}

  // The nodes for which a kernel over this memory has to wait. Those that neither are among these nor come before them
  // may run at the same time as it.
  std::vector<Node> wait_for(std::vector<Memory> memory);
  // The node of the kernel that wait_for() was last asked about.
  void add(Node node);
  // The nodes that no other one waits for: what comes after these comes after all.
  std::vector<Node> ends() const;

 private:
  struct Kernel {
    Node node;
    bool awaited;  // by another one
    std::vector<Memory> memory;
    std::vector<bool> after;  // the kernels, in their order, that have ended when this one begins
  };

  std::vector<Node> before_;
  std::vector<Kernel> kernels_;
  Kernel next_{};
};

}  // namespace cutefuse
