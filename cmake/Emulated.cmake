# -DCUTEFUSE_EMULATED=ON: the same library on a machine without a GPU. Its kernels are kept as PTX alone, which
# tests/emulator interprets on the CPU, and that stands in for the CUDA runtime library.
option(CUTEFUSE_EMULATED "Run the kernels on the CPU with tests/emulator" OFF)
# A unit takes nvcc a minute: only those whose path and name match are compiled, the others are not in the library.
set(CUTEFUSE_EMULATED_UNITS "^conv/.*_(kFloat16|kInt8)_" CACHE STRING "Regular expression: the kernel files to compile")

macro(cutefuse_emulator_library)
  if(CUTEFUSE_EMULATED AND NOT CUTEFUSE_HAS_CUDA)
    message(FATAL_ERROR "CUTEFUSE_EMULATED needs nvcc, which makes the PTX that is interpreted; install it")
  endif()
  set(CUTEFUSE_CUDART CUDA::cudart_static)
  if(CUTEFUSE_EMULATED)
    set(CUTEFUSE_CUDART cutefuse_emulator)
    set(CMAKE_CUDA_RUNTIME_LIBRARY None)
    set(CUTEFUSE_NVCC_PACKING -no-compress)
    file(GLOB emulator_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/emulator/*.cpp)
    add_library(cutefuse_emulator SHARED ${emulator_sources})
    cutefuse_warnings(cutefuse_emulator)
    # -O2 without NDEBUG: an assertion of the interpreter is worth its time.
    target_compile_options(cutefuse_emulator PRIVATE -O2 -UNDEBUG)
    # What CUDA's headers declare has no visibility of its own.
    set_target_properties(cutefuse_emulator PROPERTIES CXX_VISIBILITY_PRESET default)
    target_include_directories(cutefuse_emulator SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
    target_link_options(cutefuse_emulator PRIVATE -Wl,--no-undefined)
    find_package(Threads REQUIRED)
    target_link_libraries(cutefuse_emulator PRIVATE Threads::Threads)
  endif()
endmacro()
