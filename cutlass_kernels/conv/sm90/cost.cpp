// The constants were fitted on H200s to the times of all tiles on 300 random convolutions in float16 and 55 in int8,
// out of the L2 cache, and to the shapes of the benchmarks; 300 and 125 others judged them (95 % and 92 % of the
// first guesses within 10 % of the fastest tile), and kTurn was set by these. All constants together, and the ends,
// were then set so that the recorded times of networks and of their sites hold too. Those of enlarged sources, and of
// shortcuts, are of earlier fits. The cost of rewriting pixels in large tiles was calibrated on DenseNet-121's layers
// on H100s.
#include "conv/sm90/cost.h"

#include <algorithm>
#include <bitset>
#include <cmath>

#include "conv/sm90/k_tiles.h"

namespace cutefuse::conv {
namespace {

// Whether an activation costs as much as an exponential. GELU's time has not been measured.
bool exponential(Activation a) { return a == Activation::kSilu || a == Activation::kSigmoid || a == Activation::kGelu; }

int pixel_tiles(Sm90Tile const &tile, Problem const &p) {
  if (!tile.halo) return ceil_div(p.N * p.P * p.Q, tile.pixels());
  HaloPlan const plan = halo_plan(p, tile);
  return p.N * ceil_div(plan.size_a, plan.tile_a) * ceil_div(plan.size_b, plan.tile_b);
}

// What TMA takes over the channels that a source's last block of 64 lacks, which it fills with zeros, as a part of what
// it takes over channels that it loads.
constexpr double kFilled = 0.5;

// How much longer im2col takes over pixels of a source whose stride is no multiple of 32 bytes.
double im2col_time(Problem const &p, int source) {
  constexpr double kUneven = 2.4;
  return !is_pointwise(p) && p.ldx[source] * size_of(p.type) % 32 != 0 ? kUneven : 1.0;
}

// ---- small tiles ----------------------------------------------------------------------------------------------------

// The empty parts of all k-tiles together, in k-tiles. Those of plain matrices take no longer.
double empty_k_tiles(Sm90Tile const &tile, Problem const &p) {
  double empty = 0;
  int const channels = k_channels(tile);
  for (int i = 0; i < p.sources && !is_pointwise(p); ++i) {
    int const taps = p.R * p.S;
    bool const joined = tile.pairs && i >= joined_from(tile, p);
    double const k_tiles = !joined ? ceil_div(p.C[i], channels) * taps : joins_taps(tile, p) ? ceil_div(taps, 2) : 0.5;
    empty += k_tiles - double(p.C[i]) * taps / channels;
  }
  return empty;
}

// How many rows of 128 bytes take as long as one pixel of a k-tile, in the mean. Of enlarged sources each pixel is
// loaded once.
double rows_per_pixel(Sm90Tile const &tile, Problem const &p) {
  double loads = 0, all = 0;
  for (int i = 0; i < p.sources; ++i) {
    loads += double(blocks_of(p.C[i])) / (p.upsample[i] * p.upsample[i]) * im2col_time(p, i);
    all += blocks_of(p.C[i]);
  }
  return tile.enlarges ? loads / k_tiles(tile, p) : loads / all;
}

std::int64_t tiles_of(Sm90Tile const &tile, Problem const &p) {
  return std::int64_t(filter_tiles(tile, p)) * pixel_tiles(tile, p);
}

// Microseconds of a block's part of the reduction, where so many blocks share its multiprocessor, and so many run in
// all.
double narrow_us(Sm90Tile const &tile, Problem const &p, int splits, int resident, int blocks) {
  constexpr double kChain = 0.153;       // us for one thread to issue the loads of a k-tile, or for it to be multiplied
  constexpr double k8BitChain = 0.225;   // likewise, of 8-bit sources
  constexpr double kRow = 0.00144;       // us for one multiprocessor to load 128 bytes of a pixel by im2col
  constexpr double kPlainRow = 0.86;     // how much of that it takes over a row of a plain matrix
  constexpr double kFilterRow = 0.68;    // likewise, over a row of filters
  constexpr double kShared = 0.0000125;  // us for all multiprocessors together to load 128 bytes from L2
  constexpr double kActivate = 0.076;    // us for one warpgroup to activate its 64 pixels of a k-tile
  double const k_tiles = ceil_div(conv::k_tiles(tile, p), splits) + kFilled * empty_k_tiles(tile, p) / splits;
  double const activate = p.pre_activated ? kActivate : 0, chain = tile.type_bytes == 1 ? k8BitChain : kChain;
  // Under several taps a filter's two blocks are two rows of 64 bytes, which take a quarter longer than one of 128.
  bool const halves = tile.pairs && p.R * p.S > 1;
  double const per_filter = kFilterRow * (halves ? 1.25 : 1.0);
  double const pixel_rows = tile.pixels() * rows_per_pixel(tile, p) * (is_pointwise(p) ? kPlainRow : 1.0);
  // Of the last tile only filters that exist are loaded, where plan_last_tiles can leave out the others.
  bool const loads_all = halves || joined_from(tile, p) < p.sources;
  int const filters = loads_all ? tile.filters : std::min(tile.filters, p.K);  // of the largest tile
  double const mean_filters = loads_all ? tile.filters : double(p.K) / filter_tiles(tile, p);
  double const rows = filters * per_filter + pixel_rows, mean_rows = mean_filters * per_filter + pixel_rows;
  double const load = std::max(rows * kRow * resident, mean_rows * kShared * blocks);
  return k_tiles * (std::max(chain, load) + activate);
}

// Likewise of a patch, whose k-tile is a row of taps. calibration/small_patches.py fits the constants, and those of
// small_us for patches.
double patch_us(Sm90Tile const &tile, Problem const &p, int splits, int resident) {
  constexpr double kChain = 0.393;        // us at least from a k-tile to the next
  constexpr double kTap = 0.039;          // us for each tap of 64 channels to be multiplied
  constexpr double kPixel = 0.001;        // us more for each of the tile's pixels
  constexpr double kRow = 0.0017;         // us for one multiprocessor to load 128 bytes of a pixel
  constexpr double kFilterRow = 0.00114;  // likewise, of a filter
  constexpr double kFirst = 0.0007;       // us for each pixel of the first patch, before which nothing is multiplied
  double halves = 0, blocks = 0;          // half blocks of channels that are multiplied, and blocks
  for (int i = 0; i < p.sources; ++i) halves += ceil_div(p.C[i], kChannelBlock / 2), blocks += blocks_of(p.C[i]);
  HaloPlan const plan = halo_plan(p, tile);
  int const pixels = plan.pitch * plan.rows;
  double const multiply = kSmallPatchTaps * (kTap + kPixel * tile.pixels()) * halves / (2 * blocks);
  double const load = kSmallPatchTaps * std::min(tile.filters, p.K) * kFilterRow + kRow * pixels / p.R;
  double const k_tile = std::max(kChain, std::max(multiply, load) * resident);
  return ceil_div(k_tiles(tile, p), splits) * k_tile + kFirst * pixels * resident;
}

// Microseconds of all waves, without first loads and last stores.
double small_us(Sm90Tile const &tile, Problem const &p, int splits, int sm_count, Room const &room) {
  constexpr double kHeld = 0.49;   // us that a launch waits where the one before it leaves no room for all blocks
  constexpr double kLater = 0.76;  // us that a later wave waits where a multiprocessor holds one block at a time
  constexpr double kFinish = 0.71, kPatchFinish = 0.57;           // us to finish 64 x 64 outputs
  constexpr double kExponential = 0.82, kPatchExponential = 0.7;  // likewise, with SiLU or sigmoid
  constexpr double kShortcut = 0.41;                              // us for a shortcut to be added to them
  constexpr double kDrain = 0.065;  // us to add 64 x 64 sums of one scale to those of the others
  constexpr double kMeet = 1.25;    // us for sums to be exchanged, if every multiprocessor takes part
  constexpr double kSend = 0.62;    // us for 64 x 64 sums to go to other blocks
  constexpr double kAdd = 0.033;    // us to read one block's part of 64 x 8 sums
  // A width of fewer than 32 is finished no sooner than 32.
  double const area = tile.rows() * std::max(tile.width(), 32) / 4096.0;
  int const units = tile.width() / 8, finished = ceil_div(units, splits);  // of a block
  double const each =
      exponential(p.activation) ? (tile.halo ? kPatchExponential : kExponential) : (tile.halo ? kPatchFinish : kFinish);
  double const finish = area * finished / units * (each + (p.residual != Residual::kNone ? kShortcut : 0));
  int const drains = int(std::bitset<32>(drains_after(p)).count());  // one, but for 8-bit sources
  double const drain = kDrain * area * (drains - 1) / splits;
  double const send = kSend * area * (splits - 1) / splits, add = kAdd * tile.rows() / 64 * finished * splits;
  std::int64_t const tiles = tiles_of(tile, p);
  SmallLaunch const launch = small_launch(tile, p, splits, room);
  auto const part_of_all = [&](int clusters) { return std::min(1.0, double(clusters) * splits / sm_count); };
  auto const wave_us = [&](int clusters, bool later) {
    int const resident = ceil_div(clusters, std::max(1, room[1][splits]));  // blocks on a multiprocessor
    double us =
        tile.halo ? patch_us(tile, p, splits, resident) : narrow_us(tile, p, splits, resident, clusters * splits);
    us += (finish + drain) * resident;
    if (later && small_blocks(tile) == 1) us += kLater;
    if (splits > 1) us += kMeet * part_of_all(clusters) + send + add;
    return us;
  };
  std::int64_t const waves = tiles / launch.at_once;
  int const left = int(tiles % launch.at_once);
  double us = 2 * tiles > launch.at_once ? kHeld : 0;
  if (waves > 0) us += wave_us(launch.at_once, false) + double(waves - 1) * wave_us(launch.at_once, true);
  return left > 0 ? us + wave_us(left, waves > 0) : us;
}

// K-tiles of enlarged sources or of those of full size, whichever are fewer: each part of a sum has both.
int rarer_k_tiles(Problem const &p) {
  int enlarged = 0, others = 0;
  for (int i = 0; i < p.sources; ++i) (p.upsample[i] > 1 ? enlarged : others) += blocks_of(p.C[i]);
  return std::min(enlarged, others);
}

int small_splits(Sm90Tile const &tile, Problem const &p, int sm_count, Room const &room) {
  int const units = tile.width() / 8, length = tile.enlarges ? rarer_k_tiles(p) : k_tiles(tile, p);
  HaloPlan const plan = plan_of(tile, p);
  int best = 1;
  double fastest = small_us(tile, p, best, sm_count, room);
  for (int splits = 2; splits <= kMaxSplits && length >= splits; ++splits) {
    // A block has room for the units that it finishes, and beside them for a ring.
    bool const fits = ceil_div(units, splits) * splits <= small_parts(tile) && room[1][splits] > 0 &&
                      small_stages(tile, plan, p, true, 1) >= small_least_stages(tile);
    double const us = fits ? small_us(tile, p, splits, sm_count, room) : fastest;
    if (us < fastest) best = splits, fastest = us;
  }
  return best;
}

// ---- large tiles, in clocks -----------------------------------------------------------------------------------------

constexpr double kClocksPerUs = 1700;  // while the tensor cores are busy
constexpr double kLoadBytes = 60;      // per clock, from L2 into one multiprocessor

// Clocks of one k-step, 32 bytes of each pixel and filter: 128 for 64 x 256 outputs. Narrow wgmma wait for shared
// memory.
double multiply_clocks(Sm90Tile const &row) {
  Sm90Tile const tile = as_multiplied(row);
  int const n = halves_channels(tile) ? tile.pixels() : tile.pixels_per_warpgroup();  // width of one wgmma
  double const slow = n <= 64 ? 1.7 : n == 128 && !tile.halo ? 1.09 : 1.04;
  constexpr double k8Bit = 0.87;  // of the clocks of 16-bit products
  return tile.filters * tile.pixels() / 128.0 * slow * (tile.type_bytes == 1 ? k8Bit : 1.0);
}

// Clocks for the sums of a tile to be brought to the next source's unit: a multiplication each, or one or two long
// ones of integers.
double rescale_clocks(Sm90Tile const &tile, Problem const &p) {
  bool const integers = p.type == Type::kInt8 && (tile.halo || !p.small_sums);
  return tile.filters * tile.pixels() / 128.0 * (integers ? 5.5 : 1.0);
}

// Clocks of a tile's reduction: of its loads or its products, whichever take longer.
double loop_clocks(Sm90Tile const &tile, Problem const &p) {
  constexpr double kRepeatedBytes = 12;  // per clock, that TMA writes where it repeats pixels
  constexpr double kHalfRows = 1.25;     // how much longer im2col takes over pixels of 64 bytes, for each byte
  constexpr double kTap = 360;           // clocks of a patch's tap at least, since its filters are a stage of their own
  constexpr double kHalfTap = 250;       // likewise, whose rows are 64 bytes
  constexpr double kTurn = 550;          // of a k-tile under one tap where warpgroups take turns
  constexpr double kBetween = 25;        // from a k-tile to the next
  // Clocks that a k-tile takes longer if other warps rewrite it first: where warpgroups take turns less is seen of it.
  constexpr double kRewrite = 260, kRewriteInTurn = 80;
  int const filters = as_multiplied(tile).filters, taps_each = p.R * (p.S + tile.beside - 1);
  double load_pixels = tile.pixels() / tile.cluster_f;
  if (tile.halo) {
    HaloPlan const plan = halo_plan(p, tile);
    int const patches = std::min(p.stride_h, p.R) * std::min(p.stride_w, p.S);
    load_pixels = double(plan.pitch) * plan.rows * patches / taps_each;
  }
  bool const in_turn = tile.schedule == Sm90Schedule::kPingPong;
  double const rewrite = !p.pre_activated ? 0 : in_turn ? kRewriteInTurn : kRewrite;
  double const tap = halo_channels(tile) * tile.type_bytes == 64 ? kHalfTap : kTap;
  double const multiply = multiply_clocks(tile);
  bool const half_rows = tile.type_bytes * k_channels(tile) == 64 && !tile.halo && !is_pointwise(p);
  double clocks = 0;
  for (int i = 0; i < p.sources; ++i) {
    double const repeats = tile.beside > 1     ? double(tile.beside) / p.upsample[i]
                           : p.upsample[i] > 1 ? kLoadBytes / kRepeatedBytes
                           : tile.halo         ? 1.0
                                               : im2col_time(p, i);
    double const load = 32 * (half_rows ? kHalfRows : 1.0) * (filters + load_pixels * repeats) / kLoadBytes;
    double const k_steps = double(ceil_div(p.C[i], 32 / tile.type_bytes)) * taps_each;
    double const taps = double(ceil_div(p.C[i], k_channels(tile))) * taps_each;
    // The missing block of two is filled with zeros, which takes longer than loading it.
    bool const missing = ceil_div(p.C[i], kChannelBlock) % 2 == 1;
    double const loads = tile.pairs ? 4 * (taps + (missing ? kFilled * p.R * p.S : 0.0)) : k_steps;
    double const least = tile.halo                             ? ceil_div(p.C[i], halo_channels(tile)) * taps_each * tap
                         : takes_turns(tile) && p.R * p.S == 1 ? taps * kTurn
                                                               : 0.0;
    clocks += std::max({k_steps * multiply, loads * load, least}) + taps * (rewrite + kBetween);
    if (tile.type_bytes == 1 && i > 0 && p.scale[i] != p.scale[i - 1]) clocks += rescale_clocks(tile, p);
  }
  return clocks;
}

// Clocks of bias, activation and stores of one tile, in the mean of a block's `waves`.
double epilogue_clocks(Sm90Tile const &tile, Problem const &p, double waves) {
  constexpr double kPlain = 3500, kExponential = 6700, kShortcut = 500;  // clocks of 128 x 256 outputs
  bool const shortcut = p.residual != Residual::kNone;
  // Float32 outputs are twice the bytes. That they take twice the time has not been measured.
  double const area = tile.filters * tile.pixels() / 32768.0 * (tile.type_bytes == 4 ? 2 : 1);
  // Filters that do not exist are converted like the others, and not stored. A pixel takes as long as 32 at least, and
  // the last tile of a block as long as if all existed.
  double const empty = 1 - std::max(double(p.K) / filter_tiles(tile, p), 32.0) / tile.filters;
  double const last = (exponential(p.activation) ? kExponential : kPlain) + (shortcut ? kShortcut : 0);
  return area * (last - kPlain * empty * (1 - 1 / waves));
}

// Clocks of all tiles of a block whose four warpgroups take turns. A turn's waits and stores take equally long for
// every tile, and exponentials so long for each output; both run beside the products of other turns.
// calibration/four.py fits the constants.
double four_clocks(Sm90Tile const &tile, Problem const &p, double loop, double waves) {
  constexpr double kTile = 1500;         // of each tile
  constexpr double kExponential = 4700;  // of 128 x 256 outputs
  constexpr double kNext = 125;          // from a turn's last k-tile to the next turn's first
  constexpr double kLast = 0.3;          // of the last tile's exponentials, which nothing hides
  double const area = tile.filters * tile.pixels() / 32768.0, turns = 256.0 / tile.filters;
  double const finish = exponential(p.activation) ? kExponential * area : 0;
  return waves * std::max(loop + kNext, (loop + finish + kTile) / turns) + kLast * finish;
}

double tiles_clocks(Sm90Tile const &tile, Problem const &p, int sm_count) {
  double const loop = loop_clocks(tile, p);
  double const clusters = double(pixel_tiles(tile, p)) * ceil_div(filter_tiles(tile, p), tile.cluster_f);
  double const waves = std::ceil(clusters / std::max(1, sm_count / tile.cluster_f));
  double const epilogue = epilogue_clocks(tile, p, waves);
  if (tile.schedule == Sm90Schedule::kPingPong) {
    // One epilogue, slower by three tenths, runs beside the other warpgroup's loop; only the last one is exposed.
    double const late = 1.3 * epilogue;
    return waves > 1 ? waves * std::max(loop + 200, (loop + late) / 2) + late : loop + late;
  }
  if (tile.schedule == Sm90Schedule::kFour) return four_clocks(tile, p, loop, waves);
  return waves * (loop + epilogue);
}

// Clocks that a source adds which ends within a k-tile: TMA fills the rest of the pixels with zeros,
// which takes longer than loading them. Patches are loaded by half blocks, and add nothing.
double narrow_clocks(Sm90Tile const &tile, Problem const &p, int sm_count) {
  if (tile.halo || is_pointwise(p)) return 0;
  double const load = 128.0 * (tile.filters + tile.pixels() / tile.cluster_f) / kLoadBytes;  // clocks of one tap
  int const channels = k_channels(tile);
  double clocks = 0;
  for (int i = 0; i < p.sources; ++i) {
    int const tail = p.C[i] % channels;
    if (tail == 0) continue;
    double const empty = double(channels - tail) / channels;
    double const counted = ceil_div(tail, channels / 4) / 4.0;  // part of the load that loop_clocks counts
    clocks += p.R * p.S * load * (1 + kFilled * empty - counted);
  }
  double const tiles = double(pixel_tiles(tile, p)) * filter_tiles(tile, p);
  // Few blocks do not keep each other waiting.
  return std::max(std::ceil(tiles / sm_count) - 1, 0.0) * clocks + std::min(tiles / sm_count, 1.0) * clocks;
}

// ---- patches whose pixels are rows, in clocks -----------------------------------------------------------------------

// Of all tiles, in waves of as many as run at once: each as long as a block takes alone, or longer where blocks share
// what multiplies and loads. calibration/patch_rows.py fits the constants.
double rows_clocks(Sm90Tile const &tile, Problem const &p, int sm_count) {
  constexpr double kStep = 18.3, kRow = 2.26, kTile = 771, kTap = 95.4, kOutput = 0.0967;
  HaloPlan const plan = halo_plan(p, tile);
  int const patches = std::min(p.stride_h, p.R) * std::min(p.stride_w, p.S), taps = p.R * p.S;
  double steps = 0, chunks = 0;  // k-steps of 64 pixels; patches of channels
  for (int i = 0; i < p.sources; ++i) {
    steps += double(ceil_div(p.C[i], 16)) * taps * tile.pixels() / 64;
    chunks += ceil_div(p.C[i], halo_channels(tile));
  }
  double const work = std::max(steps * kStep, chunks * patches * plan.pitch * plan.rows * kRow) +
                      kOutput * tile.pixels() * tile.filters;
  double const alone = kTile + chunks * taps * kTap + work;
  int const tiles = pixel_tiles(tile, p), blocks = std::clamp(ceil_div(tiles, sm_count), 1, rows_blocks(tile, plan));
  return std::ceil(double(tiles) / (sm_count * blocks)) * std::max(alone, blocks * work);
}

// ---- all tiles ------------------------------------------------------------------------------------------------------

// Microseconds for sources, filters, outputs and shortcut to pass through the memory that all multiprocessors share.
double memory_us(Sm90Tile const &tile, Problem const &p) {
  constexpr double kBytesPerUs = 2700 * kClocksPerUs;
  double const outputs = p.residual != Residual::kNone ? 2 : 1;
  double bytes = double(size_of(p.output_type)) * p.N * p.P * p.Q * p.K * outputs;
  for (int i = 0; i < p.sources; ++i) {
    double const pixels = double(p.N) * p.H * p.W / (p.upsample[i] * p.upsample[i]);
    bytes += tile.type_bytes * p.C[i] * (pixels + double(p.K) * p.R * p.S);
  }
  return bytes / kBytesPerUs;
}

// Room as the driver would tell it, for a GPU that need not be here.
void estimate_room(int sm_count, Room &room) {
  // A cluster lies in one GPC, so clusters leave some multiprocessors free: three blocks and more a tenth.
  for (int i = 1; i <= kMaxSplits; ++i) {
    int const clusters = std::min(sm_count / i - i / 2, i > 2 ? 9 * sm_count / (10 * i) : sm_count);
    for (int blocks = 1; blocks <= kMaxResident; ++blocks) room[blocks][i] = blocks * clusters;
  }
}

}  // namespace

// One block a multiprocessor with the longest ring, or as many more as it takes to run all tiles at once. A block takes
// its share of the shared memory even if its reduction is short. Else a launch that starts early would crowd onto the
// multiprocessors that are free first.
SmallLaunch small_launch(Sm90Tile const &tile, Problem const &p, int splits, Room const &room) {
  std::int64_t const tiles = tiles_of(tile, p);
  HaloPlan const plan = plan_of(tile, p);
  SmallLaunch launch{};
  for (int blocks = 1; blocks <= small_blocks(tile) && (blocks == 1 || launch.at_once < tiles); ++blocks) {
    int const stages = small_stages(tile, plan, p, splits > 1, blocks);
    if (blocks > 1 && stages < small_least_stages(tile)) break;
    launch = {stages, std::max(1, room[blocks][splits])};
  }
  return launch;
}

int sm90_splits(Sm90Tile const &tile, Problem const &p, int sm_count, Room const &room) {
  return tile.schedule == Sm90Schedule::kSmall ? small_splits(tile, p, sm_count, room) : 1;
}

double sm90_us(Sm90Tile const &row, Problem const &problem, int sm_count) {
  Sm90Tile const tile = form_of(row, problem.pre_activated);
  Problem const p = divided_problem(tile, problem);
  Room room{};
  estimate_room(sm_count, room);
  int const splits = sm90_splits(tile, p, sm_count, room);
  bool const small = tile.schedule == Sm90Schedule::kSmall;
  // First loads and last stores, in us. A patch's pixels and filters are loaded by two warps; one of pairs is twice as
  // large.
  constexpr double kSmallEnds = 1.12, kRowsEnds = 3.77, kPatchEnds = 2.0, kPairEnds = 2.2, kTurnEnds = 2.4, kEnds = 2.6;
  double const ends = small                 ? kSmallEnds
                      : keeps_filters(tile) ? kRowsEnds
                      : tile.beside > 1     ? kPairEnds
                      : tile.halo           ? kPatchEnds
                      : takes_turns(tile)   ? kTurnEnds
                                            : kEnds;
  // The two overlap, but not completely. Not std::hypot: a wheel would need glibc 2.35 for it.
  double const computing = small                 ? small_us(tile, p, splits, sm_count, room)
                           : keeps_filters(tile) ? rows_clocks(tile, p, sm_count) / kClocksPerUs
                                                 : tiles_clocks(tile, p, sm_count) / kClocksPerUs;
  double const memory = memory_us(tile, p), us = std::sqrt(computing * computing + memory * memory);
  return ends + us + (small ? 0 : narrow_clocks(tile, p, sm_count) / kClocksPerUs);
}

}  // namespace cutefuse::conv
