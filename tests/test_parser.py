"""Function bodies by TensorRT for RTX: NVIDIA's parser and builder take them without the plugin library, and read in
them the sizes that the calls have. With CUTEFUSE_EVERY_BODY=1 every op_type is built, which takes a quarter of an hour.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from bodies import given_dims
from op_models import calls_of_all, model_of_calls

from cutefuse import kernels, plugin_path
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError
from cutefuse.graph.numbers import FLOAT8, INT8, Number
from cutefuse.kernels import Call
from cutefuse.operators.conv_call import HWC8, NHWC

REASON = rtx.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

EVERY = "CUTEFUSE_EVERY_BODY" in os.environ
STEP = 1 if EVERY else 24  # of the op_types, one in so many is built
CHUNK = 60
KINDS = {"float16": (17, None), "int8": (17, INT8), "float8": (19, FLOAT8)}


def built_dims(groups: Sequence[Sequence[Call]], opset: int, folder: Path, libraries: Sequence[Path] = ()) -> int:
    """Build one model of these calls and hold every output's sizes against its call's; how many plugins it has."""
    model, path = model_of_calls(groups, opset), folder / "many.onnx"
    onnx.save(model, str(path))
    graph = rtx.compile_model(path, libraries=libraries)
    made = {t.name: t.dims for layer in graph.layers for t in layer.outputs}
    calls = [call for group in groups for call in group]
    expected = [given_dims(t, call.attrs.get("layout", [HWC8])[0]) for call in calls for t in call.outputs]
    assert [joined(made[o.name], dims) for o, dims in zip(model.graph.output, expected, strict=True)] == expected
    return graph.plugin_layers


def joined(dims: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    """Sizes of which the compiler says the rows of a DepthToSpace's squares and those of pixels apart, as `whole` has
    them; any others as they are."""
    found, left = list[int](), list(dims)
    for size in whole:
        product = left.pop(0) if left else 0
        while left and product < size:
            product *= left.pop(0)
        found.append(product)
    return tuple(dims if left else found)


@pytest.mark.parametrize("library", [False, True], ids=["bodies", "plugins"])
@pytest.mark.parametrize("layout", [HWC8, NHWC], ids=["hwc8", "nhwc"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_model_of_many_op_types_is_built(kind: str, layout: int, library: bool, tmp_path: Path) -> None:
    opset, number = KINDS[kind]
    # Another choice in each layout; all op_types lie in the library's order, activations innermost.
    groups = calls_of_all("float16", number, layout, opset)[0 if EVERY else 7 * layout :: STEP]
    if library:  # what the one judge calls legal must build
        groups = [group for group in groups if kernels.reject(group[0]) is None]
        assert groups
    for first in range(0, len(groups), CHUNK):
        part = groups[first : first + CHUNK]
        plugins = built_dims(part, opset, tmp_path, [plugin_path()] if library else [])
        assert plugins == (len(part) if library else 0)


CHOSEN = r"Conv(1|3)(x3)?(Add)?(|Clip|LeakyRelu)$|^CutePreConcatConv2$|Norm$"


@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 18, 21, 24])
def test_one_body_serves_two_problems_in_every_opset(opset: int, tmp_path: Path) -> None:
    layout = opset % 2
    pairs = [p for p in calls_of_all("float16", None, layout, opset, pairs=True) if re.search(CHOSEN, p[0].op_type)]
    assert built_dims(pairs[:: 1 if EVERY else 7], opset, tmp_path) == 0
    assert all(len(pair) == 2 and pair[0].attrs != pair[1].attrs for pair in pairs)


@pytest.mark.parametrize("number", [INT8, FLOAT8], ids=lambda number: number.name)
def test_two_quantised_nodes_of_one_op_type_need_the_library(number: Number, tmp_path: Path) -> None:
    # The parser names the layer of a DequantizeLinear as its node, and a body's node has one name (graph/body.py).
    # When this fails, the parser has been mended and the documents can say so.
    path, (pair, *_) = tmp_path / "m.onnx", calls_of_all("float16", number, HWC8, 19, pairs=True)
    onnx.save(model_of_calls([pair], 19), str(path))
    with pytest.raises(CutefuseError, match="already in use"):
        rtx.compile_model(path)
    assert rtx.compile_model(path, libraries=[plugin_path()]).plugin_layers == 2


# ---- the test can fail ----


def refused(model: onnx.ModelProto, folder: Path) -> str:
    onnx.save(model, str(folder / "m.onnx"))
    with pytest.raises(CutefuseError) as caught:
        rtx.compile_model(folder / "m.onnx")
    return str(caught.value)


def test_a_slice_without_steps_is_refused(tmp_path: Path) -> None:
    group = next(p for p in calls_of_all("float16", None, HWC8, 17) if p[0].op_type == "CuteViewConcatConv2")
    model = model_of_calls([group], 17)
    for node in (n for n in model.functions[0].node if n.op_type == "Slice" and len(n.input) == 5):
        node.input.pop()
    assert "steps" in refused(model, tmp_path)


def test_a_stride_by_reference_gives_other_sizes(tmp_path: Path) -> None:
    pair = next(p for p in calls_of_all("float16", None, HWC8, 17, pairs=True) if p[0].op_type == "CuteConcatConv2")
    model = model_of_calls([pair[1:]], 17)
    (conv,) = (n for n in model.functions[0].node if n.op_type == "Conv")
    (strides,) = (a for a in conv.attribute if a.name == "strides")
    strides.CopyFrom(onnx.AttributeProto(name="strides", ref_attr_name="strides", type=onnx.AttributeProto.INTS))
    onnx.save(model, str(tmp_path / "m.onnx"))
    (y,) = (t for la in rtx.compile_model(tmp_path / "m.onnx").layers for t in la.outputs if t.name == "n0_y0")
    assert y.dims != tuple(pair[1].outputs[0].dims) and y.dims[:2] == tuple(pair[1].outputs[0].dims[:2])


def test_bodies_of_one_op_type_that_share_the_name_of_a_quantiser_are_refused(tmp_path: Path) -> None:
    groups = calls_of_all("float16", INT8, HWC8, 17)[:2]
    model = model_of_calls(groups, 17)
    for node in (n for body in model.functions for n in body.node):
        node.name = ""
    assert "already in use" in refused(model, tmp_path)
