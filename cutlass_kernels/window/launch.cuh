// The kernels of windows for one number type. A thread computes one vector of 16 bytes of one output pixel or, of a
// linear Resize, of four neighbouring ones, which lie between the same pixels where an image is enlarged. Neighbouring
// threads have neighbouring vectors. The L1 cache serves the pixels that neighbouring windows share.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "dependent_launch.cuh"
#include "window/problem.h"

namespace cutefuse::window {

template <class Element>
struct Traits {
  static constexpr int kVector = kVectorBytes / int(sizeof(Element));
  using Values = cutlass::Array<float, kVector>;

  static __device__ __forceinline__ Values to_float(uint4 const &rX) {
    return cutlass::NumericArrayConverter<float, Element, kVector>{}(
        reinterpret_cast<cutlass::Array<Element, kVector> const &>(rX));
  }
  static __device__ __forceinline__ uint4 from_float(Values const &rX) {
    auto const rY = cutlass::NumericArrayConverter<Element, float, kVector>{}(rX);
    return reinterpret_cast<uint4 const &>(rY);
  }
  // Of two registers, NaN where one is NaN.
  static __device__ __forceinline__ uint32_t largest(uint32_t a, uint32_t b) {
    uint32_t r;
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
  }
  static __device__ __forceinline__ uint32_t least() {
    return sizeof(Element) == 4 ? 0xff800000u : std::is_same_v<Element, cutlass::half_t> ? 0xfc00fc00u : 0xff80ff80u;
  }
};

// ---- where a thread's outputs lie, and what they read ---------------------------------------------------------------

struct Place {
  char const *image;  // the thread's vector of the image's first pixel
  int64_t pixel;      // bytes from pixel to pixel
  char *y;            // the thread's vector of its first output pixel
  int p, q;

  __device__ __forceinline__ Place(Params const &params, int item, int columns) {
    Problem const &problem = params.problem;
    int const group = params.by_vectors.divide(item), row = params.by_groups.divide(group);
    int const n = params.by_rows.divide(row);
    int vector = item - group * params.by_vectors.divisor, source = 0;
    q = (group - row * params.by_groups.divisor) * columns, p = row - n * params.by_rows.divisor;
    y = static_cast<char *>(params.y) + (int64_t(row) * problem.Q + q) * problem.output_pixel + vector * kVectorBytes;
    for (; vector >= problem.vectors[source]; ++source) vector -= problem.vectors[source];
    pixel = problem.pixel[source];
    image = static_cast<char const *>(params.x[source]) + int64_t(n) * problem.H * problem.W * pixel +
            vector * kVectorBytes;
  }
};

__device__ __forceinline__ uint4 load(char const *from) { return __ldg(reinterpret_cast<uint4 const *>(from)); }

// As assembly, because the compiler splits a store of 16 bytes into elements.
__device__ __forceinline__ void store(char *to, uint4 const &r) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
}

// ---- pools ----------------------------------------------------------------------------------------------------------

// Calls visit(pixel, whether it is inside of the image) for each pixel of a window. kSide: R and S, 0 for any.
template <int kSide, class Visit>
__device__ __forceinline__ void over_window(Problem const &p, Place const &place, Visit const &visit) {
  int const h0 = place.p * p.stride_h - p.pad_top, w0 = place.q * p.stride_w - p.pad_left;
  auto const row = [&](int r) {
    int const h = h0 + r * p.dilation_h;
    char const *const from = place.image + int64_t(h) * p.W * place.pixel;
    auto const tap = [&](int s) {
      int const w = w0 + s * p.dilation_w;
      visit(from + w * place.pixel, unsigned(h) < unsigned(p.H) && unsigned(w) < unsigned(p.W));
    };
    if constexpr (kSide > 0) {
#pragma unroll
      for (int s = 0; s < kSide; ++s) tap(s);
    } else {
#pragma unroll 4
      for (int s = 0; s < p.S; ++s) tap(s);
    }
  };
  if constexpr (kSide > 0) {
#pragma unroll
    for (int r = 0; r < kSide; ++r) row(r);
  } else {
#pragma unroll 1
    for (int r = 0; r < p.R; ++r) row(r);
  }
}

