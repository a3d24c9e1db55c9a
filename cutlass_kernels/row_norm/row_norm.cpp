// Host side of the row norms: what is legal, which tile to try first, and the dispatch. No CUDA header.
#include <algorithm>
#include <array>
#include <cmath>

#include "device.h"
#include "problem.h"
#include "tiles.h"

namespace cutefuse::row_norm {
namespace {

constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5}};

constexpr Facts norm(bool layer, Residual residual) {
  return {Kind::kNorm, 0, Activation::kNone, residual, false, false, false, layer};
}
constexpr Variant kVariantTable[] = {
    {"CuteRMSNorm", 2, 1, norm(false, Residual::kNone)},        // x, gamma -> y
    {"CuteAddRMSNorm", 3, 2, norm(false, Residual::kBefore)},   // x, residual, gamma -> y, sum
    {"CuteLayerNorm", 3, 1, norm(true, Residual::kNone)},       // x, gamma, beta -> y
    {"CuteAddLayerNorm", 4, 2, norm(true, Residual::kBefore)},  // x, residual, gamma, beta -> y, sum
};

std::array<Config, kTileCount> const kConfigTable = config_table();

int whole_warps(std::int64_t threads) { return int(ceil_div(threads, 32) * 32); }

char const *problem_of(Call const &call, Problem *problem) {
  constexpr char const *kName = "row_norm";
  Problem &p = *problem;
  Facts const &facts = kVariantTable[call.variant].facts;
  p.layer = facts.layer, p.residual = facts.residual != Residual::kNone;
  p.epsilon = call.attrs[0].floats[0];
  if (char const *reason = check_epsilon(kName, p.epsilon)) return reason;
  Tensor const &x = call.inputs[0];
  if (char const *reason = read_activation(kName, x, &p)) return reason;
  int const gamma = p.residual ? 2 : 1;
  if (p.residual) {
    if (char const *reason = check_like(kName, "the residual", call.inputs[1], x)) return reason;
    if (char const *reason = check_like(kName, "the sum", call.outputs[1], x)) return reason;
  }
  p.param_type = call.inputs[gamma].type;
  p.affine = true;
  if (char const *reason = check_parameter(kName, "gamma", call.inputs[gamma], &p)) return reason;
  if (p.layer) {
    if (char const *reason = check_parameter(kName, "beta", call.inputs[gamma + 1], &p)) return reason;
  }
  return check_like(kName, "the output", call.outputs[0], x);
}

char const *reject(Call const &call) {
  Problem problem{};
  return problem_of(call, &problem);
}

std::int64_t workspace_bytes(Call const &) { return 0; }

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem problem{};
  if (problem_of(call, &problem) != nullptr) return 0;
  return forward_configs(problem, call.sm, call.sm_count, ids, capacity);
}

char const *run(Call const &call) {
  ForwardParams params{};
  Problem &p = params.problem;
  if (char const *reason = problem_of(call, &p)) return reason;
  int const gamma = p.residual ? 2 : 1;
  params.x = call.inputs[0].data;
  params.gamma = call.inputs[gamma].data;
  params.y = call.outputs[0].data;
  void const *pointers[] = {params.x, params.gamma, params.y, params.x, params.x, params.x};
  if (p.residual) pointers[3] = params.residual = call.inputs[1].data;
  if (p.residual) pointers[4] = params.sum = call.outputs[1].data;
  if (p.layer) pointers[5] = params.beta = call.inputs[gamma + 1].data;
  if (p.rows > 0) {
    if (char const *reason = check_pointers("row_norm", pointers, 6)) return reason;
  }
  return run_forward("row_norm", params, call);
}

}  // namespace

std::array<Config, kTileCount> config_table() {
  std::array<Config, kTileCount> table{};
  for (int i = 0; i < kTileCount; ++i) {
    Tile const &tile = kTiles[i];
    table[i] = {tile.id, tile.min_sm, tile.name, kScopeNames[static_cast<int>(tile.scope)], kFloatTypes};
  }
  return table;
}

