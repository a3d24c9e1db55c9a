// Loads the kernel library by its path and prints what it says of itself. No header of the library, no CUDA: a program
// of another machine's architecture that runs it under an emulator is built in a second.
#include <dlfcn.h>

#include <cstdio>

int main(int count, char **argv) {
  void *library = count == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  void *describe = library ? dlsym(library, "cutefuse_describe") : nullptr;
  if (describe == nullptr) {
    std::fprintf(stderr, "describe: %s\n", count == 2 ? dlerror() : "give the path of one library");
    return 1;
  }
  std::puts(reinterpret_cast<char const *(*)()>(describe)());
}
