"""UNet for segmentation: four levels down, four up, each level of the decoder joins a skip connection by Concat."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """512x512 pixels and 64 to 512 channels; small: 64x64."""
    size = config.pixels(512, 64, 16)
    net = Net("unet", config, thin=True)

    def double(x: str, filters: int, name: str) -> str:
        return net.conv(net.conv(x, filters, 3, f"{name}/conv.0", act="Relu"), filters, 3, f"{name}/conv.3", act="Relu")

    widths = [64, 128, 256, 512, 512]
    x = double(net.input("image", 3, size, size), widths[0], "inc")
    skips = []
    for level in range(1, 5):
        skips.append(x)
        x = double(net.max_pool(x, f"down{level}"), widths[level], f"down{level}")
    for level, skip in enumerate(reversed(skips), start=1):
        joined = net.concat([skip, net.upsample(x, 2, f"up{level}")], f"up{level}/Concat")
        x = double(joined, widths[max(0, 3 - level)], f"up{level}")
    return net.model([net.conv(x, 2, 1, "outc")])