char const *read_activation(char const *op, Tensor const &x, Problem *problem) {
  Problem &p = *problem;
  p.type = x.type;
  if (x.type != Type::kFloat32 && x.type != Type::kFloat16 && x.type != Type::kBFloat16) {
    return sentence("%s: %s is not supported; use float32, float16 or bfloat16", op, name_of(x.type));
  }
  if (x.rank < 1) return sentence("%s: the input is a scalar; it needs a last dimension to normalise over", op);
  if (x.layout != Layout::kLinear || x.ld != 0) {
    return sentence("%s: the input must be row-major without gaps; make it contiguous", op);
  }
  p.columns = x.dims[x.rank - 1];
  if (p.columns == 0 || p.columns > kMaxColumns) {
    return sentence("%s: the last dimension is %lld, 1 to %lld are allowed", op, (long long)p.columns,
                    (long long)kMaxColumns);
  }
  p.rows = 1;
  for (int i = 0; i + 1 < x.rank; ++i) {
    if (x.dims[i] < 0 || p.rows < 0) {
      p.rows = -1;
    } else if (x.dims[i] != 0 && p.rows > INT64_MAX / kMaxColumns / 4 / x.dims[i]) {
      return sentence("%s: the input has more than 2^63 bytes; split it", op);
    } else {
      p.rows *= x.dims[i];
    }
  }
  return nullptr;
}

char const *check_like(char const *op, char const *what, Tensor const &given, Tensor const &x) {
  if (given.type != x.type || given.layout != x.layout || given.ld != 0 || given.rank != x.rank) {
    return sentence("%s: %s is %s of rank %d, the input is %s of rank %d; both must agree, insert a Cast or Expand", op,
                    what, name_of(given.type), given.rank, name_of(x.type), x.rank);
  }
  for (int i = 0; i < x.rank; ++i) {
    if (given.dims[i] >= 0 && x.dims[i] >= 0 && given.dims[i] != x.dims[i]) {
      return sentence(
          "%s: dimension %d of %s is %lld, that of the input is %lld; sizes must agree, broadcasting is "
          "not done",
          op, i, what, (long long)given.dims[i], (long long)x.dims[i]);
    }
  }
  return nullptr;
}

char const *check_vector(char const *op, char const *what, Tensor const &given, std::int64_t size, Type type) {
  bool const same = given.dims[0] == size || given.dims[0] < 0 || size < 0;
  if (given.type == type && given.layout == Layout::kLinear && given.ld == 0 && given.rank == 1 && same) return nullptr;
  return sentence("%s: %s is %s of rank %d and %lld elements, a %s vector of %lld is needed", op, what,
                  name_of(given.type), given.rank, (long long)(given.rank > 0 ? given.dims[0] : 1), name_of(type),
                  (long long)size);
}

char const *check_parameter(char const *op, char const *what, Tensor const &given, Problem *problem) {
  Problem &p = *problem;
  if (given.type != p.type && given.type != Type::kFloat32) {
    return sentence("%s: %s is %s beside a %s input; use %s or float32", op, what, name_of(given.type), name_of(p.type),
                    name_of(p.type));
  }
  if (char const *reason = check_vector(op, what, given, p.columns, p.param_type)) return reason;
  if (p.columns < 0) p.columns = given.dims[0];
  return nullptr;
}

char const *check_epsilon(char const *op, float epsilon) {
  if (epsilon >= 0.f && std::isfinite(epsilon)) return nullptr;
  return sentence("%s: epsilon is %g, it must be finite and not negative", op, double(epsilon));
}

char const *check_pointers(char const *op, void const *const *pointers, int count) {
  for (int i = 0; i < count; ++i) {
    if (pointers[i] == nullptr || reinterpret_cast<std::uintptr_t>(pointers[i]) % kVectorBytes != 0) {
      return sentence("%s: a tensor is at address %p; device pointers must be set and aligned to %d bytes", op,
                      pointers[i], kVectorBytes);
    }
  }
  return nullptr;
}

bool is_power_of_two(std::int64_t n) { return (n & (n - 1)) == 0; }

