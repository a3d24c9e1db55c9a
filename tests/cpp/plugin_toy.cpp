// An operator with what ConcatConv does not have: any rank, two outputs, an input that may be float32 beside 16-bit
// activations, a workspace, and tiles that are legal for some shapes only. It computes nothing: launch() says what it
// got. Attribute `fault` makes it throw where the plugin class must catch.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "fused_plugin.h"

namespace cutefuse::toy {
namespace {

constexpr AttrSpec kAttrs[] = {{"fault", AttrKind::kInts, 1, 1, 1, 0.0}, {"eps", AttrKind::kFloats, 1, 1, 1, 1e-5}};
constexpr Variant kVariants[] = {{"ToyNorm", 2, 2, {}}};
constexpr Config kConfigs[] = {{1, "any", "any", kFloatTypes}, {7, "wide", "wide", kFloatTypes}};
constexpr Retired kRetired[] = {{3, 7}};

void fault(Call const &call, int which) {
  if (call.attrs[0].ints[0] == which) throw std::runtime_error("the toy was told to throw");
}

char const *reject(Call const &call) {
  fault(call, 1);
  Tensor const &x = call.inputs[0];
  return x.rank < 1 ? "toy: a scalar has no last dimension" : nullptr;
}

std::int64_t workspace_bytes(Call const &call) {
  fault(call, 2);
  return call.inputs[0].dims[0] > 1 ? 256 * call.inputs[0].dims[0] : 0;
}

std::int32_t configs(Call const &call, std::int32_t *ids, std::int32_t) {
  fault(call, 3);
  std::int32_t count = 0;
  if (call.inputs[0].dims[call.inputs[0].rank - 1] % 8 == 0) ids[count++] = 7;
  ids[count++] = 1;
  return count;
}

// Takes what it is promised and no more; the epsilon is its state.
char const *plan(Call const &call, Plan &plan) {
  fault(call, 4);
  plan.workspace_bytes = workspace_bytes(call);
  if (call.workspace_promise >= 0) plan.workspace_bytes = std::min(plan.workspace_bytes, call.workspace_promise);
  plan.launches = 1;
  std::memcpy(plan.state, call.attrs[1].floats, sizeof(float));
  return nullptr;
}

char const *launch(Plan const &plan, Operands const &operands) {
  float epsilon;
  std::memcpy(&epsilon, plan.state, sizeof(float));
  return sentence("toy: config %d, workspace %s, %lld bytes, eps %g", plan.config,
                  operands.workspace != nullptr ? "given" : "null", static_cast<long long>(plan.workspace_bytes),
                  static_cast<double>(epsilon));
}

Port port(Variant const &, std::int32_t pos) {
  return {pos == 1   ? TypeRule::kActivationOrFloat32
          : pos == 3 ? TypeRule::kFloat32
                     : TypeRule::kActivation,
          Layout::kLinear};
}

char const *obstacle(Call const &, std::int32_t) { return "this width"; }
double predicted_us(Call const &) { return -1; }

char const *shapes(ShapeCall const &call) {
  if (call.ints("fault")[0] == 5) call.ints("no such attribute");
  call.outputs[0] = call.outputs[1] = call.inputs[0];
  return nullptr;
}

}  // namespace

extern Op const op;
Op const op = {"toy",           kVariants, kAttrs,   kConfigs,     kRetired, reject,
               workspace_bytes, configs,   obstacle, predicted_us, plan,     launch};
extern PluginRules const plugin;
PluginRules const plugin = {&op, port, shapes};

}  // namespace cutefuse::toy
