"""RAFT's update block: a motion encoder and a convolutional GRU whose gates read joined tensors (1x5 and 5x1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.net import Config, Net


def build(config: Config) -> Any:
    """128 hidden channels at 55x128, an eighth of 440x1024 pixels; small: 16 at 11x25."""
    rows = config.pixels(55, 11, 1)
    columns = rows * 128 // 55
    net = Net("raft_update", config, thin=True)
    h, context = (net.input(name, net.filters(128), rows, columns) for name in ("hidden", "context"))
    corr, flow = net.input("corr", net.filters(324), rows, columns), net.input("flow", 2, rows, columns)

    def relu(x: str, filters: int, kernel: int, name: str) -> str:
        return net.conv(x, filters, kernel, name, act="Relu")

    cor = relu(relu(corr, 256, 1, "encoder/convc1"), 192, 3, "encoder/convc2")
    flo = relu(relu(flow, 128, 7, "encoder/convf1"), 64, 3, "encoder/convf2")
    motion = relu(net.concat([cor, flo], "encoder/Concat"), 126, 3, "encoder/conv")
    x = net.concat([context, motion, flow], "Concat")
    one = net.weight("one", np.ones(()))
    for i, kernel in enumerate(((1, 5), (5, 1)), start=1):
        hx = net.concat([h, x], f"gru/Concat{i}")
        z = net.conv(hx, 128, kernel, f"gru/convz{i}", act="Sigmoid")
        r = net.conv(hx, 128, kernel, f"gru/convr{i}", act="Sigmoid")
        rh = net.add("Mul", [r, h], f"/gru/reset{i}")
        q = net.conv(net.concat([rh, x], f"gru/Concat{i}_q"), 128, kernel, f"gru/convq{i}", act="Tanh")
        keep = net.add("Mul", [net.add("Sub", [one, z], f"/gru/Sub{i}", net.channels[z]), h], f"/gru/keep{i}")
        h = net.add("Add", [keep, net.add("Mul", [z, q], f"/gru/new{i}")], f"/gru/Add{i}")
    delta = net.conv(relu(h, 256, 3, "flow_head/conv1"), 2, 3, "flow_head/conv2")
    mask = net.conv(relu(h, 256, 3, "mask/mask.0"), 576, 1, "mask/mask.2")
    return net.model([h, net.add("Mul", [mask, net.weight("quarter", np.array(0.25))], "/Mul"), delta])
