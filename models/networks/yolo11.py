"""YOLO11: C3k2 backbone, SPPF, C2PSA attention, path aggregation neck, depthwise class branches, DFL."""

from __future__ import annotations

from typing import Any

from models.blocks.yolo import DEVIATION, Scale, c2psa, c3k2, conv, detect, sppf
from models.net import Config, Net

SCALES = {"s": Scale(0.5, 0.5, 1024)}


def build(config: Config, scale: str) -> Any:
    """640x640 pixels, 80 classes; small: 64x64 and an eighth of the full width."""
    size, s = config.pixels(640, 64, 32), SCALES[scale].of(config)
    net = Net(f"yolo11{scale}", config, deviation=DEVIATION)
    layers = [net.input("images", 3, size, size)]  # layers[i + 1] is the output of Ultralytics' model.i

    def add(y: str) -> str:
        layers.append(y)
        return y

    def down(filters: int) -> str:
        return add(conv(net, layers[-1], s.channels(filters), 3, f"model.{len(layers) - 1}", stride=2))

    def block(filters: int, deep: bool, expansion: float = 0.5) -> str:
        name = f"model.{len(layers) - 1}"
        return add(c3k2(net, layers[-1], s.channels(filters), name, s.repeats(2), deep, expansion))

    def join(other: str) -> str:
        return add(net.concat([layers[-1], other], f"model.{len(layers) - 1}/Concat"))

    down(64)
    down(128)
    block(256, False, 0.25)
    down(256)
    p3 = block(512, False, 0.25)
    down(512)
    p4 = block(512, True)
    down(1024)
    block(1024, True)
    add(sppf(net, layers[-1], "model.9"))
    p5 = add(c2psa(net, layers[-1], "model.10", s.repeats(2), size >> 5))
    add(net.upsample(p5, 2, "model.11"))
    join(p4)
    n4 = block(512, False)
    add(net.upsample(n4, 2, "model.14"))
    join(p3)
    out3 = block(256, False)
    down(256)
    join(n4)
    out4 = block(512, False)
    down(512)
    join(p5)
    out5 = block(1024, True)
    return net.model([detect(net, [out3, out4, out5], "model.23", size, light=True)])
