#include "concat_conv/variants.h"

#include <cstdio>

namespace cutefuse::concat_conv {

namespace {

// Calls visit(form) for every op_type in the order of the table.
template <class Visit>
void each_form(Visit &&visit) {
  auto const sources_and_activations = [&](bool view, Residual residual, int outputs) {
    for (int sources = 1; sources <= kMaxSources; ++sources) {
      for (int a = 0; a < kActivations; ++a) {
        Activation const activation = static_cast<Activation>(a);
        // Without an activation a residual after it is one before it.
        if (residual == Residual::kAfter && activation == Activation::kNone) continue;
        visit(Form{view, residual, sources, outputs, activation});
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

std::array<Form, kVariants> const kForms = [] {
  std::array<Form, kVariants> table{};
  std::size_t i = 0;
  each_form([&](Form const &form) { table.at(i++) = form; });
  return table;
}();

std::array<Variant, kVariants> const kVariantTable = [] {
  std::array<Variant, kVariants> table{};
  std::size_t i = 0;
  each_form([&](Form const &form) {
    Variant &variant = table.at(i++);
    char outputs[16] = "";
    if (form.outputs > 1) std::snprintf(outputs, sizeof(outputs), "x%d", form.outputs);
    std::snprintf(variant.op_type, sizeof(variant.op_type), "Cute%sConcatConv%d%s%s%s%s", form.view ? "View" : "",
                  form.sources, outputs, form.residual == Residual::kBefore ? "Add" : "",
                  kActivationNames[static_cast<int>(form.activation)], form.residual == Residual::kAfter ? "Add" : "");
    variant.inputs = form.sources + 2 + (form.residual != Residual::kNone);
    variant.outputs = form.outputs;
  });
  return table;
}();

}  // namespace cutefuse::concat_conv
