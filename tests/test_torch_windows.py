"""Which pools and linear Resizes of a PyTorch program our kernels take, and what they are told; no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch, weights
from test_torch_fused import kernel_program, reference_kernels  # noqa: F401
from test_torch_graph_ops import CASES, model_of
from torch_cases import OpCase
from windows import Window, reference

import models

pytestmark = pytest.mark.torch


def window_of(attrs: Any, channels: tuple[int, ...], size: Any, out: Any) -> Window:
    """The attributes of a call as a window."""
    pairs = {"kernel_shape": "kernel", "scales": "scales", "offsets": "offsets", "strides": "strides", "pads": "pads",
             "dilations": "dilations"}  # fmt: skip
    given: dict[str, Any] = {own: tuple(attrs[name]) for name, own in pairs.items() if name in attrs}
    counts = bool(attrs.get("count_include_pad", [0])[0])
    return Window(attrs["mode"][0], channels, size, counts_pads=counts, out=out, **given)


def windowed(case: OpCase) -> Any:
    """The one step of a node's program, if it is a window."""
    from cutefuse.engines.pytorch.onnx_ops.pooling import Windowed
    from cutefuse.engines.pytorch.onnx_ops.program import load

    model, feed = model_of(case)
    program = load(model, {name: value.shape for name, value in feed.items()}, fused=False)
    steps = [step for step in program.steps if isinstance(step.run, Windowed)]
    return (program, steps[0], next(iter(feed.values()))) if steps else None


WINDOWED = [c for c in CASES if c.op_type in ("MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Upsample")]
MEANS = [
    OpCase("ReduceMean", 17, [np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype("float32")],
           {"axes": [2, 3], "keepdims": keep}) for keep in (1, 0)
]  # fmt: skip


def test_the_attributes_mean_what_pytorch_computes() -> None:
    import torch

    taken: dict[str, int] = {}
    for case in WINDOWED + MEANS:
        found = windowed(case)
        if found is None:
            continue
        program, step, given = found
        x = torch.from_numpy(given)
        y = step.run(x, *(program.constants[s] for s in step.inputs[1:]))
        n, c, *size = x.shape
        truth = reference(window_of(step.run.attrs, (c,), (n, *size), tuple(y.shape[2:])), x.double())
        assert torch.allclose(y.double(), truth, atol=1e-5, rtol=0), case.name
        taken[case.op_type] = taken.get(case.op_type, 0) + 1
    assert taken == {"MaxPool": 8, "AveragePool": 11, "GlobalAveragePool": 1, "Resize": 11, "Upsample": 1,
                     "ReduceMean": 1}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        case for case in CASES
        if case.op_type == "Resize" and (case.attrs.get("mode") != "linear" or case.attrs.get("antialias")
                                         or "crop" in case.attrs.get("coordinate_transformation_mode", ""))
        or case.op_type in ("LpPool", "GlobalMaxPool")
    ] + MEANS[1:],
    ids=lambda case: case.name,
)  # fmt: skip
def test_what_is_no_window_is_none(case: OpCase) -> None:
    assert windowed(case) is None


@pytest.fixture
def by_formula(reference_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """Kernel calls of every operator computed by formula; returns the op_types that were called."""
    import torch

    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode

    others = FusedNode.launch

    def launch(self: Any, xs: Any) -> Any:
        if self.named:
            return others(self, xs)
        reference_kernels.append(self.op_type)
        x = torch.cat(list(xs), 1)
        n, _, *size = x.shape
        (like,) = self.outputs
        channels = tuple(t.shape[1] for t in xs)
        made = self._empty(like, "cpu")
        return [made.copy_(reference(window_of(self.attrs, channels, (n, *size), like.shape[2:]), x.double()))]

    monkeypatch.setattr(FusedNode, "launch", launch)
    return reference_kernels


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1", "inception_v3", "hrnet_head", "unet"])
def test_a_network_whose_windows_are_ours_computes_the_same(name: str, by_formula: list[str], tmp_path: Path) -> None:
    import torch

    from cutefuse.engines.pytorch.onnx_ops.windows import take_windows

    _, patched = run_patch(models.build(name, "float32", small=True), tmp_path)
    program, function, inputs = kernel_program(patched)
    want = function(*inputs)
    before = [t for t in by_formula if "Window" in t]
    take_windows(program)
    taken = [step.run.op_type for step in program.steps if not getattr(step.run, "named", True)]
    got = program.function(program.constants)(*inputs)
    assert not before and sorted(taken) == sorted(t for t in by_formula if "Window" in t) and len(taken) >= 3
    assert not any(step.op_type in ("MaxPool", "Resize") for step in program.steps if not hasattr(step.run, "named"))
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))


