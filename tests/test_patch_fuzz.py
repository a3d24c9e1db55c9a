"""Damaged models, 1,400 of them in `make test-all`: never a traceback, never a hang, never a wrong result."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from examples import examples
from graphs import bn_weights, graph, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.operators.layouts import NAMES
from cutefuse.rewrite.patch import Options, patch
from cutefuse.rewrite.unpatch import unpatch

BODY = (
    "d = Concat<axis=1>(a, b) c = Concat<axis=1>(d, a) t = Transpose<perm=[0,1,2,3]>(w) "
    "x = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(c, t, k) z = BatchNormalization(x, gamma, beta, mean, var) "
    "s = Mul(z, m) u = Clip(s, lo, hi) e = Concat<axis=-3>(b, u) v = Conv<strides=[2,2]>(e, w2) "
    "g = Sigmoid(v) y = Mul(v, g)"
)
VALUES = (
    weights(w=(12, 32, 3, 3), k=(12,), w2=(8, 28, 1, 1))
    | bn_weights()
    | {"m": np.full((12, 1, 1), 1.5, np.float32), "lo": np.float32(-0.5), "hi": np.float32(0.5)}
)
NORM = (
    "s = Add(a, b) m = ReduceMean<axes=[-1]>(s) d = Sub(s, m) p = Pow(d, two) v = ReduceMean<axes=[-1]>(p) "
    "e = Add(v, eps) q = Sqrt(e) n = Div(d, q) w = Mul(n, gamma) x = Add(w, beta) "
    "r = LayerNormalization(x, gamma, beta) y = Mul(r, s)"
)
NORM_VALUES = {"two": np.float32(2), "eps": np.float32(1e-5)} | weights(gamma=(8,), beta=(8,))
AROUND = (
    "h = Shape(a) n = Slice(h, zero, two) q = Concat<axis=0>(n, hw) u = Resize(a, , , q) v = Resize(a, , scales) "
    "p0, p1 = Split<axis=1>(b, parts) p2 = Slice(b, four, all, one) c = Concat<axis=1>(u, p1, p2, v) "
    "x1 = Conv<pads=[1,1,1,1]>(c, w, k) r1 = Add(x1, z) y1 = Relu(r1) "
    "x2 = Conv<pads=[1,1,1,1]>(c, w) r2 = Relu(x2) x3 = Conv<pads=[1,1,1,1]>(c, w, k) r3 = Relu(x3) "
    "s = Add(r2, r3) y = Add(s, y1)"
)
AROUND_VALUES = weights(w=(8, 36, 3, 3), k=(8,)) | {"scales": np.float32([1, 1, 2, 2])} | {
    name: np.int64(v) for name, v in
    {"zero": [0], "two": [2], "hw": [8, 6], "parts": [8, 8], "four": [4], "all": [2**31], "one": [1]}.items()
}  # fmt: skip
AROUND_INPUTS = {"a": "n,8,4,3", "b": "n,16,8,6", "z": "n,8,8,6"}
SINGLE = (
    "o = Conv<pads=[1,1,1,1]>(b, w, k) h = Mul(o, half) t = Tanh(h) q = Mul(t, half) g = Add(q, half) x = Mul(o, g) "
    "c1 = Conv<pads=[1,1,1,1]>(x, w) n1 = BatchNormalization(c1, gamma, beta, mean, var) r1 = Add(n1, b) v1 = Relu(r1) "
    "c2 = Conv(v1, p) c3 = Conv<group=4>(v1, d) s = Add(c2, c3) a3 = Add(s, three) l = Clip(a3, zero, six) "
    "m = Mul(s, l) f = Div(m, six) u = ConvTranspose(f, p) e = Concat<axis=1>(u, v1) i = Concat<axis=1>(e, f) "
    "c4 = Conv(e, j) y4 = Sigmoid(c4) c5 = Conv(i, z) y5 = LeakyRelu(c5) y = Mul(y4, y5)"
)
SINGLE_VALUES = (
    weights(w=(16, 16, 3, 3), k=(16,), p=(16, 16, 1, 1), d=(16, 4, 1, 1), j=(16, 32, 1, 1), z=(16, 48, 1, 1))
    | bn_weights(16)
    | {n: np.float32(v) for n, v in {"half": 0.5, "three": 3, "zero": 0, "six": 6}.items()}
)
BASES = [graph(BODY, VALUES, opset=o).SerializeToString() for o in (11, 13, 17, 21)]
BASES.append(graph(NORM, NORM_VALUES, inputs={"a": "n,5,3,8", "b": "n,5,3,8"}).SerializeToString())
BASES += [graph(SINGLE, SINGLE_VALUES, opset=o, inputs={"b": "n,16,9,7"}).SerializeToString() for o in (11, 17)]
RUNNABLE = len(BASES)  # ONNX Runtime aborts the process on some damaged Slices: the next ones are patched only
BASES += [graph(AROUND, AROUND_VALUES, opset=o, inputs=AROUND_INPUTS).SerializeToString() for o in (13, 17)]
NUMBERS = [0, 1, -1, 2, 3, -3, 7, 8, 2**31, -(2**31), 2**62]


def rewire(rng: random.Random, g: onnx.GraphProto) -> None:
    node = rng.choice(g.node)
    names = [*(i.name for i in g.input), *(t.name for t in g.initializer), *(o for n in g.node for o in n.output), ""]
    if node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def rename(rng: random.Random, g: onnx.GraphProto) -> None:
    node = rng.choice(g.node)
    if node.output:
        node.output[0] = rng.choice(["", "y", "x", "w", "a", "new"])


def drop_operand(rng: random.Random, g: onnx.GraphProto) -> None:
    node = rng.choice(g.node)
    field = rng.choice([node.input, node.output])
    if len(field):
        del field[rng.randrange(len(field))]


def add_operand(rng: random.Random, g: onnx.GraphProto) -> None:
    rng.choice(g.node).input.append(rng.choice(["a", "w", "x", ""]))


def change_op(rng: random.Random, g: onnx.GraphProto) -> None:
    kinds = ["Relu", "Concat", "Conv", "Identity", "Dropout", "HardSigmoid", "Clip", "If", "Split", "Slice", "Resize",
             "Add", "Tanh", "Mul", "ConvTranspose", "Nothing", ""]  # fmt: skip
    rng.choice(g.node).op_type = rng.choice(kinds)


def change_domain(rng: random.Random, g: onnx.GraphProto) -> None:
    rng.choice(g.node).domain = rng.choice(["", "ai.onnx", "cutefuse", "com.microsoft"])


def change_attribute(rng: random.Random, g: onnx.GraphProto) -> None:
    attrs = [a for n in g.node for a in n.attribute]
    a = rng.choice(attrs)
    if a.ints:
        a.ints[rng.randrange(len(a.ints))] = rng.choice(NUMBERS)
    elif rng.random() < 0.5:
        a.i = rng.choice(NUMBERS)
    else:
        a.CopyFrom(helper.make_attribute(a.name, rng.choice(["text", 1.5, [1, 2, 3], [0.5], 4])))


def add_attribute(rng: random.Random, g: onnx.GraphProto) -> None:
    name = rng.choice(["group", "auto_pad", "dilations", "strides", "training_mode", "axis", "epsilon", "odd", "mode",
                       "nearest_mode", "coordinate_transformation_mode", "num_outputs", "axes", "scales"])  # fmt: skip
    value = rng.choice(["SAME_UPPER", "VALID", "odd", "linear", "ceil", 0, 1, 4, [1, 1], [2, 2], [1], 0.5])
    rng.choice(g.node).attribute.append(helper.make_attribute(name, value))


def change_dims(rng: random.Random, g: onnx.GraphProto) -> None:
    if rng.random() < 0.5:
        tensor = rng.choice(g.initializer)
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
        return
    shape = rng.choice([*g.input, *g.output]).type.tensor_type.shape
    if rng.random() < 0.3:
        del shape.dim[:]
    elif shape.dim:
        rng.choice(shape.dim).dim_value = rng.choice(NUMBERS)


def change_values(rng: random.Random, g: onnx.GraphProto) -> None:
    tensor = rng.choice(g.initializer)
    value = numpy_helper.to_array(tensor).copy()
    value.reshape(-1)[rng.randrange(value.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e38, -1.0, 0.0])
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def change_type(rng: random.Random, g: onnx.GraphProto) -> None:
    if rng.random() < 0.5:
        rng.choice(g.initializer).data_type = rng.randrange(0, 25)
    else:
        rng.choice([*g.input, *g.output]).type.tensor_type.elem_type = rng.randrange(0, 25)


def drop_or_double(rng: random.Random, g: onnx.GraphProto) -> None:
    field = rng.choice([g.node, g.initializer, g.input, g.output])
    if not len(field):
        return
    if rng.random() < 0.5:
        del field[rng.randrange(len(field))]
    else:
        field.append(rng.choice(field))


def shuffle(rng: random.Random, g: onnx.GraphProto) -> None:
    nodes = list(g.node)
    rng.shuffle(nodes)
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del g.node[:]
    g.node.extend(copies)


def expose(rng: random.Random, g: onnx.GraphProto) -> None:
    name = rng.choice([o for n in g.node for o in n.output])
    g.output.append(helper.make_tensor_value_info(name, 1, [None] * 4))


MUTATIONS: list[Callable[[random.Random, onnx.GraphProto], None]] = [
    rewire, rename, drop_operand, add_operand, change_op, change_domain, change_attribute, add_attribute, change_dims,
    change_values, change_type, drop_or_double, shuffle, expose,
]  # fmt: skip


def attempt(data: bytes, verify: bool = True, layout: str = "hwc8") -> str:
    """Patch bytes as a file. Anything but a CutefuseError passes through and fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "m.onnx"
        source.write_bytes(data)
        try:
            result = patch(source, Path(folder) / "out.onnx", Options(all_sites=True, verify=verify, layout=layout))
        except VerificationError as error:
            assert "\n" not in str(error)
            return "original does not run"
        except CutefuseError as error:
            assert "\n" not in str(error) and 10 < len(str(error)) < 2000
            assert [p.name for p in Path(folder).iterdir()] == ["m.onnx"], "nothing half written"
            return "refused as a whole"
        proof = result.report["verify"]
        assert proof is None or proof["passed"] or proof["why"].startswith("nothing is proven"), proof
        if result.output:
            try:
                unpatch(result.output, Path(folder) / "plain.onnx")
            except CutefuseError as error:  # a damaged node had our domain before
                assert "is not in the library" in str(error) and "\n" not in str(error)
        return "patched" if result.output else "nothing to patch"


