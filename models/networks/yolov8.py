"""YOLOv8: C2f backbone, SPPF, path aggregation neck, decoupled head with DFL, as Ultralytics exports it."""

from __future__ import annotations

from typing import Any

from models.blocks.yolo import DEVIATION, Scale, c2f, conv, detect, sppf
from models.net import Config, Net

SCALES = {"n": Scale(1 / 3, 0.25, 1024), "s": Scale(1 / 3, 0.5, 1024), "m": Scale(2 / 3, 0.75, 768)}


def build(config: Config, scale: str) -> Any:
    """640x640 pixels, 80 classes; small: 64x64 and an eighth of the full width."""
    size, s = config.pixels(640, 64, 32), SCALES[scale].of(config)
    net = Net(f"yolov8{scale}", config, deviation=DEVIATION)
    layers = [net.input("images", 3, size, size)]  # layers[i + 1] is the output of Ultralytics' model.i

    def add(y: str) -> str:
        layers.append(y)
        return y

    def down(filters: int) -> str:
        return add(conv(net, layers[-1], s.channels(filters), 3, f"model.{len(layers) - 1}", stride=2))

    def block(filters: int, repeats: int, shortcut: bool) -> str:
        name = f"model.{len(layers) - 1}"
        return add(c2f(net, layers[-1], s.channels(filters), name, s.repeats(repeats), shortcut))

    def join(other: str) -> str:
        return add(net.concat([layers[-1], other], f"model.{len(layers) - 1}/Concat"))

    down(64)
    down(128)
    block(128, 3, True)
    down(256)
    p3 = block(256, 6, True)
    down(512)
    p4 = block(512, 6, True)
    down(1024)
    block(1024, 3, True)
    p5 = add(sppf(net, layers[-1], "model.9"))
    add(net.upsample(p5, 2, "model.10"))
    join(p4)
    n4 = block(512, 3, False)
    add(net.upsample(n4, 2, "model.13"))
    join(p3)
    out3 = block(256, 3, False)
    down(256)
    join(n4)
    out4 = block(512, 3, False)
    down(512)
    join(p5)
    out5 = block(1024, 3, False)
    return net.model([detect(net, [out3, out4, out5], "model.22", size, light=False)])
