// The interface of a CUTLASS peer in the benchmark: one convolution with bias and activation over one NHWC tensor. Each
// tile of a peer is a shared library of its own, so that they compile in parallel and one that fails is left out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "cutlass/cutlass.h"

// Activations, in the order of the Python side (benchmarks/lib/cutlass_peers.py).
enum class PeerActivation : std::int32_t { kNone, kRelu, kSilu, kSigmoid };

// x[N][H][W][C], w[K][R][S][C], b[K], y[N][P][Q][K] in the type the peer is built for; pads are symmetric.
struct PeerProblem {
  std::int32_t N, H, W, C, K, R, S, P, Q;
  std::int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  std::int32_t splits;  // of the reduction
  PeerActivation activation;
};

struct PeerOperands {
  void const *x, *w, *b;
  void *y;
};

// A prepared launch: everything that depends on shapes and pointers is done once, `run` only enqueues.
struct Peer {
  virtual ~Peer() = default;
  virtual cutlass::Status run(cudaStream_t stream) = 0;
};

// Defined by each peer; null when the tile cannot take the problem.
std::unique_ptr<Peer> make_peer(PeerProblem const &problem, PeerOperands const &operands);

extern "C" {
void *peer_create(PeerProblem const *problem, PeerOperands const *operands) {
  return make_peer(*problem, *operands).release();
}

// 0, or CUTLASS's status.
int peer_run(void *peer, void *stream) {
  return static_cast<int>(static_cast<Peer *>(peer)->run(static_cast<cudaStream_t>(stream)));
}

void peer_destroy(void *peer) { delete static_cast<Peer *>(peer); }
}
