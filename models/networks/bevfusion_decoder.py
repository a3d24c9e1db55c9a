"""BEVFusion in bird's-eye view: ConvFuser joins camera and lidar, then SECOND, its neck and the head's first layers."""

from __future__ import annotations

from typing import Any

from models.blocks.second import backbone, neck
from models.net import Config, Net

CLASSES = 10


def build(config: Config) -> Any:
    """180x180 cells; small: 24x24."""
    size = config.pixels(180, 24, 4)
    net = Net("bevfusion_decoder", config, thin=True)
    camera = net.input("camera", net.filters(80), size, size)
    lidar = net.input("lidar", net.filters(256), size, size)
    x = net.conv(net.concat([camera, lidar], "fuser/Concat"), 256, 3, "fuser/fuser.0")
    stages = backbone(net, net.act(x, "Relu", "fuser/fuser.2"), (5, 5), (1, 2), (128, 256), "decoder/backbone")
    x = net.conv(neck(net, stages, (1, 2), 256, "decoder/neck"), 128, 3, "head/shared_conv")
    heatmap = net.act(net.conv(x, 128, 3, "head/heatmap_head.0/conv"), "Relu", "head/heatmap_head.0/activate")
    return net.model([x, net.conv(heatmap, CLASSES, 3, "head/heatmap_head.1")])
