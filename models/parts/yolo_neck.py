"""The neck of a YOLO detector: path aggregation over three scales with C2f blocks and SiLU."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


def build(config: Config) -> Any:
    """P3, P4, P5 of a 640x640 image with 128 to 512 channels; small: 16x16 pixels and 16 to 64 channels."""
    width, size = (16, 16) if config.small else (128, 80)
    net = Net("yolo_neck", config)

    def conv(x: str, filters: int, kernel: int, name: str, stride: int = 1) -> str:
        return net.conv(x, filters, kernel, name, stride=stride, bn=True, act="SiLU")

    def c2f(x: str, filters: int, name: str, blocks: int = 2) -> str:
        parts = net.split(conv(x, filters, 1, f"{name}.cv1"), [filters // 2] * 2, name)
        for i in range(blocks):
            inner = conv(parts[-1], filters // 2, 3, f"{name}.m.{i}.cv1")
            parts.append(conv(inner, filters // 2, 3, f"{name}.m.{i}.cv2"))
        return conv(net.concat(parts, f"{name}/Concat"), filters, 1, f"{name}.cv2")

    p3, p4, p5 = (net.input(f"p{3 + i}", width * 2**i, size >> i, size >> i) for i in range(3))
    n4 = c2f(net.concat([net.upsample(p5, 2, "up5"), p4], "join4/Concat"), width * 2, "top_down4")
    n3 = c2f(net.concat([net.upsample(n4, 2, "up4"), p3], "join3/Concat"), width, "top_down3")
    d4 = net.concat([conv(n3, width, 3, "down3", stride=2), n4], "join_down4/Concat")
    n4 = c2f(d4, width * 2, "bottom_up4")
    d5 = net.concat([conv(n4, width * 2, 3, "down4", stride=2), p5], "join_down5/Concat")
    return net.model([n3, n4, c2f(d5, width * 4, "bottom_up5")])
