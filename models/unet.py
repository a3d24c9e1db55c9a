"""UNet for segmentation: four levels down, four up, each level of the decoder joins a skip connection by Concat."""

from __future__ import annotations

from typing import Any

from models.net import Net


def build(dtype: str = "float32", small: bool = False) -> Any:
    """512x512 pixels and 64 to 512 channels; small: 64x64 and 8 to 64."""
    width, size = (8, 64) if small else (64, 512)
    net = Net("unet", dtype)

    def double(x: str, filters: int, name: str) -> str:
        x = net.conv(x, filters, 3, f"{name}.conv.0", bn=True, act="Relu")
        return net.conv(x, filters, 3, f"{name}.conv.3", bn=True, act="Relu")

    x = double(net.input("image", 3, size, size), width, "inc")
    skips = []
    for level in range(1, 5):
        skips.append(x)
        x = double(net.max_pool(x, f"down{level}"), width * min(8, 2**level), f"down{level}")
    for level, skip in enumerate(reversed(skips), start=1):
        joined = net.concat([skip, net.upsample(x, 2, f"up{level}")], f"up{level}/Concat")
        x = double(joined, net.channels[skip] // (1 if level == 4 else 2), f"up{level}")
    return net.model([net.conv(x, 2, 1, "outc")])
