"""DLA-34 of timm: residual blocks in trees, whose roots join the outputs of a tree by a 1x1 convolution."""

from __future__ import annotations

from typing import Any

from models.blocks.resnet import shortcut
from models.net import Config, Net

LEVELS = ((64, 1, False), (128, 2, True), (256, 2, True), (512, 1, True))  # channels, depth, input joins at the root


def build(config: Config) -> Any:
    """224x224 pixels, 1000 classes; small: 64x64."""
    size = config.pixels(224, 64, 32)
    net = Net("dla34", config, thin=True)

    def block(x: str, residual: str, filters: int, name: str, stride: int) -> str:
        y = net.act(net.conv(x, filters, 3, f"{name}/conv1", stride=stride), "Relu", f"{name}/relu")
        return shortcut(net, net.conv(y, filters, 3, f"{name}/conv2"), residual, name, "relu_1")

    def tree(x: str, filters: int, depth: int, name: str, stride: int, joined: list[str], with_input: bool) -> str:
        bottom = net.max_pool(x, f"{name}/downsample") if stride > 1 else x
        joined = [*joined, bottom] if with_input else joined
        if depth > 1:
            first = tree(x, filters, depth - 1, f"{name}/tree1", stride, [], False)
            return tree(first, filters, depth - 1, f"{name}/tree2", 1, [*joined, first], False)
        residual = net.conv(bottom, filters, 1, f"{name}/project/project.0") if stride > 1 else bottom
        first = block(x, residual, filters, f"{name}/tree1", stride)
        second = block(first, first, filters, f"{name}/tree2", 1)
        root = f"{name}/root"
        y = net.conv(net.concat([second, first, *joined], f"{root}/Concat"), filters, 1, f"{root}/conv")
        return net.act(y, "Relu", f"{root}/relu")

    x = net.input("images", 3, size, size)
    for name, filters, kernel, stride in (("base_layer", 16, 7, 1), ("level0", 16, 3, 1), ("level1", 32, 3, 2)):
        x = net.act(net.conv(x, filters, kernel, f"{name}/{name}.0", stride=stride), "Relu", f"{name}/{name}.2")
    for level, (filters, depth, with_input) in enumerate(LEVELS, start=2):
        x = tree(x, filters, depth, f"level{level}", 2, [], with_input)
    x = net.conv(net.add("GlobalAveragePool", [x], "/global_pool/pool/GlobalAveragePool"), 1000, 1, "fc")
    return net.model([net.add("Flatten", [x], "/flatten/Flatten", axis=1)])
