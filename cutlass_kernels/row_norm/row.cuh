// A row in 16-byte vectors, and sums over a row: through the lanes of a warp, the warps of a block, the blocks of a
// cluster. Names follow CuTe: mX is a whole tensor, rX a fragment in registers.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

#include "dependent_launch.cuh"
#include "row_norm/tiles.h"

namespace cutefuse::row_norm {

template <class Element>
inline constexpr int kVector = kVectorBytes / int(sizeof(Element));
template <class Element>
using Vector = cutlass::AlignedArray<Element, kVector<Element>>;
template <class Element>
using Values = cutlass::Array<float, kVector<Element>>;

template <class Element>
CUTE_DEVICE Values<Element> to_float(Vector<Element> const &rX) {
  return cutlass::NumericArrayConverter<float, Element, kVector<Element>>{}(rX);
}

template <class Element>
CUTE_DEVICE Vector<Element> from_float(Values<Element> const &rX) {
  Vector<Element> result;
  static_cast<cutlass::Array<Element, kVector<Element>> &>(result) =
      cutlass::NumericArrayConverter<Element, float, kVector<Element>>{}(rX);
  return result;
}

// The value 1 as often as it fits in four bytes.
template <class Element>
CUTE_DEVICE uint32_t ones() {
  cutlass::AlignedArray<Element, 4 / sizeof(Element)> r;
  r.fill(Element(1.f));
  return reinterpret_cast<uint32_t const &>(r);
}

// A row between the passes over it: float32 values, or the loaded vectors themselves where that takes half of the
// registers and loses nothing.
template <class Element, int kVectors, bool kPacked>
struct Fragment {
  Values<Element> values[kVectors];
  CUTE_DEVICE Values<Element> operator[](int i) const { return values[i]; }
  CUTE_DEVICE void forget(int, uint32_t) {}
};

template <class Element, int kVectors>
struct Fragment<Element, kVectors, true> {
  Vector<Element> raw[kVectors];
  CUTE_DEVICE Values<Element> operator[](int i) const { return to_float<Element>(raw[i]); }
  // Adds `zero` to the loaded vector. Without this the compiler keeps the float32 values of one pass for the next, and
  // spills them; it must not know that `zero` is 0.
  CUTE_DEVICE void forget(int i, uint32_t zero) {
    uint4 &r = reinterpret_cast<uint4 &>(raw[i]);
    if (sizeof(Element) == 2) r.x += zero, r.y += zero, r.z += zero, r.w += zero;
  }
};

// A plain load: L1::no_allocate, which looks right for a row that is read once, cost 5 % of the bandwidth (measured,
// H200).
CUTE_DEVICE uint4 load_vector(void const *from) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
  return r;
}

// Volatile, or the assembler loads every vector of a row at once and spills.
CUTE_DEVICE uint4 load_shared(uint4 const *from) {
  uint4 r;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(cute::cast_smem_ptr_to_uint(from)));
  return r;
}

// As assembly, because the compiler splits a conditional 16-byte store into elements.
CUTE_DEVICE void store_vector(void *to, uint4 const &r) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
}

// Row `row` of a matrix without gaps, in aligned vectors. Shifted: columns are no multiple of a vector, so the row
// starts `first` elements into its vector 0; vectors at its two ends are shared with the neighbours and are accessed
// element by element.
template <class Element, bool kShifted>
struct Row {
  static constexpr int kVec = kVector<Element>;
  int64_t origin;   // element of the tensor at which vector 0 starts
  int first, last;  // the row is [first, last) from there; an absent row has last == 0

  CUTE_DEVICE Row(int64_t row, Problem const &p) {
    int64_t const start = row * p.columns;
    first = kShifted ? int(start % kVec) : 0;
    origin = start - first;
    last = row < p.rows ? first + int(p.columns) : 0;
  }
  CUTE_DEVICE bool touches(int v) const { return v * kVec < last; }
  CUTE_DEVICE bool whole(int v) const { return !kShifted || (v * kVec >= first && (v + 1) * kVec <= last); }
  CUTE_DEVICE bool has(int v, int j) const { return !kShifted || (v * kVec + j >= first && v * kVec + j < last); }
  CUTE_DEVICE int column(int v) const { return v * kVec - first; }
  // How many elements of vector v belong to the row.
  CUTE_DEVICE int elements(int v) const {
    if (!touches(v)) return 0;
    return kShifted ? min(last, (v + 1) * kVec) - max(first, v * kVec) : kVec;
  }

