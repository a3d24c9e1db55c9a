// Which lanes, warps and blocks run next, and when what they have started ends.
#include <algorithm>
#include <climits>

#include "machine.h"

namespace emulator {

namespace {

Timing chosen_timing = Timing::kAny;
std::uint64_t chosen_seed = 0;

constexpr long kMostInstructions = 2'000'000'000;  // of a cluster; a kernel that runs on is one without end

int below(std::mt19937_64 &random, int bound) { return int(random() % std::uint64_t(bound)); }

}  // namespace

Timing timing() { return chosen_timing; }

void set_timing(Timing timing, std::uint64_t seed) { chosen_timing = timing, chosen_seed = seed; }

// ---- what runs beside a warp ----------------------------------------------------------------------------------------

std::size_t Groups::before(std::size_t groups_left) const {
  return groups_.size() > groups_left ? groups_[groups_.size() - groups_left - 1] : 0;
}

void Groups::end(std::size_t operations) {
  while (ended() < operations && !running_.empty()) {
    running_.front()();
    running_.pop_front();
  }
}

bool Groups::end_one() {
  if (running_.empty()) return false;
  end(ended() + 1);
  return true;
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

Warp::Warp(Block &block, int index, Entry const &entry)
    : block_(block),
      entry_(entry),
      index_(index),
      live_(~0u),
      rows_(static_cast<Row *>(std::calloc(std::size_t(entry.rows), sizeof(Row)))) {
  if (rows_ == nullptr) fail("there is no memory for the registers of a warp");
  GridLaunch const &launch = block.cluster.launch;
  waits_for_predecessor = launch.early;
  unsigned const first = unsigned(32 * index);
  if (block.threads < first + 32) live_ = (1u << (block.threads - first)) - 1;
  std::fill(pc_, pc_ + 32, 0);
  for (auto const &[row, value] : entry.constants) std::fill(rows_[row], rows_[row] + 32, value);
  int const static_bytes = entry.static_shared_bytes == 0 ? 0 : (entry.static_shared_bytes + 1023) / 1024 * 1024;
  for (int const row : entry.dynamic_shared) std::fill(rows_[row], rows_[row] + 32, kSharedBase + static_bytes);
  for (auto const &[row, special] : entry.specials) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      unsigned const rank = unsigned(block.rank);
      unsigned const values[] = {first + lane,
                                 block.threads,
                                 block.cluster.index * launch.cluster.x + rank,
                                 launch.grid.x,
                                 rank,
                                 launch.cluster.x,
                                 block.cluster.index,
                                 launch.grid.x / launch.cluster.x,
                                 lane,
                                 0,
                                 1};
      rows_[row][lane] = values[int(special)];
    }
  }
}

void Warp::exit(std::uint32_t mask) {
  live_ &= ~mask;
  if (live_ != 0) return;
  if (products.ended() != products.started()) fail("a warp ends before its products");
  copies.end(copies.started()), stores.end(stores.started());
}

void Warp::touch_global() const {
  if (waits_for_predecessor) fail("a kernel that may start early touches global memory before griddepcontrol.wait");
}

bool Warp::end_products(std::size_t operations) {
  std::size_t const first = std::size_t(index_) / 4 * 4, last = std::min(first + 4, block_.warps.size());
  for (std::size_t i = first; i < last; ++i) {
    if (block_.warps[i]->products.started() < operations) return false;
  }
  for (std::size_t i = first; i < last; ++i) block_.warps[i]->products.end(operations);
  return true;
}

void Warp::jump(std::uint32_t mask, int target) {
  each_lane(mask, [&](int lane) { pc_[lane] = target; });
}

std::string Warp::where() const {
  std::string text;
  int last = -1;
  for (int lane = 0; lane < 32; ++lane) {
    if ((live_ >> lane & 1) == 0 || pc_[lane] == last) continue;
    last = pc_[lane];
    text += (text.empty() ? "'" : ", '") + entry_.code[std::size_t(last)].text + "' (instruction " +
            std::to_string(last) + ")";
  }
  return text;
}

