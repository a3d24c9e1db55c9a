"""DeepLabV3+'s head: five dilated branches joined by a 1x1 convolution, then a decoder that joins finer features."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.net import Config, Net


def build(config: Config) -> Any:
    """2048 + 256 channels in, 256 inside, 33x33 and 129x129 pixels; small: 1/16 of the channels, 9x9 and 33x33."""
    width, high, low = (16, 9, 33) if config.small else (256, 33, 129)
    net = Net("deeplabv3p_head", config)
    features, skip = net.input("features", 8 * width, high, high), net.input("low_level", width, low, low)
    branches = [net.conv(features, width, 1, "aspp.convs.0", bn=True, act="Relu")]
    for i, dilation in enumerate((6, 12, 18), start=1):
        branches.append(net.conv(features, width, 3, f"aspp.convs.{i}", bn=True, act="Relu", dilation=dilation))
    pooled = net.add("GlobalAveragePool", [features], "/aspp.pool/GlobalAveragePool")
    pooled = net.conv(pooled, width, 1, "aspp.pool", bn=True, act="Relu")
    branches.append(net.resize(pooled, high, high, "aspp.pool.up"))
    x = net.conv(net.concat(branches, "aspp/Concat"), width, 1, "aspp.project", bn=True, act="Relu")
    x = net.add("Dropout", [x, net.weight("ratio", np.float32(0.1), "float32")], "/aspp/Dropout")
    skip = net.conv(skip, 4 if config.small else 48, 1, "decoder.project", bn=True, act="Relu")
    joined = net.concat([skip, net.resize(x, low, low, "decoder.up")], "decoder/Concat")
    x = net.conv(joined, width, 3, "decoder.0", bn=True, act="Relu")
    return net.model([net.conv(net.conv(x, width, 3, "decoder.1", bn=True, act="Relu"), 21, 1, "classifier")])