Launch plan_forward(Tile const &tile, int sm_count, ForwardParams *params) {
  Problem const &p = params->problem;
  std::int64_t const vectors = vectors_of(p), shares = ceil_div(vectors, tile.vectors);  // shares: threads of a row
  Launch const none{};
  params->log_lanes = params->log_cluster = 0;
  params->full = false;
  bool const registers = tile.scope == Scope::kWarp || tile.scope == Scope::kBlock;
  if (registers && is_shifted(p) && tile.vectors != 4) return none;  // built for four alone
  switch (tile.scope) {
    case Scope::kWarp: {
      if (shares > 32) return none;
      while ((1 << params->log_lanes) < shares) ++params->log_lanes;
      params->full = !is_shifted(p) && vectors == std::int64_t(tile.vectors) << params->log_lanes;
      return {ceil_div(p.rows, kForwardWarpThreads >> params->log_lanes), kForwardWarpThreads, 1};
    }
    case Scope::kBlock: {
      int const threads = whole_warps(shares);
      if (threads > forward_threads(false, tile.vectors)) return none;
      params->full = !is_shifted(p) && vectors == std::int64_t(tile.vectors) * threads && is_power_of_two(threads);
      return {p.rows, threads, 1};
    }
    case Scope::kShared: {
      std::int64_t const bytes = vectors * kVectorBytes * (p.residual ? 2 : 1);
      if (vectors < 2 * kSharedThreads) return none;
      // Few rows spread over more blocks than they need.
      int &log = params->log_cluster;
      auto const more = [&] {
        return bytes > std::int64_t(kSharedBytes) << log ||
               (p.rows << (log + 1) <= sm_count && vectors >> log >= 2 * kSharedThreads);
      };
      while ((1 << log) < kMaxCluster && more()) ++log;
      params->slice = int(ceil_div(vectors, 1 << log));
      if (ceil_div(bytes, 1 << log) > kSharedBytesAtMost - kVectorBytes) return none;
      return {p.rows << log, kSharedThreads, 1 << log};
    }
    case Scope::kCluster: {
      int &log = params->log_cluster;
      while ((kClusterThreads * kClusterVectors << log) < vectors && 1 << log < kMaxCluster) ++log;
      params->full = log > 0 && kClusterThreads * kClusterVectors << log == vectors;
      if (!params->full || !is_plain(p)) return none;
      return {p.rows << log, kClusterThreads, 1 << log};
    }
    case Scope::kStream:
      return {p.rows, kStreamThreads, 1};
  }
  return none;
}

// The tile that was fastest on an H200 (benchmarks/row_norm.py --every-tile): few rows are bound by latency and want
// many threads with one vector each; many rows want bytes in flight.
int favourite(Problem const &p, int sm_count) {
  std::int64_t const vectors = vectors_of(p);
  if (vectors > 2048) return p.rows * vectors >= (p.layer ? 32 : 64) * 1024 ? 13 : 12;
  if (is_shifted(p)) return vectors <= 128 ? 3 : 6;
  if (p.rows <= sm_count) {
    if (vectors <= 64) return vectors <= 32 ? 1 : 2;
    return vectors <= 128 || (p.residual && vectors <= 1024) ? 4 : 5;
  }
  if (vectors <= 64) return 2;
  if (vectors <= 128) return p.residual ? 5 : 3;
  if (p.residual) return vectors <= 1024 ? 5 : 6;
  return vectors <= 256 && (p.rows <= 64 * sm_count || !p.layer) ? 5 : 6;
}

std::int32_t forward_configs(Problem const &problem, int sm, int sm_count, std::int32_t *ids, std::int32_t capacity) {
  ForwardParams params{};
  params.problem = problem;
  Problem &p = params.problem;
  if (p.columns < 0) return 0;
  if (p.rows < 0) p.rows = 1 << 20;
  if (sm_count <= 0) sm_count = 108;
  int const first = favourite(p, sm_count);
  struct Guess {
    std::int32_t id;
    int rank;
  } guesses[kTileCount];
  int count = 0;
  for (Tile const &tile : kTiles) {
    if ((sm != 0 && sm < tile.min_sm) || plan_forward(tile, sm_count, &params).threads == 0) continue;
    // After the favourite: registers before shared memory before two reads, more vectors before fewer.
    guesses[count++] = {tile.id, tile.id == first ? -100 : 8 * int(tile.scope) - tile.vectors};
  }
  std::stable_sort(guesses, guesses + count, [](Guess const &a, Guess const &b) { return a.rank < b.rank; });
  count = std::min(count, int(capacity));
  for (int i = 0; i < count; ++i) ids[i] = guesses[i].id;
  return count;
}

