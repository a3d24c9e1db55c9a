"""Parts of networks: every site is fused, and ONNX Runtime computes the same; the graphs of the onnx wheel likewise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import fused_types, run_patch

import models
from cutefuse_host import Host
from models import published, table
from models.__main__ import main

# The fused sites over a Concat in graph order, and how many nodes of a single source stand beside them.
SITES = {
    "bevfusion_fuser": ["CuteConcatConv2Relu"],
    "centerpoint_neck": ["CuteConcatConv3Relu"],  # and in float16 its deconvolutions, of squares of pixels
    "deeplabv3p_head": ["CuteConcatConv5Relu", "CuteConcatConv2Relu"],
    "hrnet_head": ["CuteConcatConv4Relu"],
    "pidnet": ["CutePreConcatConv2"],
    "yolo_elan": ["CuteConcatConv4Silu", "CuteConcatConv2x2Silu", *(f"CuteConcatConv{n}Silu" for n in (4, 4, 2))],
    "yolo_neck": [*["CuteViewConcatConv2Silu", "CuteConcatConv3Silu"] * 2,
                  *["CuteConcatConv2Silu", "CuteConcatConv3Silu"] * 2],
}  # fmt: skip
SINGLE = {
    "bevfusion_fuser": 1, "centerpoint_neck": 2, "deeplabv3p_head": 7, "hrnet_head": 0, "pidnet": 5, "yolo_elan": 16,
    "yolo_neck": 18,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SITES)
def test_every_site_of_a_part_is_fused_and_computes_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    model = models.build(name, dtype, small=True)
    assert all(v.type.tensor_type.shape.dim[0].dim_param == "batch" for v in model.graph.input)
    result, patched = run_patch(model, tmp_path, include_op=["concat_conv"])
    types = [t for t in fused_types(patched) if "ConcatConv" in t]
    single = [t for t in types if re.match("Cute(View|Pre)?ConcatConv1", t)]
    spread = [t for t in types if "Spread" in t]
    assert spread == [
        f"CuteSpread{s}ConcatConv1Relu" for s in (2, 4) if (name, dtype) == ("centerpoint_neck", "float16")
    ]
    assert [t for t in types if t not in (*single, *spread)] == SITES[name] and len(single) == SINGLE[name]
    proof = result.report["verify"]
    assert proof["passed"] and all(o["max_abs_value"] > 1e-3 for o in proof["outputs"])
    onnx.checker.check_model(patched, full_check=True)
    assert {v.type.tensor_type.shape.dim[0].dim_param for v in patched.graph.output} == {"batch"}


def test_every_part_is_in_the_table_above_or_is_about_norms() -> None:
    assert set(models.PARTS) - set(SITES) == {"vit_block"}
    assert set(models.DEMO) <= set(models.names())


def test_full_sizes_keep_the_shapes_that_the_models_are_known_for(tmp_path: Path) -> None:
    result, _ = run_patch(models.build("bevfusion_fuser", "float16"), tmp_path, dry_run=True)
    assert result.report["sites"][0]["title"] == "80+256->256 3x3 @180x180 Relu"
    result, _ = run_patch(models.build("hrnet_head", "float16"), tmp_path, dry_run=True)
    assert result.report["sites"][0]["title"] == "48+96+192+384->720 1x1 @128x256 Relu"


def test_models_are_the_same_bytes_every_time() -> None:
    first, second = (models.build("hrnet_head", "float32", True).SerializeToString(deterministic=True) for _ in "ab")
    assert first == second


def test_the_command_writes_the_wanted_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "new"), "hrnet_head", "--dtype", "float16", "--small"]) == 0
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "hrnet_head-float16.onnx" and str(path) in capsys.readouterr().out


def test_the_command_names_the_models_when_asked_for_another(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["--out", str(tmp_path), "resnet"]) == 2
    assert "no model 'resnet'" in capsys.readouterr().err and not list(tmp_path.iterdir())


# name -> (candidates, fused nodes over a Concat, fused nodes of one source, merged, refused). squeezenet has 5 direct
# sites and one behind a Dropout. Inception's branches begin with up to four 1x1 convolutions of one tensor. The graphs
# have opset 9, whose bodies cannot compute strides: one kind of stride is fused. The residuals of resnet50 and of
# shufflenet are Sums; densenet joins each joined tensor again, with a BatchNormalization and ReLU before every Conv.
# shufflenet's are grouped or in channel shuffles, the first ones of alexnet too.
PUBLISHED = {
    "bvlc_alexnet": (5, 0, 1, 0, 4),
    "densenet121": (62, 57, 5, 0, 0),
    "inception_v1": (57, 6, 32, 18, 1),
    "inception_v2": (69, 9, 37, 18, 5),
    "resnet50": (53, 0, 45, 0, 8),
    "shufflenet": (30, 0, 1, 0, 29),
    "squeezenet": (26, 6, 19, 0, 1),
    "vgg19": (16, 0, 16, 0, 0),
    "zfnet512": (5, 0, 3, 0, 2),
}
HEAVY = ("bvlc_alexnet", "resnet50", "vgg19", "zfnet512")  # of weights


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in HEAVY else []) for n in PUBLISHED])
def test_published_graphs_are_fused_and_compute_the_same(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(published.load(name), tmp_path)
    single = [t for t in fused_types(patched) if "ConcatConv1" in t]
    summary = result.report["summary"]
    found = (len(fused_types(patched)) - len(single), len(single), summary["merged"], summary["refused"])
    assert (summary["candidates"], *found) == PUBLISHED[name] and result.report["verify"]["passed"]


@pytest.mark.parametrize("name", ["shufflenet", "bvlc_alexnet", "resnet50", "vgg19", "zfnet512"])
def test_published_graphs_without_a_concat_before_a_convolution_are_left_alone_on_demand(
    name: str, tmp_path: Path
) -> None:
    model = onnx.load(str(published.FOLDER / f"light_{name}.onnx"))
    result, patched = run_patch(model, tmp_path, without=["single"])
    assert patched is None and result.exit_code == 3 and result.report["summary"]["fused"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_the_page_of_models_says_what_the_rewriter_does(name: str, tmp_path: Path) -> None:
    result, _ = run_patch(table.generated(name, "float32"), tmp_path, dry_run=True)
    summary = result.report["summary"]
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == f"{summary['nodes_before']}/{summary['nodes_after']}"
    assert cells[3] == "/".join(str(summary[key]) for key in ("candidates", "fused", "merged", "refused"))


def line(name: str, origin: str = "", **more: Any) -> dict[str, Any]:
    counted = {"candidates": 3, "fused": 1, "merged": 1, "refused": 1, "nodes_before": 9, "nodes_after": 5}
    facts = {"also": "1 single", "accepted": 1, "undone": "0.0e+00", "error": "1.0e-06", "refused_by": {"groups": 1}}
    return {"name": name, "origin": origin} | counted | facts | more


def test_a_model_has_one_row_with_the_worst_error_of_its_types() -> None:
    text = table.page_of([line("a"), line("a", error="2.0e-03"), line("b", table.ONNX, error="-", also="-")])
    assert "| a | 9/5 | 3/1/1/1 | 1 single | 2.0e-03 |\n| b (onnx package) | 9/5 | 3/1/1/1 | - | - |\n" in text
    assert "Of 3 files 0 differ" in text and "3 of 3 fused nodes" in text and "Refused: 3 groups." in text


def test_a_model_that_differs_is_counted_and_shown() -> None:
    text = table.page_of([line("a", error=table.DIFFERS), line("a")])
    assert "Of 2 files 1 differ" in text and f"| {table.DIFFERS} |" in text


def test_exports_have_a_sentence_that_tells_the_whole_from_the_rest() -> None:
    text = table.page_of([line("a", table.TORCH), line("a", table.TORCH, refused=0), line("b", table.TORCH, refused=0)])
    assert "3 files" in text and "whole for b, and in part or not at all for a;" in text and "| a |" not in text
    assert "for none;" in table.page_of([line("b", table.TORCH, refused=0)])


@pytest.mark.slow
def test_a_model_is_measured_by_rewriter_verification_and_plugin_host() -> None:
    found = table.measure(Host(), "hrnet_head", "", table.generated("hrnet_head", "float32"))
    assert (found["candidates"], found["fused"], found["accepted"]) == (1, 1, 1)
    assert (
        float(found["error"]) < 1e-5 and float(found["undone"]) < 1e-5 and found["nodes_after"] < found["nodes_before"]
    )
