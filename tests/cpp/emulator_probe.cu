// Kernels that tests/test_emulator.py runs through the interpreter: arithmetic that the host does as well, and faults
// that it must name.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace {

// ---- what host and interpreter must agree on ------------------------------------------------------------------------

constexpr int kInts = 16, kFloats = 8;

__host__ __device__ void integers(std::int32_t a, std::int32_t b, std::int64_t *out) {
  std::uint32_t const u = std::uint32_t(a), v = std::uint32_t(b);
  int const by = b & 31;
  out[0] = std::int64_t(a) * b;
  out[1] = b == 0 || (a == INT32_MIN && b == -1) ? 0 : a / b;
  out[2] = b == 0 || (a == INT32_MIN && b == -1) ? 0 : a % b;
  out[3] = v == 0 ? 0 : u / v;
  out[4] = std::int32_t(u << by);
  out[5] = a >> by;
  out[6] = u >> by;
  out[7] = (std::uint64_t(u) * v) >> 32;
  out[8] = a < b ? a : b;
  out[9] = u > v ? u : v;
  out[10] = std::int8_t(a) + std::int16_t(b);
  out[11] = (a ^ b) | (~a & b);
  out[12] = std::int64_t(a) << (by + 8) >> 5;
  out[13] = a < 0 ? -std::int64_t(a) : a;
  out[14] = std::uint8_t(a) * std::uint16_t(b);
  out[15] = (std::int64_t(a) * 0x12345678) / (b | 1);
}

__host__ __device__ void floats(float a, float b, float *out) {
  out[0] = a + b;
  out[1] = a * b - b;
  out[2] = a / (b + 3.5f);
  out[3] = float(int(a * 100));
  out[4] = float(std::uint32_t(b * b * 10));
  out[5] = a > b ? a : b;
  out[6] = a != a ? 1.f : -a;
  out[7] = float(std::int64_t(a * 1e6f));
}

__global__ void arithmetic(std::int32_t const *x, float const *y, std::int64_t *ints, float *reals) {
  unsigned const i = blockIdx.x * blockDim.x + threadIdx.x;
  integers(x[2 * i], x[2 * i + 1], ints + kInts * i);
  floats(y[2 * i], y[2 * i + 1], reals + kFloats * i);
}

// The sum of a block by shuffles, votes, atomics and barriers, in a loop whose lanes leave it at different times.
__global__ void exchange(std::int32_t const *x, std::int32_t *sums) {
  __shared__ std::int32_t warps[4];
  int sum = 0, left = int(threadIdx.x) % 7;
  while (left-- > 0) sum += x[threadIdx.x];
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
  sum += __popc(__ballot_sync(~0u, threadIdx.x % 3 == 0)) + __any_sync(~0u, threadIdx.x == 40);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(sums, warps[threadIdx.x] + __shfl_sync(15u, int(threadIdx.x), 2, 4));
}

// ---- faults ---------------------------------------------------------------------------------------------------------

enum class Fault : int {
  kNone,
  kReadsBeforeItWaits,
  kHalfABarrier,
  kNoBarrier,
  kPhaseThatNeverEnds,
  kTooManyArrive,
  kBeyondShared,
  kBeyondBuffer,
  kMisaligned,
  kOtherCounts,
  kBlockThatEnded,
  kTrap,
  kEarly,  // none: a launch that may start early, of a kernel that waits
  kEarlyWithoutWait,
};

__device__ void copy_async(float *to, float const *from) {
  auto const address = std::uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

__device__ std::uint32_t barrier_address(std::uint64_t *barrier) {
  return std::uint32_t(__cvta_generic_to_shared(barrier));
}

__device__ void wait(std::uint64_t *barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "bra again;\nover:\n}" ::"r"(barrier_address(barrier)),
      "r"(parity)
      : "memory");
}

// Without a fault y = x: by cp.async, with a barrier of a phase for each thread's arrival.
__global__ void faulty(Fault fault, float const *x, float *y) {
  extern __shared__ float staged[];
  __shared__ std::uint64_t barrier;
  unsigned const i = threadIdx.x;
  if (i == 0 && fault != Fault::kNoBarrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_address(&barrier)), "r"(64) : "memory");
  }
  __syncthreads();
  if (fault == Fault::kEarly) asm volatile("griddepcontrol.wait;" ::: "memory");
  copy_async(staged + i, x + i);
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (fault != Fault::kReadsBeforeItWaits) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (fault != Fault::kPhaseThatNeverEnds || i != 5) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_address(&barrier)) : "memory");
  }
  if (fault == Fault::kTooManyArrive && i == 0) {
    for (int n = 0; n < 100; ++n) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 50;" ::"r"(barrier_address(&barrier)) : "memory");
    }
  }
  wait(&barrier, 0);
  if (fault == Fault::kHalfABarrier && i < 32) asm volatile("bar.sync 2, 64;" ::: "memory");
  if (fault == Fault::kBeyondShared) staged[64 + i] = 0;
  if (fault == Fault::kOtherCounts) asm volatile("bar.sync 1, %0;" ::"r"(i < 32 ? 64 : 96) : "memory");
  if (fault == Fault::kTrap) __trap();
  unsigned const to = fault == Fault::kBeyondBuffer ? i + 1 : i;
  if (fault == Fault::kMisaligned) {
    auto const *const four = reinterpret_cast<float4 const *>(staged + 1 + i % 8);
    y[i] = four->x + four->y + four->z + four->w;
  } else {
    y[to] = staged[i ^ 1];
  }
}