@pytest.mark.slow
@settings(examples(1000), deadline=5000)
@given(st.integers(0, len(BASES) - 1), st.integers(0, 2**32), st.integers(1, 3))
@example(0, 936, 1)  # an activation without an input
@example(0, 2_221_289_531, 1)  # an Add without an output
@example(5, 3352, 1)  # x * relu6(x + 3) / 6 of values that are too large times six
def test_models_with_damaged_structure(base: int, seed: int, count: int) -> None:
    rng = random.Random(seed)
    model = onnx.ModelProto.FromString(BASES[base])
    for _ in range(count):
        try:
            rng.choice(MUTATIONS)(rng, model.graph)
        except (
            ArithmeticError,
            IndexError,
            ValueError,
            TypeError,
            RuntimeError,
        ):  # this graph has nothing left for this mutation
            continue
    attempt(model.SerializeToString(), base < RUNNABLE, NAMES[seed % 2])


@pytest.mark.slow
@settings(max_examples=400, deadline=5000, derandomize=True)
@given(st.integers(0, len(BASES) - 1), st.integers(0, 2**32))
def test_files_with_damaged_bytes(base: int, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(BASES[base])
    # Damage the graph, not the megabytes of weights: positions are drawn where nodes and names lie, too.
    for _ in range(rng.randint(1, 8)):
        where = rng.randrange(min(len(data), 1500)) if rng.random() < 0.7 else rng.randrange(len(data))
        kind = rng.random()
        if kind < 0.6:
            data[where] = rng.randrange(256)
        elif kind < 0.8:
            del data[where : where + rng.randint(1, 20)]
        else:
            data[where:where] = rng.randbytes(rng.randint(1, 8))
    attempt(bytes(data), False, NAMES[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("layout", NAMES)
def test_the_undamaged_models_are_patched(layout: str) -> None:
    assert [attempt(b, layout=layout) for b in BASES] == ["patched"] * len(BASES)
