// Host side of the Hopper tiles: shared-memory plan of the halo path, legality, and the cost model.
#include "conv/sm90/tiles.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace cutefuse::conv {

namespace {

constexpr int kMaxBox = 256;  // pixels of a TMA box along one axis

// What every source's factor of enlargement divides, or more than a box holds.
int common_multiple(Problem const &p) {
  int multiple = 1;
  for (int i = 0; i < p.sources && multiple <= kMaxBox; ++i) multiple = std::lcm(multiple, p.upsample[i]);
  return multiple;
}

// Pixels from one row of a patch to the next, for `size` outputs along it. Of an enlarged source whole repetitions are
// loaded, each row by itself, and TMA writes to multiples of 128 bytes.
int pitch_of(Problem const &p, int size, int reach, int pad, int pixel_bytes) {
  if (!is_upsampled(p)) return size + reach;
  int before = 0;  // pixels that a repetition can have before the patch
  for (int i = 0; i < p.sources; ++i) {
    int const step = std::gcd(size, p.upsample[i]);  // patches begin at every step-th of a repetition's pixels
    before = std::max(before, p.upsample[i] - step + (step - pad % step) % step);
  }
  int const whole = std::lcm(common_multiple(p), 128 / pixel_bytes);
  return ceil_div(before + size + reach, whole) * whole;
}

HaloPlan plan_along(bool swapped, Problem const &p, Sm90Tile const &tile) {
  HaloPlan plan{};
  int const reach_h = (p.R - 1) * p.dilation_h, reach_w = (p.S - 1) * p.dilation_w;
  plan.swapped = swapped;
  plan.size_a = swapped ? p.P : p.Q, plan.size_b = swapped ? p.Q : p.P;
  plan.tile_a = tile.pixels_a, plan.tile_b = tile.pixels_b;
  int const pixel_bytes = tile.type_bytes * halo_channels(tile), filter_bytes = tile.filters * pixel_bytes;
  plan.pitch = pitch_of(p, tile.pixels_a, swapped ? reach_h : reach_w, swapped ? p.pad_top : p.pad_left, pixel_bytes);
  plan.rows = tile.pixels_b + (swapped ? reach_w : reach_h);
  plan.step_r = p.dilation_h * (swapped ? 1 : plan.pitch);
  plan.step_s = p.dilation_w * (swapped ? plan.pitch : 1);
  plan.stage_bytes = ceil_div(plan.pitch * plan.rows * pixel_bytes, 1024) * 1024;
  // Filters need a deep ring, since a stage lasts one tap; pixels get what is left, but two stages at least.
  int const region = halo_region_bytes(tile.pixels_b, tile.type_bytes);
  plan.halo_stages = std::clamp((region - 4 * filter_bytes) / plan.stage_bytes, 2, kHaloMaxStages);
  plan.filter_stages = std::clamp((region - plan.halo_stages * plan.stage_bytes) / filter_bytes, 0, kFilterMaxStages);
  return plan;
}

int rows_pitch(Problem const &p, int width) {
  return pitch_of(p, width, (p.S - 1) * p.dilation_w, p.pad_left, 2 * kChannelBlock);
}

// Of shared memory, for the shortcut of a tile of rows and the pixels between them.
int rows_shortcut_bytes(Problem const &p, Sm90Tile const &tile) {
  if (p.residual == Residual::kNone) return 0;
  int const between = (p.S - 1) * p.dilation_w + 2 * (common_multiple(p) - 1);  // at most
  return ceil_div((tile.pixels() + between) * 128, 1024) * 1024;
}

// Columns x rows of the output that one tile covers: the choice with the fewest tiles among those whose pixels, halos
// between them included, fit into the tile and whose patch fits into half of the memory that four filter stages leave.
HaloPlan plan_rows(Problem const &p, Sm90Tile const &tile) {
  int const reach_h = (p.R - 1) * p.dilation_h, reach_w = (p.S - 1) * p.dilation_w;
  int const filter_bytes = tile.filters * kChannelBlock * 2, shortcut_bytes = rows_shortcut_bytes(p, tile);
  int const stage_pixels = rows_stage_pixels(shortcut_bytes);
  int const widest = std::min(tile.pixels(), kMaxBox - reach_w), first = ceil_div(p.Q, widest);
  HaloPlan plan{};
  std::int64_t fewest = 0;
  for (int columns = first; columns <= std::max(first + 3, p.Q) && (fewest == 0 || columns <= first + 3); ++columns) {
    int const width = ceil_div(p.Q, columns), pitch = rows_pitch(p, width), rows = stage_pixels / pitch - reach_h;
    int const fit = std::min({1 + (tile.pixels() - width) / pitch, rows, kMaxBox - reach_h, p.P});
    if (fit < 1 || pitch > kMaxBox) continue;
    std::int64_t const tiles = std::int64_t(columns) * ceil_div(p.P, fit);
    if (fewest != 0 && tiles >= fewest) continue;
    fewest = tiles;
    plan.tile_a = width, plan.tile_b = ceil_div(p.P, ceil_div(p.P, fit)), plan.pitch = pitch;
  }
  plan.size_a = p.Q, plan.size_b = p.P;
  plan.rows = plan.tile_b + reach_h;
  plan.step_r = p.dilation_h * plan.pitch, plan.step_s = p.dilation_w;
  plan.stage_bytes = ceil_div(plan.pitch * plan.rows * kChannelBlock * 2, 1024) * 1024;
  plan.halo_stages = 2;
  plan.filter_stages = std::min(
      kFilterMaxStages, (kRowsRegionBytes - shortcut_bytes - plan.halo_stages * plan.stage_bytes) / filter_bytes);
  plan.shortcut_at = kRowsRegionBytes - shortcut_bytes;
  return plan;
}

}  // namespace

