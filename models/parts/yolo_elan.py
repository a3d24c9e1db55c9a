"""A YOLOv7-style ELAN block and SPPCSPC: 1x1 convolutions over four to five joined tensors, all with SiLU."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """128 channels at 160x160, then 1/2; small: 16 channels at 20x20."""
    width, size = (16, 20) if config.small else (128, 160)
    net = Net("yolo_elan", config)

    def conv(x: str, filters: int, kernel: int, name: str, stride: int = 1) -> str:
        return net.conv(x, filters, kernel, name, stride=stride, bn=True, act="SiLU")

    def elan(x: str, name: str) -> str:
        half = net.channels[x] // 2
        parts = [conv(x, half, 1, f"{name}.cv1"), conv(x, half, 1, f"{name}.cv2")]
        for i in range(2):
            inner = conv(parts[-1], half, 3, f"{name}.cv{3 + 2 * i}")
            parts.append(conv(inner, half, 3, f"{name}.cv{4 + 2 * i}"))
        return conv(net.concat(parts[::-1], f"{name}/Concat"), 2 * net.channels[x], 1, f"{name}.out")

    def sppcspc(x: str, name: str) -> str:
        c = net.channels[x] // 2
        y = conv(conv(conv(x, c, 1, f"{name}.cv1"), c, 3, f"{name}.cv3"), c, 1, f"{name}.cv4")
        pools = [net.max_pool(y, f"{name}/m.{k}", k, 1, k // 2) for k in (5, 9, 13)]
        y = conv(conv(net.concat([y, *pools], f"{name}/Concat"), c, 1, f"{name}.cv5"), c, 3, f"{name}.cv6")
        return conv(net.concat([y, conv(x, c, 1, f"{name}.cv2")], f"{name}/Concat_1"), c, 1, f"{name}.cv7")

    x = elan(net.input("x", width, size, size), "elan")
    down = conv(net.max_pool(x, "mp"), width, 1, "mp.cv1")
    other = conv(conv(x, width, 1, "mp.cv2"), width, 3, "mp.cv3", stride=2)
    x = elan(net.concat([other, down], "mp/Concat"), "elan2")
    return net.model([sppcspc(x, "spp")])
