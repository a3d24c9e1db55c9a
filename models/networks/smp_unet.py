"""Unet of segmentation-models-pytorch with a ResNet-34 encoder: enlarged features join skips, then two convolutions."""

from __future__ import annotations

from typing import Any

from models.blocks.resnet import resnet34
from models.net import Config, Net

DECODER = (256, 128, 64, 32, 16)


def build(config: Config) -> Any:
    """512x512 pixels; small: 64x64."""
    size = config.pixels(512, 64, 32)
    net = Net("smp_unet", config, thin=True)
    *skips, x = resnet34(net, net.input("images", 3, size, size))
    for level, filters in enumerate(DECODER):
        name, pixels = f"decoder/blocks.{level}", size >> (4 - level)
        x = net.resize(x, pixels, pixels, name, "nearest")
        if skips:
            x = net.concat([x, skips.pop()], f"{name}/Concat_1")
        for i in (1, 2):
            x = net.act(net.conv(x, filters, 3, f"{name}/conv{i}/conv{i}.0"), "Relu", f"{name}/conv{i}/conv{i}.2")
    return net.model([net.conv(x, 4, 3, "segmentation_head/segmentation_head.0")])
