// What the interpreter executes on: warps of 32 lanes in blocks, blocks in one cluster, and what runs beside them.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>

#include "ptx.h"

namespace emulator {

class Block;
class Cluster;

// An operation that a thread started and that ends on its own: its effect happens when it is called.
using Effect = std::function<void()>;

// Operations of one warp that end in order and are waited for by groups: wgmma, cp.async, stores by TMA.
class Groups {
 public:
  void add(Effect effect) { running_.push_back(std::move(effect)), ++started_; }
  void commit() { groups_.push_back(started_); }
  std::size_t started() const { return started_; }
  std::size_t ended() const { return started_ - running_.size(); }
  // Operations that have ended when no more than so many groups are open.
  std::size_t before(std::size_t groups_left) const;
  void end(std::size_t operations);  // so many since the start
  bool end_one();                    // false when none is running

 private:
  std::deque<Effect> running_;
  std::size_t started_ = 0;
  std::vector<std::size_t> groups_;  // operations started when each was closed
};

// A register of 32 lanes.
using Row = std::uint64_t[32];

class Warp {
 public:
  Warp(Block &block, int index, Entry const &entry);

  // Executes up to so many instructions; returns how many.
  int step(int instructions);
  bool has_exited() const { return live_ == 0; }
  std::uint32_t live() const { return live_; }
  std::string where() const;  // the instructions that its lanes stand at

  std::uint64_t *row(int index) { return rows_[std::size_t(index)]; }
  Block &block() const { return block_; }
  int index() const { return index_; }
  void exit(std::uint32_t mask);
  void jump(std::uint32_t mask, int target);

  Groups copies, products, stores;  // cp.async; wgmma; TMA's stores
  std::uint64_t barrier_ticket = 0, cluster_ticket = 0;
  bool in_barrier = false, in_cluster_barrier = false;
  bool waits_for_predecessor = false;  // a grid that may still run, and may write or read what this one touches

  // Before every access to global memory, and before TMA is asked for one.
  void touch_global() const;

  // Ends so many of the products that this warp has started, if its warpgroup has started them too: the four multiply
  // together, so that what one has waited for has ended for all.
  bool end_products(std::size_t operations);

 private:
  struct Free {
    void operator()(void *rows) const { std::free(rows); }
  };
  Block &block_;
  Entry const &entry_;
  int index_;
  std::uint32_t live_;
  int pc_[32];
  std::unique_ptr<Row[], Free> rows_;  // pages that nothing touches take no memory
};

// The 16 barriers of a block; a generation is over when all expected threads have arrived.
struct NamedBarrier {
  int arrived = 0, expected = 0;
  std::uint64_t generation = 0;
};

class Block {
 public:
  Block(Cluster &cluster, int rank, GridLaunch const &launch, Entry const &entry);

  Cluster &cluster;
  int const rank;
  std::uint32_t const threads;
  std::vector<std::uint8_t> shared;  // what lies below kSharedBase is never used
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<Warp>> warps;

  bool has_exited() const;
  // So many bytes at an address of shared memory of this block.
  std::uint8_t *shared_at(std::uint32_t address, std::size_t bytes, std::size_t alignment);
};

class Cluster {
 public:
  Cluster(GridLaunch const &launch, Entry const &entry, unsigned index, std::uint8_t *parameters,
          std::mt19937_64 &random);

  void run();

  GridLaunch const &launch;
  unsigned const index;
  std::uint8_t *const parameters;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Effect> pending;  // loads by TMA and st.async, which end in any order
  int barrier_arrived = 0;      // warps
  std::uint64_t barrier_generation = 0;

  // Adds to `pending`, or ends at once where that is the timing.
  void start(Effect effect);
  // The block that an address of shared::cluster lies in, which must still run.
  Block &block_at(std::uint32_t address, Block &own);
  int warps() const;

 private:
  bool end_some(bool something);

  std::mt19937_64 &random_;
};

// An address of another block's shared memory has its rank + 1 in these bits.
constexpr int kRankShift = 24;
constexpr std::uint32_t kSharedMask = (1u << kRankShift) - 1;
// A generic address of shared memory.
constexpr std::uint64_t kGenericShared = 0x5a00000000000000u;

Timing timing();
// So many bytes of global memory at an address, which must be allowed.
std::uint8_t *global_at(std::uint64_t address, std::size_t bytes, std::size_t alignment);

template <class T>
T get(std::uint64_t const &lane) {
  T value;
  std::memcpy(&value, &lane, sizeof(T));
  return value;
}

template <class T>
void put(std::uint64_t &lane, T value) {
  lane = 0;
  std::memcpy(&lane, &value, sizeof(T));
}

template <class Body>
void each_lane(std::uint32_t mask, Body const &body) {
  if (mask == ~0u) {
    for (int lane = 0; lane < 32; ++lane) body(lane);
  } else {
    for (; mask != 0; mask &= mask - 1) body(__builtin_ctz(mask));
  }
}

inline int first_lane(std::uint32_t mask) { return __builtin_ctz(mask); }

}  // namespace emulator
