// TMA: loads of boxes into shared memory, which tell a barrier, and stores from it.
#include "mbarrier.h"
#include "tensor_map.h"

namespace emulator {

namespace {

TensorMap const &map_at(Warp &warp, int row, int lane) {
  std::uint64_t const address = warp.row(row)[lane];
  if (address % 64 != 0) fail("the address of a tensor map is not aligned to 64 bytes");
  return *reinterpret_cast<TensorMap const *>(address);
}

int rank_of(Opcode const &opcode) {
  for (char rank = '1'; rank <= '5'; ++rank) {
    if (opcode.has(std::string{rank, 'd'})) return rank - '0';
  }
  fail("a load of a tensor without its rank");
}

// Operands: destination, map with coordinates, barrier, the offsets of im2col, the blocks of a multicast, cache hint.
Run load_box(Opcode const &opcode) {
  int const rank = rank_of(opcode);
  bool const im2col = opcode.has("im2col"), multicast = opcode.has("multicast::cluster");
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    Block *const own = &warp.block();
    warp.touch_global();
    each_lane(mask, [&](int lane) {
      auto const word = [&](int row) { return get<std::uint32_t>(warp.row(row)[lane]); };
      std::uint32_t const to = word(in.row_of(0)), barrier = word(in.row_of(2));
      TensorMap const *const map = &map_at(warp, in.rows[1], lane);
      std::vector<int> coordinates(5, 0);
      for (int i = 0; i < rank; ++i) coordinates[std::size_t(i)] = int(word(in.rows[std::size_t(2 + i)]));
      std::vector<unsigned> offsets;
      for (int i = 0; im2col && i < rank - 2; ++i) {
        offsets.push_back(word(in.rows[std::size_t(in.counts[0] + in.counts[1] + in.counts[2] + i)]) & 0xffff);
      }
      std::uint32_t blocks = 0;
      if (multicast) blocks = word(in.row_of(im2col ? 4 : 3)) & 0xffff;
      auto const bytes = std::uint32_t(box_bytes(*map));
      auto const fill = [=](Block &block, std::uint32_t rank_bits) {
        load_to_shared(*map, coordinates.data(), im2col ? offsets.data() : nullptr, block.shared.data(),
                       to & kSharedMask, std::uint32_t(block.shared.size()));
        complete_bytes(*barrier_at(rank_bits == 0 ? barrier : (barrier & kSharedMask) | rank_bits, *own), bytes);
      };
      if (!multicast) {
        own->cluster.start([=] { fill(own->cluster.block_at(to, *own), 0); });
      }
      for (std::uint32_t rank_to = 0; blocks >> rank_to != 0; ++rank_to) {
        std::uint32_t const bits = (rank_to + 1) << kRankShift;
        if ((blocks >> rank_to & 1) != 0) own->cluster.start([=] { fill(own->cluster.block_at(bits, *own), bits); });
      }
    });
    return Outcome::kDone;
  };
}

// Operands: destination, global address, bytes, barrier.
Outcome load_bytes(Warp &warp, Instruction const &in, std::uint32_t mask) {
  Block *const own = &warp.block();
  warp.touch_global();
  each_lane(mask, [&](int lane) {
    auto const word = [&](int operand) { return get<std::uint32_t>(warp.row(in.row_of(operand))[lane]); };
    std::uint32_t const to = word(0), bytes = word(2), barrier = word(3);
    std::uint64_t const from = warp.row(in.row_of(1))[lane];
    if (bytes % 16 != 0) fail("TMA copies multiples of 16 bytes, not " + std::to_string(bytes));
    own->cluster.start([=] {
      if (bytes > 0) {
        std::uint8_t *const place = own->cluster.block_at(to, *own).shared_at(to & kSharedMask, bytes, 16);
        std::memcpy(place, global_at(from, bytes, 16), bytes);
      }
      complete_bytes(*barrier_at(barrier, *own), bytes);
    });
  });
  return Outcome::kDone;
}

// Operands: map with coordinates, source.
Run store_box(Opcode const &opcode) {
  int const rank = rank_of(opcode);
  bool const im2col = opcode.has("im2col_no_offs");
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    Block *const own = &warp.block();
    warp.touch_global();
    each_lane(mask, [&](int lane) {
      TensorMap const *const map = &map_at(warp, in.rows[0], lane);
      std::vector<int> coordinates(5, 0);
      for (int i = 0; i < rank; ++i)
        coordinates[std::size_t(i)] = get<int>(warp.row(in.rows[std::size_t(1 + i)])[lane]);
      auto const from = get<std::uint32_t>(warp.row(in.row_of(1))[lane]);
      Effect const effect = [=] {
        store_from_shared(*map, coordinates.data(), im2col, own->shared.data(), from,
                          std::uint32_t(own->shared.size()));
      };
      if (timing() == Timing::kEarly) {
        effect();
      } else {
        warp.stores.add(effect);
      }
    });
    return Outcome::kDone;
  };
}

}  // namespace

Run tensor_memory(Opcode const &opcode) {
  if (opcode.base() != "cp" || !opcode.has("bulk")) return nullptr;
  if (opcode.has("commit_group")) {
    return [](Warp &warp, Instruction const &, std::uint32_t) { return warp.stores.commit(), Outcome::kDone; };
  }
  if (opcode.has("wait_group")) {  // .read too: what has been read has also been written
    return [](Warp &warp, Instruction const &in, std::uint32_t mask) {
      warp.stores.end(warp.stores.before(std::size_t(warp.row(in.rows[0])[first_lane(mask)])));
      return Outcome::kDone;
    };
  }
  if (!opcode.has("tensor")) return opcode.parts[3] == "shared::cluster" ? Run(load_bytes) : nullptr;
  // The destination comes first: cp.async.bulk.tensor.2d.shared::cluster.global loads.
  for (std::string_view const part : opcode.parts) {
    if (part == "shared::cluster" || part == "shared::cta") return load_box(opcode);
    if (part == "global") return store_box(opcode);
  }
  return nullptr;
}

}  // namespace emulator
