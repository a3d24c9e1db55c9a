// NVIDIA documents the wrapper in fatbinary_section.h. What it points to was read off the objects of nvcc 13.0.
#include "fatbin.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace emulator {
namespace {

constexpr std::uint32_t kWrapperMagic = 0x466243b1, kHeaderMagic = 0xba55ed50;
constexpr std::uint16_t kPtxKind = 1;

struct Wrapper {
  std::uint32_t magic, version;
  unsigned char const *data;
  void *more;
};

struct Header {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;  // of the entries, which follow
};

struct Entry {
  std::uint16_t kind, version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;  // of the payload, which follows the header
  std::uint32_t compressed_bytes, options;
  std::uint16_t minor, major;
  std::uint32_t sm;
};

template <class T>
T read(unsigned char const *data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

Ptx parse_entry(Entry const &entry, unsigned char const *payload) {
  std::string_view text(reinterpret_cast<char const *>(payload), entry.bytes);
  text = text.substr(0, text.find('\0'));  // padded to eight bytes
  std::size_t const target = text.find(".target sm_");
  if (entry.compressed_bytes != 0 || target == text.npos) {
    throw std::runtime_error("the PTX of sm_" + std::to_string(entry.sm) +
                             " in this fat binary is compressed; compile it with nvcc's -no-compress");
  }
  std::size_t const number = target + std::strlen(".target sm_");
  std::size_t const end = text.find_first_not_of("0123456789", number);
  return {std::atoi(std::string(text.substr(number, end - number)).c_str()), text.substr(end, 1) == "a", text};
}

}  // namespace

std::vector<Ptx> ptx_in(void const *wrapper) {
  auto const outer = read<Wrapper>(static_cast<unsigned char const *>(wrapper));
  if (outer.magic != kWrapperMagic || read<Header>(outer.data).magic != kHeaderMagic) {
    throw std::runtime_error("a kernel file was registered with something that is no fat binary of CUDA 13");
  }
  auto const header = read<Header>(outer.data);
  unsigned char const *next = outer.data + header.header_bytes, *const end = next + header.bytes;
  std::vector<Ptx> found;
  while (next + sizeof(Entry) <= end) {
    auto const entry = read<Entry>(next);
    if (entry.kind == kPtxKind) found.push_back(parse_entry(entry, next + entry.header_bytes));
    next += entry.header_bytes + entry.bytes;
  }
  if (found.empty()) {
    throw std::runtime_error("this fat binary holds no PTX; compile it with code=compute_90a, not code=sm_90a");
  }
  return found;
}

Ptx const *choose(std::vector<Ptx> const &all, int sm) {
  Ptx const *best = nullptr;
  for (Ptx const &ptx : all) {
    bool const runs = ptx.alone ? ptx.sm == sm : ptx.sm <= sm;
    if (runs && (best == nullptr || ptx.sm > best->sm)) best = &ptx;
  }
  return best;
}

}  // namespace emulator
