// Loads, stores and cp.async, and which global memory a kernel may touch.
#include <map>

#include "machine.h"

namespace emulator {

namespace {

std::map<std::uint64_t, std::uint64_t> &allowed() {
  static std::map<std::uint64_t, std::uint64_t> ranges;  // first address: bytes
  return ranges;
}

enum class Space { kParameter, kShared, kCluster, kGlobal, kGeneric };

Space space_of(Opcode const &opcode) {
  if (opcode.has("param")) return Space::kParameter;
  if (opcode.has("shared")) return Space::kShared;
  if (opcode.has("shared::cta")) return Space::kShared;
  if (opcode.has("shared::cluster")) return Space::kCluster;
  return opcode.has("global") ? Space::kGlobal : Space::kGeneric;
}

std::uint8_t *at(Warp &warp, Space space, std::uint64_t address, std::size_t bytes) {
  Block &own = warp.block();
  if (space == Space::kParameter) return own.cluster.parameters + address;
  if (space == Space::kGeneric && (address & ~std::uint64_t(~0u)) == kGenericShared) space = Space::kCluster;
  if (space == Space::kShared || space == Space::kCluster) {
    auto const word = std::uint32_t(address);
    return own.cluster.block_at(word, own).shared_at(word & kSharedMask, bytes, bytes);
  }
  warp.touch_global();
  return global_at(address, bytes, bytes);
}

struct Access {
  Space space;
  int vector, bytes;  // elements, and bytes of one
  bool is_signed;

  explicit Access(Opcode const &opcode)
      : space(space_of(opcode)),
        vector(opcode.has("v4")   ? 4
               : opcode.has("v2") ? 2
                                  : 1) {
    std::string_view const type = opcode.last();
    bytes = std::atoi(std::string(type.substr(type.find_first_of("0123456789"))).c_str()) / 8;
    is_signed = type[0] == 's';
  }
  std::size_t all_bytes() const { return std::size_t(vector * bytes); }
};

std::uint64_t extended(std::uint64_t value, Access const &access) {
  if (!access.is_signed || access.bytes > 2) return value;
  return access.bytes == 1 ? std::uint32_t(std::int8_t(value)) : std::uint32_t(std::int16_t(value));
}

// Rows: the elements, the address.
Run load(Access const access) {
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint64_t const *const address = warp.row(in.rows[std::size_t(access.vector)]);
    each_lane(mask, [&](int lane) {
      std::uint8_t const *const from =
          at(warp, access.space, address[lane] + std::uint64_t(in.offsets[0]), access.all_bytes());
      for (int i = 0; i < access.vector; ++i) {
        std::uint64_t value = 0;
        std::memcpy(&value, from + i * access.bytes, std::size_t(access.bytes));
        warp.row(in.rows[std::size_t(i)])[lane] = extended(value, access);
      }
    });
    return Outcome::kDone;
  };
}

// Rows: the address, the elements.
Run store(Access const access) {
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::uint64_t const *const address = warp.row(in.rows[0]);
    each_lane(mask, [&](int lane) {
      std::uint8_t *const to = at(warp, access.space, address[lane] + std::uint64_t(in.offsets[0]), access.all_bytes());
      for (int i = 0; i < access.vector; ++i) {
        std::memcpy(to + i * access.bytes, &warp.row(in.rows[std::size_t(1 + i)])[lane], std::size_t(access.bytes));
      }
    });
    return Outcome::kDone;
  };
}

// Rows: shared address, global address, bytes and, where fewer are read, how many of them; the rest is zero.
Outcome copy_async(Warp &warp, Instruction const &in, std::uint32_t mask) {
  Warp *const self = &warp;
  each_lane(mask, [&](int lane) {
    auto const value = [&](std::size_t operand) { return warp.row(in.rows[operand])[lane]; };
    std::uint64_t const to = value(0) + std::uint64_t(in.offsets[0]), from = value(1) + std::uint64_t(in.offsets[1]);
    std::size_t const bytes = std::uint32_t(value(2));
    std::size_t const read = in.rows.size() > 3 ? std::min<std::size_t>(std::uint32_t(value(3)), bytes) : bytes;
    if (read > 0) warp.touch_global();
    Effect const effect = [=] {
      std::uint8_t *const place = at(*self, Space::kShared, to, bytes);
      std::memset(place, 0, bytes);
      if (read > 0) std::memcpy(place, global_at(from, read, bytes), read);
    };
    if (timing() == Timing::kEarly) {
      effect();
    } else {
      warp.copies.add(effect);
    }
  });
  return Outcome::kDone;
}