HaloPlan halo_plan(Problem const &p, Sm90Tile const &tile) {
  if (tile.schedule == Sm90Schedule::kRows) return plan_rows(p, tile);
  auto const covered = [&](int size_a, int size_b) {
    return double(ceil_div(size_a, tile.pixels_a) * tile.pixels_a) * ceil_div(size_b, tile.pixels_b) * tile.pixels_b;
  };
  return plan_along(covered(p.P, p.Q) < covered(p.Q, p.P), p, tile);
}

namespace {

// Sources with scales: their outputs are float16, or of their type by whole vectors, unless the blocks of a cluster
// share the sums; and unless the tile drains sums, one serves all sources.
bool can_run_scaled(Sm90Tile const &tile, Problem const &p) {
  if (p.layout != Layout::kChannelsLast || !(tile.drains || drains_once(p))) return false;
  if (p.residual != Residual::kNone) return false;
  bool const narrow = p.output_type == p.type && p.K % 16 == 0 && !divides_reduction(tile);
  return p.output_type == Type::kFloat16 || narrow;
}

}  // namespace

bool sm90_can_run(Sm90Tile const &tile, Problem const &p) {
  if (tile.type_bytes != size_of(p.type) || !has_strides_for_tma(p)) return false;
  if (tile.type_bytes == 1 && !can_run_scaled(tile, p)) return false;
  if ((is_upsampled(p) && !tile.halo) || (p.pre_activated && !tile.pre_activates)) return false;
  if (p.outputs > 1 && tile.schedule == Sm90Schedule::kSmall) return false;
  if (p.residual != Residual::kNone && !adds_shortcut(tile)) return false;
  for (int i = 0; i < p.outputs; ++i) {  // TMA stores whole vectors; threads store float32
    OutputRange const range = output_range(p, i);
    if (tile.type_bytes != 4 && (range.last - range.first) % 8 != 0 && !owns_pad_lanes(p.output_type, range))
      return false;
  }
  if (tile.cluster_f > filter_tiles(tile, p)) return false;  // no second block to share the pixels with
  if (p.K > (1 << 16) || std::int64_t(p.N) * p.P * p.Q > 0x7fff0000) return false;
  // The pre-activation keeps the row and column of a pixel in 16 bits each.
  if (p.pre_activated && !is_pointwise(p) && std::max(p.H, p.W) > kMaxUpsampledSide) return false;
  int const reach_h = (p.R - 1) * p.dilation_h, reach_w = (p.S - 1) * p.dilation_w;
  if (tile.halo) {
    bool const rows = tile.schedule == Sm90Schedule::kRows, one_tap = p.R * p.S == 1;
    if (one_tap && (rows || !is_upsampled(p))) return false;  // a patch would bring nothing that im2col does not
    if (p.stride_h * p.stride_w != 1 || reach_h > 64 || reach_w > 64) return false;
    if (rows) {
      int const pitch = rows_pitch(p, 1);
      return pitch <= kMaxBox && (reach_h + 1) * pitch <= rows_stage_pixels(rows_shortcut_bytes(p, tile));
    }
    for (bool const swapped : {false, true}) {
      HaloPlan const plan = plan_along(swapped, p, tile);
      if (plan.filter_stages < kFilterMinStages || plan.pitch > kMaxBox || plan.rows > kMaxBox) return false;
    }
    return true;
  }
  if (is_pointwise(p)) return true;
  // im2col maps: 8-bit tap offsets, corners of the bounding box in [-128, 127], strides up to 8.
  auto const corner = [](int pad_begin, int pad_end, int reach) {
    return pad_begin <= 128 && pad_end - reach >= -128 && pad_end - reach <= 127;
  };
  return p.stride_h <= 8 && p.stride_w <= 8 && reach_h <= 255 && reach_w <= 255 &&
         corner(p.pad_top, p.pad_bottom, reach_h) && corner(p.pad_left, p.pad_right, reach_w);
}

