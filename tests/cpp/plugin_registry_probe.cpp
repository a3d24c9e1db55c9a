// Prints the place of IPluginRegistry::registerCreator in NVIDIA's headers, and what plugins/register believes. On
// Linux a pointer to a virtual member function holds 1 + its offset in the virtual table.
#include <NvInferRuntime.h>

#include <cstdio>
#include <cstring>

#include "register/slots.h"

int main() {
  bool (nvinfer1::IPluginRegistry::*place)(nvinfer1::IPluginCreatorInterface &, nvinfer1::AsciiChar const *) noexcept =
      &nvinfer1::IPluginRegistry::registerCreator;
  std::ptrdiff_t offset = 0;
  std::memcpy(&offset, &place, sizeof(offset));
  std::printf("%td %d\n", (offset - 1) / static_cast<std::ptrdiff_t>(sizeof(void *)),
              cutefuse::register_creator_slot(NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR));
}
