"""BEVFusion's camera neck (LSS-FPN): coarse features, enlarged bilinearly, join the next finer ones of six cameras."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net

CAMERAS, CHANNELS, FILTERS = 6, (192, 384, 768), 256  # channels of Swin-T at 1/8, 1/16 and 1/32


def build(config: Config) -> Any:
    """Features of six images of 256x704 pixels; small: 64x176. --size gives the rows."""
    rows = config.pixels(256, 64, 64)
    columns = rows * 11 // 4
    net = Net("bevfusion_neck", config, thin=True, images=CAMERAS)
    sizes = [(rows >> level, columns >> level) for level in (3, 4, 5)]
    xs = [net.input(f"x{i}", net.filters(c), *size)
          for i, (c, size) in enumerate(zip(CHANNELS, sizes, strict=True))]  # fmt: skip
    for level in (1, 0):
        up = net.resize(xs[level + 1], *sizes[level], f"up{level}")
        y = net.concat([xs[level], up], f"Concat{'' if level else '_1'}")
        for kind, kernel in (("lateral_convs", 1), ("fpn_convs", 3)):
            scope = f"{kind}.{level}"
            y = net.act(net.conv(y, FILTERS, kernel, f"{scope}/conv"), "Relu", f"{scope}/activate")
        xs[level] = y
    return net.model(xs[:2])