namespace {

int output_tiles(Sm90Tile const &tile, Problem const &p) {
  if (!tile.halo) return ceil_div(p.N * p.P * p.Q, tile.pixels());
  HaloPlan const plan = halo_plan(p, tile);
  return p.N * ceil_div(plan.size_a, plan.tile_a) * ceil_div(plan.size_b, plan.tile_b);
}

}  // namespace

int sm90_splits(Sm90Tile const &tile, Problem const &p, int sm_count, int const (&room)[kMaxSplits + 1]) {
  if (!divides_reduction(tile)) return 1;
  if (tile.schedule == Sm90Schedule::kSmall) return small_splits(tile, p, sm_count, room);
  int const tiles = output_tiles(tile, p) * filter_tiles(tile, p);
  int const length = k_tiles<kChannelBlock>(p);
  // k-tiles of a multiprocessor, and the cost of adding up the parts
  auto const cost = [&](int splits) { return ceil_div(tiles * splits, sm_count) * ceil_div(length, splits) + splits; };
  int best = 1;
  for (int splits = 2; splits <= kMaxSplits; ++splits) {
    if (tiles <= room[splits] && length >= 4 * splits && cost(splits) < cost(best)) best = splits;
  }
  return best;
}

namespace {

// What parts of a tile take, in clocks. Fitted on an H200, by which a multiprocessor multiplies at 1625 to 1700 MHz.
struct Rates {
  double per_us;
  double epilogue, exponential;  // of 128 x 256 outputs; with SiLU or Sigmoid
  double start;                  // of a tile behind the first one
  double tap;                    // at least, of a patch: the filters of one tap are a stage of their ring
  double split, rows;            // adding up the parts of a reduction; undivided tiles of whole rows
  double repeated;               // bytes a clock that TMA writes where it repeats pixels
  double bytes;                  // a clock, of all multiprocessors
};

// To rank tiles: the conv, latency and single_source shapes, cold and warm.
constexpr Rates kRanking{1625, 3500, 7000, 500, 0, 3500, 3000, 9, 2400};

// Inside of a network. Its tensors come from L2, and the loads of the next tile are in flight while one is stored.
constexpr Rates kWarm{1700, 1500, 7300, 0, 375, 4300, 5000, 12, 2900};

double clocks_of(Sm90Tile const &tile, Problem const &p, int sm_count, Rates const &rates) {
  int room[kMaxSplits + 1];
  bool const small = tile.schedule == Sm90Schedule::kSmall;
  int const resident = small ? small_room(tile).blocks : 1;
  for (int i = 1; i <= kMaxSplits; ++i) {  // a cluster lies in one GPC, and those of three and more leave a tenth free
    room[i] = resident * std::min(sm_count / i - i / 2, i > 2 ? 9 * sm_count / (10 * i) : sm_count);
  }
  int const splits = sm90_splits(tile, p, sm_count, room), cluster = tile.cluster_f * splits;
  double const tiles_x = output_tiles(tile, p);
  double load_pixels = tile.pixels() / tile.cluster_f;
  if (tile.halo) {
    HaloPlan const plan = halo_plan(p, tile);
    load_pixels = double(plan.pitch) * plan.rows / (p.R * p.S);
  }
  int const n = tile.pixels_per_warpgroup();  // width of one wgmma
  // 128 clocks for 64 x 256 x 32 bytes; narrow ones wait for shared memory, and L2 delivers some 50 bytes a clock.
  double const slow = n >= 160                ? (tile.halo ? 1.0 : 1.02)
                      : tile.halo && n >= 120 ? 1.02
                      : n >= 128              ? 1.15
                      : n > 64                ? 1.1
                                              : 1.6;
  double const multiply = tile.filters * tile.pixels() / 128.0 * slow;
  // Nothing hides an epilogue, unless the warpgroups take turns: then one, slower by a fifth, runs during the other's
  // loop, and only the last one is exposed.
  bool const exponential = p.activation == Activation::kSilu || p.activation == Activation::kSigmoid;
  bool const shortcut = p.residual != Residual::kNone;
  // Float32 outputs are twice the bytes. That they take twice the time has not been measured.
  double const area = tile.filters * tile.pixels() / 32768.0 * (tile.type_bytes == 4 ? 2 : 1);
  double const epilogue = area * ((exponential ? rates.exponential : rates.epilogue) + (shortcut ? 500 : 0));
  // A pre-activated k-tile is rewritten before it is multiplied, by 256 threads or by those of one warpgroup.
  bool const alone = tile.schedule == Sm90Schedule::kPingPong;
  double const rewrite = p.pre_activated ? tile.pixels() * (alone ? 6.0 : 4.0) : 0;
  double loop = 0;
  for (int i = 0; i < p.sources; ++i) {
    double const repeats = p.upsample[i] > 1 ? 50.0 / rates.repeated : 1.0;
    double const load = 32 * (tile.filters + load_pixels * repeats) / 50;
    double const k_steps = double(ceil_div(p.C[i], 32 / tile.type_bytes)) * p.R * p.S;
    double const taps = double(ceil_div(p.C[i], kChannelBlock)) * p.R * p.S;
    double const least = tile.halo ? taps * rates.tap : 0.0;
    loop += (std::max(k_steps * std::max(multiply, load), least) + taps * rewrite) / splits;
  }
  double const late = 1.2 * epilogue;
  double const clusters = tiles_x * ceil_div(filter_tiles(tile, p), tile.cluster_f);
  double const waves = std::ceil(clusters / std::max(1, sm_count / cluster));
  // Tiles of whole rows pass their sums through shared memory undivided, too.
  double const adding = splits > 1 ? rates.split : tile.schedule == Sm90Schedule::kRows ? rates.rows : 0;
  double clocks = waves * (loop + epilogue + rates.start + adding);
  if (tile.schedule == Sm90Schedule::kPingPong) {
    clocks = waves > 1 ? waves * std::max(loop + 200, (loop + late) / 2) + late : loop + late;
  }
  if (small) clocks = small_us(tile, p, splits, sm_count, room) * rates.per_us;
  double bytes = double(size_of(p.output_type)) * p.N * p.P * p.Q * p.K * (shortcut ? 2 : 1);
  for (int i = 0; i < p.sources; ++i) {
    bytes += double(tile.type_bytes) * p.N * p.H * p.W * p.C[i] / (p.upsample[i] * p.upsample[i]);
  }
  double const memory = bytes / rates.bytes;
  // The two overlap, but not completely. Not std::hypot: a wheel would need glibc 2.35 for it.
  return std::sqrt(clocks * clocks + memory * memory);
}

// Clocks on top of clocks_of where a source ends within a block of 64 channels: TMA fills the rest of the pixels with
// zeros, which takes longer than loading them. Patches with a halo are loaded by half blocks, unless they are of rows.
double narrow_clocks(Sm90Tile const &tile, Problem const &p, int sm_count) {
  bool const rows = tile.schedule == Sm90Schedule::kRows;
  if ((tile.halo && !rows) || is_pointwise(p)) return 0;
  int const pixels = rows ? halo_plan(p, tile).stage_bytes / (2 * kChannelBlock) / (p.R * p.S) : tile.pixels();
  double const load = 2.0 * kChannelBlock * (tile.filters + pixels / tile.cluster_f) / 50.0;  // of a tap
  double clocks = 0;
  for (int i = 0; i < p.sources; ++i) {
    int const tail = p.C[i] % kChannelBlock;
    if (tail == 0) continue;
    double const empty = double(kChannelBlock - tail) / kChannelBlock;
    double const counted = ceil_div(tail, 16) / 4.0;  // of the load, in clocks_of
    clocks += p.R * p.S * load * (1 + 1.1 * empty - counted);
  }
  double const tiles = double(output_tiles(tile, p)) * filter_tiles(tile, p);
  // Few blocks do not keep each other waiting.
  return std::max(std::ceil(tiles / sm_count) - 1, 0.0) * clocks + std::min(tiles / sm_count, 1.0) * clocks;
}

// Of the blocks of 64 channels, the share that the sources leave empty.
double empty_share(Problem const &p) {
  double channels = 0, blocks = 0;
  for (int i = 0; i < p.sources; ++i) channels += p.C[i], blocks += ceil_div(p.C[i], kChannelBlock);
  return 1 - channels / (blocks * kChannelBlock);
}

}  // namespace