// The pixels of a window of known size are loaded at once: fewer blocks of larger ones share a multiprocessor.
template <class Element, int kSide>
__global__ void __launch_bounds__(kThreads, kSide > 3 ? kBlocks / 2 : kBlocks)
    window_max(__grid_constant__ Params const params) {
  using T = Traits<Element>;
  wait_and_let_next_start();
  int const item = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (item >= params.items) return;
  Place const place(params, item, 1);
  uint32_t const least = T::least();
  uint4 rY{least, least, least, least};
  over_window<kSide>(params.problem, place, [&](char const *from, bool inside) {
    uint4 const rX = inside ? load(from) : uint4{least, least, least, least};
    rY = {T::largest(rY.x, rX.x), T::largest(rY.y, rX.y), T::largest(rY.z, rX.z), T::largest(rY.w, rX.w)};
  });
  store(place.y, rY);
}

// How many of `taps` that begin at `first` lie in [low, high).
__device__ __forceinline__ int count_inside(int first, int dilation, int taps, int low, int high) {
  int count = 0;
  for (int r = 0; r < taps; ++r) count += first + r * dilation >= low && first + r * dilation < high;
  return count;
}

template <class Element, int kSide>
__global__ void __launch_bounds__(kThreads, kBlocks) window_mean(__grid_constant__ Params const params) {
  using T = Traits<Element>;
  wait_and_let_next_start();
  int const item = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (item >= params.items) return;
  Place const place(params, item, 1);
  Problem const &p = params.problem;
  typename T::Values rY;
  rY.fill(0.f);
  over_window<kSide>(p, place, [&](char const *from, bool inside) {
    if (!inside) return;
    auto const rX = T::to_float(load(from));
#pragma unroll
    for (int i = 0; i < T::kVector; ++i) rY[i] += rX[i];
  });
  bool const pads = p.counts_pads;
  int const h0 = place.p * p.stride_h, w0 = place.q * p.stride_w;
  int const rows = count_inside(h0 - p.pad_top, p.dilation_h, p.R, pads ? -p.pad_top : 0, p.H + pads * p.pad_bottom);
  int const columns =
      count_inside(w0 - p.pad_left, p.dilation_w, p.S, pads ? -p.pad_left : 0, p.W + pads * p.pad_right);
  float const share = 1.f / float(rows * columns);
#pragma unroll
  for (int i = 0; i < T::kVector; ++i) rY[i] *= share;
  store(place.y, T::from_float(rY));
}

// The mean of a whole image: the threads of a block share its pixels, 1 << log_vectors neighbouring ones each of them.
template <class Element>
__global__ void __launch_bounds__(kImageThreads, kBlocks / 2) window_image(__grid_constant__ Params const params) {
  using T = Traits<Element>;
  constexpr int kWarps = kImageThreads / 32;
  __shared__ float sums[kWarps][T::kVector << kMostLogVectors];
  wait_and_let_next_start();
  Problem const &p = params.problem;
  int const log = params.log_vectors, vectors = params.by_vectors.divisor, pixels = p.H * p.W;
  int const n = params.by_shares.divide(int(blockIdx.x));
  int const first = (int(blockIdx.x) - n * params.by_shares.divisor) << log, count = min(1 << log, vectors - first);
  int const lane = int(threadIdx.x) & ((1 << log) - 1);
  Place const place(params, n * vectors + first + min(lane, count - 1), 1);
  typename T::Values rSum;
  rSum.fill(0.f);
  int const step = kImageThreads >> log;
  for (int i = int(threadIdx.x) >> log; i < pixels; i += kImageLoads * step) {
    uint4 rX[kImageLoads];  // all of them are on their way before the first is added
#pragma unroll
    for (int k = 0; k < kImageLoads; ++k) {
      rX[k] = i + k * step < pixels ? load(place.image + (i + k * step) * place.pixel) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kImageLoads; ++k) {
      auto const r = T::to_float(rX[k]);
#pragma unroll
      for (int j = 0; j < T::kVector; ++j) rSum[j] += r[j];
    }
  }
#pragma unroll
  for (int j = 0; j < T::kVector; ++j) {
    for (int apart = 1 << log; apart < 32; apart *= 2) rSum[j] += __shfl_xor_sync(~0u, rSum[j], apart);
    if (threadIdx.x % 32 == lane) sums[threadIdx.x / 32][lane * T::kVector + j] = rSum[j];
  }
  __syncthreads();
  if (int(threadIdx.x) >= count * T::kVector) return;
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][threadIdx.x];
  auto *const y = static_cast<Element *>(params.y) + n * (params.problem.output_pixel / int(sizeof(Element)));
  y[first * T::kVector + int(threadIdx.x)] = Element(sum / float(pixels));
}

