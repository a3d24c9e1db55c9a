// What threads wait for: the barriers of blocks and clusters, mbarrier objects; and the exchange of values in a warp.
#include "mbarrier.h"

namespace emulator {

namespace {

constexpr std::uint64_t kNoBytes = 1u << 21;

void end_phase(BarrierState &barrier) {
  if (barrier.pending != 0 || barrier.bytes != kNoBytes) return;
  barrier.pending = barrier.expected;
  barrier.parity ^= 1;
}

std::uint32_t word(Warp &warp, int row, int lane) { return get<std::uint32_t>(warp.row(row)[lane]); }

std::uint32_t address_of(Warp &warp, Instruction const &in, int operand, int lane) {
  return word(warp, in.row_of(operand), lane) + std::uint32_t(in.offsets[0]);
}

// ---- blocks and clusters --------------------------------------------------------------------------------------------

// Rows: barrier and threads; without the second, all threads of the block.
Outcome sync_block(Warp &warp, Instruction const &in, bool waits) {
  Block &block = warp.block();
  std::uint32_t const id = word(warp, in.rows[0], 0);
  int const expected = in.rows.size() > 1 ? int(word(warp, in.rows[1], 0)) : int((block.threads + 31) / 32 * 32);
  if (id > 15) fail("a block has the barriers 0 to 15");
  if (expected % 32 != 0 || expected == 0) fail("a barrier waits for whole warps");
  NamedBarrier &barrier = block.barriers[id];
  if (!warp.in_barrier) {
    if (barrier.arrived > 0 && barrier.expected != expected) fail("the warps at a barrier expect different threads");
    barrier.expected = expected;
    warp.barrier_ticket = barrier.generation;
    if ((barrier.arrived += 32) == expected) barrier.arrived = 0, ++barrier.generation;
    warp.in_barrier = waits;
    if (!waits) return Outcome::kDone;
  }
  if (barrier.generation == warp.barrier_ticket) return Outcome::kBlocked;
  warp.in_barrier = false;
  return Outcome::kDone;
}

Outcome sync_cluster(Warp &warp, bool arrives) {
  Cluster &cluster = warp.block().cluster;
  if (arrives) {
    if (warp.in_cluster_barrier) fail("a warp arrives twice at the barrier of its cluster without waiting");
    warp.in_cluster_barrier = true, warp.cluster_ticket = cluster.barrier_generation;
    ++cluster.barrier_arrived;
    return Outcome::kDone;
  }
  if (!warp.in_cluster_barrier) fail("a warp waits at the barrier of its cluster before it has arrived");
  if (cluster.barrier_generation == warp.cluster_ticket && cluster.barrier_arrived >= cluster.warps()) {
    cluster.barrier_arrived = 0, ++cluster.barrier_generation;
  }
  if (cluster.barrier_generation == warp.cluster_ticket) return Outcome::kBlocked;
  warp.in_cluster_barrier = false;
  return Outcome::kDone;
}

Run blocks(Opcode const &opcode) {
  if (opcode.base() == "bar" && opcode.has("warp")) {
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      std::uint32_t const members = word(warp, in.rows[0], first_lane(mask)) & warp.live();
      return (members & ~mask) != 0 ? Outcome::kBlocked : Outcome::kDone;
    };
  }
  bool const cluster = opcode.has("cluster"), arrives = opcode.has("arrive");
  if (opcode.base() != "bar" && opcode.base() != "barrier") return nullptr;
  if (opcode.has("red")) return nullptr;
  return [=](Warp &warp, Instruction const &in, std::uint32_t) {
    return cluster ? sync_cluster(warp, arrives) : sync_block(warp, in, !arrives);
  };
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------

// Rows: state, address, and the number of arrivals or bytes where one is given.
Run arrivals(Opcode const &opcode) {
  bool const expects = opcode.has("expect_tx"), arrives = opcode.has("arrive");
  if (!expects && !arrives) return nullptr;
  int const operand = arrives ? 1 : 0;
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    bool const counted = int(in.counts.size()) > operand + 1;
    each_lane(mask, [&](int lane) {
      BarrierState &barrier = *barrier_at(address_of(warp, in, operand, lane), warp.block());
      std::uint32_t const count = counted ? word(warp, in.row_of(operand + 1), lane) : 1;
      if (expects) expect_bytes(barrier, count);
      if (arrives) arrive(barrier, expects ? 1 : count);
    });
    return Outcome::kDone;
  };
}

Run mbarriers(Opcode const &opcode) {
  if (opcode.base() != "mbarrier") return nullptr;
  if (opcode.has("init")) {
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      each_lane(mask, [&](int lane) {
        std::uint8_t *const place = warp.block().shared_at(address_of(warp, in, 0, lane), 8, 8);
        std::uint32_t const count = word(warp, in.rows[1], lane);
        if (count == 0 || count >= 1u << 20) fail("a barrier expects 1 to 2^20 - 1 threads");
        BarrierState const state{count, count, kNoBytes, 0, 0};
        std::memcpy(place, &state, sizeof(state));
      });
      return Outcome::kDone;
    };
  }
  if (opcode.has("inval")) return [](Warp &, Instruction const &, std::uint32_t) { return Outcome::kDone; };
  if (opcode.has("try_wait") || opcode.has("test_wait")) {
    bool const blocks = opcode.has("try_wait");
    if (!opcode.has("parity")) return nullptr;
    return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
      std::uint32_t over = 0;
      each_lane(mask, [&](int lane) {
        BarrierState const &barrier = *barrier_at(address_of(warp, in, 1, lane), warp.block());
        over |= std::uint32_t(barrier.parity != (word(warp, in.rows[2], lane) & 1)) << lane;
      });
      if (blocks && over != mask) return Outcome::kBlocked;
      each_lane(mask, [&](int lane) { put<bool>(warp.row(in.rows[0])[lane], (over >> lane & 1) != 0); });
      return Outcome::kDone;
    };
  }
  return arrivals(opcode);
}

