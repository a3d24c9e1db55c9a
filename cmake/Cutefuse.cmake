# The build recipe: compiler discovery, warnings, and what one line `cutefuse_op(<stem>)` adds.

find_program(CUTEFUSE_CCACHE ccache)
if(CUTEFUSE_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CUTEFUSE_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CUTEFUSE_CCACHE})
endif()

set(CUTEFUSE_HAS_CUDA OFF)
if(CUTEFUSE_CUDA)
  include(CheckLanguage)
  # check_language() never looks again once it found nothing: forget that, nvcc may have been installed since.
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  # The architectures are set per target below; OFF keeps CMake from adding its own.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CUTEFUSE_HAS_CUDA ON)
    cutefuse_check_architectures()
  else()
    message(STATUS "no CUDA compiler found: building without kernels (install nvcc to get them)")
  endif()
endif()

# CUTLASS headers: -DCUTLASS_DIR, the nvidia-cutlass wheel of the Python that runs the build, or GitHub as last resort.
function(cutefuse_find_cutlass out)
  if(CUTLASS_DIR)
    set(${out} ${CUTLASS_DIR} PARENT_SCOPE)
    return()
  endif()
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found AND EXISTS ${found}/source/include/cute/tensor.hpp)
    set(${out} ${found}/source/include PARENT_SCOPE)
    return()
  endif()
  # An isolated build does not see the environment's wheel: download it beside the build, without its dependencies.
  set(unpacked ${CMAKE_BINARY_DIR}/cutlass)
  if(NOT EXISTS ${unpacked}/cutlass_library)
    execute_process(COMMAND ${Python3_EXECUTABLE} -m pip download -q --no-deps -d ${unpacked} nvidia-cutlass==4.2.0.0
                    OUTPUT_QUIET ERROR_QUIET)
    file(GLOB wheel ${unpacked}/nvidia_cutlass-*.whl)
    if(wheel)
      file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${unpacked})
    endif()
  endif()
  if(EXISTS ${unpacked}/cutlass_library/source/include/cute/tensor.hpp)
    set(${out} ${unpacked}/cutlass_library/source/include PARENT_SCOPE)
    return()
  endif()
  message(STATUS "nvidia-cutlass wheel not found; fetching CUTLASS 4.2.0 (pip install --no-deps nvidia-cutlass==4.2.0.0)")
  include(FetchContent)
  FetchContent_Declare(cutlass GIT_REPOSITORY https://github.com/NVIDIA/cutlass.git GIT_TAG v4.2.0 GIT_SHALLOW ON
                       SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(cutlass)
  set(${out} ${cutlass_SOURCE_DIR}/include PARENT_SCOPE)
endfunction()

# The compiler takes up to 6 GB for each front end of the largest kernel file. So no more files are compiled at once than
# fit into memory, or the machine would swap for hours. With more than four cores, the front ends of a file run at once.
function(cutefuse_compile_jobs target)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  cmake_host_system_information(RESULT memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
  set(threads 1)
  if(cores GREATER 4)
    cutefuse_front_ends(front_ends "${CUTEFUSE_CUDA_ARCHS}")
    list(LENGTH front_ends threads)
  endif()
  math(EXPR jobs "${memory_mb} / (6500 * ${threads})")
  if(jobs LESS 1)
    set(jobs 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutefuse_compile=${jobs})
  set_property(TARGET ${target} PROPERTY JOB_POOL_COMPILE cutefuse_compile)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-t=${threads}>)
endfunction()

function(cutefuse_warnings target)
  target_compile_options(
    ${target}
    PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Werror>
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Werror;-Werror=all-warnings;-Xptxas=-warn-spills,-Werror>")
endfunction()

# -DTENSORRT_INCLUDE_DIR: NVIDIA's headers, which need the CUDA toolkit's, instead of plugins/tensorrt_abi.h.
function(cutefuse_tensorrt_headers target)
  if(NOT TENSORRT_INCLUDE_DIR)
    return()
  endif()
  find_package(CUDAToolkit REQUIRED)
  target_include_directories(${target} SYSTEM PRIVATE ${TENSORRT_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(${target} PRIVATE CUTEFUSE_NVIDIA_HEADERS=1)
endfunction()

macro(cutefuse_library)
  file(GLOB conv_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cutlass_kernels/conv/*.cpp
       ${CMAKE_SOURCE_DIR}/cutlass_kernels/conv/*/*.cpp)
  add_library(cutefuse SHARED cutlass_kernels/architecture.cpp cutlass_kernels/branches.cpp cutlass_kernels/c_api.cpp
                              cutlass_kernels/capture.cpp cutlass_kernels/device.cpp cutlass_kernels/op.cpp ${conv_sources}
                              plugins/attributes.cpp plugins/fused_plugin.cpp plugins/entry.cpp)
  cutefuse_warnings(cutefuse)
  cutefuse_tensorrt_headers(cutefuse)
  target_include_directories(cutefuse PRIVATE ${CMAKE_SOURCE_DIR}/cutlass_kernels ${CMAKE_SOURCE_DIR}/plugins
                                              ${CMAKE_BINARY_DIR}/generated)
  # A library without kernels judges for every GPU that they are written for: another machine's library will run them.
  string(REPLACE ";" " " targets "${CUTEFUSE_ALL_ARCHS}")
  set(archs none)
  set(cuda_version "")
  if(CUTEFUSE_HAS_CUDA)
    cutefuse_find_cutlass(cutlass_include)
    target_include_directories(cutefuse SYSTEM PRIVATE ${cutlass_include})
    # A wheel goes without the line numbers that profilers show.
    set(lines $<$<NOT:$<OR:$<BOOL:${SKBUILD}>,$<BOOL:${CUTEFUSE_EMULATED}>>>:-lineinfo>)
    set(options --expt-relaxed-constexpr ${lines} ${CUTEFUSE_NVCC_PACKING})
    target_compile_options(cutefuse PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${options}>")
    cutefuse_compile_jobs(cutefuse)
    target_link_libraries(cutefuse PRIVATE ${CUTEFUSE_CUDART})
    string(REPLACE ";" " " targets "${CUTEFUSE_CUDA_ARCHS}")
    set(archs ${targets})
    set(cuda_version ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})
  endif()
  cutefuse_contents("${archs}" "${cuda_version}")
  target_compile_definitions(
    cutefuse
    # The version is of the C++ files alone: a new one compiles no kernel again.
    PRIVATE $<$<COMPILE_LANGUAGE:CXX>:CUTEFUSE_VERSION="${PROJECT_VERSION}"> CUTEFUSE_ARCHS="${archs}"
            CUTEFUSE_TARGETS="${targets}" CUTEFUSE_CUDA_VERSION="${cuda_version}"
            CUTEFUSE_WITH_CUDA=$<BOOL:${CUTEFUSE_HAS_CUDA}>
            CUTEFUSE_HAS_CUDA="$<IF:$<BOOL:${CUTEFUSE_HAS_CUDA}>,true,false>")
  set(exports ${CMAKE_SOURCE_DIR}/plugins/exports.map)
  target_link_options(cutefuse PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,--version-script=${exports})
  set_property(TARGET cutefuse APPEND PROPERTY LINK_DEPENDS ${exports})
  set(CUTEFUSE_OP_LIST "")
  set(CUTEFUSE_PLUGIN_LIST "")
  set(CUTEFUSE_conv_KERNELS "")
  set(CUTEFUSE_row_norm_KERNELS "")
  set(CUTEFUSE_window_KERNELS "")
endmacro()

# Adds cutlass_kernels/<stem>/*.cpp and plugins/<stem>.cpp.
macro(cutefuse_op stem)
  file(GLOB host_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cutlass_kernels/${stem}/*.cpp)
  target_sources(cutefuse PRIVATE ${host_sources})
  if(EXISTS ${CMAKE_SOURCE_DIR}/plugins/${stem}.cpp)
    target_sources(cutefuse PRIVATE ${CMAKE_SOURCE_DIR}/plugins/${stem}.cpp)
    string(APPEND CUTEFUSE_PLUGIN_LIST "CUTEFUSE_OP(${stem})\n")
  endif()
  string(APPEND CUTEFUSE_OP_LIST "CUTEFUSE_OP(${stem})\n")
endmacro()

# Adds an operator's kernels of one number type where nvcc is: a translation unit for each group of tiles, so that they
# compile in parallel. <path>/launch.cuh says what a unit holds.
macro(cutefuse_kernels stem path type element)
  cutefuse_gencode(gencode "${path}" "${type}")
  set(tiles "")
  if(EXISTS ${CMAKE_SOURCE_DIR}/cutlass_kernels/${stem}/tiles.h)
    set(tiles "#include \"${stem}/tiles.h\"\n")
  endif()
  if(CUTEFUSE_HAS_CUDA AND gencode)
    foreach(group ${ARGN})
      if(CUTEFUSE_EMULATED AND NOT "${path}/${stem}_${type}_${group}" MATCHES "${CUTEFUSE_EMULATED_UNITS}")
        continue()
      endif()
      set(unit "CUTEFUSE_KERNELS(${stem}, ${type}, ${group}, ${element})\n")
      set(source ${CMAKE_BINARY_DIR}/generated/${path}/${stem}_${type}_${group}.cu)
      file(CONFIGURE OUTPUT ${source} CONTENT "${tiles}#include \"${path}/launch.cuh\"\n${unit}")
      target_sources(cutefuse PRIVATE ${source})
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${gencode}")
      string(REGEX MATCH "^[a-z_]+" family ${path})
      string(APPEND CUTEFUSE_${family}_KERNELS ${unit})
    endforeach()
  endif()
endmacro()

# The plugin host (see cutefuse_host/) always uses plugins/tensorrt_abi.h: driving a library built with NVIDIA's headers tests both.
function(cutefuse_host_library)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cutefuse_host/src/*.cpp)
  add_library(cutefuse_host SHARED ${sources})
  cutefuse_warnings(cutefuse_host)
  target_include_directories(cutefuse_host PRIVATE ${CMAKE_SOURCE_DIR}/plugins)
  target_compile_definitions(cutefuse_host PRIVATE CUTEFUSE_WITH_CUDA=$<BOOL:${CUTEFUSE_HAS_CUDA}>)
  target_link_libraries(cutefuse_host PRIVATE ${CMAKE_DL_LIBS} $<$<BOOL:${CUTEFUSE_HAS_CUDA}>:${CUTEFUSE_CUDART}>)
  target_link_options(cutefuse_host PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
  install(TARGETS cutefuse_host LIBRARY DESTINATION cutefuse/lib COMPONENT cutefuse)
endfunction()

# For tools that only dlopen a plugin library; it finds libcutefuse.so beside itself.
function(cutefuse_register_library)
  add_library(cutefuse_register SHARED ${CMAKE_SOURCE_DIR}/plugins/register/register.cpp)
  cutefuse_warnings(cutefuse_register)
  target_include_directories(cutefuse_register PRIVATE ${CMAKE_SOURCE_DIR}/plugins)
  target_link_libraries(cutefuse_register PRIVATE ${CMAKE_DL_LIBS})
  target_link_options(cutefuse_register PRIVATE -Wl,--no-undefined)
  install(TARGETS cutefuse_register LIBRARY DESTINATION cutefuse/lib COMPONENT cutefuse)
endfunction()

macro(cutefuse_finish)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/op_list.inc CONTENT "${CUTEFUSE_OP_LIST}")
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/plugin_list.inc CONTENT "${CUTEFUSE_PLUGIN_LIST}")
  foreach(family conv row_norm window)
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/${family}_kernels.inc CONTENT "${CUTEFUSE_${family}_KERNELS}")
  endforeach()
  cutefuse_host_library()
  cutefuse_register_library()
  install(TARGETS cutefuse LIBRARY DESTINATION cutefuse/lib COMPONENT cutefuse)
endmacro()
