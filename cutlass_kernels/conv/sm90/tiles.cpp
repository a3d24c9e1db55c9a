// Host side of the Hopper tiles: how a patch lies in shared memory, and which problems a tile can express.
#include "conv/sm90/tiles.h"

#include <algorithm>
#include <numeric>

namespace cutefuse::conv {

namespace {

constexpr int kMaxBox = 256;  // pixels of a TMA box along one axis

// The least common multiple of the sources' factors of enlargement, or some number beyond kMaxBox.
int common_multiple(Problem const &p) {
  int multiple = 1;
  for (int i = 0; i < p.sources && multiple <= kMaxBox; ++i) multiple = std::lcm(multiple, p.upsample[i]);
  return multiple;
}

// Pixels from one row of a patch to the next, for `size` outputs along it. Enlarged sources are loaded row by row, in
// whole repetitions, and TMA writes each row to a multiple of 128 bytes.
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

// All taps of all channels stay, and pixels have two stages, or more where as many blocks share a multiprocessor. None
// if that is too much for a block.
void keep_filters(Problem const &p, Sm90Tile const &tile, HaloPlan &plan) {
  std::int64_t chunks = 0;
  for (int i = 0; i < p.sources; ++i) chunks += ceil_div(p.C[i], halo_channels(tile));
  if (chunks * p.R * p.S * tile.filters * halo_channels(tile) * tile.type_bytes > kHaloSharedBytes) return;
  plan.filter_stages = int(chunks) * p.R * p.S, plan.halo_stages = 2;
  int const blocks = rows_blocks(tile, plan);
  while (plan.halo_stages < kHaloMaxStages && blocks > 0) {
    HaloPlan longer = plan;
    if (++longer.halo_stages, rows_blocks(tile, longer) < blocks) break;
    plan = longer;
  }
  if (blocks == 0) plan.halo_stages = 0;
}

// Filters need a deep ring, since a stage lasts one tap; pixels get what is left, but two stages at least.
void divide_region(Sm90Tile const &tile, int filter_bytes, HaloPlan &plan) {
  int const region = halo_region_bytes(tile.filters, tile.pixels_a, tile.pixels_b, tile.type_bytes);
  plan.halo_stages = std::clamp((region - 4 * filter_bytes) / plan.stage_bytes, 2, kHaloMaxStages);
  plan.filter_stages = std::clamp((region - plan.halo_stages * plan.stage_bytes) / filter_bytes, 0, kFilterMaxStages);
}

HaloPlan plan_along(bool swapped, Problem const &p, Sm90Tile const &tile) {
  HaloPlan plan{};
  // Of the first parity's pixels, every stride-th: the others' taps reach no further.
  int const reach_h = (p.R - 1) * p.dilation_h / p.stride_h, reach_w = (p.S - 1) * p.dilation_w / p.stride_w;
  plan.swapped = swapped;
  plan.size_a = swapped ? p.P : p.Q, plan.size_b = swapped ? p.Q : p.P;
  plan.tile_a = tile.pixels_a, plan.tile_b = tile.pixels_b;
  int const pixel_bytes = tile.type_bytes * halo_channels(tile), filter_bytes = tile.filters * pixel_bytes;
  plan.pitch = pitch_of(p, tile.pixels_a, swapped ? reach_h : reach_w, swapped ? p.pad_top : p.pad_left, pixel_bytes);
  plan.rows = tile.pixels_b + (swapped ? reach_w : reach_h);
  plan.step_r = p.dilation_h * (swapped ? 1 : plan.pitch);
  plan.step_s = p.dilation_w * (swapped ? plan.pitch : 1);
  plan.stage_bytes = ceil_div(plan.pitch * plan.rows * pixel_bytes, 1024) * 1024;
  if (keeps_filters(tile)) {
    keep_filters(p, tile, plan);
  } else if (tile.schedule == Sm90Schedule::kSmall) {
    plan.halo_stages = p.sources == 1 && p.C[0] <= kChannelBlock ? 1 : kSmallPatches;
  } else {
    divide_region(tile, filter_bytes, plan);
  }
  return plan;
}

// A patch of pairs of pixels (beside.cuh).
HaloPlan plan_beside(Problem const &p, Sm90Tile const &tile) {
  Sm90Tile const multiplied = as_multiplied(tile);
  int const pixel_bytes = tile.type_bytes * halo_channels(tile);
  int const per_line = 128 / pixel_bytes;  // TMA writes to multiples of 128 bytes: of an enlarged source row by row
  HaloPlan plan{};
  plan.beside = tile.beside;
  plan.size_a = p.Q, plan.size_b = p.P, plan.tile_a = tile.pixels_a, plan.tile_b = tile.pixels_b;
  // Pairs that the last one reads; one more where it begins within an enlarged pixel.
  plan.pitch = multiplied.pixels_a + (p.S + (is_upsampled(p) ? 1 : 0)) / 2;
  if (is_upsampled(p)) plan.pitch = ceil_div(plan.pitch, per_line) * per_line;
  plan.rows = tile.pixels_b + (p.R - 1) * p.dilation_h;
  plan.part = ceil_div(plan.pitch * plan.rows, per_line) * per_line;
  plan.step_r = p.dilation_h * plan.pitch;
  plan.stage_bytes = ceil_div(2 * plan.part * pixel_bytes, 1024) * 1024;
  divide_region(multiplied, multiplied.filters * pixel_bytes, plan);
  return plan;
}

}  // namespace

HaloPlan halo_plan(Problem const &p, Sm90Tile const &tile) {
  if (tile.beside > 1) return plan_beside(p, tile);
  auto const covered = [&](int size_a, int size_b) {
    return double(ceil_div(size_a, tile.pixels_a) * tile.pixels_a) * ceil_div(size_b, tile.pixels_b) * tile.pixels_b;
  };
  return plan_along(covered(p.P, p.Q) < covered(p.Q, p.P), p, tile);
}

namespace {

// TMA stores whole vectors; float32 is stored by threads. 8-bit sources, which have scales, give float16 outputs or, if
// their pixels are whole vectors, outputs of their own type.
bool can_store(Sm90Tile const &tile, Problem const &p) {
  if (tile.type_bytes == 4) return true;
  bool const narrow = p.output_type == p.type && p.K % 16 == 0;
  if (tile.type_bytes == 1 && p.output_type != Type::kFloat16 && !narrow) return false;
  for (int i = 0; i < p.outputs; ++i) {
    OutputRange const range = output_range(p, i);
    int const vector = 16 / size_of(p.output_type);
    if (range.first % 8 != 0 || range.ld % vector != 0) return false;
    if ((range.last - range.first) % 8 != 0 && !owns_pad_lanes(p, range)) return false;
  }
  return true;
}

// Whether pairs of pixels share columns, and pairs and repetitions coincide.
bool fits_beside(Sm90Tile const &tile, Problem const &p) {
  if (p.S == 1 || p.dilation_w > 1 || p.outputs > 1) return false;
  if (std::any_of(p.upsample, p.upsample + p.sources, [](int factor) { return factor > 2; })) return false;
  HaloPlan const plan = plan_beside(p, tile);
  return plan.filter_stages >= kFilterMinStages && 2 * plan.pitch <= kMaxBox && plan.rows <= kMaxBox;
}

bool fits_patches(Sm90Tile const &tile, Problem const &p) {
  int const reach_h = (p.R - 1) * p.dilation_h, reach_w = (p.S - 1) * p.dilation_w;
  if (p.R * p.S == 1 && !is_upsampled(p)) return false;  // a patch gains nothing over im2col
  if (reach_h > 64 || reach_w > 64) return false;
  if (p.stride_h * p.stride_w > 1) {
    bool const whole = p.dilation_h * p.dilation_w == 1 && !is_upsampled(p);  // a tap's neighbours are of one parity
    if (p.stride_h > 2 || p.stride_w > 2 || !whole || tile.beside > 1) return false;
  }
  if (tile.beside > 1) return fits_beside(tile, p);
  bool const small = tile.schedule == Sm90Schedule::kSmall;
  if (small && (p.S != kSmallPatchTaps || p.stride_h * p.stride_w > 1 || is_upsampled(p))) return false;
  if (keeps_filters(tile) && (p.K > tile.filters || p.outputs > 1)) return false;  // a block keeps its filters
  for (bool const swapped : {false, true}) {
    HaloPlan const plan = plan_along(swapped, p, tile);
    int const most = kMaxBox / std::max(p.stride_h, p.stride_w);
    bool const has_room = keeps_filters(tile) ? plan.halo_stages > 0
                          : small             ? small_stages(tile, plan, p, true, 1) >= small_least_stages(tile)
                                              : plan.filter_stages >= kFilterMinStages;
    if (!has_room || plan.pitch > most || plan.rows > most) return false;
  }
  return true;
}

bool fits_im2col(Problem const &p) {
  if (is_pointwise(p)) return true;
  int const reach_h = (p.R - 1) * p.dilation_h, reach_w = (p.S - 1) * p.dilation_w;
  // im2col maps: 8-bit tap offsets, corners of the bounding box in [-128, 127], strides up to 8.
  auto const corner = [](int pad_begin, int pad_end, int reach) {
    return pad_begin <= 128 && pad_end - reach >= -128 && pad_end - reach <= 127;
  };
  return p.stride_h <= 8 && p.stride_w <= 8 && reach_h <= 255 && reach_w <= 255 &&
         corner(p.pad_top, p.pad_bottom, reach_h) && corner(p.pad_left, p.pad_right, reach_w);
}

// Whether some sources are enlarged by two and all others are of full size, under a 1x1 filter. PhasePlan counts blocks
// of channels in 16 bits.
bool fits_phases(Problem const &p) {
  int const *const end = p.upsample + p.sources;
  auto const twice = std::count(p.upsample, end, 2), once = std::count(p.upsample, end, 1);
  return is_pointwise(p) && twice > 0 && once > 0 && twice + once == p.sources && k_tiles<kChannelBlock>(p) <= 0xffff;
}

bool fits_geometry(Sm90Tile const &tile, Problem const &p) {
  if (tile.cluster_f > filter_tiles(tile, p)) return false;  // there is no second block to share the pixels with
  if (p.K > (1 << 16) || std::int64_t(p.N) * p.P * p.Q > 0x7fff0000) return false;
  // PartStart counts the blocks of packed filters in 16 bits.
  bool const counts_pairs = tile.schedule == Sm90Schedule::kSmall && tile.pairs;
  if (counts_pairs && k_tiles<kChannelBlock>(p) / (p.R * p.S) > 0xffff) return false;
  if (tile.enlarges) return fits_phases(p);
  return tile.halo ? fits_patches(tile, p) : fits_im2col(p);
}

}  // namespace

char const *sm90_obstacle(Sm90Tile const &tile, Problem const &p) {
  bool const scaled = tile.type_bytes == 1;
  if (p.reads != Reads::kSources) return "the image of a network, or single channels";
  if (scaled && p.layout != Layout::kChannelsLast) return "blocks of 32 channels";
  if (!has_strides_for_tma(p)) return "pixels of this stride";
  bool const by_threads = tile.schedule == Sm90Schedule::kSmall || tile.pixel_rows;
  if (p.spread > 1 && by_threads) return "spread outputs";
  if (is_upsampled(p) && !tile.halo && !tile.enlarges) return "enlarged sources";
  if (tile.enlarges && !is_upsampled(p)) return "sources of full size";
  if (scaled && tile.schedule != Sm90Schedule::kSmall && !one_sum_fits(p)) return "sums beyond 32 bits";
  if (p.pre_activated && !tile.pre_activates) return "a pre-activation";
  if (tile.schedule == Sm90Schedule::kSmall && activated_channels(p) > kMaxActivated) {
    return "a pre-activation of this many channels";
  }
  if (!p.pre_activated && !tile.plain) return "sources without a pre-activation";
  if (p.residual != Residual::kNone && (scaled || !adds_shortcut(tile))) return "a residual";
  bool const fits = can_store(tile, p) && fits_geometry(tile, p);
  return fits ? nullptr : "this filter, stride, padding or number of channels";
}

bool sm90_can_run(Sm90Tile const &tile, Problem const &p) {
  return tile.type_bytes == size_of(p.type) && sm90_obstacle(tile, p) == nullptr;
}

}  // namespace cutefuse::conv
