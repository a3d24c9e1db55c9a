"""Graphs in which very many nodes share a tensor: the work grows as they do. Calls are counted, as in
test_long_chains.py."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import run_patch
from onnx import NodeProto, TensorProto, helper

from cutefuse.select.wiring import MOST_TIED

pytestmark = pytest.mark.slow

Wide = tuple[list[NodeProto], list[str], int]  # nodes, further inputs, size of the filters
ENLARGE = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def node(kind: str, read: list[str], made: str, **attributes: object) -> NodeProto:
    return helper.make_node(kind, read, made.split(), made.split()[0], **attributes)


def joined(count: int, first: Callable[[int], str]) -> list[NodeProto]:
    """Concats of `first(i)` and an own tensor, each with its Conv."""
    nodes = []
    for i in range(count):
        nodes.append(node("Concat", [first(i), f"o{i}"], f"c{i}", axis=1))
        nodes.append(node("Conv", [f"c{i}", "w"], f"t{i}"))
    return nodes


def own(count: int) -> list[str]:
    return [f"o{i}" for i in range(count)]


def shared(count: int) -> Wide:
    """Concats that share an input."""
    return joined(count, lambda i: "a"), own(count), 1


def made(count: int) -> Wide:
    """Concats that share a tensor which a Conv makes."""
    return [node("Conv", ["a", "v"], "s"), *joined(count, lambda i: "s")], own(count), 1


def read(count: int) -> Wide:
    """Convs that share a Concat, too wide to be one kernel."""
    convs = [node("Conv", ["c", "w"], f"t{i}", pads=[1, 1, 1, 1]) for i in range(count)]
    return [node("Concat", ["a", "b"], "c", axis=1), *convs], ["b"], 3


def pointwise(count: int) -> Wide:
    """1x1 Convs that share a Concat, all of which TensorRT could merge."""
    convs = [node("Conv", ["c", "w"], f"t{i}") for i in range(count)]
    return [node("Concat", ["a", "b"], "c", axis=1), *convs], ["b"], 1


def enlarged(count: int) -> Wide:
    """Enlargements of one tensor."""
    nodes = [node("Resize", ["l", "", "scales"], f"r{i}", **ENLARGE) for i in range(count)]
    return nodes + joined(count, lambda i: f"r{i}"), ["l", *own(count)], 1


def split(count: int) -> Wide:
    """Ranges of one tensor."""
    nodes = [node("Split", ["d"], f"r{i} q{i}", axis=1) for i in range(count)]
    return nodes + joined(count, lambda i: f"r{i}"), ["d", *own(count)], 1


def gathered(count: int) -> Wide:
    """Sites whose results one Concat joins."""
    last = node("Concat", [f"t{i}" for i in range(count)], "z", axis=1)
    return [*joined(count, lambda i: f"p{i}"), last], [*own(count), *(f"p{i}" for i in range(count))], 1


def model(wide: Wide) -> onnx.ModelProto:
    nodes, inputs, size = wide
    stored = {"w": (8, 16, size, size), "v": (8, 8, 1, 1)}
    values = [onnx.numpy_helper.from_array(np.full(dims, 1e-3, np.float16), name) for name, dims in stored.items()]
    values.append(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"))
    shapes = {"l": [1, 8, 4, 4], "d": [1, 16, 8, 8]}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, shapes.get(n, [1, 8, 8, 8])) for n in ("a", *inputs)]
    read_later = {t for n in nodes for t in n.input}
    ends = [o for n in nodes for o in n.output[:1] if o not in read_later]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, None) for n in ends]
    made_ = helper.make_graph(nodes, "wide", infos, outputs, values)
    return helper.make_model(made_, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# With --all every site stays; else those of the other two engines go, one by one or together.
@pytest.mark.parametrize("kind, engine, all_sites", [
    (shared, "tensorrt", True), (shared, "rtx", False), (shared, "torch", False), (made, "torch", False),
    (read, "tensorrt", True), (pointwise, "tensorrt", True), (enlarged, "tensorrt", True), (split, "tensorrt", True),
    (gathered, "tensorrt", True), (gathered, "torch", False),
])  # fmt: skip
def test_calls_grow_as_the_readers_of_a_tensor_do(
    kind: Callable[[int], Wide], engine: str, all_sites: bool, tmp_path: Path
) -> None:
    calls = []
    for count in (8, MOST_TIED + 6, 3 * (MOST_TIED + 6)):  # the first run fills caches
        profile = cProfile.Profile()
        profile.enable()
        result, _ = run_patch(model(kind(count)), tmp_path, dry_run=True, engine=engine, all_sites=all_sites)
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
        assert result.report["summary"]["candidates"] >= count
    assert calls[2] < 4.5 * calls[1]  # up to nine times where every pair is looked at
