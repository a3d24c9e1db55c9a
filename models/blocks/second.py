"""SECOND's backbone over bird's-eye-view features, and the neck that brings its stages to one resolution."""

from __future__ import annotations

from collections.abc import Sequence

from models.net import Net


def backbone(net: Net, x: str, layers: Sequence[int], strides: Sequence[int], filters: Sequence[int],
             name: str) -> list[str]:  # fmt: skip
    """One output of each stage: a convolution with the stage's stride, then `layers` more."""
    outputs = []
    for stage, (count, stride, width) in enumerate(zip(layers, strides, filters, strict=True)):
        for i in range(count + 1):
            scope = f"{name}/blocks.{stage}/blocks.{stage}"
            x = net.conv(x, width, 3, f"{scope}.{3 * i}", stride=1 if i else stride)
            x = net.act(x, "Relu", f"{scope}.{3 * i + 2}")
        outputs.append(x)
    return outputs


def neck(net: Net, xs: Sequence[str], strides: Sequence[float], filters: int, name: str) -> str:
    """Bring each stage to one resolution and join them.

    strides: 2 enlarges by a transposed convolution, 1 keeps the size by a 1x1 convolution, 1/2 halves it. The exporter
    folds a BatchNormalization into a Conv, but not into a ConvTranspose.
    """
    ups = []
    for i, (x, stride) in enumerate(zip(xs, strides, strict=True)):
        scope = f"{name}/deblocks.{i}/deblocks.{i}"
        if stride > 1:
            y = net.batch_norm(net.conv_transpose(x, filters, int(stride), f"{scope}.0"), f"{scope}.1")
        else:
            kernel = round(1 / stride)
            y = net.conv(x, filters, kernel, f"{scope}.0", stride=kernel, pad=0)
        ups.append(net.act(y, "Relu", f"{scope}.2"))
    return net.concat(ups, f"{name}/Concat")
