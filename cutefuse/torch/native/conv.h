// Fused convolutions with packed filters: one kernel call over images that lie as NHWC pixels; inference alone.
#pragma once

#include <ATen/ops/zeros.h>

#include <vector>

#include "launch.h"
#include "node.h"

namespace cutefuse::native {

using Ints = at::IntArrayRef;
using PackedConv = std::vector<Tensor>(at::TensorList, c10::string_view, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints,
                                       double, double, double, std::int64_t);

inline auto const &packed_conv_op() {
  static auto const op = operator_named<PackedConv>("cutefuse::packed_conv");
  return op;
}

// As cutefuse/torch/pixels.py has them.
inline std::int64_t padded(std::int64_t channels, Tensor const &t) {
  std::int64_t const step = std::int64_t(kAlignment) / t.element_size();
  return (channels + step - 1) / step * step;
}

// Elements from pixel to pixel of an NCHW tensor that lies as NHWC pixels of whole vectors; 0 if it does not.
inline std::int64_t pixel_stride(Tensor const &x) {
  Ints const size = x.sizes(), step = x.strides();
  std::int64_t const n = size[0], c = size[1], h = size[2], w = size[3], wide = padded(c, x);
  if (x.numel() == 0) return wide;
  if (c > 1 && step[1] != 1) return 0;
  std::int64_t const pixel = w > 1 ? step[3] : h > 1 ? step[2] : n > 1 ? step[0] : c == wide ? c : 0;
  bool const fits = pixel >= c && (h == 1 || step[2] == w * pixel) && (n == 1 || step[0] == h * w * pixel);
  return fits && pixel == padded(pixel, x) && is_aligned(x) ? pixel : 0;
}

// The image as the kernels can read it, copied where it does not lie so; its elements from pixel to pixel.
inline std::pair<Tensor, std::int64_t> as_pixels(Tensor const &x) {
  if (std::int64_t const pixel = pixel_stride(x)) return {x, pixel};
  Tensor const y = at::zeros({x.size(0), x.size(2), x.size(3), padded(x.size(1), x)}, x.options());
  Tensor const image = y.narrow(3, 0, x.size(1)).permute({0, 3, 1, 2});
  image.copy_(x);
  return {image, y.size(3)};
}

// An image that a kernel can write: channels-last, its pixels whole vectors.
inline Tensor empty_pixels(std::int64_t N, std::int64_t K, std::int64_t P, std::int64_t Q, Tensor const &beside) {
  std::int64_t const wide = padded(K, beside);
  if (wide == K) {
    return at::empty({N, K, P, Q}, beside.options().memory_format(at::MemoryFormat::ChannelsLast));
  }
  return empty({N, P, Q, wide}, beside.scalar_type(), beside).narrow(3, 0, K).permute({0, 3, 1, 2});
}

inline std::vector<Tensor> packed_conv(at::TensorList inputs, c10::string_view op_type, Ints channels,
                                       Ints kernel_shape, Ints strides, Ints pads, Ints dilations, Ints starts,
                                       Ints upsample, Ints outputs, double alpha, double lo, double hi,
                                       std::int64_t tile) {
  std::size_t const sources = channels.size();
  TORCH_CHECK(inputs.size() >= sources + 2 && sources > 0, "packed_conv: ", sources,
              " sources, a packed filter and a bias are needed, ", inputs.size(), " tensors were given");
  Tensor const &x = inputs[0];
  TORCH_CHECK(x.dim() == 4, "packed_conv: the source has ", x.dim(), " axes; give images of 4, N C H W");
  if (!runs_in_library(x)) {
    return in_python<std::vector<Tensor>>("packed_conv", inputs.vec(), std::string(op_type), channels.vec(),
                                          kernel_shape.vec(), strides.vec(), pads.vec(), dilations.vec(), starts.vec(),
                                          upsample.vec(), outputs.vec(), alpha, lo, hi, tile);
  }
  Key key{3, x.get_device(), tile, bits_of(alpha), bits_of(lo), bits_of(hi)};
  key.append(op_type.begin(), op_type.end());
  for (Ints list : {channels, kernel_shape, strides, pads, dilations, starts, upsample, outputs}) {
    key.push_back(static_cast<std::int64_t>(list.size()));
    key.append(list.begin(), list.end());
  }
  std::vector<Tensor> read;
  std::vector<std::int64_t> pixels;
  c10::SmallVector<void const *, 12> from;
  read.reserve(inputs.size());
  for (Tensor const &t : inputs) {
    check_device(t, x, "an operand");
    auto [image, pixel] = t.dim() == 4 ? as_pixels(t) : std::pair<Tensor, std::int64_t>(*dense(t), 0);
    add_to(key, image);
    key.push_back(pixel);
    from.push_back(image.const_data_ptr());
    pixels.push_back(pixel);
    read.push_back(std::move(image));
  }
  TORCH_CHECK(kernel_shape.size() == 2 && strides.size() == 2 && pads.size() == 4 && dilations.size() == 2 &&
                  strides[0] > 0 && strides[1] > 0 && !upsample.empty(),
              "packed_conv: its geometry is not that of a 2-D convolution; pass the attributes of the node");
  auto const size = [&](int axis) {
    std::int64_t const room = x.size(2 + axis) * upsample[0] + pads[axis] + pads[axis + 2];
    return std::max<std::int64_t>(0, (room - dilations[axis] * (kernel_shape[axis] - 1) - 1) / strides[axis] + 1);
  };
  std::vector<Tensor> made;
  c10::SmallVector<void *, 4> to;
  std::int64_t const filters = read[sources].size(0);
  for (std::int64_t K : outputs.size() > 1 ? outputs : Ints(filters)) {
    made.push_back(empty_pixels(x.size(0), K, size(0), size(1), x));
    to.push_back(made.back().data_ptr());
  }
  Kept const &kept = plan_of(key, [&] {
    return call_python(library.conv_planner, read, pixels, made, std::string(op_type), channels.vec(),
                       kernel_shape.vec(), strides.vec(), pads.vec(), dilations.vec(), starts.vec(), upsample.vec(),
                       outputs.vec(), alpha, lo, hi, tile);
  });
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
    return packed_conv_op().redispatch(keys & c10::after_autograd_keyset, inputs, op_type, channels, kernel_shape,
                                       strides, pads, dilations, starts, upsample, outputs, alpha, lo, hi, tile);
  }();
  if (torch::autograd::compute_requires_grad(inputs)) {
    auto *const error = new torch::autograd::Error(
        "cutefuse's fused convolutions are for inference; train the model "
        "that was given to fuse",
        torch::autograd::collect_next_edges(inputs));
    torch::autograd::set_history(made, owned(static_cast<Node *>(error)));
  }
  return made;
}

}  // namespace cutefuse::native
