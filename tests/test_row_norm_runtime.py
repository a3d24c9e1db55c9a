"""ONNX Runtime's own RMSNorm in the rewriter: taken where it is ours, refused in words where it is not."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import fused_types, run_patch
from test_row_norm import SUM, make


def simplified(body: str, **attributes: object) -> onnx.ModelProto:
    """ONNX Runtime's SimplifiedLayerNormalization, an RMSNorm of the default domain that no ONNX schema knows."""
    model = make(body)
    node = next(n for n in model.graph.node if n.op_type == "LayerNormalization")
    node.op_type = "SimplifiedLayerNormalization"
    node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())
    return model


@pytest.mark.parametrize(("body", "op_type"), [
    ("y = LayerNormalization<epsilon=0.001>(x, g)", "CuteRMSNorm"),
    (SUM + "n = LayerNormalization(x, g) y = Mul(n, x)", "CuteAddRMSNorm"),
])  # fmt: skip
def test_the_rms_norm_of_onnx_runtime_is_taken(body: str, op_type: str, tmp_path: Path) -> None:
    result, patched = run_patch(simplified(body), tmp_path)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"]


@pytest.mark.parametrize(("outputs", "attributes", "reason"), [
    (["y"], {"axis": 1}, "only the last axis"), (["y"], {"stash_type": 10}, "stash_type is not float32"),
    (["y", "inverse"], {}, "also gives its statistics"),
])  # fmt: skip
def test_another_norm_of_onnx_runtime_is_refused(
    outputs: list[str], attributes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    model = simplified("y = LayerNormalization(x, g)", **attributes)
    model.graph.node[0].output[:] = outputs
    result, patched = run_patch(model, tmp_path, verify=False)
    assert patched is None and reason in result.report["sites"][0]["reason"]