int Warp::step(int instructions) {
  int done = 0;
  while (done < instructions && live_ != 0) {
    // The lanes that are furthest behind go first, so that branches join again.
    bool advanced = false;
    for (int after = -1; !advanced;) {
      int pc = INT_MAX;
      for (int lane = 0; lane < 32; ++lane) {
        if ((live_ >> lane & 1) != 0 && pc_[lane] > after) pc = std::min(pc, pc_[lane]);
      }
      if (pc == INT_MAX) return done;
      std::uint32_t mask = 0;
      for (int lane = 0; lane < 32; ++lane) mask |= std::uint32_t(pc_[lane] == pc) << lane;
      mask &= live_;
      after = pc;
      Instruction const &in = entry_.code[std::size_t(pc)];
      if (in.converges && mask != live_) continue;
      std::uint32_t active = mask;
      if (in.guard >= 0) {
        std::uint64_t const *const predicate = row(in.guard);
        for (int lane = 0; lane < 32; ++lane) active &= ~(std::uint32_t((predicate[lane] & 1) == in.unless) << lane);
      }
      Outcome outcome = Outcome::kDone;
      try {
        if (active != 0) outcome = in.run(*this, in, active);
      } catch (std::exception const &error) {
        fail(std::string(error.what()) + ", in '" + in.text + "' (instruction " + std::to_string(pc) + ") of warp " +
             std::to_string(index_) + " of block " + std::to_string(block_.rank) + " of cluster " +
             std::to_string(block_.cluster.index));
      }
      if (outcome == Outcome::kBlocked) continue;
      if (outcome == Outcome::kJumped) mask &= ~active;
      jump(mask, pc + 1);
      advanced = true;
    }
    ++done;
  }
  return done;
}

// ---- a block --------------------------------------------------------------------------------------------------------

Block::Block(Cluster &cluster_, int rank_, GridLaunch const &launch, Entry const &entry)
    : cluster(cluster_), rank(rank_), threads(launch.block.x) {
  std::size_t const fixed = std::size_t(entry.static_shared_bytes + 1023) / 1024 * 1024;
  shared.assign(kSharedBase + fixed + launch.dynamic_shared_bytes, 0xff);  // NaN, and no barrier
  for (unsigned first = 0; first < threads; first += 32) {
    warps.push_back(std::make_unique<Warp>(*this, int(first / 32), entry));
  }
}

bool Block::has_exited() const {
  return std::all_of(warps.begin(), warps.end(), [](auto const &warp) { return warp->has_exited(); });
}

std::uint8_t *Block::shared_at(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
  if (address < kSharedBase || address + bytes > shared.size()) {
    fail("shared memory ends at " + std::to_string(shared.size()) + ", the address is " + std::to_string(address));
  }
  if (address % alignment != 0) fail("the address " + std::to_string(address) + " is not aligned");
  return shared.data() + address;
}

// ---- a cluster ------------------------------------------------------------------------------------------------------

Cluster::Cluster(GridLaunch const &launch_, Entry const &entry, unsigned index_, std::uint8_t *parameters_,
                 std::mt19937_64 &random)
    : launch(launch_), index(index_), parameters(parameters_), random_(random) {
  for (unsigned rank = 0; rank < launch.cluster.x; ++rank) {
    blocks.push_back(std::make_unique<Block>(*this, int(rank), launch, entry));
  }
}

void Cluster::start(Effect effect) {
  if (timing() == Timing::kEarly) return effect();
  pending.push_back(std::move(effect));
}

Block &Cluster::block_at(std::uint32_t address, Block &own) {
  std::uint32_t const rank = address >> kRankShift;
  if (rank == 0) return own;
  if (rank > blocks.size()) fail("the cluster has no block " + std::to_string(rank - 1));
  Block &block = *blocks[rank - 1];
  if (block.has_exited())
    fail("block " + std::to_string(rank - 1) + " of the cluster, whose memory is used, has ended");
  return block;
}