# Two fused convolutions around a window. {x} is what comes before it, {y} what reads it.
BEFORE = "c1 = Conv<kernel_shape=[1,1]>(x, w1) a = Relu(c1) c2 = Conv<kernel_shape=[1,1]>(x, w2) b = Relu(c2) "
AFTER = "c3 = Conv<kernel_shape=[1,1]>(p, w3) y = Relu(c3)"
JOIN = BEFORE + "j = Concat<axis=1>(a, b) "
POOL = "p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(j) "


def taken(body: str, tmp_path: Path, *, a: int = 16, b: int = 8, dims: str = "2,8,12,12", **options: Any) -> Any:
    """(op_types of the windows that are taken, types of the steps that stay with PyTorch) of a patched graph."""
    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
    from cutefuse.engines.pytorch.onnx_ops.program import load
    from cutefuse.engines.pytorch.onnx_ops.windows import take_windows

    values = weights(w1=(a, 8, 1, 1), w2=(b, 8, 1, 1), w3=(8, options.pop("channels", a + b), 1, 1))
    values["s"] = np.array([1, 1, 2, 2], np.float32)
    model = graph(body, values, inputs={"x": dims}, **options)
    _, patched = run_patch(model, tmp_path)
    program = load(patched or model, {"x": tuple(int(d) for d in dims.split(","))}, fused=True)
    take_windows(program)
    ours = [step.run for step in program.steps if isinstance(step.run, FusedNode)]
    assert program.fused == [node for node in ours if node.named]
    stay = [step.op_type for step in program.steps if not isinstance(step.run, FusedNode)]
    return [node.op_type for node in ours if not node.named], stay


def test_a_pool_reads_what_a_concat_joins_and_the_concat_goes(tmp_path: Path) -> None:
    assert taken(JOIN + POOL + AFTER, tmp_path) == (["CuteWindow2"], [])


@pytest.mark.parametrize(
    "window",
    [
        "p = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(j) ",
        'p = Resize<mode="linear">(j, , s) ',
        "p = GlobalAveragePool(j) ",
        "p = MaxPool<kernel_shape=[9,9], pads=[4,4,4,4]>(j) ",  # as many pixels as were measured
    ],
)
def test_other_windows_are_taken_too(window: str, tmp_path: Path) -> None:
    windows, _ = taken(JOIN + window + AFTER, tmp_path)
    assert windows == ["CuteWindow2"]


def test_a_concat_that_others_read_stays_for_them(tmp_path: Path) -> None:
    body = JOIN + POOL + AFTER + " z = Softmax<axis=1>(j)"
    assert taken(body, tmp_path, outputs=("y", "z")) == (["CuteWindow2"], ["Concat", "Softmax"])


def test_a_concat_of_fused_nodes_for_fused_nodes_is_a_window_of_one_pixel(tmp_path: Path) -> None:
    many = "".join(f"c{i} = Conv<kernel_shape=[1,1]>(x, w2) a{i} = Relu(c{i}) " for i in range(10, 20))
    joined = many + "j = Concat<axis=1>(a10, a11, a12, a13, a14) k = Concat<axis=1>(j, a15, a16, a17, a18, a19) "
    body = joined + "p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(k) " + AFTER
    assert taken(body, tmp_path, channels=80) == (["CuteWindow5", "CuteWindow6"], [])


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (JOIN + POOL + "y = Sigmoid(p)", {}),  # Inductor makes one kernel of both
        (JOIN + POOL.replace("p =", "y ="), {}),  # a result of the network
        (JOIN + "t = Sin(j) " + POOL.replace("(j)", "(t)") + AFTER, {}),  # Inductor computes the sine inside
        (JOIN + "p = MaxPool<kernel_shape=[11,11], pads=[5,5,5,5]>(j) " + AFTER, {}),  # too many pixels
        (JOIN + "p = Resize<mode=\"cubic\">(j, , s) " + AFTER, {}),
        (JOIN + "p = GlobalAveragePool(j) " + AFTER, {"dims": "1,8,33,33"}),  # one block for 1089 pixels
    ],
)  # fmt: skip
def test_the_rest_stays_with_pytorch(body: str, options: dict[str, Any], tmp_path: Path) -> None:
    windows, others = taken(body, tmp_path, **options)
    assert windows == [] and others


def test_channels_that_are_no_whole_vectors_stay(tmp_path: Path) -> None:
    assert taken(JOIN + POOL + AFTER, tmp_path, a=6, b=3)[0] == []


def test_a_network_without_fused_nodes_is_the_peer_and_stays_as_it_is() -> None:
    from cutefuse.engines.pytorch.onnx_ops.program import load
    from cutefuse.engines.pytorch.onnx_ops.windows import take_windows

    model = models.build("googlenet", "float32", small=True)
    program = load(model, {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input},
                   fused=True)  # fmt: skip
    before = [step.run for step in program.steps]
    take_windows(program)
    assert [step.run for step in program.steps] == before
    assert onnx.checker.check_model(model) is None
