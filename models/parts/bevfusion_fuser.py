"""BEVFusion's ConvFuser: camera and lidar features of the bird's-eye view joined by one 3x3 convolution."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """80 + 256 -> 256 channels on 180x180 cells, then the decoder's first convolution; small: 1/4 of both."""
    scale, size = (4, 45) if config.small else (1, 180)
    net = Net("bevfusion_fuser", config)
    camera = net.input("camera", 80 // scale, size, size)
    lidar = net.input("lidar", 256 // scale, size, size)
    x = net.concat([camera, lidar], "fuser/Concat")
    x = net.conv(x, 256 // scale, 3, "fuser", bn=True, act="Relu")
    return net.model([net.conv(x, 128 // scale, 3, "decoder.blocks.0", bn=True, act="Relu")])
