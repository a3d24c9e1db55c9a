"""RAFT's update block: a motion encoder and a convolutional GRU whose gates read joined tensors (1x5 and 5x1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.net import Config, Net


def build(config: Config) -> Any:
    """128 hidden channels at 55x128, an eighth of 440x1024 pixels; small: 16 at 11x25."""
    width, height = 16 if config.small else 128, config.pixels(55, 11, 1)
    columns = height * 128 // 55
    net = Net("raft_update", config)
    h, context = net.input("hidden", width, height, columns), net.input("context", width, height, columns)
    corr, flow = net.input("corr", 36 if config.small else 324, height, columns), net.input("flow", 2, height, columns)

    cor = net.conv(net.conv(corr, 2 * width, 1, "encoder.convc1", act="Relu"), width, 3, "encoder.convc2", act="Relu")
    flo = net.conv(net.conv(flow, width, 7, "encoder.convf1", act="Relu"), width // 2, 3, "encoder.convf2", act="Relu")
    motion = net.conv(net.concat([cor, flo], "encoder/Concat"), width - 2, 3, "encoder.conv", act="Relu")
    x = net.concat([context, net.concat([motion, flow], "encoder/Concat_1")], "Concat")
    one = net.weight("one", np.ones(1))
    for i, kernel in enumerate(((1, 5), (5, 1)), start=1):
        hx = net.concat([h, x], f"gru/Concat{i}")
        z = net.conv(hx, width, kernel, f"gru.convz{i}", act="Sigmoid")
        r = net.conv(hx, width, kernel, f"gru.convr{i}", act="Sigmoid")
        rh = net.add("Mul", [r, h], f"/gru/reset{i}")
        q = net.conv(net.concat([rh, x], f"gru/Concat{i}_q"), width, kernel, f"gru.convq{i}", act="Tanh")
        keep = net.add("Mul", [net.add("Sub", [one, z], f"/gru/Sub{i}", width), h], f"/gru/keep{i}")
        h = net.add("Add", [keep, net.add("Mul", [z, q], f"/gru/new{i}")], f"/gru/Add{i}")
    return net.model([h, net.conv(net.conv(h, 2 * width, 3, "flow.conv1", act="Relu"), 2, 3, "flow.conv2")])
