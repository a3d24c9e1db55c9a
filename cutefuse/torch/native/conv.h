// Fused convolutions with packed filters: one kernel call over images that lie as NHWC pixels; inference alone.
#pragma once

#include <vector>

#include "launch.h"
#include "node.h"

namespace cutefuse::native {

using Ints = at::IntArrayRef;
using PackedConv = std::vector<Tensor>(at::TensorList, c10::string_view, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints,
                                       double, double, double, std::int64_t);

// An image [N, K, P, Q] in channels-last memory with `wide` elements in a pixel.
inline Tensor empty_image(std::int64_t N, std::int64_t K, std::int64_t P, std::int64_t Q, std::int64_t wide,
                          Tensor const &beside) {
  if (wide == K) {
    return at::empty({N, K, P, Q}, beside.options().memory_format(at::MemoryFormat::ChannelsLast));
  }
  return empty({N, P, Q, wide}, beside.scalar_type(), beside).narrow(3, 0, K).permute({0, 3, 1, 2});
}

// An operand as the kernel reads it; `pixel`: 0, or the elements of a pixel of an image that must be copied; negative:
// what is read in its own order.
inline Tensor readable(Tensor const &t, std::int64_t pixel) {
  if (pixel < 0) return *dense(t);
  return pixel == 0 ? t : empty_image(t.size(0), t.size(1), t.size(2), t.size(3), pixel, t).copy_(t);
}

inline std::vector<Tensor> packed_conv(at::TensorList inputs, c10::string_view op_type, Ints channels,
                                       Ints kernel_shape, Ints strides, Ints pads, Ints dilations, Ints starts,
                                       Ints upsample, Ints outputs, double alpha, double lo, double hi,
                                       std::int64_t tile) {
  TORCH_CHECK(!inputs.empty(), "packed_conv: no tensors were given; give sources, a packed filter and a bias");
  Tensor const &x = inputs[0];
  auto const ask = [&](auto result, char const *what) {
    return in_python<decltype(result)>(what, inputs.vec(), std::string(op_type), channels.vec(), kernel_shape.vec(),
                                       strides.vec(), pads.vec(), dilations.vec(), starts.vec(), upsample.vec(),
                                       outputs.vec(), alpha, lo, hi, tile);
  };
  if (!runs_in_library(x)) return ask(std::vector<Tensor>(), "packed_conv");
  Key key{3, x.get_device(), tile, bits_of(alpha), bits_of(lo), bits_of(hi)};
  key.append(op_type.begin(), op_type.end());
  for (Ints list : {channels, kernel_shape, strides, pads, dilations, starts, upsample, outputs}) {
    key.push_back(static_cast<std::int64_t>(list.size()));
    key.append(list.begin(), list.end());
  }
  for (Tensor const &t : inputs) {
    check_device(t, x, "an operand");
    add_to(key, t);
    if (t.dim() != 4) continue;  // it is made dense
    key.append(t.strides().begin(), t.strides().end());
    key.push_back(is_aligned(t));
  }
  Kept const &kept = plan_of(key, [&] { return ask(Planned(), "plan_conv"); });
  std::vector<Tensor> read, made;
  c10::SmallVector<void const *, 12> from;
  c10::SmallVector<void *, 4> to;
  read.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    from.push_back(read.emplace_back(readable(inputs[i], kept.copies[i])).const_data_ptr());
  }
  for (auto const &[N, K, P, Q, wide] : kept.outputs) {
    to.push_back(made.emplace_back(empty_image(N, K, P, Q, wide, x)).data_ptr());
  }
  enqueue(kept, from.data(), to.data(), x);
  return made;
}

// The filter is packed and its constants are folded: there is no derivative, which is said when someone asks for it.
inline std::vector<Tensor> packed_conv_autograd(c10::DispatchKeySet keys, at::TensorList inputs,
                                                c10::string_view op_type, Ints channels, Ints kernel_shape,
                                                Ints strides, Ints pads, Ints dilations, Ints starts, Ints upsample,
                                                Ints outputs, double alpha, double lo, double hi, std::int64_t tile) {
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView const below;
    return operator_named<PackedConv>("cutefuse::packed_conv")
        .redispatch(keys & c10::after_autograd_keyset, inputs, op_type, channels, kernel_shape, strides, pads,
                    dilations, starts, upsample, outputs, alpha, lo, hi, tile);
  }();
  if (torch::autograd::compute_requires_grad(inputs)) {
    torch::autograd::set_history(
        made,
        refusal("cutefuse's fused convolutions are for inference; train the model that was given to fuse", inputs));
  }
  return made;
}

}  // namespace cutefuse::native