// Rows: the barrier at which the thread arrives when its copies have ended.
Run copies_arrive(Opcode const &opcode) {
  if (opcode.base() != "cp" || !opcode.has("mbarrier") || !opcode.has("noinc")) return nullptr;
  return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
    Warp *const self = &warp;
    each_lane(mask, [&](int lane) {
      std::uint32_t const address = address_of(warp, in, 0, lane);
      warp.copies.add([=] { arrive(*barrier_at(address, self->block()), 1); });
    });
    if (timing() == Timing::kEarly) warp.copies.end(warp.copies.started());
    return Outcome::kDone;
  };
}

// Rows: address, the words, barrier.
Run async_store(Opcode const &opcode) {
  if (opcode.base() != "st" || !opcode.has("async")) return nullptr;
  int const words = opcode.has("v4") ? 4 : opcode.has("v2") ? 2 : 1;
  if (opcode.last().substr(1) != "32") return nullptr;
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    Block *const own = &warp.block();
    each_lane(mask, [&](int lane) {
      std::uint32_t const to = address_of(warp, in, 0, lane);
      std::uint32_t const barrier = word(warp, in.row_of(2), lane) + std::uint32_t(in.offsets[1]);
      std::vector<std::uint32_t> values;
      for (int i = 0; i < words; ++i) values.push_back(word(warp, in.rows[std::size_t(1 + i)], lane));
      own->cluster.start([=] {
        Block &block = own->cluster.block_at(to, *own);
        std::size_t const bytes = 4 * values.size();
        std::memcpy(block.shared_at(to & kSharedMask, bytes, bytes), values.data(), bytes);
        complete_bytes(*barrier_at(barrier, *own), std::uint32_t(bytes));
      });
    });
    return Outcome::kDone;
  };
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

// Rows: d, perhaps p, a, b, c, mask.
Run shuffle(Opcode const &opcode) {
  if (opcode.base() != "shfl") return nullptr;
  std::string const mode(opcode.parts[2]);
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint32_t const members = word(warp, in.row_of(4), first_lane(mask)) & warp.live();
    if ((members & ~mask) != 0) return Outcome::kBlocked;
    std::uint32_t from[32];
    for (int lane = 0; lane < 32; ++lane) from[lane] = word(warp, in.row_of(1), lane);
    each_lane(mask, [&](int lane) {
      int const by = int(word(warp, in.row_of(2), lane) & 31), bounds = int(word(warp, in.row_of(3), lane));
      int const segment = bounds >> 8 & 31, clamp = bounds & 31;
      int const last = (lane & segment) | (clamp & ~segment), base = lane & segment;
      int source = mode == "up"     ? lane - by
                   : mode == "down" ? lane + by
                   : mode == "bfly" ? lane ^ by
                                    : base | (by & ~segment);
      bool const inside = mode == "up" ? source >= last : source <= last;
      if (!inside) source = lane;
      put<std::uint32_t>(warp.row(in.rows[0])[lane], from[source]);
      if (in.counts[0] == 2) put<bool>(warp.row(in.rows[1])[lane], inside);
    });
    return Outcome::kDone;
  };
}

