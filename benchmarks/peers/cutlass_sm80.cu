// Peer: CUTLASS 2.x implicit GEMM (mma.sync, cp.async), bias as a source of stride 0, activation in its stock epilogue.
// PEER_TILE is M, N, K of the block, M, N of the warp, stages. With PEER_TF32 the tensors are float32 and the tensor
// cores take them as tf32, rounded to nearest.
#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_generic.h"
#include "cutlass/epilogue/thread/linear_combination_sigmoid.h"
#include "cutlass/epilogue/thread/linear_combination_silu.h"
#include "peer.h"

namespace {

#ifdef PEER_TF32
using Element = float;
using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
#else
using Element = cutlass::half_t;
using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
#endif
using Nhwc = cutlass::layout::TensorNHWC;
constexpr int kVector = 16 / sizeof(Element);  // elements of one 16-byte access

template <int kBlockM, int kBlockN, int kBlockK, int kWarpM, int kWarpN, int kStageCount>
struct Tile {
  using Block = cutlass::gemm::GemmShape<kBlockM, kBlockN, kBlockK>;
  using Warp = cutlass::gemm::GemmShape<kWarpM, kWarpN, kBlockK>;
  static constexpr int kStages = kStageCount;
};
using PeerTile = Tile<PEER_TILE>;

template <class Epilogue>
using Convolution = cutlass::conv::device::ImplicitGemmConvolution<typename cutlass::conv::kernel::DefaultConv2dFprop<
    Element, Nhwc, Element, Nhwc, Element, Nhwc, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    PeerTile::Block, PeerTile::Warp, Instruction, Epilogue,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, PeerTile::kStages, cutlass::arch::OpMultiplyAdd,
    cutlass::conv::IteratorAlgorithm::kOptimized, cutlass::conv::StrideSupport::kStrided, kVector, kVector>::Kernel>;

template <class Epilogue>
class Sm80Peer : public Peer {
 public:
  using Device = Convolution<Epilogue>;

  static std::unique_ptr<Peer> make(PeerProblem const &p, PeerOperands const &operands) {
    using Extent = cutlass::Tensor4DCoord;
    cutlass::conv::Conv2dProblemSize const size(Extent(p.N, p.H, p.W, p.C), Extent(p.K, p.R, p.S, p.C),
                                                Extent(p.pad_h, p.pad_h, p.pad_w, p.pad_w), {p.stride_h, p.stride_w},
                                                {p.dilation_h, p.dilation_w}, Extent(p.N, p.P, p.Q, p.K),
                                                cutlass::conv::Mode::kCrossCorrelation, p.splits, 1);
    auto const tensor = [](void const *data, Nhwc layout) {
      return cutlass::TensorRef<Element, Nhwc>(static_cast<Element *>(const_cast<void *>(data)), layout);
    };
    typename Device::Arguments const arguments(size, tensor(operands.x, Nhwc::packed(size.activation_extent())),
                                               tensor(operands.w, Nhwc::packed(size.filter_extent())),
                                               tensor(operands.b, Nhwc(Nhwc::Stride(0))),
                                               tensor(operands.y, Nhwc::packed(size.output_extent())), {1.0f, 1.0f});
    if (Device::can_implement(arguments) != cutlass::Status::kSuccess) return nullptr;
    auto peer = std::make_unique<Sm80Peer>();
    std::size_t const bytes = Device::get_workspace_size(arguments);
    if (bytes > 0 && cudaMalloc(&peer->semaphores_, bytes) != cudaSuccess) return nullptr;
    if (peer->device_.initialize(arguments, peer->semaphores_) != cutlass::Status::kSuccess) return nullptr;
    return peer;
  }

  ~Sm80Peer() override { cudaFree(semaphores_); }
  cutlass::Status run(cudaStream_t stream) override { return device_.run(stream); }

 private:
  Device device_;
  void *semaphores_ = nullptr;  // of the serial split; the kernel leaves them as it found them, zero
};

}  // namespace

std::unique_ptr<Peer> make_peer(PeerProblem const &problem, PeerOperands const &operands) {
  namespace thread = cutlass::epilogue::thread;
  switch (problem.activation) {
    case PeerActivation::kNone:
      return Sm80Peer<thread::LinearCombination<Element, kVector, float, float>>::make(problem, operands);
    case PeerActivation::kRelu:
      // LinearCombinationRelu gives wrong sums with a split reduction; this one leaves the activation to the last part.
      return Sm80Peer<thread::LinearCombinationGeneric<thread::ReLu, Element, kVector, float, float>>::make(problem,
                                                                                                            operands);
    case PeerActivation::kSilu:
      return Sm80Peer<thread::LinearCombinationSilu<Element, kVector, float, float>>::make(problem, operands);
    case PeerActivation::kSigmoid:
      return Sm80Peer<thread::LinearCombinationSigmoid<Element, kVector, float, float>>::make(problem, operands);
  }
  return nullptr;
}
