"""GoogLeNet of torchvision: nine inception blocks, whose next block begins with 1x1 convolutions on their Concat."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net

# filters of branch1, branch2.0, branch2.1, branch3.0, branch3.1, branch4.1
BLOCKS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
POOLS = {"3b": ("maxpool3", 3), "4e": ("maxpool4", 2)}  # behind a block: name and window


def build(config: Config) -> Any:
    """224x224 pixels, 1000 classes; small: 64x64."""
    size = config.pixels(224, 64, 32)
    net = Net("googlenet", config, thin=True)

    def conv(x: str, filters: int, kernel: int, name: str, stride: int = 1) -> str:
        return net.act(net.conv(x, filters, kernel, f"{name}/conv", stride=stride), "Relu", name)

    def inception(x: str, block: str) -> str:
        one, two, two_out, three, three_out, pooled = BLOCKS[block]
        name = f"inception{block}"
        a = conv(x, one, 1, f"{name}/branch1")
        b = conv(conv(x, two, 1, f"{name}/branch2/branch2.0"), two_out, 3, f"{name}/branch2/branch2.1")
        c = conv(conv(x, three, 1, f"{name}/branch3/branch3.0"), three_out, 3, f"{name}/branch3/branch3.1")
        d = net.max_pool(x, f"{name}/branch4/branch4.0", 3, 1, 1, ceil_mode=True)
        return net.concat([a, b, c, conv(d, pooled, 1, f"{name}/branch4/branch4.1")], f"{name}/Concat")

    x = conv(net.input("images", 3, size, size), 64, 7, "conv1", stride=2)
    x = net.max_pool(x, "maxpool1", 3, 2, ceil_mode=True)
    x = conv(conv(x, 64, 1, "conv2"), 192, 3, "conv3")
    x = net.max_pool(x, "maxpool2", 3, 2, ceil_mode=True)
    for block in BLOCKS:
        x = inception(x, block)
        if block in POOLS:
            name, kernel = POOLS[block]
            x = net.max_pool(x, name, kernel, 2, ceil_mode=True)
    return net.model([net.linear(net.add("GlobalAveragePool", [x], "/avgpool/GlobalAveragePool"), 1000, "fc")])
