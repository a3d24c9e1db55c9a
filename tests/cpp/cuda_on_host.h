// Enough of CUDA for a kernel without inline assembly to run on the host: a block is as many threads, __syncthreads()
// and the shuffles are barriers. Blocks run one after another. The test puts launches in place of <<<>>>.
#pragma once
#include <barrier>
#include <cmath>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static

struct Index {
  unsigned x;
};
struct float4 {
  float x, y, z, w;
};
using cudaStream_t = void *;
constexpr int cudaSuccess = 0;

inline thread_local Index threadIdx;
inline Index blockIdx, blockDim;
inline float tree[1024];   // dynamic shared memory
inline float lanes[1024];  // what every thread of a block offers in a shuffle
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline int cudaGetLastError() { return cudaSuccess; }
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int offset) {
  auto &warp = *warp_barriers[threadIdx.x / 32];
  lanes[threadIdx.x] = value;
  warp.arrive_and_wait();
  float const other = lanes[threadIdx.x ^ unsigned(offset)];
  warp.arrive_and_wait();
  return other;
}

template <class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel const &kernel) {
  blockDim.x = threads;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (unsigned w = 0; w < threads / 32; ++w) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < threads; ++t)
      workers.emplace_back([t, &kernel] {
        threadIdx.x = t;
        kernel();
      });
    for (auto &worker : workers) worker.join();
  }
}
