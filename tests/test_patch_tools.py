"""A patched file in the hands of other tools: they keep the fused nodes and their bodies, and it still computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types

import models
from cutefuse.graph.runner import Runner
from cutefuse.rewrite.patch import Options, patch


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    onnx.save(models.build("yolo_neck", "float32", small=True), str(folder / "m.onnx"))
    assert patch(folder / "m.onnx", folder / "p.onnx", Options(all_sites=True)).exit_code == 0
    return folder / "p.onnx"


def outputs(model: onnx.ModelProto, folder: Path) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {i.name: [1, *(d.dim_value for d in i.type.tensor_type.shape.dim[1:])] for i in model.graph.input}
    return Runner(model, folder)({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()})


def assert_same(model: onnx.ModelProto, path: Path) -> None:
    original = onnx.load(str(path))
    assert fused_types(model) == fused_types(original) and len(fused_types(model)) == 26
    assert {f.name for f in model.functions} == {f.name for f in original.functions}
    for a, b in zip(outputs(original, path.parent), outputs(model, path.parent), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_graphsurgeon_folds_and_cleans_without_harm(patched: Path) -> None:
    gs = pytest.importorskip("onnx_graphsurgeon")
    graph = gs.import_onnx(onnx.load(str(patched)))
    graph.fold_constants().cleanup().toposort()
    assert_same(gs.export_onnx(graph), patched)


@pytest.mark.slow
def test_polygraphy_sanitizes_without_harm(patched: Path, tmp_path: Path) -> None:
    pytest.importorskip("polygraphy")
    out = tmp_path / "clean.onnx"
    command = ["surgeon", "sanitize", str(patched), "--fold-constants", "--cleanup", "-o", str(out)]
    start = "import sys; from polygraphy.tools import main; sys.argv[0] = 'polygraphy'; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", start, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(onnx.load(str(out)), patched)


def test_the_onnx_checker_and_strict_inference_accept_it(patched: Path) -> None:
    onnx.checker.check_model(str(patched), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(str(patched)), strict_mode=True)
    known = {v.name for v in inferred.graph.value_info} | {v.name for v in inferred.graph.output}
    fused = [n for n in inferred.graph.node if n.domain == "cutefuse"]
    assert {n.output[0] for n in fused} <= known, "shapes flow through the bodies"


def test_extracting_a_part_keeps_what_it_needs(patched: Path, tmp_path: Path) -> None:
    node = next(n for n in onnx.load(str(patched)).graph.node if n.domain == "cutefuse")
    onnx.utils.extract_model(str(patched), str(tmp_path / "part.onnx"), list(node.input[:2]), [node.output[0]])
    part = onnx.load(str(tmp_path / "part.onnx"))
    assert fused_types(part) == [node.op_type] and [f.name for f in part.functions] == [node.op_type]