  // The row's start is the same for a whole block, and a 32-bit offset from there needs one register, not two.
  template <class T>
  CUTE_DEVICE T *at(T *mX, int v) const {
    return mX + origin + uint32_t(v) * kVec;
  }

  // Zeros outside of the row.
  CUTE_DEVICE Vector<Element> load(void const *mX, int v) const {
    Vector<Element> rX;
    rX.clear();
    if (!touches(v)) return rX;
    Element const *const from = at(static_cast<Element const *>(mX), v);
    if (whole(v)) {
      reinterpret_cast<uint4 &>(rX) = load_vector(from);
    } else {
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        if (has(v, j)) rX[j] = from[j];
      }
    }
    return rX;
  }
  CUTE_DEVICE void store(void *mY, int v, Vector<Element> const &rY) const {
    if (!touches(v)) return;
    Element *const to = at(static_cast<Element *>(mY), v);
    if (whole(v)) {
      store_vector(to, reinterpret_cast<uint4 const &>(rY));
    } else {
      CUTE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        if (has(v, j)) to[j] = rY[j];
      }
    }
  }
};

// The part of gamma or beta that belongs to a vector of the row, as it lies in memory; its type may be wider than the
// row's.
template <class Element, class Param, bool kShifted>
struct Parameter {
  static constexpr int kLoads = int(sizeof(Param) / sizeof(Element));
  uint4 raw[kLoads];

  Parameter() = default;
  // `absent`, two elements or one, is where there is no such operand or no column: no branch in the way of the loads.
  CUTE_DEVICE Parameter(void const *mP, Row<Element, kShifted> const &row, int v, uint32_t absent) {
    CUTE_UNROLL
    for (int k = 0; k < kLoads; ++k) {
      raw[k] = make_uint4(absent, absent, absent, absent);
      if constexpr (kShifted) {
        Param *const to = reinterpret_cast<Param *>(&raw[k]);
        int const first = k * kVector<Param>;
        CUTE_UNROLL
        for (int j = 0; j < kVector<Param>; ++j) {
          if (mP != nullptr && row.has(v, first + j)) to[j] = static_cast<Param const *>(mP)[row.column(v) + first + j];
        }
      } else if (mP != nullptr && row.touches(v)) {
        raw[k] = __ldg(static_cast<uint4 const *>(mP) + v * kLoads + k);
      }
    }
  }
  CUTE_DEVICE Values<Element> values() const {
    Values<Element> r;
    CUTE_UNROLL
    for (int k = 0; k < kLoads; ++k) {
      Values<Param> const some = to_float<Param>(reinterpret_cast<Vector<Param> const &>(raw[k]));
      CUTE_UNROLL
      for (int j = 0; j < kVector<Param>; ++j) r[k * kVector<Param> + j] = some[j];
    }
    return r;
  }
};

// Kernels for older devices hold no cluster instruction at all.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kClusters = true;
#else
inline constexpr bool kClusters = false;
#endif

// Initialises the barriers and arrives at the cluster's barrier; cluster_wait() must follow before the first sum.
template <int kCount>
CUTE_DEVICE void announce_barriers(uint64_t *barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kCount; ++i) cute::initialize_barrier(barriers[i]);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
}

// Where the warps of a row leave their sums: two turns of two values, kWarps warps, and for clusters a barrier a turn
// of each group.
template <int kWarps>
struct RowSlots {
  float sums[2][2][kWarps];
  uint64_t arrived[kMostGroups][2];

  CUTE_DEVICE void announce() { announce_barriers<2 * kMostGroups>(arrived[0]); }
};

