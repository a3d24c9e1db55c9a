"""ResNet's blocks and the ResNet-34 encoder of segmentation networks."""

from __future__ import annotations

from models.net import Net

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and channels of ResNet-34


def shortcut(net: Net, y: str, x: str, name: str, relu: str) -> str:
    """Add and ReLU at the end of a residual block; relu: what the exporter calls the activation."""
    return net.act(net.add("Add", [y, x], f"/{name}/Add"), "Relu", f"{name}/{relu}")


def basic(net: Net, x: str, filters: int, name: str, stride: int = 1, dilation: int = 1, project: bool = False) -> str:
    """Two 3x3 convolutions and a shortcut, which a 1x1 convolution projects where the shape changes."""
    y = net.conv(x, filters, 3, f"{name}/conv1", stride=stride, dilation=dilation)
    y = net.conv(net.act(y, "Relu", f"{name}/relu"), filters, 3, f"{name}/conv2", dilation=dilation)
    if project:
        x = net.conv(x, filters, 1, f"{name}/downsample/downsample.0", stride=stride, dilation=dilation)
    return shortcut(net, y, x, name, "relu_1")


def bottleneck(net: Net, x: str, filters: int, name: str, project: bool = False) -> str:
    """1x1, 3x3 and 1x1 convolutions, the last with four times the filters, and a shortcut."""
    y = net.act(net.conv(x, filters, 1, f"{name}/conv1"), "Relu", f"{name}/relu")
    y = net.act(net.conv(y, filters, 3, f"{name}/conv2"), "Relu", f"{name}/relu_1")
    y = net.conv(y, 4 * filters, 1, f"{name}/conv3")
    if project:
        x = net.conv(x, 4 * filters, 1, f"{name}/downsample/downsample.0")
    return shortcut(net, y, x, name, "relu_2")


def resnet34(net: Net, image: str, output_stride: int = 32) -> list[str]:
    """The encoder: features at 1/2, 1/4, 1/8, 1/16 and 1/32; at output_stride 16 the last stage dilates instead."""
    x = net.act(net.conv(image, 64, 7, "encoder/conv1", stride=2), "Relu", "encoder/relu")
    features = [x]
    x = net.max_pool(x, "encoder/maxpool", 3, 2, 1)
    for stage, (blocks, filters) in enumerate(STAGES):
        dilated = 4 << stage > output_stride
        for block in range(blocks):
            first = block == 0 and stage > 0
            x = basic(
                net, x, filters, f"encoder/layer{stage + 1}/layer{stage + 1}.{block}",
                2 if first and not dilated else 1, 2 if dilated else 1, project=first,
            )  # fmt: skip
        features.append(x)
    return features
