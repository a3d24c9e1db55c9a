"""HRNet-W48's segmentation head: four resolutions brought to the finest, joined, mixed by a 1x1 convolution."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """48 + 96 + 192 + 384 -> 720 channels at 128x256; small: 1/6 of the channels, 1/8 of the pixels a side."""
    width, height, columns = (8, 16, 32) if config.small else (48, 128, 256)
    net = Net("hrnet_head", config)
    scales = [net.input(f"x{i}", width * 2**i, height >> i, columns >> i) for i in range(4)]
    finest = [scales[0], *(net.upsample(x, 2**i, f"up{i}", "linear") for i, x in enumerate(scales[1:], start=1))]
    x = net.conv(net.concat(finest, "head/Concat"), 15 * width, 1, "head.0", bn=True, act="Relu")
    return net.model([net.conv(x, 19, 1, "head.3")])
