// Host side of the int8 and float8 ConcatConv: what is legal. No CUDA header.
#include <array>
#include <cmath>
#include <cstdio>

#include "architecture.h"
#include "conv/checks.h"
#include "conv/plan.h"
#include "quant_concat_conv/tiles.h"

namespace cutefuse::quant_concat_conv {

extern Op const op;

namespace {

enum { kInputScales = kConvAttrs, kOutputScale, kOutputType, kAlpha, kLo, kHi, kSumBound, kOwnAttrs };

constexpr std::array<AttrSpec, kOwnAttrs + 2> kAttrSpecs = conv_attributes({
    {"input_scales", AttrKind::kFloats, 1, kMaxSources, 0, 0.0},  // one for each source
    {"output_scale", AttrKind::kFloats, 1, 1, 1, 1.0},            // of an 8-bit output
    {"output_type", AttrKind::kInts, 1, 1, 1, 1.0},               // of a float output, as ONNX numbers types
    {"alpha", AttrKind::kFloats, 1, 1, 1, 0.01},                  // LeakyRelu
    {"lo", AttrKind::kFloats, 1, 1, 1, -3.402823466e38},          // Clip
    {"hi", AttrKind::kFloats, 1, 1, 1, 3.402823466e38},
    {"sum_bound", AttrKind::kInts, 1, 1, 1, 0.0},  // which no sum of int8 exceeds (check_sum_bound); 0: not known
});

constexpr int kVariants = 2 * kMaxSources * kActivations;

// First the variants with a float output, then those with an output of the sources' type, whose names end in Q.
std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  std::size_t i = 0;
  auto const add = [&](int first, int last, bool quantised_output) {
    for (int sources = 1; sources <= kMaxSources; ++sources) {
      for (int a = first; a < last; ++a) {
        Variant &variant = table.at(i++);
        variant.facts = {Kind::kConvolution, sources, static_cast<Activation>(a)};
        variant.facts.quantised = true, variant.facts.quantised_output = quantised_output;
        std::snprintf(variant.op_type, sizeof(variant.op_type), "CuteQConcatConv%d%s%s", sources, kActivationNames[a],
                      quantised_output ? "Q" : "");
        variant.inputs = sources + 3;  // sources, packed filter, its scales, bias
        variant.outputs = 1;
      }
    }
  };
  for (bool const quantised_output : {false, true}) add(0, kFirstActivations, quantised_output);
  for (bool const quantised_output : {false, true}) add(kFirstActivations, kActivations, quantised_output);
  return table;
}();

constexpr auto kConfigTable = configs_of(kTiles, kSm90Tiles);

bool good_scale(float scale) { return std::isfinite(scale) && scale > 0.f; }

// Float8 needs tensor cores that multiply it, and code that was compiled for them.
char const *check_float8(Checks const &checks) {
  std::int32_t const sm = checks.call.sm;
  if (checks.p.type != Type::kFloat8 || offers(sm, kFloat8Mma)) return nullptr;
  constexpr std::int32_t kOldest = oldest(kFloat8Mma);
  if ((architecture(sm).features & kFloat8Mma) == 0) {
    return sentence(
        "quant_concat_conv: compute capability %d.%d does not multiply float8, only %d.%d and newer do; quantise to "
        "int8 for it",
        sm / 10, sm % 10, kOldest / 10, kOldest % 10);
  }
  return sentence(
      "quant_concat_conv: this library runs on compute capability %d.%d with code that is older than %d.%d and without "
      "float8 (it was built for %s); name that architecture in -DCUTEFUSE_CUDA_ARCHS, or quantise to int8",
      sm / 10, sm % 10, kOldest / 10, kOldest % 10, CUTEFUSE_TARGETS);
}

// sum_bound: the largest magnitude that int8's sum of products can have, whatever the sources hold, where it is brought
// from the unit of one source's scale to the next one's, in either unit. Who knows the filters knows it.
char const *check_sum_bound(Checks const &checks) {
  constexpr std::int64_t kSmall = 1 << 22;
  std::int64_t const bound = checks.call.attrs[kSumBound].ints[0];
  checks.p.small_sums = checks.p.type == Type::kInt8 && bound > 0 && bound <= kSmall;
  if (bound >= 0 && bound <= kInt32Max) return nullptr;
  return sentence("quant_concat_conv: sum_bound is %lld; write a magnitude of at most %lld, or 0 where none is known",
                  (long long)bound, (long long)kInt32Max);
}

char const *check_scales(Checks const &checks) {
  if (char const *reason = check_float8(checks)) return reason;
  if (char const *reason = check_sum_bound(checks)) return reason;
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
    if (p.type == Type::kInt8 && largest_sum(p, i) > kInt32Max) {
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
  p.output_type = quantised ? p.type : number == 1 ? Type::kFloat32 : number == 10 ? Type::kFloat16 : Type::kBFloat16;
  if (!quantised && number != 1 && number != 10 && number != 16) {
    return sentence("quant_concat_conv: output_type %lld is none of 1 (float32), 10 (float16), 16 (bfloat16)",
                    (long long)number);
  }
  p.output_scale = checks.call.attrs[kOutputScale].floats[0];
  if (quantised && !good_scale(p.output_scale)) {
    return sentence("quant_concat_conv: output_scale is %g; scales must be positive and finite", p.output_scale);
  }
  char const *const reason = checks.pixels("output", checks.call.outputs[0], p.output_type, p.K, &p.ldy);
  p.ranges[0] = {0, p.K, p.ldy};
  return reason;
}

constexpr Family kFamily = {op, kTiles, kSm90Tiles, kAlpha, check_scales, check_output};

}  // namespace

Op const op = op_of<kFamily>("quant_concat_conv", kVariantTable, kAttrSpecs, kConfigTable, kRetired);

}  // namespace cutefuse::quant_concat_conv
