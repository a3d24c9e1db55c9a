"""CenterPoint's neck: three scales brought to one by transposed convolutions, joined, and a shared 3x3 convolution."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.net import Net


def build(dtype: str = "float32", small: bool = False) -> Any:
    """64, 128, 256 channels at 128x128 and below; small: 1/8 of the channels at 16x16."""
    width, size = (8, 16) if small else (64, 128)
    net = Net("centerpoint_neck", dtype)
    scales = [net.input(f"x{i}", width << i, size >> i, size >> i) for i in range(3)]
    ups = []
    for i, x in enumerate(scales):
        w = net.rng.standard_normal((net.channels[x], 2 * width, 1 << i, 1 << i)) / np.sqrt(net.channels[x])
        y = net.add(
            "ConvTranspose", [x, net.weight(f"deblock{i}.weight", w)], f"/deblock{i}/ConvTranspose", 2 * width,
            kernel_shape=[1 << i] * 2, strides=[1 << i] * 2,
        )  # fmt: skip
        ups.append(net.act(net.batch_norm(y, f"deblock{i}"), "Relu", f"deblock{i}"))
    shared = net.conv(net.concat(ups, "neck/Concat"), width, 3, "shared_conv", bn=True, act="Relu")
    heads = [net.conv(net.conv(shared, width, 3, f"{h}.0", bn=True, act="Relu"), k, 3, f"{h}.1")
             for h, k in (("reg", 2), ("height", 1), ("heatmap", 3))]  # fmt: skip
    return net.model(heads)
