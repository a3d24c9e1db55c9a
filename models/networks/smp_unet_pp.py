"""UnetPlusPlus of segmentation-models-pytorch with a ResNet-34 encoder: a node joins all that lies on its level."""

from __future__ import annotations

from typing import Any

from models.blocks.resnet import resnet34
from models.net import Config, Net


def build(config: Config) -> Any:
    """512x512 pixels; small: 64x64."""
    size = config.pixels(512, 64, 32)
    net = Net("smp_unet_pp", config, thin=True)
    *skips, deepest = resnet34(net, net.input("images", 3, size, size))
    skips = skips[::-1]  # from 1/16 to 1/2

    def node(x: str, others: list[str], filters: int, name: str) -> str:
        x = net.upsample(x, 2, f"decoder/{name}")
        if others:
            x = net.concat([x, *others], f"decoder/{name}/Concat")
        for i in (1, 2):
            scope = f"decoder/{name}/conv{i}/conv{i}"
            x = net.act(net.conv(x, filters, 3, f"{scope}.0"), "Relu", f"{scope}.2")
        return x

    # x[depth, layer]: the node on the level of skip `layer`, `layer - depth` joins away from the encoder
    x: dict[tuple[int, int], str] = {}
    for distance in range(4):
        for depth in range(4 - distance):
            layer = depth + distance
            below = x[depth, layer - 1] if distance else (skips[depth - 1] if depth else deepest)
            others = [*(x[i, layer] for i in range(depth + 1, layer + 1)), skips[layer]]
            filters = (256, 128, 64, 32)[layer] if depth == 0 else (256, 128, 64, 64)[layer]
            x[depth, layer] = node(below, others, filters, f"x_{depth}_{layer}")
    y = node(x[0, 3], [], 16, "x_0_4")
    return net.model([net.conv(y, 4, 3, "segmentation_head/segmentation_head.0")])
