"""The blocks of YOLOv8 and YOLO11 as Ultralytics exports them: SiLU as Sigmoid and Mul, C2f's halves by Split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.net import Config, Net

CLASSES, BINS = 80, 16  # of COCO; of the distribution over each side of a box
STRIDES = (8, 16, 32)
# In front of SiLU, which takes more than its share from small values: at 1 they vanish after some layers.
DEVIATION = 3.0


@dataclass(frozen=True)
class Scale:
    """How a size (n, s, m, ...) multiplies repeats and channels, and the most channels before that."""

    depth: float
    width: float
    most: int

    def channels(self, count: int) -> int:
        """Channels of a layer, a multiple of 8."""
        return -(-int(min(count, self.most) * self.width) // 8) * 8

    def repeats(self, count: int) -> int:
        """Blocks in a row."""
        return max(1, round(count * self.depth))

    def of(self, config: Config) -> Scale:
        """Itself, or as narrow as it gets where the configuration is small."""
        return Scale(self.depth, 1 / 8, self.most) if config.small else self


def conv(net: Net, x: str, filters: int, kernel: int, name: str, stride: int = 1) -> str:
    """Convolution, folded BatchNormalization, SiLU."""
    return net.act(net.conv(x, filters, kernel, f"{name}/conv", stride=stride), "SiLU", name)


def depthwise(net: Net, x: str, name: str, act: str = "SiLU") -> str:
    """3x3 convolution of each channel alone, folded BatchNormalization, SiLU."""
    return net.act(net.depthwise(x, 3, f"{name}/conv"), act, name)


def bottleneck(net: Net, x: str, filters: int, name: str, inner: int, shortcut: bool) -> str:
    """Two 3x3 convolutions, `inner` channels between them, and a shortcut where wanted."""
    y = conv(net, conv(net, x, inner, 3, f"{name}/cv1"), filters, 3, f"{name}/cv2")
    return net.add("Add", [x, y], f"/{name}/Add") if shortcut else y


def _c2f(net: Net, x: str, filters: int, name: str, hidden: int, blocks: list[Callable[[str, str], str]]) -> str:
    parts = net.split(conv(net, x, 2 * hidden, 1, f"{name}/cv1"), [hidden, hidden], name)
    for i, block in enumerate(blocks):
        parts.append(block(parts[-1], f"{name}/m.{i}"))
    return conv(net, net.concat(parts, f"{name}/Concat"), filters, 1, f"{name}/cv2")


def c2f(net: Net, x: str, filters: int, name: str, repeats: int, shortcut: bool) -> str:
    """YOLOv8's block: both halves and every bottleneck behind the second are joined."""
    hidden = filters // 2
    return _c2f(net, x, filters, name, hidden, [lambda y, n: bottleneck(net, y, hidden, n, hidden, shortcut)] * repeats)