// ---- linear Resizes -------------------------------------------------------------------------------------------------

// Between which two neighbours of an axis an output lies, and the weight of the second.
struct Between {
  int first, second;
  float weight;
  __device__ __forceinline__ Between(int i, float scale, float offset, int size) {
    float const at = fminf(fmaxf(float(i) * scale + offset, 0.f), float(size - 1));
    first = int(at), second = min(first + 1, size - 1), weight = at - float(first);
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks) window_linear(__grid_constant__ Params const params) {
  using T = Traits<Element>;
  wait_and_let_next_start();
  int const item = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (item >= params.items) return;
  Problem const &p = params.problem;
  Place place(params, item, kColumns);
  Between const h(place.p, p.scale_h, p.offset_h, p.H);
  int64_t const row = p.W * place.pixel;
  char const *const upper = place.image + h.first * row, *const lower = place.image + h.second * row;
  auto const column = [&](int w) {
    auto const rA = T::to_float(load(upper + w * place.pixel)), rB = T::to_float(load(lower + w * place.pixel));
    typename T::Values r;
#pragma unroll
    for (int i = 0; i < T::kVector; ++i) r[i] = (1.f - h.weight) * rA[i] + h.weight * rB[i];
    return r;
  };
  typename T::Values rLeft, rRight;
  int left = -1, right = -1;  // the columns that they hold
#pragma unroll
  for (int j = 0; j < kColumns; ++j, place.y += p.output_pixel) {
    if (place.q + j >= p.Q) return;
    Between const w(place.q + j, p.scale_w, p.offset_w, p.W);
    if (w.first != left) {
      if (w.first == right) {
        rLeft = rRight;
      } else {
        rLeft = column(w.first);
      }
      rRight = column(w.second);
      left = w.first, right = w.second;
    }
    typename T::Values rY;
#pragma unroll
    for (int i = 0; i < T::kVector; ++i) rY[i] = (1.f - w.weight) * rLeft[i] + w.weight * rRight[i];
    store(place.y, T::from_float(rY));
  }
}

// ---- choice ---------------------------------------------------------------------------------------------------------

template <class Element>
void const *pick(Problem const &p) {
  using Kernel = void (*)(Params);
  int const side = p.R == p.S ? p.R : 0;
  Kernel kernel = window_linear<Element>;
  if (p.mode == Mode::kMean) {
    kernel = is_whole_image(p) ? window_image<Element> : side == 2 ? window_mean<Element, 2> : window_mean<Element, 0>;
  }
  if (p.mode == Mode::kMax) {
    kernel = side == 2   ? window_max<Element, 2>
             : side == 3 ? window_max<Element, 3>
             : side == 5 ? window_max<Element, 5>
                         : window_max<Element, 0>;
  }
  return reinterpret_cast<void const *>(kernel);
}

}  // namespace cutefuse::window

#define CUTEFUSE_KERNELS(stem, type, group, Element)                       \
  namespace cutefuse::stem {                                               \
  void const *kernel_##type(Problem const &p) { return pick<Element>(p); } \
  }
