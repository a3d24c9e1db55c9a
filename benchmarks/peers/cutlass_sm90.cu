// Peer: CUTLASS 3.x implicit GEMM (TMA im2col, wgmma, warp-specialised), bias and activation in its stock fusion.
// PEER_TILE is M, N, K of the block and M, N of the cluster. CUTLASS has one schedule for convolutions on this
// architecture: the cooperative, ping-pong and persistent ones are refused by a static_assert of its dispatch policy.
// clang-format off: CUTLASS's collective headers do not include what they use, so these come first.
#include "cute/tensor.hpp"
#include "cutlass/kernel_hardware_info.hpp"
// clang-format on
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "peer.h"

namespace {

using namespace cute;
using Half = cutlass::half_t;
using Nhwc = cutlass::layout::TensorNHWC;
constexpr int kVector = 8;  // elements of 16 bytes, TMA's alignment
constexpr int kBarrierBytes = 1024;
constexpr auto kFprop = cutlass::conv::Operator::kFprop;

template <int kBlockM, int kBlockN, int kBlockK, int kClusterM, int kClusterN>
struct Tile {
  using Block = Shape<Int<kBlockM>, Int<kBlockN>, Shape<Int<kBlockK>>>;
  using Cluster = Shape<Int<kClusterM>, Int<kClusterN>, _1>;
};
using PeerTile = Tile<PEER_TILE>;

template <template <class> class Activation>
struct Convolution {
  using Fusion = cutlass::epilogue::fusion::LinCombPerColBiasEltAct<Activation, Half, float, Half, void, float>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename PeerTile::Block, typename PeerTile::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Nhwc, kVector, Half, Nhwc, kVector,
      cutlass::epilogue::TmaWarpSpecialized, Fusion>::CollectiveOp;
  // Main loop and epilogue share one memory in this kernel, so nothing but barriers is kept back from the stages.
  using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kFprop, Half, Nhwc, kVector, Half, Nhwc, kVector, float,
      typename PeerTile::Block, typename PeerTile::Cluster,
      cutlass::conv::collective::StageCountAutoCarveout<kBarrierBytes>,
      cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
  using Problem = cutlass::conv::ConvProblemShape<kFprop, Mainloop::NumSpatialDimensions>;
  using Device =
      cutlass::conv::device::ConvUniversalAdapter<cutlass::conv::kernel::ConvUniversal<Problem, Mainloop, Epilogue>>;
};

template <template <class> class Activation>
class Sm90Peer : public Peer {
 public:
  using Types = Convolution<Activation>;
  using Device = typename Types::Device;

  static std::unique_ptr<Peer> make(PeerProblem const &p, PeerOperands const &operands) {
    if (p.splits != 1) return nullptr;
    typename Types::Problem const shape(cutlass::conv::Mode::kCrossCorrelation, {p.N, p.H, p.W, p.C},
                                        {p.K, p.R, p.S, p.C}, {p.pad_h, p.pad_w}, {p.pad_h, p.pad_w},
                                        {p.stride_h, p.stride_w}, {p.dilation_h, p.dilation_w}, 1);
    using Strides = typename Types::Epilogue::StrideD;
    Strides stride_y{};
    for_each(make_seq<rank<0>(Strides{})>{}, [&](auto i) { get<0, i>(stride_y) = shape.stride_C[2 - i]; });
    typename Device::Arguments arguments(shape,
                                         {static_cast<Half const *>(operands.x), static_cast<Half const *>(operands.w)},
                                         {{}, nullptr, {}, static_cast<Half *>(operands.y), stride_y});
    arguments.epilogue.thread.bias_ptr = static_cast<Half const *>(operands.b);
    if (Device::can_implement(arguments) != cutlass::Status::kSuccess) return nullptr;
    auto peer = std::make_unique<Sm90Peer>();
    if (peer->device_.initialize(arguments) != cutlass::Status::kSuccess) return nullptr;
    return peer;
  }

  cutlass::Status run(cudaStream_t stream) override { return device_.run(stream); }

 private:
  Device device_;
};

}  // namespace

std::unique_ptr<Peer> make_peer(PeerProblem const &problem, PeerOperands const &operands) {
  namespace thread = cutlass::epilogue::thread;
  switch (problem.activation) {
    case PeerActivation::kNone:
      return Sm90Peer<thread::Identity>::make(problem, operands);
    case PeerActivation::kRelu:
      return Sm90Peer<thread::ReLu>::make(problem, operands);
    case PeerActivation::kSilu:
      return Sm90Peer<thread::SiLu>::make(problem, operands);
    case PeerActivation::kSigmoid:
      return Sm90Peer<thread::Sigmoid>::make(problem, operands);
  }
  return nullptr;
}
