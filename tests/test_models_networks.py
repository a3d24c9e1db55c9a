"""The whole networks: valid, at their published size, sane in ONNX Runtime, and patched without a change of result."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs import fused_types, run_patch

import models
from models.__main__ import main

# Fused sites by the number of joined sources, the same for small and full sizes.
SITES = {
    "yolov8n": {2: 10, 3: 2, 4: 1},
    "yolov8s": {2: 10, 3: 2, 4: 1},
    "yolov8m": {2: 4, 3: 6, 4: 1, 5: 2},
    "yolo11s": {2: 16, 4: 1},
    "unet": {2: 4},
    "unet_pp": {2: 4, 3: 3, 4: 2, 5: 1},
    "smp_unet": {2: 4},
    "smp_unet_pp": {2: 4, 3: 3, 4: 2, 5: 1},
    "deeplabv3p": {5: 1},
    "hrnet_ocr": {2: 1, 4: 2},
    "googlenet": {4: 6},
    "inception_v3": {3: 4, 4: 13, 6: 2},
    "squeezenet1_1": {2: 6},
    "densenet121": {2: 6, 3: 10, 4: 10, 5: 9, 6: 9, 7: 9, 8: 4},  # pre-activated, older layers joined in groups of 7
    "vovnet39": {6: 6},
    "dla34": {2: 3, 3: 1, 4: 2},
    "bevfusion_neck": {2: 2},
    "bevfusion_decoder": {2: 2},
    "centerpoint": {3: 1},
    "raft_update": {2: 1, 4: 4},  # the GRU's input is joined, and joined again with the state
}
# Fused nodes of one source, beside them: an activation, a residual, a range or an enlargement is what they have.
SINGLE = {
    "yolov8n": 41, "yolov8s": 41, "yolov8m": 61, "yolo11s": 54, "unet": 14, "unet_pp": 20, "smp_unet": 39,
    "smp_unet_pp": 45, "deeplabv3p": 41, "hrnet_ocr": 265, "googlenet": 33, "inception_v3": 56, "squeezenet1_1": 20,
    "densenet121": 5, "vovnet39": 33, "dla34": 27, "bevfusion_neck": 2, "bevfusion_decoder": 14, "centerpoint": 27,
    "raft_update": 5,
}  # fmt: skip
# As the authors or the package of a network publish them: parameters, and 10^9 multiplications and additions an image.
# HRNet's are 1296.8 * 10^9 multiply-adds of 1024x2048 pixels.
PUBLISHED = {
    "yolov8n": (3_151_904, 8.7), "yolov8s": (11_156_544, 28.6), "yolov8m": (25_886_080, 78.9),
    "yolo11s": (9_443_760, 21.5), "googlenet": (6_624_904, 3.0), "inception_v3": (23_834_568, 11.43),
    "squeezenet1_1": (1_235_496, 0.70), "densenet121": (7_978_856, 5.67), "vovnet39": (22_600_296, 14.18),
    "dla34": (15_742_104, 6.14), "hrnet_ocr": (None, 2 * 1296.8 / 4),
}  # fmt: skip
NOT_FOLDED = ("yolo", "squeezenet")  # published without BatchNormalizations

FOLDER = Path(models.__file__).parent
# What a file may import beside the standard library: the generators need nothing that a deployment machine lacks.
IMPORTS = {
    "": {"numpy", "onnx", "models"},
    "blocks": {"numpy", "models.net", "models.blocks"},
    "networks": {"numpy", "models.net", "models.blocks"},
    "parts": {"numpy", "models.net"},
}


@pytest.mark.parametrize(
    "path",
    [
        FOLDER / "net.py",
        FOLDER / "moments.py",
        *(p for f in ("blocks", "networks", "parts") for p in (FOLDER / f).glob("*.py")),
    ],
    ids=lambda p: p.stem,
)
def test_a_generator_imports_numpy_and_onnx_alone(path: Path) -> None:
    allowed = IMPORTS["" if path.parent == FOLDER else path.parent.name]
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            standard = name.partition(".")[0] in sys.stdlib_module_names
            assert standard or any(name == a or name.startswith(f"{a}.") for a in allowed), f"{path} imports {name}"


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def inputs(model: onnx.ModelProto, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dims = [d.dim_value or batch for d in kind.shape.dim]
        feeds[value.name] = rng.standard_normal(dims).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return feeds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", models.NETWORKS)
def test_no_activation_of_a_network_vanishes_or_explodes(name: str, dtype: str) -> None:
    model = models.build(name, dtype, small=True, batch=1)
    results = {o.name for o in model.graph.output}
    sums = [n.output[0] for n in model.graph.node if n.op_type in ("Conv", "Gemm", "Add")]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(s) for s in sums if s not in results)
    ran = session(model)
    names = [o.name for o in ran.get_outputs()]
    values, others = (dict(zip(names, ran.run(None, inputs(model, 1, seed)), strict=True)) for seed in range(2))
    assert all(np.isfinite(v).all() for v in values.values())
    sizes = {s: math.sqrt(np.mean(values[s].astype(np.float64) ** 2)) for s in sums}
    boxes = {s for s in sums if re.search(r"model\.2[23]/(Add|dfl)", s)}  # in cells and bins, not around zero
    assert all(0.05 < size < 20 for s, size in sizes.items() if s not in boxes), sizes
    for result in results:
        first, second = (v[result].astype(np.float64) for v in (values, others))
        assert np.abs(first - second).mean() > 0.1 * np.abs(first).mean(), f"{result} hardly depends on the input"


@pytest.mark.slow
@pytest.mark.parametrize("name", models.NETWORKS)
def test_every_network_is_patched_and_computes_the_same(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(models.build(name, small=True, batch=1), tmp_path, include_op=["concat_conv"])
    counts = Counter(int(re.search(r"ConcatConv(\d)", t)[1]) for t in fused_types(patched))
    assert counts == {1: SINGLE[name], **SITES[name]} and result.report["verify"]["passed"]
    onnx.checker.check_model(patched, full_check=True)


def test_every_network_is_in_the_table_of_sites() -> None:
    assert set(SITES) == set(SINGLE) == set(models.NETWORKS) and not set(models.NETWORKS) & set(models.PARTS)


def operations(model: onnx.ModelProto) -> int:
    """Multiplications and additions of all convolutions and matrix products."""
    graph = model.graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.output)}
    weights = {t.name: list(t.dims) for t in graph.initializer}
    total = 0
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm"):
            total += math.prod(shapes[node.output[0]]) * math.prod(weights[node.input[1]][1:])
        elif node.op_type == "MatMul":
            total += math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
    return 2 * total


def parameters(model: onnx.ModelProto, unfold: bool) -> int:
    """Weights and biases; unfold: those before the exporter folded each BatchNormalization, which has two a channel."""
    sizes = {t.name: math.prod(t.dims) for t in model.graph.initializer}
    total = 0
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            total += sum(sizes[name] for name in node.input[1:])
            if unfold and node.op_type == "Conv" and len(node.input) == 3 and node.name != "/fc/Conv":
                total += sizes[node.input[2]]
        elif node.op_type == "BatchNormalization":
            total += sizes[node.input[1]] + sizes[node.input[2]]
    return total


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_network_at_deployment_size_is_as_large_as_published(name: str) -> None:
    model = models.build(name, batch=1)
    expected_parameters, expected_operations = PUBLISHED[name]
    assert operations(model) / 1e9 == pytest.approx(expected_operations, rel=0.01)
    if expected_parameters is not None:
        assert parameters(model, not name.startswith(NOT_FOLDED)) == expected_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolo11s", "smp_unet", "hrnet_ocr", "bevfusion_neck", "googlenet"])
def test_a_dynamic_batch_computes_each_image_as_if_alone(name: str) -> None:
    model = models.build(name, small=True)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    ran, feeds = session(model), inputs(model, 2)
    together = ran.run(None, feeds)
    alone = [ran.run(None, {k: v[i : i + 1] for k, v in feeds.items()}) for i in range(2)]
    for i, result in enumerate(together):
        assert result.shape[0] == 2
        parts = np.concatenate([a[i] for a in alone])
        np.testing.assert_allclose(result, parts, rtol=0, atol=1e-4 * np.abs(parts).max())
        assert np.abs(result[0] - result[1]).max() > 1e-3


@pytest.mark.parametrize(("name", "images"), [("yolov8m", 8), ("unet_pp", 8), ("bevfusion_neck", 48)])
def test_a_fixed_batch_is_in_every_shape(name: str, images: int) -> None:
    model = models.build(name, "float16", small=True, batch=8)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_value == images
    assert not [v for v in model.graph.value_info for d in v.type.tensor_type.shape.dim if d.dim_param]


def test_the_size_of_the_input_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float16", "--small", "--batch", "2", "--size", "96"]
    assert main(["yolov8n", "--out", str(tmp_path), *options]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "yolov8n-float16-b2-96.onnx"
    shape = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_value for d in shape] == [2, 3, 96, 96]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["yolov8n", "--size", "100"], "give a multiple of 32"),
        (["yolov8n", "--size", "16"], "give a multiple of 32"),
        (["hrnet_head", "--size", "128"], "has one size; leave --size out"),
    ],
)
def test_a_size_that_the_model_cannot_have_is_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path), "--small"]) == 2
    assert reason in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--batch", "--size"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "x"])
def test_batch_and_size_are_positive_whole_numbers(option: str, value: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["yolov8n", f"{option}={value}"])
    assert stopped.value.code == 2 and "whole number" in capsys.readouterr().err
