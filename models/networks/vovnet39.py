"""VoVNet-39 of timm: one-shot aggregation, where a 1x1 convolution joins the input and all five layers of a block."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net

STAGES = ((128, 256, 1), (160, 512, 1), (192, 768, 2), (224, 1024, 2))  # channels inside and out, blocks


def build(config: Config) -> Any:
    """224x224 pixels, 1000 classes; small: 64x64."""
    size = config.pixels(224, 64, 32)
    net = Net("vovnet39", config, thin=True)

    def conv(x: str, filters: int, kernel: int, name: str, stride: int = 1) -> str:
        return net.act(net.conv(x, filters, kernel, f"{name}/conv", stride=stride), "Relu", f"{name}/bn/act")

    x = net.input("images", 3, size, size)
    for i, (filters, stride) in enumerate(((64, 2), (64, 1), (128, 2))):
        x = conv(x, filters, 3, f"stem/stem.{i}", stride)
    for stage, (inner, outer, blocks) in enumerate(STAGES):
        if stage:
            x = net.max_pool(x, f"stages/stages.{stage}/pool", 3, 2, ceil_mode=True)
        for block in range(blocks):
            name, parts = f"stages/stages.{stage}/blocks/blocks.{block}", [x]
            for i in range(5):
                parts.append(conv(parts[-1], inner, 3, f"{name}/conv_mid/conv_mid.{i}"))
            x = conv(net.concat(parts, f"{name}/conv_mid/Concat"), outer, 1, f"{name}/conv_concat")
    pooled = net.add("GlobalAveragePool", [x], "/head/global_pool/pool/GlobalAveragePool")
    return net.model([net.linear(pooled, 1000, "head/fc", "head/global_pool/flatten/Flatten")])
