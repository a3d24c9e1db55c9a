// RMSNorm, LayerNorm and LayerNorm's backward step by step, each as simple as its idea, float32: the teaching steps in
// front of the library's kernels. Every launcher takes rows of `columns` and runs on the given stream; a step that
// cannot take a shape says so by returning false.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

__device__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// The sum of all threads' values, in all threads: warps by shuffle, then one value per warp through shared memory.
__device__ float block_sum(float value) {
  __shared__ float warps[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.f;
  return warp_sum(value);
}

// v1: a block per row, in which one thread does all the work and the others leave at once.
__global__ void rms_v1(float const *x, float const *gamma, float *y, int64_t, int columns, float epsilon) {
  if (threadIdx.x != 0) return;
  int64_t const start = int64_t(blockIdx.x) * columns;
  float squares = 0.f;
  for (int i = 0; i < columns; ++i) squares += x[start + i] * x[start + i];
  float const rstd = rsqrtf(squares / columns + epsilon);
  for (int i = 0; i < columns; ++i) y[start + i] = x[start + i] * rstd * gamma[i];
}

// One thread per row does everything. Neighbouring threads read addresses a whole row apart.
__global__ void rms_thread(float const *x, float const *gamma, float *y, int64_t rows, int columns, float epsilon) {
  int64_t const row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float squares = 0.f;
  for (int i = 0; i < columns; ++i) squares += x[row * columns + i] * x[row * columns + i];
  float const rstd = rsqrtf(squares / columns + epsilon);
  for (int i = 0; i < columns; ++i) y[row * columns + i] = x[row * columns + i] * rstd * gamma[i];
}

// v2: one block per row, one thread per column, and a tree of halves in shared memory with a barrier at each level.
__global__ void rms_v2(float const *x, float const *gamma, float *y, int64_t, int columns, float epsilon) {
  extern __shared__ float tree[];
  int64_t const start = int64_t(blockIdx.x) * columns;
  int const i = threadIdx.x;
  tree[i] = i < columns ? x[start + i] * x[start + i] : 0.f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (i < half) tree[i] += tree[i + half];
    __syncthreads();
  }
  if (i < columns) y[start + i] = x[start + i] * rsqrtf(tree[0] / columns + epsilon) * gamma[i];
}

// Four warps per row, whose loops go by the lane alone: each warp sums and writes the whole row, the same work four
// times.
__global__ void rms_again(float const *x, float const *gamma, float *y, int64_t, int columns, float epsilon) {
  int64_t const start = int64_t(blockIdx.x) * columns;
  int const lane = threadIdx.x % 32;
  float squares = 0.f;
  for (int i = lane; i < columns; i += 32) squares += x[start + i] * x[start + i];
  float const rstd = rsqrtf(warp_sum(squares) / columns + epsilon);
  for (int i = lane; i < columns; i += 32) y[start + i] = x[start + i] * rstd * gamma[i];
}

// A warp per row: what warp-wide reduction alone gives. A long row leaves much work for each of the 32 lanes.
__global__ void rms_warp(float const *x, float const *gamma, float *y, int64_t rows, int columns, float epsilon) {
  int64_t const row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  int const lane = threadIdx.x % 32;
  float squares = 0.f;
  for (int i = lane; i < columns; i += 32) squares += x[row * columns + i] * x[row * columns + i];
  float const rstd = rsqrtf(warp_sum(squares) / columns + epsilon);
  for (int i = lane; i < columns; i += 32) y[row * columns + i] = x[row * columns + i] * rstd * gamma[i];
}

// v3: a block per row, a strided loop for any length, shuffles within warps and one barrier between them.
__global__ void rms_v3(float const *x, float const *gamma, float *y, int64_t, int columns, float epsilon) {
  int64_t const start = int64_t(blockIdx.x) * columns;
  float squares = 0.f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) squares += x[start + i] * x[start + i];
  float const rstd = rsqrtf(block_sum(squares) / columns + epsilon);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) y[start + i] = x[start + i] * rstd * gamma[i];
}

// v4: v3 with 16-byte loads and stores: a quarter of the memory instructions.
__global__ void rms_v4(float4 const *x, float4 const *gamma, float4 *y, int64_t, int columns, float epsilon) {
  int const vectors = columns / 4;
  int64_t const start = int64_t(blockIdx.x) * vectors;
  float squares = 0.f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    float4 const v = x[start + i];
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  float const rstd = rsqrtf(block_sum(squares) / columns + epsilon);
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    float4 const v = x[start + i], g = gamma[i];
    y[start + i] = make_float4(v.x * rstd * g.x, v.y * rstd * g.y, v.z * rstd * g.z, v.w * rstd * g.w);
  }
}