Run copies(Opcode const &opcode) {
  if (opcode.base() != "cp" || opcode.has("bulk") || opcode.has("mbarrier")) return nullptr;
  if (opcode.has("commit_group")) {
    return [](Warp &warp, Instruction const &, std::uint32_t) { return warp.copies.commit(), Outcome::kDone; };
  }
  if (opcode.has("wait_all")) {
    return [](Warp &warp, Instruction const &, std::uint32_t) {
      return warp.copies.end(warp.copies.started()), Outcome::kDone;
    };
  }
  if (opcode.has("wait_group")) {
    return [](Warp &warp, Instruction const &in, std::uint32_t) {
      warp.copies.end(warp.copies.before(std::size_t(warp.row(in.rows[0])[0])));
      return Outcome::kDone;
    };
  }
  return copy_async;
}

// Rows d, address, value: the sum, and what was there before.
template <class T>
Run add_to_memory(Space space, bool returns) {
  return [=](Warp &warp, Instruction const &in, std::uint32_t mask) {
    std::size_t const address = returns ? 1 : 0;
    each_lane(mask, [&](int lane) {
      std::uint64_t const where = warp.row(in.rows[address])[lane] + std::uint64_t(in.offsets[0]);
      std::uint8_t *const place = at(warp, space, where, sizeof(T));
      T before;
      std::memcpy(&before, place, sizeof(T));
      T const after = before + get<T>(warp.row(in.rows[address + 1])[lane]);
      std::memcpy(place, &after, sizeof(T));
      if (returns) put<T>(warp.row(in.rows[0])[lane], before);
    });
    return Outcome::kDone;
  };
}

Run atomics(Opcode const &opcode) {
  bool const returns = opcode.base() == "atom";
  if ((!returns && opcode.base() != "red") || !opcode.has("add")) return nullptr;
  Space const space = space_of(opcode);
  if (opcode.last() == "f32") return add_to_memory<float>(space, returns);
  if (opcode.last() == "u32" || opcode.last() == "s32") return add_to_memory<std::uint32_t>(space, returns);
  return nullptr;
}

}  // namespace

void allow(void const *data, std::size_t bytes) { allowed()[reinterpret_cast<std::uint64_t>(data)] = bytes; }

void forbid(void const *data) { allowed().erase(reinterpret_cast<std::uint64_t>(data)); }

std::uint8_t *global_at(std::uint64_t address, std::size_t bytes, std::size_t alignment) {
  if (address % alignment != 0) fail("the global address is not aligned to " + std::to_string(alignment) + " bytes");
  auto const &ranges = allowed();
  if (!ranges.empty()) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin() || address + bytes > (--next)->first + next->second) {
      std::string const before =
          next == ranges.end() || next->first > address
              ? "before the first buffer"
              : std::to_string(address - next->first) + " bytes into a buffer of " + std::to_string(next->second);
      fail("the kernel touches global memory that is not its own, " + before);
    }
  }
  return reinterpret_cast<std::uint8_t *>(address);
}

Run memory(Opcode const &opcode) {
  if (opcode.base() == "ld") return load(Access(opcode));
  if (opcode.base() == "st" && !opcode.has("async")) return store(Access(opcode));
  if (opcode.base() == "prefetch" || opcode.base() == "prefetchu") {
    return [](Warp &, Instruction const &, std::uint32_t) { return Outcome::kDone; };
  }
  for (auto const find : {copies, atomics}) {
    if (Run run = find(opcode)) return run;
  }
  return nullptr;
}

}  // namespace emulator
