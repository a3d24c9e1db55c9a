// What host code asks the CUDA runtime: which device is current, and how a kernel starts. No CUDA header: without CUDA
// there is no device.
#pragma once

#include <cstdint>

namespace cutefuse {

// `index` is -1 without a usable device or in a build without CUDA; sm and sm_count are then 0: any device.
struct Device {
  std::int32_t index = -1;
  std::int32_t sm = 0;  // compute capability * 10
  std::int32_t sm_count = 0;
};

// The calling thread's current device. Never leaves a CUDA error behind.
Device current_device();

// The text of a cudaError_t, null of success. It is no longer the thread's last error.
char const *text_of(std::int32_t error);

// Makes a device current for the calling thread until the scope ends: a plan runs on its own device, whichever the
// application has made current. Index -1 is no device; the scope can enter it only where no device is current.
class DeviceScope {
 public:
  explicit DeviceScope(std::int32_t index);
  ~DeviceScope();
  DeviceScope(DeviceScope const &) = delete;
  bool entered() const { return entered_; }

 private:
  std::int32_t before_;
  bool entered_, changed_ = false;
};

inline bool is_aligned(void const *data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// A kernel that takes one parameter block by value. `function` is null where this library does not hold it.
struct Kernel {
  void const *function = nullptr;
  std::int32_t threads = 0;
  std::int32_t shared_bytes = 0;  // dynamic
};

constexpr std::int64_t kMostBlocks = 0x7fffffff;  // of one launch

struct Launch {
  Kernel kernel;
  std::int64_t blocks = 0;
  std::int32_t cluster = 1;  // blocks that share memory
  bool early = false;        // may start before the stream's previous kernel has ended, and waits for it itself
};

// prepare() and start() return null when done, else what is wrong, in a few words for a sentence.
// Checks that the grid can be launched and, if the current device is to run it (`here`), allows the kernel its shared
// memory there.
char const *prepare(Launch const &launch, bool here);
// Enqueues the kernel on `stream`, a cudaStream_t, with a copy of the parameter block at `params`.
char const *start(Launch const &launch, void *params, void *stream);

// How many clusters of `cluster` blocks run at once on the current device, which depends on how its multiprocessors are
// grouped; 0 when CUDA does not say.
std::int32_t clusters_at_once(Kernel const &kernel, std::int32_t cluster);

}  // namespace cutefuse
