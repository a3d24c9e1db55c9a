// Host side of the int8 ConcatConv: what is legal, which tile to try first, and which kernel a plan takes. No CUDA
// header.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "conv/checks.h"
#include "conv/plan.h"
#include "quant_concat_conv/tiles.h"

namespace cutefuse::quant_concat_conv {

extern Op const op;

namespace {

enum { kInputScales = kConvAttrs, kOutputScale, kOutputType, kAlpha, kLo, kHi, kAttrs };

constexpr std::array<AttrSpec, kAttrs> kAttrSpecs = conv_attributes({
    {"input_scales", AttrKind::kFloats, 1, kMaxSources, 0, 0.0},  // one for each source
    {"output_scale", AttrKind::kFloats, 1, 1, 1, 1.0},            // of an int8 output
    {"output_type", AttrKind::kInts, 1, 1, 1, 1.0},               // of a float output, as ONNX numbers types
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},                  // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},          // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
});

constexpr int kFloatVariants = kMaxSources * kActivations, kVariants = 2 * kFloatVariants;

// First the variants with a float output, then those with an int8 one, whose names end in Q.
std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  for (int i = 0; i < kVariants; ++i) {
    Facts &facts = table[i].facts;
    facts.sources = i % kFloatVariants / kActivations + 1;
    facts.activation = static_cast<Activation>(i % kActivations);
    facts.quantised = true, facts.quantised_output = i >= kFloatVariants;
    std::snprintf(table[i].op_type, sizeof(table[i].op_type), "CuteQConcatConv%d%s%s", facts.sources,
                  kActivationNames[i % kActivations], facts.quantised_output ? "Q" : "");
    table[i].inputs = facts.sources + 3;  // sources, packed filter, its scales, bias
    table[i].outputs = 1;
  }
  return table;
}();

std::array<Config, kTileCount> const kConfigTable = [] {
  std::array<Config, kTileCount> table{};
  for (int i = 0; i < kTileCount; ++i) {
    Tile const &tile = kTiles[i];
    table[i] = {tile.id, tile.min_sm, tile.name, tile.halo_rows > 0 ? "rows" : "plain", bit_of(Type::kInt8)};
  }
  return table;
}();

bool good_scale(float scale) { return std::isfinite(scale) && scale > 0.f; }

// Largest |sum of products| of a source; beyond 2^31 - 1 the integers could overflow.
std::int64_t largest_sum(Problem const &p, int source) {
  constexpr int kMaxProduct = 1 << 14;  // |x * w| of two int8
  return std::int64_t(p.C[source]) * p.R * p.S * kMaxProduct;
}

char const *check_scales(Checks const &checks) {
  Problem &p = checks.p;
  AttrValue const &scales = checks.call.attrs[kInputScales];
  if (scales.count != p.sources) {
    return sentence("quant_concat_conv: input_scales has %d values, there are %d sources; write one for each",
                    scales.count, p.sources);
  }
  for (int i = 0; i < p.sources; ++i) {
    p.scale[i] = scales.floats[i];
    if (!good_scale(p.scale[i])) {
      return sentence("quant_concat_conv: the scale of source %d is %g; scales must be positive and finite", i,
                      p.scale[i]);
    }
    if (largest_sum(p, i) > kInt32Max) {
      return sentence(
          "quant_concat_conv: %d channels under a %dx%d filter can overflow 32-bit sums of int8 products; skip this "
          "fusion",
          p.C[i], p.R, p.S);
    }
  }
  return nullptr;
}

char const *check_output(Checks const &checks) {
  Problem &p = checks.p;
  bool const quantised = kVariantTable[checks.call.variant].facts.quantised_output;
  std::int64_t const number = checks.call.attrs[kOutputType].ints[0];
  p.output_type = quantised      ? Type::kInt8
                  : number == 1  ? Type::kFloat32
                  : number == 10 ? Type::kFloat16
                                 : Type::kBFloat16;
  if (!quantised && number != 1 && number != 10 && number != 16) {
    return sentence("quant_concat_conv: output_type %lld is none of 1 (float32), 10 (float16), 16 (bfloat16)",
                    (long long)number);
  }
  p.output_scale = checks.call.attrs[kOutputScale].floats[0];
  if (quantised && !good_scale(p.output_scale)) {
    return sentence("quant_concat_conv: output_scale is %g; scales must be positive and finite", p.output_scale);
  }
  return checks.pixels("output", checks.call.outputs[0], p.output_type, p.K, &p.ldy);
}

