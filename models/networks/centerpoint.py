"""CenterPoint over pillars: SECOND with three stages, its neck, a shared convolution and the heads of six tasks."""

from __future__ import annotations

from typing import Any

from models.blocks.second import backbone, neck
from models.net import Config, Net

TASKS = (1, 2, 2, 1, 2, 2)  # classes of each task, as on nuScenes
HEADS = {"reg": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2}


def build(config: Config) -> Any:
    """A grid of 512x512 pillars with 64 channels; small: 64x64."""
    size = config.pixels(512, 64, 8)
    net = Net("centerpoint", config, thin=True)
    x = net.input("pillars", net.filters(64), size, size)
    stages = backbone(net, x, (3, 5, 5), (2, 2, 2), (64, 128, 256), "backbone")
    x = neck(net, stages, (1 / 2, 1, 2), 128, "neck")
    x = net.act(net.conv(x, 64, 3, "head/shared_conv/conv"), "Relu", "head/shared_conv/activate")
    outputs = []
    for task, classes in enumerate(TASKS):
        for head, channels in (HEADS | {"heatmap": classes}).items():
            scope = f"head/task_heads.{task}/{head}/{head}"
            y = net.act(net.conv(x, 64, 3, f"{scope}.0/conv"), "Relu", f"{scope}.0/activate")
            outputs.append(net.conv(y, channels, 3, f"{scope}.1"))
    return net.model(outputs)
