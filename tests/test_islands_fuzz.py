"""Random graphs around fused convolutions: in layout nhwc they compute the same, have no Transpose between two fused
nodes, and come back as they were."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from examples import examples
from graphs import graph, run_patch, weights
from hypothesis import given
from hypothesis import strategies as st

from cutefuse.graph.verify import verify
from cutefuse.operators.layouts import NHWC
from cutefuse.rewrite import islands
from cutefuse.rewrite.unpatch import unpatch

pytestmark = pytest.mark.slow

WIDTH = 16  # channels of every tensor of the pool
UNARY = ("Sigmoid", "Tanh", "Relu", "LeakyRelu", "Neg", "Softplus", "Elu", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
CONSTANTS: dict[str, tuple[int, ...]] = {
    "c0": (), "c1": (6,), "c2": (8, 1), "c3": (16, 1, 1), "c4": (1, 16, 1, 1), "c5": (1, 16, 8, 6), "c6": (1, 1, 1, 6),
}  # fmt: skip
VALUES = weights(w=(16, 16, 3, 3), w2=(16, 32, 1, 1), d=(16, 8, 1, 1), k=(16,), **CONSTANTS) | {
    "half": np.int64([8, 8]), "from": np.int64([4]), "to": np.int64([12]), "axis": np.int64([1]),
    "flat": np.int64([2, 16, 48]), "whole": np.int64([2, 16, 8, 6]),
}  # fmt: skip


def body(rng: random.Random, count: int) -> tuple[str, list[str]]:
    """Nodes over tensors of [2, 16, 8, 6] and the tensors that leave."""
    pool, lines = ["a", "b"], list[str]()
    for i in range(count):
        x, y, t = rng.choice(pool[-4:]), rng.choice(pool), f"t{i}"
        kind = rng.randrange(13)
        if kind < 4:
            activation = rng.choice(["Relu", "Sigmoid", "Tanh"])
            lines.append(f"x{i} = Conv<pads=[1,1,1,1]>({x}, w, k) {t} = {activation}(x{i})")
        elif kind == 4:
            lines.append(f"j{i} = Concat<axis=1>({x}, {y}) x{i} = Conv(j{i}, w2) {t} = Relu(x{i})")
        elif kind == 5:
            lines.append(f"x{i} = Conv<group=2>({x}, d, k) g{i} = Sigmoid(x{i}) {t} = Mul(x{i}, g{i})")
        elif kind == 6:
            lines.append(f"{t} = {rng.choice(UNARY)}({x})")
        elif kind == 7:
            lines.append(f"{t} = {rng.choice(BINARY)}({x}, {y})")
        elif kind == 8:
            pair = [x, rng.choice([*CONSTANTS])]
            rng.shuffle(pair)
            lines.append(f"{t} = {rng.choice(BINARY)}({', '.join(pair)})")
        elif kind == 9:
            lines.append(f"p{i}, q{i} = Split<axis={rng.choice([1, -3])}>({x}, half) {t} = Concat<axis=1>(q{i}, p{i})")
        elif kind == 10:
            lines.append(f"s{i} = Slice({x}, from, to, axis) p{i}, q{i} = Split<axis=1>({y}, half) "
                         f"{t} = Concat<axis=-3>(s{i}, p{i})")  # fmt: skip
        elif kind == 11:
            lines.append(f"{t} = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({x})")
        else:
            lines.append(f"f{i} = Reshape({x}, flat) e{i} = Softmax<axis=1>(f{i}) {t} = Reshape(e{i}, whole)")
        pool.append(t)
    outputs = {pool[-1], *rng.sample(pool[2:], k=min(2, count))}
    return " ".join(lines), sorted(outputs)


def fused_to_fused(model: onnx.ModelProto) -> list[str]:
    """Tensors that go from a fused node to another through Transposes alone."""
    makers = {o: n for n in model.graph.node for o in n.output}

    def behind(tensor: str) -> onnx.NodeProto | None:
        node = makers.get(tensor)
        while node is not None and node.op_type == "Transpose":
            node = makers.get(node.input[0])
        return node

    found = []
    for node in (n for n in model.graph.node if n.domain == "cutefuse"):
        for name in node.input:
            maker = behind(name)
            if maker is not None and maker.domain == "cutefuse" and makers[name].op_type == "Transpose":
                found.append(name)
    return found


def check(seed: int, count: int) -> None:
    rng = random.Random(seed)
    text, outputs = body(rng, count)
    inputs = {"a": "2,16,8,6", "b": "2,16,8,6"}
    model = graph(text, VALUES, opset=rng.choice([13, 17, 21]), inputs=inputs, outputs=outputs)
    plain = {}
    with tempfile.TemporaryDirectory() as name:
        for layout in ("hwc8", "nhwc"):
            folder = Path(name) / layout
            folder.mkdir()
            result, patched = run_patch(model, folder, layout=layout)
            if patched is None:  # no site in this graph
                return
            assert result.report["verify"]["passed"]
            if layout == "nhwc":
                assert islands.layouts(patched) == {NHWC} and not fused_to_fused(patched)
                turned = [(n.input[0], tuple(n.attribute[0].ints)) for n in patched.graph.node
                          if n.op_type == "Transpose"]  # fmt: skip
                assert len(turned) == len(set(turned)), "one Transpose a tensor"
            unpatch(folder / "model.cutefuse.onnx", folder / "plain.onnx")
            plain[layout] = onnx.load(str(folder / "plain.onnx"))
        kinds = {k: sorted((n.op_type, n.name) for n in m.graph.node) for k, m in plain.items()}
        assert kinds["hwc8"] == kinds["nhwc"]
        assert verify(Path(name) / "nhwc" / "model.onnx", plain["nhwc"], Path(name) / "nhwc", 1e-4, {})["passed"]


def test_what_unpatching_writes_does_not_depend_on_the_layout() -> None:
    """A fused node's source is an output of the model, whose sizes the file does not tell."""
    check(10_766, 20)


@examples(300)
@given(st.integers(0, 2**32), st.integers(2, 24))
def test_random_graphs_compute_the_same_in_both_layouts(seed: int, count: int) -> None:
    check(seed, count)
