"""DeepLabV3Plus of segmentation-models-pytorch: ResNet-34 at output stride 16, separable ASPP, a joining decoder."""

from __future__ import annotations

from typing import Any

from models.blocks.resnet import resnet34
from models.net import Config, Net

RATES = (12, 24, 36)


def build(config: Config) -> Any:
    """512x512 pixels; small: 64x64."""
    size = config.pixels(512, 64, 16)
    net = Net("deeplabv3p", config, thin=True)
    features = resnet34(net, net.input("images", 3, size, size), output_stride=16)
    low, high = features[1], features[4]

    def separable(x: str, name: str, relu: str, rate: int = 1) -> str:
        x = net.depthwise(x, 3, f"{name}.0", dilation=rate, bias=False)
        return net.act(net.conv(x, 256, 1, f"{name}.1"), "Relu", relu)

    aspp = "decoder/aspp/aspp.0"
    branches = [net.act(net.conv(high, 256, 1, f"{aspp}/convs.0/convs.0.0"), "Relu", f"{aspp}/convs.0/convs.0.2")]
    for i, rate in enumerate(RATES, start=1):
        scope = f"{aspp}/convs.{i}"
        branches.append(separable(high, f"{scope}/convs.{i}.0/convs.{i}.0", f"{scope}/convs.{i}.2", rate))
    pooled = net.add("GlobalAveragePool", [high], f"/{aspp}/convs.4/convs.4.0/GlobalAveragePool")
    pooled = net.act(net.conv(pooled, 256, 1, f"{aspp}/convs.4/convs.4.1"), "Relu", f"{aspp}/convs.4/convs.4.3")
    branches.append(net.resize(pooled, size >> 4, size >> 4, f"{aspp}/convs.4"))
    x = net.conv(net.concat(branches, f"{aspp}/Concat"), 256, 1, f"{aspp}/project/project.0")
    x = separable(net.act(x, "Relu", f"{aspp}/project/project.2"), "decoder/aspp/aspp.1/aspp.1", "decoder/aspp/aspp.3")

    x = net.upsample(x, 4, "decoder/up", "linear", align_corners=True)
    skip = net.act(net.conv(low, 48, 1, "decoder/block1/block1.0"), "Relu", "decoder/block1/block1.2")
    x = net.concat([x, skip], "decoder/Concat")
    x = separable(x, "decoder/block2/block2.0/block2.0", "decoder/block2/block2.2")
    x = net.conv(x, 4, 1, "segmentation_head/segmentation_head.0")
    return net.model([net.upsample(x, 4, "segmentation_head/segmentation_head.1", "linear", align_corners=True)])