// Rows: d, predicate, mask.
Run vote(Opcode const &opcode) {
  if (opcode.base() != "vote") return nullptr;
  bool const all = opcode.has("all"), any = opcode.has("any");
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint32_t const members = word(warp, in.rows[2], first_lane(mask)) & warp.live();
    if ((members & ~mask) != 0) return Outcome::kBlocked;
    std::uint32_t votes = 0;
    each_lane(mask, [&](int lane) { votes |= std::uint32_t(get<bool>(warp.row(in.rows[1])[lane])) << lane; });
    std::uint32_t const result = all ? votes == mask : any ? votes != 0 : votes;
    each_lane(mask, [&](int lane) { put<std::uint32_t>(warp.row(in.rows[0])[lane], result); });
    return Outcome::kDone;
  };
}

Run others(Opcode const &opcode) {
  std::string_view const base = opcode.base();
  if (base == "elect") {  // rows: the lane, whether it is this one, mask
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      std::uint32_t const members = word(warp, in.row_of(1), first_lane(mask)) & warp.live();
      if ((members & ~mask) != 0) return Outcome::kBlocked;
      int const elected = first_lane(members);
      each_lane(mask, [&](int lane) {
        put<std::uint32_t>(warp.row(in.rows[0])[lane], std::uint32_t(elected));
        put<bool>(warp.row(in.rows[1])[lane], lane == elected);
      });
      return Outcome::kDone;
    };
  }
  if (base == "mapa") {
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      each_lane(mask, [&](int lane) {
        std::uint32_t const rank = word(warp, in.rows[2], lane);
        if (rank >= warp.block().cluster.blocks.size()) fail("the cluster has no block " + std::to_string(rank));
        put<std::uint32_t>(warp.row(in.rows[0])[lane],
                           (word(warp, in.rows[1], lane) & kSharedMask) | (rank + 1) << kRankShift);
      });
      return Outcome::kDone;
    };
  }
  // Grids run one after the other, so nothing is waited for; but a warp that never asks is found (touch_global).
  if (base == "griddepcontrol" && opcode.has("wait")) {
    return [](Warp &warp, Instruction const &, std::uint32_t) {
      warp.waits_for_predecessor = false;
      return Outcome::kDone;
    };
  }
  // Memory is seen in the order in which instructions are executed.
  if (base == "griddepcontrol" || base == "fence" || base == "membar" || base == "setmaxnreg") {
    return [](Warp &, Instruction const &, std::uint32_t) { return Outcome::kDone; };
  }
  return nullptr;
}

}  // namespace

BarrierState *barrier_at(std::uint32_t address, Block &own) {
  std::uint8_t *const place = own.cluster.block_at(address, own).shared_at(address & kSharedMask, 8, 8);
  auto *const state = reinterpret_cast<BarrierState *>(place);
  if (state->missing != 0) fail("there is no barrier at " + std::to_string(address & kSharedMask) + " yet");
  return state;
}

void expect_bytes(BarrierState &barrier, std::uint32_t bytes) {
  if (barrier.bytes + bytes >= 1u << 22) fail("a barrier cannot wait for 2^21 bytes");
  barrier.bytes += bytes;
}

void complete_bytes(BarrierState &barrier, std::uint32_t bytes) {
  if (barrier.bytes < bytes) fail("2^21 bytes more than were announced have come to a barrier");
  barrier.bytes -= bytes;
  end_phase(barrier);
}

void arrive(BarrierState &barrier, std::uint32_t count) {
  if (barrier.pending < count) fail("more threads arrive at a barrier than it expects in a phase");
  barrier.pending -= count;
  end_phase(barrier);
}

Run barrier(Opcode const &opcode) {
  for (auto const find : {blocks, mbarriers, copies_arrive, async_store, shuffle, vote, others}) {
    if (Run run = find(opcode)) return run;
  }
  return nullptr;
}

}  // namespace emulator
