"""Axes through Resize keep the names that the model gives them, and no other axis gets one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph

from cutefuse.commands.patch import main
from cutefuse.graph.read import Graph
from cutefuse.graph.shapes import inferred

SUM = (
    "l = Conv<pads=[0,0,0,0]>(b, w1) c = Conv<pads=[1,1,1,1]>(a, w) r = Exp(scales) u = {resize}"
    " s = Add(c, u) y = Relu(s)"
)


def sum_of_two(
    resize: str, opset: int = 17, sizes: str = "N,16,32,32", small: str = "N,8,16,16", **tensors: np.ndarray
) -> onnx.ModelProto:
    """A Conv whose result is added to an enlarged one, as the exchange units of an HRNet do."""
    weights = {"w": np.ones((16, 16, 3, 3), np.float32), "w1": np.ones((16, 8, 1, 1), np.float32)}
    tensors = {"scales": np.array([1, 1, 2, 2], np.float32), "roi": np.zeros(0, np.float32)} | tensors
    return graph(SUM.format(resize=resize), weights | tensors, inputs={"a": sizes, "b": small}, opset=opset)


def symbols(model: onnx.ModelProto, tensor: str) -> tuple[int | str, ...] | None:
    return Graph(model, Path(), inferred(model)).partial_symbols(tensor)


NEAREST = '<mode="nearest",coordinate_transformation_mode="asymmetric",nearest_mode="floor">'
KEPT = {
    "scales": (f"Resize{NEAREST}(l, roi, scales)", {}),
    "bilinear": ('Resize<mode="linear">(l, roi, scales)', {}),
    "scales of two axes": ("Resize<axes=[2,3]>(l, roi, two)", {"opset": 18, "two": np.array([2, 2], np.float32)}),
    "opset 10": ("Resize(l, scales)", {"opset": 10}),
    "opset 9": ("Upsample(l, scales)", {"opset": 9}),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_axis_that_is_not_scaled_keeps_its_name(name: str) -> None:
    resize, options = KEPT[name]
    model = sum_of_two(resize, **options)
    assert symbols(model, "u") == ("N", 16, 32, 32) == symbols(model, "s")


def test_a_batch_that_is_read_from_a_tensor_keeps_its_name() -> None:
    body = (
        "i = Shape(l) n = Slice(i, zero, two) z = Concat<axis=0>(n, hw) e = Resize(l, roi, empty, z) u = Identity(e)"
        " s = Add(a, u)"
    )
    tensors = {"zero": np.array([0]), "two": np.array([2]), "hw": np.array([32, 32]), "roi": np.zeros(0, np.float32),
               "empty": np.zeros(0, np.float32)}  # fmt: skip
    inputs = {"a": "N,8,32,32", "b": "N,8,16,16"}
    model = graph(f"l = Relu(b) {body}", tensors, inputs=inputs, outputs=["s"])
    assert symbols(model, "u") == ("N", 8, 32, 32)


OTHER = {
    "a scaled batch": ("Resize(l, roi, twice)", {"twice": np.array([2, 1, 2, 2], np.float32)}, 0),
    "rows of unknown number": ("Resize(l, roi, scales)", {"small": "N,8,h,16"}, 2),
    "a crop": ('Resize<coordinate_transformation_mode="tf_crop_and_resize">(l, box, scales)',
               {"box": np.zeros(8, np.float32)}, 0),
    "scales that are computed": ("Resize(l, roi, r)", {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_any_other_axis_gets_no_name_of_the_model(name: str) -> None:
    resize, options, axis = OTHER[name]
    model = sum_of_two(resize, **options)
    found = symbols(model, "u")
    assert found is None or found[axis] not in ("N", "h", 1)


def test_names_that_inference_makes_up_are_not_written_down() -> None:
    """Two inputs without names: the inference of another round may give the same name to the other one."""
    model = sum_of_two("Resize(l, roi, scales)")
    for info in model.graph.input[:2]:
        info.type.tensor_type.shape.dim[0].Clear()
    ours, theirs = symbols(model, "u"), symbols(model, "c")
    assert ours and theirs and ours[0] != theirs[0]


def test_many_stages_are_named_one_after_the_other() -> None:
    body = (
        "u0 = Relu(a) "
        + " ".join(
            f"d{i} = MaxPool<kernel_shape=[2,2],strides=[2,2]>(u{i}) e{i} = Resize(d{i}, roi, scales)"
            f" u{i + 1} = Add(u{i}, e{i})"
            for i in range(20)
        )
        + " y = Relu(u20)"
    )
    tensors = {"scales": np.array([1, 1, 2, 2], np.float32), "roi": np.zeros(0, np.float32)}
    model = graph(body, tensors, inputs={"a": "N,8,32,32"}, outputs=["y"])
    assert symbols(model, "u20") == ("N", 8, 32, 32)


def test_a_size_is_not_taken_for_a_position_nor_changed_by_a_cast() -> None:
    """Arithmetic in which the code of an unknown size would be an index, or wrap around to a size."""
    body = (
        "i = Shape(a) n = Slice(i, zero, one) p = Slice(five, zero, n) g = Gather(five, n) c = Cast<to=2>(n)"
        " q = Cast<to=7>(c) y = Relu(a)"
    )
    tensors = {"zero": np.array([0]), "one": np.array([1]), "five": np.arange(5)}
    model = graph(body, tensors, inputs={"a": "N,8,4,4"})
    literals = {n.output[0] for n in inferred(model).node if n.op_type == "Constant"}
    assert literals.isdisjoint({"n", "p", "g", "c", "q"})


def test_an_exchange_unit_with_a_dynamic_batch_is_fused_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(sum_of_two(KEPT["scales"][0]), path)
    assert main([str(path), "--all", "--verify", "--input-shape", "a:3x16x32x32", "--input-shape", "b:3x8x16x16"]) == 0
    assert "CuteConcatConv1AddRelu" in [n.op_type for n in onnx.load(tmp_path / "m.cutefuse.onnx").graph.node]


def test_batches_of_two_names_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(sum_of_two(KEPT["scales"][0], small="M,8,16,16"), path)
    main([str(path), "--all", "--dry-run"])
    assert "'u' is Mx16x32x32, the Conv's output Nx16x32x32" in " ".join(capsys.readouterr().out.split())
