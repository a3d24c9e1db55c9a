"""CenterPoint's neck: three scales brought to one by transposed convolutions, joined, and a shared 3x3 convolution."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """64, 128, 256 channels at 128x128 and below; small: 1/8 of the channels at 16x16."""
    width, size = (8, 16) if config.small else (64, 128)
    net = Net("centerpoint_neck", config)
    scales = [net.input(f"x{i}", width << i, size >> i, size >> i) for i in range(3)]
    ups = []
    for i, x in enumerate(scales):
        y = net.conv_transpose(x, 2 * width, 1 << i, f"deblock{i}")
        ups.append(net.act(net.batch_norm(y, f"deblock{i}"), "Relu", f"deblock{i}"))
    shared = net.conv(net.concat(ups, "neck/Concat"), width, 3, "shared_conv", bn=True, act="Relu")
    heads = [net.conv(net.conv(shared, width, 3, f"{h}.0", bn=True, act="Relu"), k, 3, f"{h}.1")
             for h, k in (("reg", 2), ("height", 1), ("heatmap", 3))]  # fmt: skip
    return net.model(heads)
