"""Exports of PyTorch modules by both exporters, from opset 11 to the newest: fused, and proven equal."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import fused_types

from cutefuse import kernels
from cutefuse.operators.conv_form import form_of
from cutefuse.rewrite.patch import Options, patch
from models import exports

pytestmark = pytest.mark.torch
BEFORE_VIEWS = {  # a body of a view needs opset 12
    "yolo_up": ["CuteConcatConv2Silu"],
    "c2f": ["CuteConcatConv2Silu"],
    "elan": ["CuteConcatConv2x2Silu", "CuteConcatConv2Silu"],
}


def check(path: Path, types: list[str]) -> None:
    result = patch(path, path.with_name("out.onnx"), Options(all_sites=True, verify=True))
    if not types:
        assert result.output is None
        return
    assert result.report["verify"]["passed"]
    assert fused_types(onnx.load(str(path.with_name("out.onnx")))) == types


def test_every_activation_of_the_library_is_exported_by_some_module() -> None:
    pytest.importorskip("torch")
    types = [t for _, _, types in exports.modules().values() for t in types if "Conv" in t]
    assert {form_of(t).suffix for t in types} == set(kernels.describe()["activations"])


@pytest.mark.parametrize("opset", exports.TRACING_OPSETS)
@pytest.mark.parametrize("name", exports.NAMES)
def test_the_tracing_exporters_graphs_are_fused(name: str, opset: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if opset < exports.OLDEST_TRACING.get(name, 0):
        pytest.skip("the exporter has no form of it in this opset")
    types = exports.export(name, tmp_path / "m.onnx", opset, dynamo=False)
    check(tmp_path / "m.onnx", BEFORE_VIEWS.get(name, types) if opset < 12 else types)


@pytest.mark.parametrize("opset", exports.DYNAMO_OPSETS)
@pytest.mark.parametrize("name", exports.NAMES)
def test_the_dynamo_exporters_graphs_are_fused(name: str, opset: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    check(tmp_path / "m.onnx", exports.export(name, tmp_path / "m.onnx", opset, dynamo=True))
