// A row norm as numbers: what the kernels are given, and the sizes of their blocks. Pure host C++.
#pragma once

#include <cstdint>

#include "device.h"
#include "op.h"

namespace cutefuse::row_norm {

constexpr std::int64_t kMaxColumns = 262144;
constexpr int kVectorBytes = 16;
constexpr int kMaxCluster = 8;            // the largest cluster that every Hopper part accepts
constexpr int kForwardWarpThreads = 128;  // of a block whose rows take a warp or less each
constexpr int kSharedThreads = 256;
constexpr int kSharedBlocks = 6;         // that share a multiprocessor while each holds at most kSharedBytes of a row
constexpr int kSharedBytes = 32 * 1024;  // a row of more takes another block of its cluster
constexpr int kSharedBytesAtMost = 96 * 1024;  // what every GPU with clusters allows one block
constexpr int kClusterThreads = 256,
              kClusterBlocks =
                  4;  // threads of a block; blocks on a multiprocessor, which leaves each thread 64 registers
constexpr int kClusterVectors = 8;
constexpr int kStreamThreads = 512;
constexpr int kFinalRows = 16;  // threads that share a column where partial sums are added
constexpr int kBackwardThreads = 512;
constexpr int kMaxStages = 3;
constexpr int kMostGroups = 2;  // rows side by side in the blocks of a cluster

// The largest block of a forward kernel, and how many of them should fit a multiprocessor: one and two vectors per
// thread leave registers for gamma and beta, four do not. `roomy` kernels get more registers: those with a residual,
// which keep the sum in float32, and those of LayerNorm on GPUs before Hopper, which would spill.
constexpr int forward_threads(bool warp, int vectors) { return warp ? kForwardWarpThreads : vectors < 4 ? 1024 : 512; }
constexpr int forward_blocks(bool warp, int vectors, bool roomy) {
  return warp ? (vectors == 4 && roomy ? 5 : 8) : vectors == 4 && !roomy ? 2 : 1;
}

// y = (s - mean) * rstd * gamma + beta over each row of s = x + residual, all in float32; y and `sum` are rounded once.
// RMSNorm has no mean, and rstd = 1 / sqrt(mean of squares + epsilon). A null operand does not exist.
struct Problem {
  Type type;        // of x, residual, y, sum and their gradients
  Type param_type;  // of gamma, beta and their gradients: `type` or float32
  bool layer;       // LayerNorm, else RMSNorm
  bool residual;    // s = x + residual, else s = x; backward: the sum has a gradient of its own
  bool affine;      // gamma exists, and beta with LayerNorm (forward)
  std::int64_t rows;
  std::int64_t columns;
  float epsilon;
};

struct ForwardParams {
  Problem problem;
  void const *x, *residual, *gamma, *beta;
  void *y, *sum;
  float *mean, *rstd;
  int log_lanes;       // two to this: threads of a warp that share a row (kernels for short rows)
  int log_cluster;     // two to this: blocks that share a row
  int slice;           // vectors of a row that one of them keeps in shared memory
  float inverse;       // 1 / columns
  bool full;           // all threads have equally many values, and threads are a power of two
  std::uint32_t zero;  // always 0, but the compiler must not know (Fragment::forget)
};

struct BackwardParams {
  Problem problem;
  void const *dy, *dsum, *x, *gamma;  // x is the tensor that was normalised: with a residual, the saved sum
  float const *mean, *rstd;
  void *dx, *dgamma, *dbeta;
  float *partial;  // [parts][columns] of dgamma, then of dbeta
  int parts;       // row ranges whose dgamma and dbeta are summed apart, then together in a fixed order
  int vectors;     // of a row, per thread of the pipelined kernel: 2 (16-bit types) or 4
  int lanes, log_lanes, cluster, stages;  // log_lanes where lanes <= 32
};

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rows whose length is no multiple of a vector may start inside one, and touch up to one vector more.
constexpr bool is_shifted(Problem const &p) { return p.columns % (kVectorBytes / size_of(p.type)) != 0; }
// The calls that forward_even.cuh serves, whose kernels decide every case at compile time.
constexpr bool is_plain(Problem const &p) {
  return size_of(p.type) == 2 && p.param_type == p.type && p.affine && !p.residual && !is_shifted(p);
}
constexpr std::int64_t vectors_of(Problem const &p) {
  int const vector = kVectorBytes / size_of(p.type);
  return is_shifted(p) ? ceil_div(p.columns + vector - 1, vector) : p.columns / vector;
}

// Dynamic shared memory of the pipelined backward kernel for gamma, where registers cannot hold it.
constexpr int gamma_bytes(BackwardParams const &p) {
  int const bytes =
      p.vectors * kVectorBytes / size_of(p.problem.type) * size_of(p.problem.param_type) * kBackwardThreads;
  return size_of(p.problem.type) == 2 && p.vectors == 4 ? bytes : 0;
}

struct Grid {
  std::int64_t blocks;
  int threads, cluster;
};

// Dynamic shared memory of the pipelined backward kernel: rows of dy, x and dsum that are being copied.
constexpr int ring_bytes(BackwardParams const &p) {
  return p.stages * (p.problem.residual ? 3 : 2) * p.vectors * kVectorBytes * kBackwardThreads;
}

// What a tensor of a call may be. Backward also takes x, gamma and the saved statistics.
enum Operand { kX, kResidual, kGamma, kBeta, kY, kSum, kMean, kRstd, kDy, kDsum, kDx, kDgamma, kDbeta, kOperands };

// The operands of an op_type in its order, inputs first.
struct Form {
  Operand operands[9];
};

// What differs between the two operators. `absent`: whether a vector without elements stands for an absent gamma, beta,
// dgamma, dbeta, residual, sum, dsum or mean, or in forward for an absent rstd.
struct Family {
  Op const &op;
  Span<Form> forms;  // of each op_type
  bool absent;
};

// The tensors of a call by operand: their places in its list, inputs first; -1: there is none.
struct Slots {
  std::int8_t at[kOperands];
  bool layer, backward;
  bool has(Operand operand) const { return at[operand] >= 0; }
};

Slots slots_of(Family const &family, Call const &call);

// Fills in the problem and returns null, or returns why the call is refused.
char const *problem_of(Family const &family, Call const &call, Slots const &slots, Problem *problem);

// The functions of Op.
char const *reject(Family const &family, Call const &call);
std::int64_t workspace_bytes(Family const &family, Call const &call);
std::int32_t configs(Family const &family, Call const &call, std::int32_t *ids, std::int32_t capacity);
char const *obstacle(Family const &family, Call const &call, std::int32_t config);
double predicted_us(Family const &family, Call const &call);
char const *plan(Family const &family, Call const &call, Plan &plan);
char const *launch(Family const &family, Plan const &plan, Operands const &operands);

}  // namespace cutefuse::row_norm