char const *run_forward(char const *op, ForwardParams params, Call const &call) {
  Problem const &p = params.problem;
  if (p.rows < 0 || p.columns < 0) return sentence("%s: run needs every size, one is still dynamic", op);
  if (p.rows == 0) return nullptr;
  std::int32_t sm = call.sm, sm_count = call.sm_count;
  if (sm == 0 || sm_count == 0) current_device(&sm, &sm_count);
  std::int32_t ids[kTileCount];
  std::int32_t const count = forward_configs(p, sm, sm_count, ids, kTileCount);
  std::int32_t const id = call.config != 0 ? call.config : ids[0];
  if (std::find(ids, ids + count, id) == ids + count) {
    return sentence(
        "%s: tile %d cannot run rows of %lld %s on compute capability %d.%d; ask configs() for the legal ones", op, id,
        (long long)p.columns, name_of(p.type), sm / 10, sm % 10);
  }
  Tile const &tile = *find_tile(id);
  Launch const launch = plan_forward(tile, sm_count, &params);
  params.inverse = 1.f / float(p.columns);
  if (launch.blocks > 0x7fffffff) {
    return sentence("%s: %lld rows take more than the 2^31 blocks of one launch; split the batch", op,
                    (long long)p.rows);
  }
#if CUTEFUSE_WITH_CUDA
  switch (p.type) {
    case Type::kFloat16:
      return launch_forward_f16(tile, params, launch, sm, call.stream);
    case Type::kBFloat16:
      return launch_forward_bf16(tile, params, launch, sm, call.stream);
    default:
      return launch_forward_f32(tile, params, launch, sm, call.stream);
  }
#else
  return sentence("%s: this library was built without CUDA; install nvcc and build again to run kernels", op);
#endif
}

Launch plan_backward(int sm, int sm_count, BackwardParams *params) {
  Problem const &p = params->problem;
  // Dynamic shared memory that one block may ask for, less what the kernel declares.
  int const limit = (sm == 86 || sm == 89 || sm >= 120 ? 99 : sm >= 90 ? 227 : 163) * 1024 - 3 * 1024;
  // Sixteen columns leave registers for gamma; longer rows of 16-bit types take 32 before they take clusters.
  params->vectors = size_of(p.type) == 2 && vectors_of(p) <= 2 * kBackwardThreads ? 2 : 4;
  std::int64_t shares = ceil_div(vectors_of(p), params->vectors);
  params->cluster = 1, params->log_lanes = 0;
  auto const fit = [&](int threads) {
    while (shares > std::int64_t(threads) * params->cluster) params->cluster *= 2;
  };
  fit(kBackwardThreads);
  // A row on half of a block, beside another row that works while it waits for its sums: LayerNorm up to 16384 columns,
  // and both norms where the cluster is of four already. Of two, it would become one that leaves multiprocessors idle.
  int const halves = params->cluster * 2;
  bool const beside = sm >= 90 && size_of(p.type) == 2 && vectors_of(p) > kBackwardThreads &&
                      p.rows * halves >= 2 * sm_count && (params->cluster == 1 ? p.layer : params->cluster == 4);
  if (beside) {
    params->vectors = 4;
    shares = ceil_div(vectors_of(p), params->vectors);
    fit(kBackwardThreads / 2);
  }
  params->lanes = whole_warps(ceil_div(shares, params->cluster));
  if (shares <= 32) {
    while ((1 << params->log_lanes) < shares) ++params->log_lanes;
    params->lanes = 1 << params->log_lanes;
  }
  int const group = std::max(params->lanes, 32);  // threads that start together: a block holds whole warps
  int const rows_of_group = group / params->lanes;
  std::int64_t groups = 1;
  if (beside && params->cluster > 1) groups = 2;
  if (params->cluster == 1) {
    // Rows side by side share one sum of dgamma at the end, but only when there are enough to fill the chip.
    groups = std::clamp<std::int64_t>(p.rows / (std::int64_t(sm_count) * rows_of_group), 1, kBackwardThreads / group);
  }
  params->stages = 1;
  int const one = ring_bytes(*params);
  int const room = limit - gamma_bytes(*params);
  params->stages = std::clamp(room / one, 1, kMaxStages);
  // Clusters of four and more do not fill the processing clusters whose multiprocessors are no multiple of them.
  int const usable = params->cluster < 4 ? sm_count : std::max(16, sm_count / 16 * 16);
  std::int64_t const most = std::max(1, usable / params->cluster);
  if (!is_shifted(p) && params->cluster <= (sm >= 90 ? kMaxCluster : 1) && one <= room) {
    params->parts = int(std::min(ceil_div(p.rows, groups * rows_of_group), most));
    return {std::int64_t(params->parts) * params->cluster, int(groups) * group, params->cluster};
  }
  std::int64_t const fill = ceil_div(8 * sm_count, ceil_div(p.columns, 32));
  params->parts = int(std::min(ceil_div(p.rows, 16), std::max<std::int64_t>(1, fill)));
  return {};
}

extern Op const op;
Op const op = {"row_norm",
               {kVariantTable, 4},
               {kAttrSpecs, 1},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               run};

}  // namespace cutefuse::row_norm
