"""PIDNet's PAPPM: its joined branches pass a BatchNormalization before the grouped convolution, so nothing may fuse."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """1024 channels at 16x32 into 96 a branch; small: 1/16 of the channels, the same pixels."""
    channels, width = (64, 8) if config.small else (1024, 96)
    net = Net("pidnet", config)
    x = net.input("x", channels, 16, 32)

    def process(y: str, name: str, filters: int, kernel: int, group: int = 1) -> str:
        y = net.act(net.batch_norm(y, name), "Relu", name)
        return net.conv(y, filters, kernel, name, bias=False, group=group)

    base = process(x, "scale0", width, 1)
    scales = []
    for i, (kernel, stride) in enumerate(((5, 2), (9, 4), (17, 8)), start=1):
        y = net.avg_pool(x, f"scale{i}", kernel, stride, kernel // 2)
        y = net.upsample(process(y, f"scale{i}", width, 1), stride, f"scale{i}.up", "linear")
        scales.append(net.add("Add", [y, base], f"/scale{i}/Add"))
    processed = process(net.concat(scales, "scale_process/Concat"), "scale_process", 3 * width, 3, group=3)
    y = process(net.concat([base, processed], "compression/Concat"), "compression", channels // 4, 1)
    return net.model([net.add("Add", [y, process(x, "shortcut", channels // 4, 1)], "/Add")])
