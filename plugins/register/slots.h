// The slot of registerCreator(IPluginCreatorInterface &, char const *) in the virtual table of IPluginRegistry. The
// registry is the one plugin interface that TensorRT 11 changed, so register.cpp calls the function by its slot, not
// through a class. A test compares these numbers with NVIDIA's headers.
#pragma once

namespace cutefuse {

// -1 for a TensorRT whose headers nobody has compared yet: those of 10.0 to 10.16 and of 11.0 and 11.1 have been.
constexpr int register_creator_slot(int tensorrt_major, int tensorrt_minor) {
  bool const known = tensorrt_minor >= 0 && tensorrt_minor <= (tensorrt_major == 10 ? 16 : 1);
  return !known ? -1 : tensorrt_major == 10 ? 12 : tensorrt_major == 11 ? 8 : -1;
}

}  // namespace cutefuse
