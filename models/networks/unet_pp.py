"""UNet++: nested skip pathways, where a decoder node joins all earlier nodes of its level."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """512x512 pixels and 32 to 512 channels; small: 32x32."""
    size = config.pixels(512, 32, 16)
    net = Net("unet_pp", config, thin=True)

    def block(x: str, level: int, name: str) -> str:
        for i in (1, 2):
            x = net.conv(x, 32 << level, 3, f"{name}/conv{i}", act="Relu")
        return x

    x = {(0, 0): block(net.input("image", 3, size, size), 0, "conv0_0")}
    for i in range(1, 5):
        x[i, 0] = block(net.max_pool(x[i - 1, 0], f"pool{i}"), i, f"conv{i}_0")
    for j in range(1, 5):
        for i in range(5 - j):
            up = net.upsample(x[i + 1, j - 1], 2, f"up{i + 1}_{j - 1}")
            joined = net.concat([*(x[i, k] for k in range(j)), up], f"conv{i}_{j}/Concat")
            x[i, j] = block(joined, i, f"conv{i}_{j}")
    return net.model([net.conv(x[0, 4], 1, 1, "final")])