// Writes to the same shared variable of another block of the cluster and counts the bytes at its barrier: no fence, as
// a cluster barrier would need one that waits for this thread's stores to global memory.
CUTE_DEVICE void store_remote(float *shared, uint64_t *barrier, uint32_t block, float value) {
  cute::store_shared_remote(__float_as_uint(value), cute::cast_smem_ptr_to_uint(shared),
                            cute::cast_smem_ptr_to_uint(barrier), block);
}

// cute::wait_barrier names no memory: the compiler could move loads of the arrived data before it.
CUTE_DEVICE void wait_for_remote(uint64_t &barrier, int phase) {
  cute::wait_barrier(barrier, phase);
  asm volatile("" ::: "memory");
}

// Run-time flags to template arguments: make(std::bool_constant<flag>...).
template <bool... kFlags, class Make>
auto pick(Make const &make) {
  return make(std::bool_constant<kFlags>{}...);
}

template <bool... kFlags, class Make, class... Flags>
auto pick(Make const &make, bool flag, Flags... flags) {
  return flag ? pick<kFlags..., true>(make, flags...) : pick<kFlags..., false>(make, flags...);
}

using ForwardKernel = void (*)(ForwardParams);

// Sums of kValues values over a row whose threads are 2^log_lanes lanes of a warp (kWarp), or group number `group` of
// `warps` warps of a block, times `cluster` blocks. Without kGroups a block is one group: a kernel with numbered
// barriers gets far fewer blocks on a multiprocessor.
template <bool kWarp, int kWarps, bool kGroups>
struct RowSum {
  RowSlots<kWarps> &slots;
  int log_lanes, group, warps, cluster;
  int turn = 0,
      phase = 0;  // calls use the two halves in turn: the barrier of one call ends the reading of the call before

  template <int kValues>
  CUTE_DEVICE cutlass::Array<float, kValues> operator()(cutlass::Array<float, kValues> values) {
    auto const add = [&](int offset) {
      CUTE_UNROLL
      for (int k = 0; k < kValues; ++k) values[k] += __shfl_xor_sync(0xffffffffu, values[k], offset);
    };
    if constexpr (kWarp) {
      for (int i = 0; i < log_lanes; ++i) add(1 << i);
    } else {
      CUTE_UNROLL
      for (int offset = 16; offset > 0; offset /= 2) add(offset);
      int const all = warps * cluster, first = group * all;
      int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 - group * warps;
      uint64_t *const arrived = slots.arrived[kClusters && cluster > 1 ? group : 0];
      CUTE_UNROLL
      for (int k = 0; k < kValues; ++k) {
        float *const mine = slots.sums[turn][k] + first;
        if (kClusters && cluster > 1) {
          int const rank = int(cute::block_rank_in_cluster());
          if (lane < cluster) store_remote(&mine[rank * warps + warp], &arrived[turn], lane, values[k]);
        } else if (lane == 0) {
          mine[warp] = values[k];
        }
      }
      if (kClusters && cluster > 1) {
        if (warp == 0 && lane == 0) {
          cute::set_barrier_transaction_bytes(arrived[turn], all * kValues * sizeof(float));
        }
        wait_for_remote(arrived[turn], phase);
      } else if constexpr (kGroups) {
        cutlass::arch::NamedBarrier::sync(warps * 32, group);
      } else {
        __syncthreads();
      }
      // `lanes` is the smallest power of two that holds all sums, and the other lanes repeat them: every step saved is
      // latency saved.
      int const lanes = all > 16 ? 32 : 1 << (32 - __clz(all - 1)), mine = first + (lane & (lanes - 1));
      CUTE_UNROLL
      for (int k = 0; k < kValues; ++k) {
        values[k] = mine - first < all ? slots.sums[turn][k][mine] : 0.f;
        for (int i = mine + 32; i < first + all; i += 32) values[k] += slots.sums[turn][k][i];
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) add(offset);
      turn ^= 1;
      phase ^= turn ^ 1;
    }
    return values;
  }
};

}  // namespace cutefuse::row_norm
