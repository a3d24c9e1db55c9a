"""SqueezeNet 1.1 of torchvision: fire modules, whose 1x1 and 3x3 halves the next squeeze joins."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net

# position in torchvision's `features` -> filters of squeeze and of each expand; the positions between are MaxPools
FIRES = {
    3: (16, 64),
    4: (16, 64),
    6: (32, 128),
    7: (32, 128),
    9: (48, 192),
    10: (48, 192),
    11: (64, 256),
    12: (64, 256),
}


def build(config: Config) -> Any:
    """224x224 pixels, 1000 classes; small: 64x64."""
    size = config.pixels(224, 64, 32)
    net = Net("squeezenet1_1", config, thin=True)

    def fire(x: str, squeeze: int, expand: int, name: str) -> str:
        x = net.act(net.conv(x, squeeze, 1, f"{name}/squeeze"), "Relu", f"{name}/squeeze_activation")
        one, three = (net.conv(x, expand, k, f"{name}/expand{k}x{k}") for k in (1, 3))
        halves = [net.act(y, "Relu", f"{name}/expand{k}x{k}_activation") for y, k in ((one, 1), (three, 3))]
        return net.concat(halves, f"{name}/Concat")

    x = net.conv(net.input("images", 3, size, size), 64, 3, "features/features.0", stride=2, pad=0)
    x = net.act(x, "Relu", "features/features.1")
    for i in range(2, 13):
        name = f"features/features.{i}"
        x = fire(x, *FIRES[i], name) if i in FIRES else net.max_pool(x, name, 3, 2, ceil_mode=True)
    x = net.act(net.conv(x, 1000, 1, "classifier/classifier.1"), "Relu", "classifier/classifier.2")
    x = net.add("GlobalAveragePool", [x], "/classifier/classifier.3/GlobalAveragePool")
    return net.model([net.add("Flatten", [x], "/Flatten", axis=1)])