// LayerNorm without affine parameters, one thread per row: three passes over the row.
__global__ void layer_thread(float const *x, float const *, float *y, int64_t rows, int columns, float epsilon) {
  int64_t const row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float const *const from = x + row * columns;
  float mean = 0.f, squares = 0.f;
  for (int i = 0; i < columns; ++i) mean += from[i];
  mean /= columns;
  for (int i = 0; i < columns; ++i) squares += (from[i] - mean) * (from[i] - mean);
  float const rstd = rsqrtf(squares / columns + epsilon);
  for (int i = 0; i < columns; ++i) y[row * columns + i] = (from[i] - mean) * rstd;
}

// dx of LayerNorm without affine parameters, one thread per row: dx = rstd * (dy - mean(dy) - n * mean(dy * n)), where
// n is the normalised row. https://arxiv.org/abs/1607.06450; the derivative by the chain rule over mean and variance.
__global__ void layer_backward_thread(float const *x, float const *dy, float *dx, int64_t rows, int columns,
                                      float epsilon) {
  int64_t const row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float const *const from = x + row * columns, *const given = dy + row * columns;
  float mean = 0.f, squares = 0.f, sum = 0.f, product = 0.f;
  for (int i = 0; i < columns; ++i) mean += from[i];
  mean /= columns;
  for (int i = 0; i < columns; ++i) squares += (from[i] - mean) * (from[i] - mean);
  float const rstd = rsqrtf(squares / columns + epsilon);
  for (int i = 0; i < columns; ++i) sum += given[i], product += given[i] * (from[i] - mean) * rstd;
  sum /= columns, product /= columns;
  for (int i = 0; i < columns; ++i) dx[row * columns + i] = rstd * (given[i] - sum - (from[i] - mean) * rstd * product);
}

// The same by a block per row, as v3: four sums, and a barrier before each but the first, which may still be read.
__global__ void layer_backward_block(float const *x, float const *dy, float *dx, int64_t, int columns, float epsilon) {
  float const *const from = x + int64_t(blockIdx.x) * columns, *const given = dy + int64_t(blockIdx.x) * columns;
  float mean = 0.f, squares = 0.f, sum = 0.f, product = 0.f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) mean += from[i], sum += given[i];
  mean = block_sum(mean) / columns;
  __syncthreads();
  sum = block_sum(sum) / columns;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) squares += (from[i] - mean) * (from[i] - mean);
  __syncthreads();
  float const rstd = rsqrtf(block_sum(squares) / columns + epsilon);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) product += given[i] * (from[i] - mean) * rstd;
  __syncthreads();
  product = block_sum(product) / columns;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    dx[int64_t(blockIdx.x) * columns + i] = rstd * (given[i] - sum - (from[i] - mean) * rstd * product);
}

unsigned per_thread(int64_t threads) { return unsigned((threads + kThreads - 1) / kThreads); }

}  // namespace

// other: gamma [columns] of RMSNorm, dy [rows, columns] of the backward steps; y: the result, dx of these.
extern "C" bool ladder_run(int step, float const *x, float const *other, float *y, int64_t rows, int columns,
                           float epsilon, void *stream_) {
  cudaStream_t const stream = static_cast<cudaStream_t>(stream_);
  switch (step) {
    case 1:
      rms_v1<<<unsigned(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 2:
      rms_thread<<<per_thread(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 3: {
      if (columns > 1024) return false;  // a thread for each column does not fit a block
      int threads = 32;
      while (threads < columns) threads *= 2;
      rms_v2<<<unsigned(rows), threads, threads * sizeof(float), stream>>>(x, other, y, rows, columns, epsilon);
      break;
    }
    case 4:
      rms_again<<<unsigned(rows), 128, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 5:
      rms_warp<<<per_thread(rows * 32), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 6:
      rms_v3<<<unsigned(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 7:
      if (columns % 4 != 0) return false;  // a row would start between two vectors
      rms_v4<<<unsigned(rows), kThreads, 0, stream>>>(reinterpret_cast<float4 const *>(x),
                                                      reinterpret_cast<float4 const *>(other),
                                                      reinterpret_cast<float4 *>(y), rows, columns, epsilon);
      break;
    case 8:
      layer_thread<<<per_thread(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 9:
      layer_backward_thread<<<per_thread(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    case 10:
      layer_backward_block<<<unsigned(rows), kThreads, 0, stream>>>(x, other, y, rows, columns, epsilon);
      break;
    default:
      return false;
  }
  return cudaGetLastError() == cudaSuccess;
}