def c3k(net: Net, x: str, name: str) -> str:
    """Two 1x1 convolutions of half the channels, two bottlenecks behind the first, joined."""
    filters = net.channels[x]
    a, b = (conv(net, x, filters // 2, 1, f"{name}/cv{i}") for i in (1, 2))
    for i in range(2):
        a = bottleneck(net, a, filters // 2, f"{name}/m/m.{i}", filters // 2, True)
    return conv(net, net.concat([a, b], f"{name}/Concat"), filters, 1, f"{name}/cv3")


def c3k2(net: Net, x: str, filters: int, name: str, repeats: int, deep: bool, expansion: float = 0.5) -> str:
    """YOLO11's block: C2f over C3k blocks where deep, else over bottlenecks of half the channels."""
    hidden = int(filters * expansion)

    def block(y: str, scope: str) -> str:
        return c3k(net, y, scope) if deep else bottleneck(net, y, hidden, scope, hidden // 2, True)

    return _c2f(net, x, filters, name, hidden, [block] * repeats)


def sppf(net: Net, x: str, name: str) -> str:
    """A chain of three 5x5 MaxPools, joined with its input."""
    filters = net.channels[x]
    parts = [conv(net, x, filters // 2, 1, f"{name}/cv1")]
    for i in range(3):
        parts.append(net.max_pool(parts[-1], f"{name}/m{f'_{i}' if i else ''}", 5, 1, 2))
    return conv(net, net.concat(parts, f"{name}/Concat"), filters, 1, f"{name}/cv2")


def attention(net: Net, x: str, name: str, rows: int) -> str:
    """Attention over all pixels of rows x rows, heads of 64 channels, with a depthwise convolution of the values."""
    channels = net.channels[x]
    heads, pixels = max(1, channels // 64), rows * rows
    value, key = channels // heads, channels // heads // 2
    qkv = net.conv(x, 2 * key * heads + channels, 1, f"{name}/qkv/conv")
    qkv = net.reshape(qkv, [heads, 2 * key + value, pixels], f"{name}/Reshape", heads)
    q, k, v = net.split(qkv, [key, key, value], name, axis=2)
    scaled = net.add("Mul", [q, net.weight(f"{name}.scale", np.array(key**-0.5))], f"/{name}/Mul")
    scores = net.add("MatMul", [net.add("Transpose", [scaled], f"/{name}/Transpose", perm=[0, 1, 3, 2]), k],
                     f"/{name}/MatMul")  # fmt: skip
    weights = net.add("Softmax", [scores], f"/{name}/Softmax", axis=-1)
    weights = net.add("Transpose", [weights], f"/{name}/Transpose_1", perm=[0, 1, 3, 2])
    mixed = net.add("MatMul", [v, weights], f"/{name}/MatMul_1")
    mixed = net.reshape(mixed, [channels, rows, rows], f"{name}/Reshape_1", channels)
    position = depthwise(
        net, net.reshape(v, [channels, rows, rows], f"{name}/Reshape_2", channels), f"{name}/pe", act=""
    )
    return net.conv(net.add("Add", [mixed, position], f"/{name}/Add"), channels, 1, f"{name}/proj/conv")


def c2psa(net: Net, x: str, name: str, repeats: int, rows: int) -> str:
    """Attention and a two-layer 1x1 network, each with a shortcut, on the second half of the channels."""
    filters = net.channels[x]
    a, b = net.split(conv(net, x, filters, 1, f"{name}/cv1"), [filters // 2] * 2, name)
    for i in range(repeats):
        scope = f"{name}/m/m.{i}"
        b = net.add("Add", [b, attention(net, b, f"{scope}/attn", rows)], f"/{scope}/Add")
        y = net.conv(conv(net, b, filters, 1, f"{scope}/ffn/ffn.0"), filters // 2, 1, f"{scope}/ffn/ffn.1/conv")
        b = net.add("Add", [b, y], f"/{scope}/Add_1")
    return conv(net, net.concat([a, b], f"{name}/Concat"), filters, 1, f"{name}/cv2")


def detect(net: Net, levels: list[str], name: str, size: int, light: bool) -> str:
    """The head: boxes as distributions over BINS distances a side, and classes; light: depthwise class branches.

    Returns [batch, 4 + CLASSES, anchors]: centre, width and height in pixels, then the probability of each class.
    """
    box_width = max(16, net.channels[levels[0]] // 4, 4 * BINS)
    class_width = max(net.channels[levels[0]], min(CLASSES, 100))
    boxes, classes = [], []
    for i, x in enumerate(levels):
        scope = f"{name}/cv2.{i}/cv2.{i}"
        y = conv(net, conv(net, x, box_width, 3, f"{scope}.0"), box_width, 3, f"{scope}.1")
        y = net.conv(y, 4 * BINS, 1, f"{scope}.2")
        boxes.append(net.reshape(y, [4 * BINS, -1], f"{name}/Reshape{f'_{i}' if i else ''}", 4 * BINS))
        scope, y = f"{name}/cv3.{i}/cv3.{i}", x
        for j in range(2):
            if light:
                y = depthwise(net, y, f"{scope}.{j}/cv3.{i}.{j}.0")
                y = conv(net, y, class_width, 1, f"{scope}.{j}/cv3.{i}.{j}.1")
            else:
                y = conv(net, y, class_width, 3, f"{scope}.{j}")
        y = net.conv(y, CLASSES, 1, f"{scope}.2")
        classes.append(net.reshape(y, [CLASSES, -1], f"{name}/Reshape_{i + 3}", CLASSES))
    box = net.add("Concat", boxes, f"/{name}/Concat", axis=-1)
    score = net.add("Sigmoid", [net.add("Concat", classes, f"/{name}/Concat_1", axis=-1)], f"/{name}/Sigmoid")
    return net.concat([decode(net, box, name, size), score], f"{name}/Concat_7")


def decode(net: Net, box: str, name: str, size: int) -> str:
    """Distances from the anchors, as the mean of each distribution (DFL), to boxes in pixels."""
    counts = [(size // stride) ** 2 for stride in STRIDES]
    anchors = np.concatenate([_centres(size // stride) for stride in STRIDES], axis=1)[None]
    steps = np.repeat(np.array(STRIDES), counts)[None]
    total = sum(counts)
    dfl = f"{name}/dfl"
    x = net.add(
        "Transpose",
        [net.reshape(box, [4, BINS, total], f"{dfl}/Reshape", 4)],
        f"/{dfl}/Transpose",
        BINS,
        perm=[0, 2, 1, 3],
    )
    x = net.add("Softmax", [x], f"/{dfl}/Softmax", axis=1)
    mean = net.weight(f"{dfl}.conv.weight", np.arange(BINS).reshape(1, BINS, 1, 1))
    x = net.add(
        "Conv", [x, mean], f"/{dfl}/conv/Conv", 1, dilations=[1, 1], group=1, kernel_shape=[1, 1], pads=[0] * 4,
        strides=[1, 1],
    )  # fmt: skip
    near, far = net.split(net.reshape(x, [4, total], f"{dfl}/Reshape_1", 4), [2, 2], name)
    centre = net.weight(f"{name}.anchors", anchors)
    low = net.add("Sub", [centre, near], f"/{name}/Sub", 2)
    high = net.add("Add", [centre, far], f"/{name}/Add_1", 2)
    middle = net.add("Div", [net.add("Add", [low, high], f"/{name}/Add_2"), net.weight(f"{name}.two", np.array(2))],
                     f"/{name}/Div_1")  # fmt: skip
    extent = net.add("Sub", [high, low], f"/{name}/Sub_1")
    boxes = net.concat([middle, extent], f"{name}/Concat_6")
    return net.add("Mul", [boxes, net.weight(f"{name}.strides", steps)], f"/{name}/Mul_2")


def _centres(cells: int) -> np.ndarray:
    """x and y of the centres of a grid of cells x cells, [2, cells * cells]."""
    y, x = np.meshgrid(np.arange(cells) + 0.5, np.arange(cells) + 0.5, indexing="ij")
    return np.stack([x.ravel(), y.ravel()])
