// The tiles of a node that its builder may time, as TensorRT's custom tactics.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "op.h"

namespace cutefuse {

class Tactics {
 public:
  explicit Tactics(Op const &op) : op_(op) {}

  // The legal tiles of the first call, best guess first; of every further call, those that can run it too.
  void serve(Call const &call) {
    std::vector<std::int32_t> legal(static_cast<std::size_t>(op_.configs_table.size));
    legal.resize(static_cast<std::size_t>(op_.configs(call, legal.data(), op_.configs_table.size)));
    auto const illegal = [&](std::int32_t id) { return std::count(legal.begin(), legal.end(), id) == 0; };
    if (served_++ == 0) {
      ids_ = legal;
    } else {
      ids_.erase(std::remove_if(ids_.begin(), ids_.end(), illegal), ids_.end());
    }
  }

  // Leaves this tile alone; 0 leaves all. One that cannot run every call leaves all too, which the returned sentence
  // says: the model may have been tuned on another GPU, in another type or for other sizes.
  char const *pin(std::int32_t tile) {
    if (tile == 0) return nullptr;
    if (std::count(ids_.begin(), ids_.end(), tile) == 0) {
      return sentence(
          "attribute tile asks for %d, which cannot run this configuration here; all %d tiles that can are timed", tile,
          static_cast<int>(ids_.size()));
    }
    ids_ = {tile};
    return nullptr;
  }

  std::vector<std::int32_t> const &ids() const { return ids_; }

 private:
  Op const &op_;
  std::int32_t served_ = 0;  // calls
  std::vector<std::int32_t> ids_;
};

}  // namespace cutefuse
