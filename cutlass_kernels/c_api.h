// The flat C interface: one ctypes binding serves every operator. Structs are those of op.h.
#pragma once

#include <cstdint>

#include "op.h"

#define CUTEFUSE_EXPORT extern "C" __attribute__((visibility("default")))

// JSON text, valid for ever: {"abi", "version", "cuda", "archs", "activations", "ops": [{"name", "attributes",
// "variants", "configs", "retired"}]}. A variant carries its Facts, a config what it is and takes.
CUTEFUSE_EXPORT char const *cutefuse_describe();

// Operator id of an ONNX op_type for the calls below, or -1; *variant receives the value for Call::variant.
CUTEFUSE_EXPORT std::int32_t cutefuse_find(char const *op_type, std::int32_t *variant);

// Null when legal, else one sentence valid until this thread calls again.
CUTEFUSE_EXPORT char const *cutefuse_reject(std::int32_t op, cutefuse::Call const *call);

// Bytes of workspace for every tile of the call; -1 when the call is rejected.
CUTEFUSE_EXPORT std::int64_t cutefuse_workspace_bytes(std::int32_t op, cutefuse::Call const *call);

// Legal tiles, best guess first; returns their number, 0 when the call is rejected.
CUTEFUSE_EXPORT std::int32_t cutefuse_configs(std::int32_t op, cutefuse::Call const *call, std::int32_t *ids,
                                              std::int32_t capacity);

// Enqueues the operator on call->stream; null when done, else one sentence.
CUTEFUSE_EXPORT char const *cutefuse_run(std::int32_t op, cutefuse::Call const *call);