char const *problem_of(Call const &call, Problem *problem) {
  Problem &p = *problem = Problem{};
  Checks const checks{op, call, p};
  checks.read_op_type();
  p.type = Type::kInt8;
  p.layout = call.inputs[0].layout;
  if (char const *reason = checks.geometry()) return reason;
  if (char const *reason = checks.activation(kAlpha)) return reason;
  if (char const *reason = check_scales(checks)) return reason;
  if (char const *reason = checks.sources()) return reason;
  if (char const *reason = checks.size()) return reason;
  if (char const *reason = checks.filter()) return reason;
  if (char const *reason = checks.vector("scales of the filter", call.inputs[p.sources + 1])) return reason;
  if (char const *reason = checks.vector("bias", call.inputs[p.sources + 2])) return reason;
  return check_output(checks);
}

char const *reject(Call const &call) {
  Problem problem;
  return problem_of(call, &problem);
}

// What of a problem a tile cannot run on images wide enough for it, null: nothing; and whether these are: a row of
// outputs in a tile over rows takes two more pixels of its stage.
char const *obstacle_of(Tile const &tile, Problem const &p, int sm) {
  std::int64_t sum = 0;
  bool equal = true;
  for (int i = 0; i < p.sources; ++i) sum += largest_sum(p, i), equal = equal && p.scale[i] == p.scale[0];
  bool const right_filter = tile.halo_rows == 0 || (p.S == kRowTaps && p.stride_w == 1 && p.dilation_w == 1);
  if (!right_filter) return "this filter, stride or dilation";
  if (tile.shared_bytes() > shared_limit(sm)) return "stages larger than the shared memory";
  if (tile.drains()) return nullptr;
  return !equal ? "sources of other scales" : sum > kInt32Max ? "sums beyond 32 bits" : nullptr;
}

bool runs(Tile const &tile, Problem const &p, int sm) {
  return (sm == 0 || sm >= tile.min_sm) && obstacle_of(tile, p, sm) == nullptr;
}

bool fits(Tile const &tile, Problem const &p) {
  return tile.halo_rows == 0 || p.Q < 1 || (tile.m - 2) / p.Q + 2 <= tile.halo_rows / (kRowTaps - 1);
}

std::int64_t workspace_bytes(Call const &call) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return -1;
  std::int64_t bytes = 0;
  for (Tile const &tile : kTiles) {
    if (runs(tile, p, call.sm)) bytes = std::max(bytes, workspace_bound(tile, p, Target(call)));
  }
  return bytes;
}

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t capacity) {
  Problem p;
  if (problem_of(call, &p) != nullptr) return 0;
  Candidate legal[kTileCount];
  int count = 0;
  bool const sized = p.N > 0 && p.P > 0 && p.Q > 0;
  for (Tile const &tile : kTiles) {
    if (!runs(tile, p, call.sm) || !fits(tile, p)) continue;
    legal[count++] = {tile.id, false, sized ? cost_us(tile, p, Target(call)) : 0.0};
  }
  return ranked(legal, count, ids, capacity);
}

char const *obstacle(Call const &call, std::int32_t config) {
  Problem p;
  problem_of(call, &p);
  Tile const &tile = *find_tile(config);
  char const *const what = obstacle_of(tile, p, call.sm);
  return what != nullptr ? what : "images this narrow";
}

// Which translation unit holds a tile's kernels; null in a library without any.
Find *kernels_of([[maybe_unused]] Tile const &tile) {
#if CUTEFUSE_WITH_CUDA
  if (tile.halo_rows > 0) return tile.drains() ? find_rows_drain : find_rows;
  return tile.drains() ? find_drain : find_one_scale;
#else
  return nullptr;
#endif
}

char const *plan(Call const &call, Plan &plan) {
  Problem p;
  if (char const *reason = problem_of(call, &p)) return reason;
  if (p.N == 0) return nullptr;
  if (Tile const *const tile = find_tile(call.config)) return plan_sm80(op, *tile, call, p, kernels_of(*tile), plan);
  return sentence("quant_concat_conv: no tile runs these sources on compute capability %d.%d; skip this fusion",
                  call.sm / 10, call.sm % 10);
}

char const *launch(Plan const &plan, Operands const &operands) { return launch_sm80(op, plan, operands); }

}  // namespace

Op const op = {"quant_concat_conv",
               {kVariantTable.data(), kVariants},
               {kAttrSpecs.data(), kAttrs},
               {kConfigTable.data(), kTileCount},
               {kRetired, sizeof(kRetired) / sizeof(kRetired[0])},
               reject,
               workspace_bytes,
               configs,
               obstacle,
               plan,
               launch};

}  // namespace cutefuse::quant_concat_conv