double sm90_cost(Sm90Tile const &tile, Problem const &p, int sm_count) {
  double const slow = tile.schedule == Sm90Schedule::kRows ? 1.08 : 1.0;
  double const clocks = clocks_of(tile, p, sm_count, kRanking) + narrow_clocks(tile, p, sm_count);
  return 1.1 + slow * clocks / kRanking.per_us;
}

// Fitted to the 1,756 fused sites of 41 runs of 21 networks on an H200: the time that a kernel adds behind another one
// of ours, whose end its start overlaps. A single one is off by 10 %.
double sm90_warm_us(Sm90Tile const &tile, Problem const &p, int sm_count) {
  double const us = clocks_of(tile, p, sm_count, kWarm) / kWarm.per_us;
  // Small tiles have no descriptors of patches to fetch and few outputs to drain; empty channels cost them no L2 reads.
  if (tile.schedule == Sm90Schedule::kSmall) return 1.0 + 1.3 * us * (1 - 0.15 * empty_share(p));
  // First loads and last stores: patches and long pipelines have more of both.
  double const ends = tile.halo || tile.schedule == Sm90Schedule::kPingPong ? 3.2 : 2.6;
  return ends + us + narrow_clocks(tile, p, sm_count) / kWarm.per_us;
}

}  // namespace cutefuse::conv
