#include "concat_conv/variants.h"

#include <cstdio>

namespace cutefuse::concat_conv {

namespace {

// Calls visit(facts, outputs) for every op_type in the order of the table.
template <class Visit>
void each_form(Visit &&visit) {
  auto const sources_and_activations = [&](bool view, Residual residual, int outputs) {
    for (int sources = 1; sources <= kMaxSources; ++sources) {
      for (int a = 0; a < kActivations; ++a) {
        Activation const activation = static_cast<Activation>(a);
        // Without an activation a residual after it is one before it.
        if (residual == Residual::kAfter && activation == Activation::kNone) continue;
        visit(Facts{Kind::kConvolution, sources, activation, residual, view}, outputs);
      }
    }
  };
  sources_and_activations(false, Residual::kNone, 1);
  for (bool const view : {false, true}) {
    if (view) sources_and_activations(view, Residual::kNone, 1);
    sources_and_activations(view, Residual::kBefore, 1);
    sources_and_activations(view, Residual::kAfter, 1);
    for (int outputs = 2; outputs <= kMaxOutputs; ++outputs) sources_and_activations(view, Residual::kNone, outputs);
  }
}

}  // namespace

std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  std::size_t i = 0;
  each_form([&](Facts const &facts, int outputs) {
    Variant &variant = table.at(i++);
    char several[16] = "";
    if (outputs > 1) std::snprintf(several, sizeof(several), "x%d", outputs);
    std::snprintf(variant.op_type, sizeof(variant.op_type), "Cute%sConcatConv%d%s%s%s%s", facts.view ? "View" : "",
                  facts.sources, several, facts.residual == Residual::kBefore ? "Add" : "",
                  kActivationNames[static_cast<int>(facts.activation)],
                  facts.residual == Residual::kAfter ? "Add" : "");
    variant.inputs = facts.sources + 2 + (facts.residual != Residual::kNone);  // filter, bias
    variant.outputs = outputs;
    variant.facts = facts;
  });
  return table;
}();

}  // namespace cutefuse::concat_conv