int Cluster::warps() const {
  int count = 0;
  for (auto const &block : blocks) {
    for (auto const &warp : block->warps) count += !warp->has_exited();
  }
  return count;
}

// Ends an operation, with luck or in any case; false if there is none.
bool Cluster::end_some(bool something) {
  if (!something && (timing() != Timing::kAny || random_() % 4 != 0)) return false;
  if (!pending.empty() && (something || random_() % 2 == 0)) {
    std::swap(pending[std::size_t(below(random_, int(pending.size())))], pending.back());
    Effect const effect = std::move(pending.back());
    pending.pop_back();
    effect();
    return true;
  }
  if (something) {
    for (auto const &block : blocks) {
      for (auto const &warp : block->warps) {
        if (warp->stores.end_one() || warp->copies.end_one()) return true;
      }
    }
    return false;
  }
  auto &block = *blocks[std::size_t(below(random_, int(blocks.size())))];
  auto &warp = *block.warps[std::size_t(below(random_, int(block.warps.size())))];
  if (warp.products.ended() < warp.products.started()) return warp.end_products(warp.products.ended() + 1);
  return warp.stores.end_one() || warp.copies.end_one();
}

void Cluster::run() {
  std::vector<Warp *> order;
  for (auto const &block : blocks) {
    for (auto const &warp : block->warps) order.push_back(warp.get());
  }
  long executed = 0;
  while (warps() > 0) {
    std::shuffle(order.begin(), order.end(), random_);
    long in_turn = 0;
    for (Warp *warp : order) {
      in_turn += warp->step(1 + below(random_, 400));
      in_turn += end_some(false);
    }
    executed += in_turn;
    if (executed > kMostInstructions) fail("the kernel has executed " + std::to_string(executed) + " instructions");
    if (in_turn > 0 || end_some(true)) continue;
    std::string sentence = "deadlock in cluster " + std::to_string(index) + ":";
    for (Warp *warp : order) {
      if (warp->has_exited()) continue;
      sentence += "\n  block " + std::to_string(warp->block().rank) + " warp " + std::to_string(warp->index()) +
                  " waits at " + warp->where();
    }
    fail(sentence);
  }
  if (!pending.empty()) fail("a kernel ended while " + std::to_string(pending.size()) + " of its loads were running");
}

// ---- a grid ---------------------------------------------------------------------------------------------------------

void run(GridLaunch const &as_asked, void *const *parameters) {
  facts(as_asked.function);  // throws without the kernel
  Entry const &entry = *as_asked.function.module->entries.at(as_asked.function.name);
  GridLaunch launch = as_asked;
  if (entry.cluster > 1) launch.cluster.x = entry.cluster;
  if (launch.grid.y * launch.grid.z * launch.block.y * launch.block.z * launch.cluster.y * launch.cluster.z != 1) {
    fail("the interpreter takes grids, clusters and blocks of one dimension");
  }
  if (int(launch.block.x) > entry.max_threads) fail("the block has more threads than the kernel is compiled for");
  if (launch.grid.x % launch.cluster.x != 0) fail("the grid is not a multiple of the cluster");
  struct alignas(128) Line {
    std::uint8_t bytes[128];
  };
  std::vector<Line> lines(std::size_t(entry.parameter_bytes + 127) / 128);
  auto *const copy = reinterpret_cast<std::uint8_t *>(lines.data());
  for (std::size_t i = 0; i < entry.parameter_offsets.size(); ++i) {
    std::memcpy(copy + entry.parameter_offsets[i], parameters[i], std::size_t(entry.parameter_sizes[i]));
  }
  std::mt19937_64 random(chosen_seed);
  for (unsigned i = 0; i < launch.grid.x / launch.cluster.x; ++i) Cluster(launch, entry, i, copy, random).run();
}

}  // namespace emulator
