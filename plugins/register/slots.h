// Where IPluginRegistry keeps registerCreator(IPluginCreatorInterface &, char const *): the registry's virtual table is
// the one interface of plugins that TensorRT 11 changed, so it is called by place and never by class. A test compares
// these numbers with NVIDIA's headers.
#pragma once

namespace cutefuse {

// -1 for a TensorRT that this library does not know.
constexpr int register_creator_slot(int tensorrt_major) {
  return tensorrt_major == 10 ? 12 : tensorrt_major == 11 ? 8 : -1;
}

}  // namespace cutefuse
