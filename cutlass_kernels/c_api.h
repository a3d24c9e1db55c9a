// The flat C interface: one ctypes binding serves every operator. Structs are those of op.h.
#pragma once

#include <cstdint>

#include "op.h"

#define CUTEFUSE_EXPORT extern "C" __attribute__((visibility("default")))

// JSON text, valid as long as the process: {"abi", "version", "cuda", "cuda_version", "archs", "targets",
// "architectures", "activations", "ops": [{"name", "attributes", "variants", "configs", "retired"}]}. cuda_version: of
// the CUDA runtime inside, or "". archs: what the library holds code for ("86": machine code, "100-virtual": PTX), or
// "none"; targets: what it is judged for. architectures: what each has, and which code of the targets runs there. A
// variant carries its Facts, a config its properties.
CUTEFUSE_EXPORT char const *cutefuse_describe();

// Operator id of an ONNX op_type for the calls below, or -1; *variant receives the value for Call::variant.
CUTEFUSE_EXPORT std::int32_t cutefuse_find(char const *op_type, std::int32_t *variant);

// Null when legal, else one sentence valid until this thread calls again.
CUTEFUSE_EXPORT char const *cutefuse_reject(std::int32_t op, cutefuse::Call const *call);

// Null when the library holds code for a compute capability (times 10), else one sentence.
CUTEFUSE_EXPORT char const *cutefuse_reject_device(std::int32_t sm);

// Bytes of workspace with which every tile does its best, for this call and every larger image; -1 when it is rejected.
CUTEFUSE_EXPORT std::int64_t cutefuse_workspace_bytes(std::int32_t op, cutefuse::Call const *call);

// Legal tiles, best guess first; returns their number, 0 when the call is rejected.
CUTEFUSE_EXPORT std::int32_t cutefuse_configs(std::int32_t op, cutefuse::Call const *call, std::int32_t *ids,
                                              std::int32_t capacity);

// Predicted microseconds of the call with its tile or, where config is 0, with the best guess. Negative where a size is
// not known, the operator has no model, or the call is rejected. The time is that inside a network, where operands lie
// in the L2 cache; the constants are an H200's.
CUTEFUSE_EXPORT double cutefuse_predicted_us(std::int32_t op, cutefuse::Call const *call);

// Plans a call, once per shape, for the current device; null when done, else one sentence. The plan is plain data
// of cutefuse_plan_bytes() bytes that may be copied, and needs at most call->workspace_promise bytes of workspace.
CUTEFUSE_EXPORT char const *cutefuse_plan(std::int32_t op, cutefuse::Call const *call, cutefuse::Plan *plan);
CUTEFUSE_EXPORT std::int64_t cutefuse_plan_bytes();

// Enqueues a plan on operands->stream; null when done, else one sentence. Any number of threads may run one plan.
CUTEFUSE_EXPORT char const *cutefuse_run(cutefuse::Plan const *plan, cutefuse::Operands const *operands);

// Whether kernels that this thread enqueues on a captured stream run side by side in the graph where their memory
// allows it. At first the environment's CUTEFUSE_SIDE_BY_SIDE=1 does; its 0 forbids it to all. Returns what held.
CUTEFUSE_EXPORT std::int32_t cutefuse_side_by_side(std::int32_t allowed);
