// Max and average pools, linear Resizes and Concats of channels-last images: what is joined is read where it lies. No
// plugin registers them: the PyTorch engine is their only user. No CUDA header.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "architecture.h"
#include "device.h"
#include "window/problem.h"

namespace cutefuse::window {

#define CUTEFUSE_KERNELS(stem, type, group, Element) void const *kernel_##type(Problem const &);
#include "window_kernels.inc"
#undef CUTEFUSE_KERNELS

namespace {

enum { kMode, kKernelShape, kStrides, kPads, kDilations, kCountIncludePad, kScales, kOffsets };
constexpr AttrSpec kAttrSpecs[] = {
    {"mode", AttrKind::kInts, 1, 1, 0, 0.0},          // 0: largest, 1: mean, 2: linear
    {"kernel_shape", AttrKind::kInts, 2, 2, 2, 1.0},  // pools alone, as ONNX has them
    {"strides", AttrKind::kInts, 2, 2, 2, 1.0},
    {"pads", AttrKind::kInts, 4, 4, 4, 0.0},  // top, left, bottom, right
    {"dilations", AttrKind::kInts, 2, 2, 2, 1.0},
    {"count_include_pad", AttrKind::kInts, 1, 1, 1, 0.0},
    {"scales", AttrKind::kFloats, 2, 2, 2, 1.0},  // linear: input pixels from output pixel to output pixel
    {"offsets", AttrKind::kFloats, 2, 2, 2, 0.0}  // linear: where in the input the first output pixel lies
};

constexpr std::array<Variant, kMaxSources> variants() {
  std::array<Variant, kMaxSources> all{};
  for (int i = 0; i < kMaxSources; ++i) {
    all[i] = {"CuteWindow1", i + 1, 1, {Kind::kWindow, i + 1}};
    all[i].op_type[10] = char('1' + i);
  }
  return all;
}
constexpr auto kVariantTable = variants();
constexpr std::array<Config, 0> kNoTiles{};
constexpr std::array<Retired, 0> kRetired{};

int vector_of(Type type) { return kVectorBytes / size_of(type); }

bool between(std::int64_t const *values, int count, std::int64_t low) {
  return std::all_of(values, values + count, [&](std::int64_t v) { return v >= low && v <= kMaxSide; });
}

char const *read_attributes(Call const &call, Problem &p) {
  auto const ints = [&](int i) { return call.attrs[i].ints; };
  float const *const scales = call.attrs[kScales].floats, *const offsets = call.attrs[kOffsets].floats;
  if (ints(kMode)[0] < 0 || ints(kMode)[0] >= kModes) {
    return sentence("window: mode is %lld; write 0 (largest), 1 (mean) or 2 (linear)", (long long)ints(kMode)[0]);
  }
  if (!between(ints(kKernelShape), 2, 1) || !between(ints(kStrides), 2, 1) || !between(ints(kDilations), 2, 1) ||
      !between(ints(kPads), 4, 0)) {
    return sentence("window: sides, strides and dilations must be 1 to %d, pads 0 to %d; leave this pool to the engine",
                    kMaxSide, kMaxSide);
  }
  for (int i = 0; i < 2; ++i) {
    if (!(scales[i] > 0.f && std::isfinite(scales[i]) && std::isfinite(offsets[i]))) {
      return sentence("window: scale %g and offset %g; the scale must be above 0, both finite", double(scales[i]),
                      double(offsets[i]));
    }
  }
  p.mode = static_cast<Mode>(ints(kMode)[0]);
  p.R = int(ints(kKernelShape)[0]), p.S = int(ints(kKernelShape)[1]);
  p.stride_h = int(ints(kStrides)[0]), p.stride_w = int(ints(kStrides)[1]);
  p.dilation_h = int(ints(kDilations)[0]), p.dilation_w = int(ints(kDilations)[1]);
  p.pad_top = int(ints(kPads)[0]), p.pad_left = int(ints(kPads)[1]);
  p.pad_bottom = int(ints(kPads)[2]), p.pad_right = int(ints(kPads)[3]);
  p.counts_pads = ints(kCountIncludePad)[0] != 0;
  p.scale_h = scales[0], p.scale_w = scales[1], p.offset_h = offsets[0], p.offset_w = offsets[1];
  return nullptr;
}

// An image of whole vectors; `what` names it. Fills in its vectors and the bytes from pixel to pixel.
char const *read_image(char const *what, Tensor const &t, Type type, int *vectors, std::int64_t *pixel) {
  if (t.rank != 4 || t.layout != Layout::kChannelsLast || t.type != type || (kFloatTypes & bit_of(type)) == 0) {
    return sentence("window: the %s is %s of rank %d; pass float32, float16 or bfloat16 images of one type as NHWC",
                    what, name_of(t.type), t.rank);
  }
  if (t.dims[1] % vector_of(type) != 0 || t.ld % vector_of(type) != 0 || (t.ld != 0 && t.ld < t.dims[1])) {
    return sentence("window: the %s has %lld channels in pixels of %lld elements; both must be multiples of %d", what,
                    (long long)t.dims[1], (long long)t.ld, vector_of(type));
  }
  *vectors = int(t.dims[1] / vector_of(type));
  *pixel = (t.ld != 0 ? t.ld : t.dims[1]) * size_of(type);
  return nullptr;
}

// Whether each window begins before the image ends, and ends after it begins.
bool meets(int size, int out, int side, int stride, int dilation, int pad) {
  return pad <= (side - 1) * std::int64_t(dilation) && (out - 1) * std::int64_t(stride) - pad < size;
}

// Fills in the problem and returns null, or returns why the call is refused.
char const *problem_of(Call const &call, Problem &p) {
  if (char const *reason = read_attributes(call, p)) return reason;
  Tensor const &x = call.inputs[0], &y = call.outputs[0];
  p.type = x.type, p.sources = call.num_inputs;
  std::int64_t channels = 0;
  for (int i = 0; i < p.sources; ++i) {
    Tensor const &source = call.inputs[i];
    if (char const *reason = read_image("source", source, x.type, &p.vectors[i], &p.pixel[i])) return reason;
    channels += source.dims[1];
    for (int axis : {0, 2, 3}) {
      if (source.dims[axis] == x.dims[axis]) continue;
      return sentence("window: dimension %d of source %d is %lld, that of source 0 is %lld; a Concat needs equal sizes",
                      axis, i, (long long)source.dims[axis], (long long)x.dims[axis]);
    }
  }
  int vectors = 0;
  if (char const *reason = read_image("output", y, x.type, &vectors, &p.output_pixel)) return reason;
  std::int64_t const sizes[] = {x.dims[0], x.dims[2], x.dims[3], y.dims[2], y.dims[3], channels};
  if (!between(sizes, 6, 0) || y.dims[0] != x.dims[0] || y.dims[1] != channels) {
    return sentence(
        "window: images of %lldx%lldx%lldx%lld (NCHW) into %lldx%lldx%lldx%lld; batch and channels must be "
        "equal, every size at most %d",
        (long long)x.dims[0], (long long)channels, (long long)x.dims[2], (long long)x.dims[3], (long long)y.dims[0],
        (long long)y.dims[1], (long long)y.dims[2], (long long)y.dims[3], kMaxSide);
  }
  p.N = int(sizes[0]), p.H = int(sizes[1]), p.W = int(sizes[2]), p.P = int(sizes[3]), p.Q = int(sizes[4]);
  bool const reads = p.H > 0 && p.W > 0 &&
                     (p.mode == Mode::kLinear || (meets(p.H, p.P, p.R, p.stride_h, p.dilation_h, p.pad_top) &&
                                                  meets(p.W, p.Q, p.S, p.stride_w, p.dilation_w, p.pad_left)));
  if (!reads && p.P > 0 && p.Q > 0) {
    return sentence(
        "window: %dx%d outputs of %dx%d windows do not all meet the image of %dx%d; give fewer or smaller pads", p.P,
        p.Q, p.R, p.S, p.H, p.W);
  }
  constexpr int kMostItems = INT32_MAX - kThreads;  // so that the last block's threads have numbers too
  if (std::int64_t(p.N) * p.P * p.Q > kMostItems / std::max(vectors, 1)) {
    return sentence("window: the output has %lld vectors of 16 bytes, %d are possible; split the batch",
                    (long long)p.N * p.P * p.Q * vectors, kMostItems);
  }
  return nullptr;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

char const *reject(Call const &call) {
  Problem p{};
  return problem_of(call, p);
}

struct State {
  Params params;
  Launch launch;
};
static_assert(sizeof(State) <= sizeof(Plan::state));

char const *refused(char const *why) {
  return sentence("window: the kernel could not be launched (%s); check that the library was built for this GPU", why);
}

void const *kernel_of([[maybe_unused]] Problem const &p) {
#define CUTEFUSE_KERNELS(stem, number, group, Element) \
  if (p.type == Type::number) return kernel_##number(p);
#include "window_kernels.inc"
#undef CUTEFUSE_KERNELS
  return nullptr;
}

char const *plan(Call const &call, Plan &plan) {
  State state{};
  Params &params = state.params;
  Problem &p = params.problem;
  if (char const *reason = problem_of(call, p)) return reason;
  bool const image = p.mode == Mode::kMean && is_whole_image(p);
  int const vectors = std::accumulate(p.vectors, p.vectors + p.sources, 0);
  int const groups = p.mode == Mode::kLinear ? ceil_div(p.Q, kColumns) : p.Q;
  params.items = p.N * p.P * groups * vectors;
  if (params.items > 0) {
    params.by_vectors = Divider(vectors), params.by_groups = Divider(groups), params.by_rows = Divider(p.P);
    // Of a larger image a block takes fewer vectors, so that each of its threads loads kImageLoads pixels at most.
    params.log_vectors = kMostLogVectors;
    int &log = params.log_vectors;
    while (log > 0 && p.H * p.W > kImageLoads * (kImageThreads >> log)) --log;
    params.by_shares = Divider(ceil_div(vectors, 1 << log));
    plan.operands = (2u << call.num_inputs) - 1, plan.launches = 1;
    int const threads = image ? kImageThreads : kThreads;
    state.launch.kernel = {plan.device >= 0 ? kernel_of(p) : nullptr, threads, 0};
    state.launch.blocks = image ? std::int64_t(p.N) * params.by_shares.divisor : ceil_div(params.items, threads);
    state.launch.early = offers(plan.sm, kClusters);
    if (char const *why = prepare(state.launch, plan.device >= 0)) return refused(why);
  }
  std::memcpy(plan.state, &state, sizeof(state));
  return nullptr;
}

char const *launch(Plan const &plan, Operands const &operands) {
  State state;
  std::memcpy(&state, plan.state, sizeof(state));
  std::copy(operands.inputs, operands.inputs + plan.num_inputs, state.params.x);
  state.params.y = operands.outputs[0];
  char const *const why = start(state.launch, &state.params, operands.stream);
  return why == nullptr ? nullptr : refused(why);
}

}  // namespace

extern Op const op;
Op const op = {"window",
               kVariantTable,
               kAttrSpecs,
               kNoTiles,
               kRetired,
               reject,
               [](Call const &) -> std::int64_t { return 0; },
               [](Call const &, std::int32_t *, std::int32_t) -> std::int32_t { return 0; },
               [](Call const &, std::int32_t) -> char const * { return nullptr; },
               [](Call const &) { return -1.0; },
               plan,
               launch};

}  // namespace cutefuse::window
