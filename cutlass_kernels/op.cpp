// The common part of all operators: the registry, sentences, and the checks around plan and run.
#include "op.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "architecture.h"
#include "capture.h"
#include "device.h"

namespace cutefuse {

#define CUTEFUSE_OP(stem) \
  namespace stem {        \
  extern Op const op;     \
  }
#include "op_list.inc"
#undef CUTEFUSE_OP

Span<Op const *> operators() {
#define CUTEFUSE_OP(stem) &stem::op,
  static Op const *const kOps[] = {
#include "op_list.inc"
  };
#undef CUTEFUSE_OP
  return kOps;
}

std::int32_t find_attribute(Op const &op, char const *name) {
  std::int32_t i = op.attrs.size - 1;
  while (i >= 0 && std::strcmp(op.attrs[i].name, name) != 0) --i;
  return i;
}

char const *sentence(char const *format, ...) {
  thread_local char text[512];
  char made[sizeof(text)];  // an argument may point to the sentence made before, in `text`
  std::va_list args;
  va_start(args, format);
  std::vsnprintf(made, sizeof(made), format, args);
  va_end(args);
  return std::strcpy(text, made);
}

namespace {

// The value of attribute kTileAttr, 0 where the operator does not have it.
std::int64_t tile_attribute(Op const &op, AttrValue const *attrs) {
  std::int32_t const i = find_attribute(op, kTileAttr.name);
  return i < 0 ? 0 : attrs[i].ints[0];
}

char const *reject_tile(Op const &op, Call const &call) {
  std::int64_t const tile = tile_attribute(op, call.attrs);
  if (tile == 0 || asked_tile(op, call.attrs) != 0) return nullptr;
  auto const lower = [](Config const &a, Config const &b) { return a.id < b.id; };
  auto const [first, last] = std::minmax_element(op.configs_table.begin(), op.configs_table.end(), lower);
  return sentence(
      "%s: attribute tile is %lld, and the operator's tiles are among %d to %d; write an id that kernels.describe() "
      "lists, or 0 for any",
      op.name, (long long)tile, first->id, last->id);
}

}  // namespace

char const *reject(Op const &op, Call const &call) {
  if (char const *reason = reject_device(call.sm)) return reason;
  if (char const *reason = reject_tile(op, call)) return reason;
  return op.reject(call);
}

std::int32_t asked_tile(Op const &op, AttrValue const *attrs) {
  std::int64_t const tile = tile_attribute(op, attrs);
  auto const id = static_cast<std::int32_t>(tile);
  return id == tile ? living_config(op, id) : 0;
}

std::int32_t living_config(Op const &op, std::int32_t id) {
  if (Retired const *const tile = find_id(op.retired, id)) return tile->heir;
  return find_id(op.configs_table, id) != nullptr ? id : 0;
}

namespace {

constexpr std::int32_t kMostConfigs = 256;

// Why tile `asked` is not legal. call.config is that tile, or its heir where it was retired.
char const *refuse_tile(Op const &op, Call const &call, std::int32_t asked) {
  Config const *const tile = find_id(op.configs_table, call.config);
  if (tile == nullptr) {
    return sentence("%s: tile %d does not exist; ask configs() for the legal ones", op.name, asked);
  }
  Type const type = call.inputs[0].type;
  char const *what = (tile->type_mask & bit_of(type)) == 0 ? name_of(type) : nullptr;
  if (what == nullptr) what = offers(call.sm, tile->needs) ? op.obstacle(call, call.config) : "this call";
  return sentence("%s: tile %d cannot run %s on compute capability %d.%d; ask configs() for the legal ones", op.name,
                  asked, what, call.sm / 10, call.sm % 10);
}

bool has_unknown_size(Tensor const &t) {
  return std::any_of(t.dims, t.dims + t.rank, [](std::int64_t size) { return size < 0; });
}

char const *choose(Op const &op, Call &call) {
  std::int32_t ids[kMostConfigs];
  std::int32_t const count = op.configs(call, ids, kMostConfigs);
  if (call.config == 0) {
    call.config = count > 0 ? ids[0] : 0;
    return nullptr;
  }
  std::int32_t const asked = call.config;
  call.config = living_config(op, asked);
  if (std::find(ids, ids + count, call.config) != ids + count) return nullptr;
  if (call.config != asked && call.config != 0 && count > 0) {  // a retired tile ran calls that its heir does not
    call.config = ids[0];
    return nullptr;
  }
  return refuse_tile(op, call, asked);
}

// The bytes from a tensor's address to its end.
std::int64_t extent_of(Tensor const &t) {
  std::int64_t pixels = 1;  // or rows
  std::int32_t const inner = t.layout == Layout::kLinear ? t.rank - 1 : 1;
  for (std::int32_t i = 0; i < t.rank; ++i) pixels *= i == inner ? 1 : t.dims[i];
  std::int64_t width = t.rank == 0 ? 1 : t.dims[inner];
  if (t.layout == Layout::kChannelsLast) width = padded_channels(t.type, width);
  if (t.layout == Layout::kBlocks32) width = (width + 31) / 32 * 32;
  return pixels * std::max(width, t.ld) * size_of(t.type);
}

}  // namespace

double predicted_us(Op const &op, Call const &given) {
  Call call = given;
  for (std::int32_t i = 0; i < call.num_inputs + call.num_outputs; ++i) {
    if (has_unknown_size(tensor_of(call, i))) return -1;
  }
  if (choose(op, call) != nullptr || call.config == 0) return -1;
  return op.predicted_us(call);
}

char const *plan(Op const &op, Call const &given, Plan *plan) {
  *plan = Plan{};
  Call call = given;
  Device const device = current_device();
  if (call.sm == 0) call.sm = device.sm;
  if (call.sm_count == 0 && call.sm == device.sm) call.sm_count = device.sm_count;
  if (char const *reason = reject(op, call)) return reason;
  for (std::int32_t i = 0; i < call.num_inputs + call.num_outputs; ++i) {
    if (has_unknown_size(tensor_of(call, i))) {
      return sentence("%s: a plan needs every size, one of tensor %d is still dynamic", op.name, i);
    }
  }
  if (char const *reason = choose(op, call)) return reason;
  plan->op = static_cast<std::int32_t>(std::find(operators().begin(), operators().end(), &op) - operators().begin());
  plan->variant = call.variant, plan->config = call.config, plan->splits = 1;
  plan->device = call.sm == device.sm ? device.index : -1;
  plan->sm = call.sm, plan->sm_count = call.sm_count;
  plan->num_inputs = call.num_inputs, plan->num_outputs = call.num_outputs;
  for (std::int32_t i = 0; i < call.num_inputs + call.num_outputs; ++i)
    plan->extents[i] = extent_of(tensor_of(call, i));
  return op.plan(call, *plan);
}

char const *run(Plan const &plan, Operands const &operands) {
  if (plan.op < 0 || plan.op >= operators().size) return "cutefuse: run needs a plan that cutefuse_plan has filled";
  Op const &op = *operators()[plan.op];
  if (plan.launches == 0) return nullptr;
  for (std::int32_t i = 0; i < plan.num_inputs + plan.num_outputs; ++i) {
    void const *const data = i < plan.num_inputs ? operands.inputs[i] : operands.outputs[i - plan.num_inputs];
    if ((plan.operands >> i & 1) == 0 || (data != nullptr && is_aligned(data))) continue;
    return sentence("%s: tensor %d is at address %p; device pointers must be set and aligned to 16 bytes", op.name, i,
                    data);
  }
  if (plan.workspace_bytes > 0 && (operands.workspace == nullptr || !is_aligned(operands.workspace) ||
                                   operands.workspace_bytes < plan.workspace_bytes)) {
    return sentence(
        "%s: the workspace has %lld bytes at address %p, the plan needs %lld, aligned to 16; pass them, or plan with "
        "fewer",
        op.name, (long long)operands.workspace_bytes, operands.workspace, (long long)plan.workspace_bytes);
  }
  DeviceScope const scope(plan.device);
  if (!scope.entered()) {
    return sentence(
        "%s: the plan is for compute capability %d.%d and no device of this process; plan again with that GPU current",
        op.name, plan.sm / 10, plan.sm % 10);
  }
  SideBySide beside(plan, operands);
  char const *const reason = op.launch(plan, operands);
  char const *const why = beside.end();
  if (reason != nullptr || why == nullptr) return reason;
  return sentence(
      "%s: the kernels of this CUDA graph cannot run side by side (%s); capture again with CUTEFUSE_SIDE_BY_SIDE=0",
      op.name, why);
}

}  // namespace cutefuse
