// What the library asks of a stream that is captured into a CUDA graph, and changes in it. No CUDA header.
#pragma once

#include <vector>

#include "op.h"

namespace cutefuse {

// Whether the stream is being captured, and the next launch comes after something else than our kernels.
bool follows_others(void *stream);

// Whether kernels that this thread enqueues on a captured stream may run side by side. CUTEFUSE_SIDE_BY_SIDE=1 allows
// it to every thread that says nothing, 0 forbids it to all. Returns what held before.
bool let_side_by_side(bool allowed);

// While it lives, the stream's next kernel waits for those of our kernels before it whose memory it touches, and for
// none besides. What is not ours comes after all of them, and before those that follow it.
class SideBySide {
 public:
  SideBySide(Plan const &plan, Operands const &operands);
  SideBySide(SideBySide const &) = delete;
  // Lets what follows wait for all. Null when done; else the capture is lost, and this says why in a few words.
  char const *end();

 private:
  void *stream_ = nullptr;  // null: it does nothing
  std::vector<void *> awaited_;
};

}  // namespace cutefuse