// A block that writes to the other one's shared memory, which waits for it or does not.
__global__ void __cluster_dims__(2) to_the_other(bool waits, float const *x, float *y) {
  __shared__ float here;
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (rank == 0 || waits) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    std::uint32_t other;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(other)
                 : "r"(std::uint32_t(__cvta_generic_to_shared(&here))), "r"(1 - rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(other), "f"(x[rank]) : "memory");
    if (waits) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    y[rank] = here;
  }
}

// ---- mma of float8 -------------------------------------------------------------------------------------------------

// (register,lane), of one warp: d = a * b + c.
__global__ void float8_products(std::uint32_t const *a, std::uint32_t const *b, float const *c, float *d) {
  int const lane = int(threadIdx.x);
  float sum[4] = {c[lane], c[lane + 32], c[lane + 64], c[lane + 96]};
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[lane]), "r"(a[lane + 32]), "r"(a[lane + 64]), "r"(a[lane + 96]), "r"(b[lane]), "r"(b[lane + 32]));
  for (int i = 0; i < 4; ++i) d[lane + 32 * i] = sum[i];
}

// ---- wgmma of tf32 --------------------------------------------------------------------------------------------------

// d(64,8) = a(64,8) * b(8,8) transposed, by a warpgroup, from shared memory without swizzle: 8 rows of 16 bytes are a
// core matrix, the one with the next four columns follows it.
__global__ void tf32_products(float const *a, float const *b, float *d) {
  __shared__ alignas(128) float rows[(64 + 8) * 8];
  int const thread = int(threadIdx.x);
  for (int i = thread; i < (64 + 8) * 8; i += 128) {
    int const row = i / 8, column = i % 8;
    rows[row / 8 * 64 + column / 4 * 32 + row % 8 * 4 + column % 4] = i < 64 * 8 ? a[i] : b[i - 64 * 8];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  auto const operand = [](float const *at) {
    std::uint64_t const start = __cvta_generic_to_shared(at) >> 4, leading = 128 >> 4, stride = 256 >> 4;
    return start | leading << 16 | stride << 32;
  };
  float sum[4];
  asm volatile(
      "wgmma.fence.sync.aligned;\n"
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %1, %2, %3}, %4, %5, adds, 1, 1;\n}\n"
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "l"(operand(rows)), "l"(operand(rows + 64 * 8))
      : "memory");
  for (int i = 0; i < 4; ++i) {
    d[(thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8) * 8 + thread % 4 * 2 + i % 2] = sum[i];
  }
}

}  // namespace

// Each returns the last error's text, or null. Data are the caller's, as kernels see them.
extern "C" __attribute__((visibility("default"))) char const *probe_arithmetic(int blocks, std::int32_t const *x,
                                                                               float const *y, std::int64_t *ints,
                                                                               float *reals, bool on_host) {
  if (on_host) {
    for (int i = 0; i < 32 * blocks; ++i) {
      integers(x[2 * i], x[2 * i + 1], ints + kInts * i);
      floats(y[2 * i], y[2 * i + 1], reals + kFloats * i);
    }
    return nullptr;
  }
  arithmetic<<<unsigned(blocks), 32>>>(x, y, ints, reals);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" __attribute__((visibility("default"))) char const *probe_exchange(std::int32_t const *x, std::int32_t *sum) {
  exchange<<<1, 128>>>(x, sum);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" __attribute__((visibility("default"))) char const *probe_float8(std::uint32_t const *a,
                                                                           std::uint32_t const *b, float const *c,
                                                                           float *d) {
  float8_products<<<1, 32>>>(a, b, c, d);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" __attribute__((visibility("default"))) char const *probe_tf32(float const *a, float const *b, float *d) {
  tf32_products<<<1, 128>>>(a, b, d);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" __attribute__((visibility("default"))) char const *probe_fault(int fault, float const *x, float *y) {
  if (Fault(fault) == Fault::kBlockThatEnded) {
    to_the_other<<<2, 32>>>(false, x, y);
  } else if (fault < 0) {
    to_the_other<<<2, 32>>>(true, x, y);
  } else {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1), config.blockDim = dim3(64), config.dynamicSmemBytes = 64 * sizeof(float);
    config.attrs = &early, config.numAttrs = Fault(fault) >= Fault::kEarly ? 1 : 0;
    cudaLaunchKernelEx(&config, faulty, Fault(fault), x, y);
  }
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
