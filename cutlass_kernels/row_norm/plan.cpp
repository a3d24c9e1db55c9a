// The grids of the norms' kernels, which tile a call gets, and its launches, for both operators. No CUDA header.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "device.h"
#include "row_norm/tiles.h"

namespace cutefuse::row_norm {

#define CUTEFUSE_KERNELS(stem, type, group, Element) Kernels kernels_##type();
#include "row_norm_kernels.inc"
#undef CUTEFUSE_KERNELS

namespace {

int whole_warps(std::int64_t threads) { return int(ceil_div(threads, 32) * 32); }

bool is_power_of_two(std::int64_t n) { return (n & (n - 1)) == 0; }

// Threads and blocks of a tile on a device of sm_count multiprocessors; sets log_lanes, log_cluster, slice and full. No
// threads: the tile cannot hold the row.
Grid forward_grid(Tile const &tile, int sm_count, ForwardParams *params) {
  Problem const &p = params->problem;
  std::int64_t const vectors = vectors_of(p), shares = ceil_div(vectors, tile.vectors);  // shares: threads of a row
  Grid const none{};
  params->log_lanes = params->log_cluster = 0;
  params->full = false;
  bool const registers = tile.scope == Scope::kWarp || tile.scope == Scope::kBlock;
  if (registers && is_shifted(p) && tile.vectors != 4) return none;  // built only for four
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

// The tile that was fastest on an H200 (benchmarks/row_norm.py --every-tile): few rows are bound by latency and need
// many threads with one vector each; many rows need bytes in flight.
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

// The grid of the pipelined kernel; sets lanes, cluster, stages and parts for the call's device. No threads: it does
// not fit, and the kernels for any row serve.
Grid backward_grid(Call const &call, BackwardParams *params) {
  Problem const &p = params->problem;
  std::int32_t const gpu = call.sm > 0 ? call.sm : 90;  // the choices below are fitted on an H200
  bool const clusters = offers(call.sm, kClusters);
  int const sm_count = multiprocessors(call.sm_count, gpu);
  int const limit = shared_limit(gpu) - 3 * 1024;  // less the kernel's static shared memory
  // Sixteen columns leave registers for gamma; longer rows of 16-bit types take 32 before they take clusters.
  params->vectors = size_of(p.type) == 2 && vectors_of(p) <= 2 * kBackwardThreads ? 2 : 4;
  std::int64_t shares = ceil_div(vectors_of(p), params->vectors);
  params->cluster = 1, params->log_lanes = 0;
  auto const fit = [&](int threads) {
    while (shares > std::int64_t(threads) * params->cluster) params->cluster *= 2;
  };
  fit(kBackwardThreads);
  // Give a row half of a block, so that the row in the other half works while this one waits for its sums. This pays
  // for LayerNorm up to 16384 columns, and for both norms where the cluster has four blocks already. A cluster of two
  // would become one of four, which leaves multiprocessors idle.
  int const halves = params->cluster * 2;
  bool const beside = clusters && size_of(p.type) == 2 && vectors_of(p) > kBackwardThreads &&
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
  // Clusters of four and more blocks leave some multiprocessors idle, since those of a GPC are not always a multiple of
  // them.
  int const usable = params->cluster < 4 ? sm_count : std::max(16, sm_count / 16 * 16);
  std::int64_t const most = std::max(1, usable / params->cluster);
  if (!is_shifted(p) && params->cluster <= (clusters ? kMaxCluster : 1) && one <= room) {
    params->parts = int(std::min(ceil_div(p.rows, groups * rows_of_group), most));
    return {std::int64_t(params->parts) * params->cluster, int(groups) * group, params->cluster};
  }
  std::int64_t const fill = ceil_div(8 * sm_count, ceil_div(p.columns, 32));
  params->parts = int(std::min(ceil_div(p.rows, 16), std::max<std::int64_t>(1, fill)));
  return {};
}

// ---- what plans hold ------------------------------------------------------------------------------------------------

constexpr int kMostLaunches =
    3;  // backward: dx; partial sums of dgamma and dbeta where that kernel leaves none; their sums

struct State {
  ForwardParams forward;
  BackwardParams backward;
  Slots slots;
  Launch launches[kMostLaunches];
};
static_assert(sizeof(State) <= sizeof(Plan::state));

char const *refused(Op const &op, char const *why) {
  return sentence("%s: the kernel could not be launched (%s); check that the library was built for this GPU", op.name,
                  why);
}

std::int64_t bytes_of_parts(Problem const &p, std::int64_t parts) {
  return parts * p.columns * 2 * std::int64_t(sizeof(float));
}

Kernels kernels_of([[maybe_unused]] Type type) {
#define CUTEFUSE_KERNELS(stem, number, group, Element) \
  if (type == Type::number) return kernels_##number();
#include "row_norm_kernels.inc"
#undef CUTEFUSE_KERNELS
  return {};
}

// Plans `kernel` on `grid` as the next launch.
char const *add(State &state, Plan &plan, void const *kernel, Grid const &grid, int shared_bytes) {
  Launch &launch = state.launches[plan.launches++];
  launch = {{kernel, grid.threads, shared_bytes}, grid.blocks, grid.cluster, offers(plan.sm, kClusters)};
  return prepare(launch, plan.device >= 0);
}

std::uint32_t bits(Slots const &slots, std::initializer_list<Operand> operands) {
  std::uint32_t all = 0;
  for (Operand operand : operands) all |= slots.has(operand) ? 1u << slots.at[operand] : 0;
  return all;
}

char const *plan_forward(Op const &op, State &state, Call const &call, Plan &plan) {
  Problem const &p = state.forward.problem;
  if (p.rows == 0) return nullptr;
  Tile const *const tile = find_id(kTiles, call.config);
  if (tile == nullptr) {
    return sentence("%s: no tile runs rows of %lld %s on compute capability %d.%d; skip this fusion", op.name,
                    (long long)p.columns, name_of(p.type), call.sm / 10, call.sm % 10);
  }
  Grid const grid = forward_grid(*tile, multiprocessors(call.sm_count, call.sm), &state.forward);
  state.forward.inverse = 1.f / float(p.columns);
  int const rows = p.residual ? 2 : 1;  // tensors whose row a block keeps in shared memory
  plan.operands = bits(state.slots, {kX, kResidual, kGamma, kBeta, kY, kSum});
  void const *kernel = nullptr;
  if (plan.device >= 0) kernel = kernels_of(p.type).forward(*tile, state.forward);
  int const shared_bytes = tile->scope == Scope::kShared ? state.forward.slice * kVectorBytes * rows : 0;
  char const *const why = add(state, plan, kernel, grid, shared_bytes);
  return why == nullptr ? nullptr : refused(op, why);
}

char const *plan_backward(Op const &op, State &state, Call const &call, Plan &plan) {
  BackwardParams &params = state.backward;
  Problem const &p = params.problem;
  Slots const &slots = state.slots;
  bool const sums = slots.has(kDgamma) || slots.has(kDbeta);
  if (p.rows > 0x7fffffff) {
    return sentence("%s: %lld rows are more than the 2^31 of one launch; split the batch", op.name, (long long)p.rows);
  }
  Grid grid = backward_grid(call, &params);
  bool const pipelined = grid.threads > 0;
  if (sums && p.rows > 0 && call.workspace_promise >= 0) {
    params.parts = int(std::min<std::int64_t>(params.parts, call.workspace_promise / bytes_of_parts(p, 1)));
    if (params.parts < 1) {
      return sentence("%s: the sums of dgamma and dbeta need %lld bytes of workspace, %lld are promised; pass more",
                      op.name, (long long)bytes_of_parts(p, 1), (long long)call.workspace_promise);
    }
  }
  BackwardKernels kernels{};
  if (plan.device >= 0) kernels = kernels_of(p.type).backward(params, pipelined);
  std::int64_t const column_blocks = ceil_div(p.columns, 32);
  char const *why = nullptr;
  if (p.rows > 0 && pipelined) {
    grid.blocks = std::int64_t(params.parts) * grid.cluster;
    why = add(state, plan, kernels.rows, grid, ring_bytes(params) + gamma_bytes(params));
    // One cluster more than can run at once would run after the others and take as long again.
    if (why == nullptr && grid.cluster > 2 && plan.device >= 0) {
      int const most = clusters_at_once(state.launches[0].kernel, grid.cluster);
      if (most > 0) params.parts = std::min(params.parts, most);
      state.launches[0].blocks = std::int64_t(params.parts) * grid.cluster;
    }
  } else if (p.rows > 0) {
    why = add(state, plan, kernels.rows, {p.rows, kStreamThreads, 1}, 0);
    if (why == nullptr && sums)
      why = add(state, plan, kernels.columns, {column_blocks * params.parts, 32 * kFinalRows, 1}, 0);
  }
  // Without rows there are no parts, and the sums are zero.
  if (why == nullptr && sums) why = add(state, plan, kernels.sums, {column_blocks, 32 * kFinalRows, 1}, 0);
  if (why != nullptr) return refused(op, why);
  plan.workspace_bytes = sums ? bytes_of_parts(p, params.parts) : 0;
  if (p.rows > 0) plan.operands = bits(slots, {kDy, kDsum, kX, kGamma, kDx});
  return nullptr;
}

}  // namespace

char const *reject(Family const &family, Call const &call) {
  Problem p{};
  return problem_of(family, call, slots_of(family, call), &p);
}

std::int64_t workspace_bytes(Family const &family, Call const &call) {
  BackwardParams params{};
  Problem &p = params.problem;
  Slots const slots = slots_of(family, call);
  if (!slots.has(kDgamma) && !slots.has(kDbeta)) return 0;
  if (problem_of(family, call, slots, &p) != nullptr || p.rows < 0 || p.columns < 0) return 0;
  backward_grid(call, &params);
  return bytes_of_parts(p, params.parts);
}

std::int32_t configs(Family const &family, Call const &call, std::int32_t *ids, std::int32_t capacity) {
  ForwardParams params{};
  Problem &p = params.problem;
  Slots const slots = slots_of(family, call);
  if (slots.backward || problem_of(family, call, slots, &p) != nullptr || p.columns < 0) return 0;
  if (p.rows < 0) p.rows = 1 << 20;
  int const sm_count = multiprocessors(call.sm_count, call.sm);
  Tile const *legal[std::size(kTiles)];
  int count = 0;
  for (Tile const &tile : kTiles) {
    if (!offers(call.sm, tile.needs)) continue;
    Grid const grid = forward_grid(tile, sm_count, &params);
    if (grid.threads > 0 && grid.blocks <= kMostBlocks) legal[count++] = &tile;
  }
  // After the first choice: registers before shared memory before two reads, more vectors before fewer.
  int const first = favourite(p, sm_count);
  auto const rank = [&](Tile const *tile) { return tile->id == first ? -100 : 8 * int(tile->scope) - tile->vectors; };
  std::stable_sort(legal, legal + count, [&](Tile const *a, Tile const *b) { return rank(a) < rank(b); });
  count = std::min(count, int(capacity));
  std::transform(legal, legal + count, ids, [](Tile const *tile) { return tile->id; });
  return count;
}

double predicted_us(Family const &, Call const &) { return -1; }

char const *obstacle(Family const &family, Call const &call, std::int32_t) {
  Slots const slots = slots_of(family, call);
  if (slots.backward) return "a backward pass, which has no tiles,";
  Tensor const &x = call.inputs[slots.at[kX]];
  return sentence("rows of %lld %s", (long long)x.dims[x.rank - 1], name_of(x.type));
}

char const *plan(Family const &family, Call const &call, Plan &plan) {
  State state{};
  state.slots = slots_of(family, call);
  if (char const *reason = problem_of(family, call, state.slots, &state.forward.problem)) return reason;
  state.backward.problem = state.forward.problem;
  char const *const reason = (state.slots.backward ? plan_backward : plan_forward)(family.op, state, call, plan);
  std::memcpy(plan.state, &state, sizeof(state));
  return reason;
}

char const *launch(Family const &family, Plan const &plan, Operands const &operands) {
  State state;
  std::memcpy(&state, plan.state, sizeof(state));
  auto const at = [&](Operand operand) -> void * {
    int const i = state.slots.at[operand];
    if (i < 0) return nullptr;
    return i < plan.num_inputs ? const_cast<void *>(operands.inputs[i]) : operands.outputs[i - plan.num_inputs];
  };
  ForwardParams &f = state.forward;
  f.x = at(kX), f.residual = at(kResidual), f.gamma = at(kGamma), f.beta = at(kBeta), f.y = at(kY), f.sum = at(kSum);
  f.mean = static_cast<float *>(at(kMean)), f.rstd = static_cast<float *>(at(kRstd));
  BackwardParams &b = state.backward;
  b.dy = at(kDy), b.dsum = at(kDsum), b.x = f.x, b.gamma = f.gamma, b.mean = f.mean, b.rstd = f.rstd;
  b.dx = at(kDx), b.dgamma = at(kDgamma), b.dbeta = at(kDbeta);
  b.partial = plan.workspace_bytes > 0 ? static_cast<float *>(operands.workspace) : nullptr;
  void *const params = state.slots.backward ? static_cast<void *>(&b) : &f;
  for (std::int32_t i = 0; i < plan.launches; ++i) {
    if (char const *why = start(state.launches[i], params, operands.stream)) return refused(family.op, why);
  }
  return nullptr;
}

}  // namespace cutefuse::row_norm
