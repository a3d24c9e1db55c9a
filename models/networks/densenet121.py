"""DenseNet-121 of timm: each layer joins all before it, then BatchNormalization, ReLU and a 1x1 convolution."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net

LAYERS, GROWTH = (6, 12, 24, 16), 32


def build(config: Config) -> Any:
    """224x224 pixels, 1000 classes; small: 64x64."""
    size = config.pixels(224, 64, 32)
    net = Net("densenet121", config, thin=True)

    def normed(x: str, name: str) -> str:
        return net.act(net.batch_norm(x, name, 1e-5), "Relu", f"{name}/act")

    x = net.conv(net.input("images", 3, size, size), 64, 7, "features/conv0", stride=2)
    x = net.max_pool(net.act(x, "Relu", "features/norm0/act"), "features/pool0", 3, 2, 1)
    channels = 64
    for block, layers in enumerate(LAYERS, start=1):
        name, parts = f"features/denseblock{block}", [x]
        for layer in range(1, layers + 1):
            scope = f"{name}/denselayer{layer}"
            y = normed(net.concat(parts, f"{scope}/Concat") if layer > 1 else x, f"{scope}/norm1")
            y = net.act(net.conv(y, 4 * GROWTH, 1, f"{scope}/conv1"), "Relu", f"{scope}/norm2/act")
            parts.append(net.conv(y, GROWTH, 3, f"{scope}/conv2", bias=False))
        x = net.concat(parts, f"{name}/Concat")
        channels += layers * GROWTH
        if block < len(LAYERS):
            name, channels = f"features/transition{block}", channels // 2
            x = net.conv(normed(x, f"{name}/norm"), channels, 1, f"{name}/conv", bias=False)
            x = net.avg_pool(x, f"{name}/pool", 2, 2)
    x = net.act(net.batch_norm(x, "features/norm5", 1e-5), "Relu", "features/norm5/act")
    pooled = net.add("GlobalAveragePool", [x], "/global_pool/pool/GlobalAveragePool")
    return net.model([net.linear(pooled, 1000, "classifier", "global_pool/flatten/Flatten")])
