// What the architectures of GPUs have, by compute capability, and which of them the library holds code for. No CUDA
// header: the rewriter asks about GPUs of other machines.
#pragma once

#include <cstdint>

namespace cutefuse {

// What a kernel may need and not every architecture has.
enum Feature : std::uint32_t {
  kNoFeature = 0,
  kClusters = 1,   // clusters of blocks with distributed shared memory, bulk copies, dependent launches
  kWgmma = 2,      // wgmma, TMA with multicast
  kFloat8Mma = 4,  // mma.sync of float8
};
constexpr char const *kFeatureNames[] = {"clusters", "wgmma", "float8"};  // by bit

struct Architecture {
  std::int32_t sm;          // compute capability * 10; 0 stands for any GPU
  std::int32_t shared_kib;  // dynamic shared memory that one block may ask for
  std::int32_t sm_count;    // multiprocessors of `board`
  std::uint32_t features;
  bool tegra;  // a system on a chip: it runs no machine code of graphics cards, nor do they run its code
  char const *board;
};

// CUDA programming guide, appendix on compute capabilities: shared memory of a block, clusters. wgmma is of 9.0 alone
// (PTX ISA: sm_90a); 10.x, 11.x and 12.x have clusters and bulk copies, and no wgmma. mma.sync of float8 is of 8.9 and
// all newer ones: one instruction on 8.9 and 12.x, two of float16 behind a conversion on 9.0, 10.x and 11.x.
inline constexpr Architecture kArchitectures[] = {
    {80, 163, 108, kNoFeature, false, "A100"},
    {86, 99, 82, kNoFeature, false, "RTX 3090"},
    {87, 163, 16, kNoFeature, true, "Jetson AGX Orin"},
    {89, 99, 128, kFloat8Mma, false, "RTX 4090"},
    {90, 227, 132, kClusters | kWgmma | kFloat8Mma, false, "H200"},
    {100, 227, 148, kClusters | kFloat8Mma, false, "B200"},
    {103, 227, 148, kClusters | kFloat8Mma, false, "B300"},
    {110, 227, 20, kClusters | kFloat8Mma, true, "Jetson Thor"},
    {120, 99, 170, kClusters | kFloat8Mma, false, "RTX 5090"},
    {121, 99, 48, kClusters | kFloat8Mma, false, "GB10"},
};

// The oldest compute capability with these features.
constexpr std::int32_t oldest(std::uint32_t needs) {
  for (Architecture const &row : kArchitectures) {
    if ((needs & ~row.features) == 0) return row.sm;
  }
  return 0;
}

// The row of a compute capability. One that is not listed gets what every GPU from that version on has.
Architecture architecture(std::int32_t sm);

// `given` multiprocessors or, where that is 0, those of the usual board of the compute capability.
std::int32_t multiprocessors(std::int32_t given, std::int32_t sm);

// Dynamic shared memory that one block may ask for, in bytes; for sm 0 the most there is.
std::int32_t shared_limit(std::int32_t sm);

// Whether a kernel that needs these features can run: the GPU has them, and this library, or one that is built as
// configured, holds code that uses them. For sm 0 always.
bool offers(std::int32_t sm, std::uint32_t needs);

// Null when this library, or one that is built as configured, holds code that runs on the compute capability `sm`, or
// `sm` is 0; else one sentence.
char const *reject_device(std::int32_t sm);

// How this library, or one that is built as configured, runs on `sm`: "machine code", "PTX", or null.
char const *code_for(std::int32_t sm);

}  // namespace cutefuse
