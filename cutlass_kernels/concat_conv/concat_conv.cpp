// Host side of ConcatConv: its op_types, and what is legal. No CUDA header.
#include <array>
#include <string>

#include "concat_conv/attributes.h"
#include "concat_conv/tiles.h"
#include "conv/plan.h"

namespace cutefuse::concat_conv {

extern Op const op;

namespace {

// 72 plain ones, 352 with a residual or several outputs, 424 of both kinds with views, 72 pre-activated ones, 9 of
// images, 72 depthwise ones and 216 of spread outputs.
constexpr int kVariants = 1217, kMostSpread = 4;

Variant variant_of(Facts const &facts, int outputs) {
  Variant variant{};
  std::string const form = facts.view            ? "View"
                           : facts.pre_activated ? "Pre"
                           : facts.image         ? "Image"
                           : facts.depthwise     ? "Depthwise"
                           : facts.spread > 1    ? "Spread" + std::to_string(facts.spread)
                                                 : "";
  std::string const name =
      "Cute" + form + "ConcatConv" + std::to_string(facts.sources) +
      (outputs > 1 ? "x" + std::to_string(outputs) : "") + (facts.residual == Residual::kBefore ? "Add" : "") +
      kActivationNames[static_cast<int>(facts.activation)] + (facts.residual == Residual::kAfter ? "Add" : "");
  name.copy(variant.op_type, sizeof(variant.op_type) - 1);
  variant.inputs = facts.sources + 2 + (facts.residual != Residual::kNone) + 2 * facts.pre_activated;  // filter, bias
  variant.outputs = outputs;
  variant.facts = facts;
  return variant;
}

// Never change the order: engines hold names, but callers of the C interface may hold indices.
std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  std::size_t i = 0;
  // Of every number of sources with every activation [first, last).
  auto const add = [&](int first, int last, Facts form, int outputs = 1, int most_sources = kMaxSources) {
    for (form.sources = 1; form.sources <= most_sources; ++form.sources) {
      for (int a = first; a < last; ++a) {
        form.activation = static_cast<Activation>(a);
        // Without an activation, a residual after it is the same as one before it.
        if (form.residual == Residual::kAfter && form.activation == Activation::kNone) continue;
        table.at(i++) = variant_of(form, outputs);
      }
    }
  };
  auto const with = [](auto Facts::*fact, auto value, Facts form = {}) {
    form.*fact = value;
    return form;
  };
  auto const add_all = [&](int first, int last) {
    add(first, last, {});
    for (bool const view : {false, true}) {
      Facts const form = with(&Facts::view, view);
      if (view) add(first, last, form);
      add(first, last, with(&Facts::residual, Residual::kBefore, form));
      add(first, last, with(&Facts::residual, Residual::kAfter, form));
      for (int outputs = 2; outputs <= kMaxOutputs; ++outputs) add(first, last, form, outputs);
    }
    add(first, last, with(&Facts::pre_activated, true));
  };
  add_all(0, kFirstActivations);
  add_all(kFirstActivations, kActivations);
  add(0, kActivations, with(&Facts::image, true), 1, 1);
  add(0, kActivations, with(&Facts::depthwise, true));
  for (int spread = 2; spread <= kMostSpread; ++spread) add(0, kActivations, with(&Facts::spread, spread));
  return table;
}();

constexpr auto kConfigTable = configs_of(kTiles, kSm90Tiles);

// Outputs that lie over squares of pixels: a range for each row of a square, in one tensor of whole vectors.
char const *check_spread(Checks const &checks) {
  Problem &p = checks.p;
  int const s = p.spread, channels = p.K / (s * s), vector = 16 / size_of(p.type);
  std::int64_t const given = checks.call.attrs[kOutputChannels].ints[0];
  if (size_of(p.type) != 2 || p.K % (s * s * vector) != 0 || (given != 0 && given != channels)) {
    return sentence(
        "concat_conv: %d %s filters (output_channels %lld) cannot be spread over squares of %dx%d pixels; float16 or "
        "bfloat16 and a multiple of %d channels for each pixel are possible; leave the rearrangement outside",
        p.K, name_of(p.type), (long long)given, s, s, vector);
  }
  if (p.N > 0 && p.P > 0 && p.Q > 0 && p.N > kInt32Max / p.P / p.Q / (s * s)) {
    return sentence(
        "concat_conv: %dx%dx%d (NHW) pixels, spread over squares of %dx%d, are more than 2^31; split the batch", p.N,
        p.P, p.Q, s, s);
  }
  if (char const *reason = checks.pixels("output", checks.call.outputs[0], p.type, channels, &p.ldy)) return reason;
  if (p.ldy != channels) {
    return sentence("concat_conv: spread outputs of %d channels lie in pixels of %lld elements; make the pixels dense",
                    channels, (long long)p.ldy);
  }
  p.ldy *= s, p.outputs = s;
  for (int i = 0; i < s; ++i) p.ranges[i] = {i * s * channels, (i + 1) * s * channels, p.ldy};
  return nullptr;
}

char const *check_outputs(Checks const &checks) {
  Problem &p = checks.p;
  if (p.spread > 1) return check_spread(checks);
  AttrValue const &given = checks.call.attrs[kOutputChannels];
  int const vector = p.dense ? 1 : 16 / size_of(p.type);
  std::int64_t sum = 0;
  bool legal = given.count == p.outputs;
  for (int j = 0; legal && j < p.outputs; ++j) {
    std::int64_t const channels = p.outputs == 1 && given.ints[j] == 0 ? p.K : given.ints[j];
    legal = channels >= 1 && channels <= p.K - sum && (j + 1 == p.outputs || channels % vector == 0);
    p.ranges[j].first = static_cast<int>(sum);
    sum += legal ? channels : 0;
    p.ranges[j].last = static_cast<int>(sum);
  }
  if (!legal || sum != p.K) {
    return sentence(
        "concat_conv: output_channels has %d values, the first %lld, for %d outputs of %d channels; write one for each "
        "that add up, all but the last multiples of %d",
        given.count, (long long)given.ints[0], p.outputs, p.K, vector);
  }
  for (int j = 0; j < p.outputs; ++j) {
    OutputRange &range = p.ranges[j];
    int const channels = range.last - range.first;
    if (char const *reason = checks.pixels("output", checks.call.outputs[j], p.type, channels, &range.ld))
      return reason;
  }
  p.ldy = p.ranges[0].ld;
  if (p.residual == Residual::kNone) return nullptr;
  return checks.pixels("residual", checks.call.inputs[p.sources + 2], p.type, p.K, &p.ldz, p.residual_start,
                       kVariantTable[checks.call.variant].facts.view);
}

// channel_starts and upsample: one value for each source of a view, the default otherwise; and residual_start.
char const *check_views(Checks const &checks) {
  Problem &p = checks.p;
  bool const view = kVariantTable[checks.call.variant].facts.view;
  for (int const attr : {kChannelStarts, kUpsample}) {
    AttrValue const &given = checks.call.attrs[attr];
    std::int64_t const neutral = attr == kUpsample, most = attr == kUpsample ? kMaxUpsample : kInt32Max / 2;
    bool const is_default = given.count == 1 && given.ints[0] == neutral;
    if (!is_default && (!view || given.count != p.sources)) {
      return sentence("concat_conv: attribute %s has %d values, the first %lld, for %d sources; %s",
                      kAttrSpecs[attr].name, given.count, (long long)given.ints[0], p.sources,
                      view ? "write one for each" : "only CuteView op_types take other values than the default");
    }
    for (int i = 0; i < p.sources; ++i) {
      std::int64_t const value = is_default ? neutral : given.ints[i];
      if (value < neutral || value > most) {
        return sentence("concat_conv: %s[%d] is %lld, %lld to %lld are allowed", kAttrSpecs[attr].name, i,
                        (long long)value, (long long)neutral, (long long)most);
      }
      (attr == kUpsample ? p.upsample : p.start)[i] = static_cast<int>(value);
    }
  }
  int const step = p.dense ? 1 : 16 / size_of(p.type);  // of the channels at which a range may start
  std::int64_t const first = checks.call.attrs[kResidualStart].ints[0];
  bool const ranged = view && p.residual != Residual::kNone;
  if (first < 0 || first > kInt32Max / 2 || (first > 0 && !ranged) || first % step != 0) {
    return sentence(
        "concat_conv: residual_start is %lld; 0 is allowed, and for CuteView op_types with a residual every multiple "
        "of %d",
        (long long)first, step);
  }
  p.residual_start = static_cast<int>(first);
  for (int i = 0; i < p.sources; ++i) {
    if (p.start[i] % step == 0) continue;
    return sentence("concat_conv: source %d starts at channel %d; a range must start at a multiple of %d %s channels",
                    i, p.start[i], step, name_of(p.type));
  }
  return nullptr;
}

constexpr Family kFamily = {op, kTiles, kSm90Tiles, kAlpha, check_views, check_outputs};

}  // namespace

Op const op = op_of<kFamily>("concat_conv", kVariantTable, kAttrSpecs, kConfigTable, kRetired);

}  // namespace cutefuse::concat_conv
