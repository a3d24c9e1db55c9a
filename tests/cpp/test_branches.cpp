// Which kernels of a captured graph wait for each other, on the CPU: random kernels over little memory, against all
// that a plain order promises.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "branches.h"
#include "expect.h"

using cutefuse::Branches;
using cutefuse::Memory;
using Node = Branches::Node;

namespace {

Node node(std::uintptr_t number) { return reinterpret_cast<Node>(number); }

bool conflict(std::vector<Memory> const &a, std::vector<Memory> const &b) {
  for (Memory const &x : a) {
    for (Memory const &y : b) {
      for (std::uintptr_t byte = x.begin; byte < x.end; ++byte) {
        if ((x.written || y.written) && byte >= y.begin && byte < y.end) return true;
      }
    }
  }
  return false;
}

std::vector<Node> added(Branches &branches, std::vector<Memory> memory, Node own) {
  std::vector<Node> const waits = branches.wait_for(std::move(memory));
  branches.add(own);
  return waits;
}

// Two kernels over the same byte, of which one writes it, keep their order; no edge says what others say already; the
// ends are the nodes that nothing waits for.
void test_random(unsigned seed) {
  std::mt19937 random(seed);
  auto const below = [&](unsigned count) { return static_cast<std::uintptr_t>(random() % count); };
  std::vector<Node> const before = {node(1001), node(1002)};
  Branches branches(before);
  std::vector<std::vector<Memory>> memories;
  std::map<Node, std::set<Node>> behind;  // all that have ended when a node begins
  int const kernels = 2 + static_cast<int>(below(40));
  for (int i = 0; i < kernels; ++i) {
    std::vector<Memory> memory;
    for (std::uintptr_t k = below(4); k < 4; ++k) {
      std::uintptr_t const begin = below(60);
      memory.push_back({begin, begin + below(6), below(3) == 0});
    }
    Node const own = node(1 + static_cast<std::uintptr_t>(i));
    std::vector<Node> const waits = added(branches, memory, own);
    for (Node const other : waits) {
      for (Node const another : waits) expect(behind[another].count(other) == 0, "an edge that another one implies", i);
    }
    for (Node const other : waits) {
      behind[own].insert(other);
      behind[own].insert(behind[other].begin(), behind[other].end());
    }
    for (Node const first : before) expect(behind[own].count(first) == 1, "a kernel ahead of what came before", i);
    for (int j = 0; j < i; ++j) {
      bool const ordered = behind[own].count(node(1 + static_cast<std::uintptr_t>(j))) == 1;
      if (conflict(memories[static_cast<std::size_t>(j)], memory)) expect(ordered, "two kernels over one byte", j, i);
    }
    memories.push_back(memory);
    std::vector<Node> const ends = branches.ends();
    std::set<Node> all(ends.begin(), ends.end());
    expect(all.size() == ends.size(), "an end twice", i);
    for (Node const end : ends) all.insert(behind[end].begin(), behind[end].end());
    expect(all.size() == before.size() + memories.size(), "the ends are not behind all", i);
    for (Node const end : ends) {
      for (Node const other : ends) expect(behind[other].count(end) == 0, "an end that another one waits for", i);
    }
  }
}

void test_cases() {
  Branches branches({node(9)});
  using Nodes = std::vector<Node>;
  expect(branches.ends() == Nodes{node(9)}, "without a kernel the end is what came before");
  std::vector<Memory> const a = {{0, 8, false}, {8, 16, true}}, b = {{0, 8, false}, {16, 24, true}};
  expect(added(branches, a, node(1)) == Nodes{node(9)}, "the first kernel");
  expect(added(branches, b, node(2)) == Nodes{node(9)}, "two kernels that read the same run side by side");
  expect(branches.ends() == (Nodes{node(1), node(2)}), "both are ends");
  expect(added(branches, {{8, 9, false}, {23, 30, true}}, node(3)) == (Nodes{node(2), node(1)}), "it waits for both");
  expect(branches.ends() == Nodes{node(3)}, "one end");
  branches.wait_for({{0, 100, true}});  // of a launch that failed
  expect(added(branches, {{24, 25, false}}, node(4)) == Nodes{node(3)}, "as if it had not been asked about");
  expect(added(branches, {{100, 100, true}}, node(5)) == Nodes{node(9)}, "no memory, nothing to wait for");
  expect(branches.ends() == (Nodes{node(4), node(5)}), "the ends at last");
}

}  // namespace

int main() {
  test_cases();
  for (unsigned seed = 0; seed < 500; ++seed) test_random(seed);
  if (failures == 0) std::puts("test_branches: passed");
  return failures == 0 ? 0 : 1;
}
