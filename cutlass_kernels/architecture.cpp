#include "architecture.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "op.h"

namespace cutefuse {
namespace {

constexpr Architecture kAny{0, 227, 108, kClusters | kWgmma | kFloat8Mma, false, "any GPU"};

// What the build is configured for, as CUTEFUSE_CUDA_ARCHS names it: "86" and "90a" are machine code, "100-virtual" is
// PTX.
std::vector<std::string> const &targets() {
  static std::vector<std::string> const kNames = [] {
    std::istringstream text(CUTEFUSE_TARGETS);
    return std::vector<std::string>(std::istream_iterator<std::string>(text), {});
  }();
  return kNames;
}

bool is_ptx(std::string const &target) { return target.find("-virtual") != std::string::npos; }
// Not atoi: compiled against glibc 2.38 or newer, it would need that version on every machine that installs the wheel.
int number_of(std::string const &target) {
  int number = 0;
  std::from_chars(target.data(), target.data() + target.size(), number);
  return number;
}

bool is_known(std::int32_t sm) {
  auto const same = [&](Architecture const &row) { return row.sm == sm; };
  return std::any_of(std::begin(kArchitectures), std::end(kArchitectures), same);
}

// CUDA programming guide, binary compatibility: machine code runs on graphics cards of the same major version of the
// compute capability, from its own minor version on. Code for an architecture whose name ends in `a` runs there alone.
// The driver compiles PTX for every later architecture.
bool runs_on(std::string const &target, std::int32_t sm) {
  int const number = number_of(target);
  if (is_ptx(target)) return number <= sm;
  if (number == sm || target.back() == 'a') return number == sm;
  bool const cards = is_known(sm) && !architecture(sm).tegra && !architecture(number).tegra;
  return cards && number / 10 == sm / 10 && number < sm;
}

// The code that CUDA picks for a compute capability: machine code before PTX, newer before older. Null: none runs
// there.
std::string const *code_of(std::int32_t sm) {
  auto const rank = [](std::string const &target) { return number_of(target) - (is_ptx(target) ? 1000 : 0); };
  std::string const *best = nullptr;
  for (std::string const &target : targets()) {
    if (runs_on(target, sm) && (best == nullptr || rank(target) >= rank(*best))) best = &target;
  }
  return best;
}

}  // namespace

Architecture architecture(std::int32_t sm) {
  if (sm == 0) return kAny;
  for (Architecture const &row : kArchitectures) {
    if (row.sm == sm) return row;
  }
  std::uint32_t const features = (sm >= 90 ? kClusters : kNoFeature) | (sm >= 89 ? kFloat8Mma : kNoFeature);
  return {sm, 99, kAny.sm_count, features, false, "a GPU that is not known"};
}

std::int32_t multiprocessors(std::int32_t given, std::int32_t sm) {
  return given > 0 ? given : architecture(sm).sm_count;
}

std::int32_t shared_limit(std::int32_t sm) { return architecture(sm).shared_kib * 1024; }

bool offers(std::int32_t sm, std::uint32_t needs) {
  if (sm == 0 || needs == 0) return true;
  std::string const *const code = code_of(sm);
  if (code == nullptr) return false;
  std::uint32_t used = architecture(number_of(*code)).features;
  if (code->back() != 'a') used &= ~kWgmma;
  return (needs & ~(used & architecture(sm).features)) == 0;
}

char const *code_for(std::int32_t sm) {
  std::string const *const code = code_of(sm);
  return code == nullptr ? nullptr : is_ptx(*code) ? "PTX" : "machine code";
}

char const *reject_device(std::int32_t sm) {
  if (sm == 0 || code_for(sm) != nullptr) return nullptr;
  return sentence(
      "cutefuse: a GPU of compute capability %d.%d is asked for, this library holds code for %s alone; build it with "
      "-DCUTEFUSE_CUDA_ARCHS naming that architecture if the kernels know it, or leave the model unfused",
      sm / 10, sm % 10, CUTEFUSE_TARGETS);
}

}  // namespace cutefuse
