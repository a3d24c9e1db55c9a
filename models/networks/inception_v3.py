"""Inception v3 of torchvision: five kinds of blocks, with 1x7, 7x1, 1x3 and 3x1 filters and an average pool in most."""

from __future__ import annotations

from typing import Any

from models.net import Config, Net


class Blocks:
    """The blocks, as torchvision names them."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def conv(self, x: str, filters: int, kernel: int | tuple[int, int], name: str, stride: int = 1,
             pad: int | None = None) -> str:  # fmt: skip
        """Convolution, folded BatchNormalization, ReLU."""
        return self.net.act(self.net.conv(x, filters, kernel, f"{name}/conv", stride=stride, pad=pad), "Relu", name)

    def chain(self, x: str, name: str, *layers: tuple[int, int | tuple[int, int]]) -> str:
        """Convolutions in a row, (filters, kernel) each, numbered from 1."""
        for i, (filters, kernel) in enumerate(layers, start=1):
            x = self.conv(x, filters, kernel, f"{name}_{i}")
        return x

    def pooled(self, x: str, filters: int, name: str) -> str:
        """A 3x3 average and a 1x1 convolution."""
        return self.conv(self.net.avg_pool(x, name, 3, 1, 1), filters, 1, f"{name}/branch_pool")

    def a(self, x: str, name: str, pool_filters: int) -> str:
        """At 35x35."""
        return self.net.concat(
            [
                self.conv(x, 64, 1, f"{name}/branch1x1"),
                self.chain(x, f"{name}/branch5x5", (48, 1), (64, 5)),
                self.chain(x, f"{name}/branch3x3dbl", (64, 1), (96, 3), (96, 3)),
                self.pooled(x, pool_filters, name),
            ],
            f"{name}/Concat",
        )

    def b(self, x: str, name: str) -> str:
        """From 35x35 to 17x17."""
        other = self.chain(x, f"{name}/branch3x3dbl", (64, 1), (96, 3))
        return self.net.concat(
            [
                self.conv(x, 384, 3, f"{name}/branch3x3", stride=2, pad=0),
                self.conv(other, 96, 3, f"{name}/branch3x3dbl_3", stride=2, pad=0),
                self.net.max_pool(x, name, 3, 2),
            ],
            f"{name}/Concat",
        )

    def c(self, x: str, name: str, inner: int) -> str:
        """At 17x17."""
        row, column = (1, 7), (7, 1)
        double = ((inner, 1), (inner, column), (inner, row), (inner, column), (192, row))
        return self.net.concat(
            [
                self.conv(x, 192, 1, f"{name}/branch1x1"),
                self.chain(x, f"{name}/branch7x7", (inner, 1), (inner, row), (192, column)),
                self.chain(x, f"{name}/branch7x7dbl", *double),
                self.pooled(x, 192, name),
            ],
            f"{name}/Concat",
        )

    def d(self, x: str, name: str) -> str:
        """From 17x17 to 8x8."""
        one = self.conv(x, 192, 1, f"{name}/branch3x3_1")
        other = self.chain(x, f"{name}/branch7x7x3", (192, 1), (192, (1, 7)), (192, (7, 1)))
        return self.net.concat(
            [
                self.conv(one, 320, 3, f"{name}/branch3x3_2", stride=2, pad=0),
                self.conv(other, 192, 3, f"{name}/branch7x7x3_4", stride=2, pad=0),
                self.net.max_pool(x, name, 3, 2),
            ],
            f"{name}/Concat",
        )

    def e(self, x: str, name: str) -> str:
        """At 8x8: two of the branches fork once more."""
        one = self.conv(x, 384, 1, f"{name}/branch3x3_1")
        other = self.chain(x, f"{name}/branch3x3dbl", (448, 1), (384, 3))
        forks = ((one, "branch3x3_2"), (other, "branch3x3dbl_3"))
        return self.net.concat(
            [
                self.conv(x, 320, 1, f"{name}/branch1x1"),
                *(self.conv(y, 384, k, f"{name}/{fork}{s}") for y, fork in forks
                  for s, k in (("a", (1, 3)), ("b", (3, 1)))),
                self.pooled(x, 192, name),
            ],
            f"{name}/Concat",
        )  # fmt: skip


def build(config: Config) -> Any:
    """299x299 pixels, 1000 classes; small: 107x107."""
    size = config.pixels(299, 107, 1)
    net = Net("inception_v3", config, thin=True)
    blocks = Blocks(net)
    x = blocks.conv(net.input("images", 3, size, size), 32, 3, "Conv2d_1a_3x3", stride=2, pad=0)
    x = blocks.conv(blocks.conv(x, 32, 3, "Conv2d_2a_3x3", pad=0), 64, 3, "Conv2d_2b_3x3")
    x = blocks.conv(net.max_pool(x, "maxpool1", 3, 2), 80, 1, "Conv2d_3b_1x1")
    x = net.max_pool(blocks.conv(x, 192, 3, "Conv2d_4a_3x3", pad=0), "maxpool2", 3, 2)
    for name, pool_filters in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        x = blocks.a(x, name, pool_filters)
    x = blocks.b(x, "Mixed_6a")
    for name, inner in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        x = blocks.c(x, name, inner)
    x = blocks.d(x, "Mixed_7a")
    x = blocks.e(blocks.e(x, "Mixed_7b"), "Mixed_7c")
    return net.model([net.linear(net.add("GlobalAveragePool", [x], "/avgpool/GlobalAveragePool"), 1000, "fc")])
