"""A comparison of engines that differ by more than fusing says so, and credits fusing with nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_files as ef
import pytest

from cutefuse.commands.compare import main
from cutefuse.report.analyse.compare import compare
from cutefuse.report.analyse.tables import compare_terminal
from cutefuse.report.read.reader import find_engines, read_engine


def in_float32(layer: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(layer).replace(ef.FP16_HWC8, ef.FP32_LINEAR))  # type: ignore[no-any-return]


def pair(folder: Path, plain: list[Any], **conversion: Any) -> tuple[Path, Path]:
    before, after = ef.write_pair(folder)
    ef.write_engine(before, "net.onnx", plain, ef.PLAIN_US, 0.11)
    if conversion:
        report = {**ef.PATCH_REPORT, "conversion": conversion}
        (after / "net.cutefuse.patch.json").write_text(json.dumps(report))
    return before, after


FLOAT32 = [in_float32(layer) for layer in ef.PLAIN]
LOWERED = {"dtype": "float16", "scope": "model", "changed": True}


@pytest.mark.parametrize("conversion", [{}, LOWERED], ids=["by the layers", "by the patch report"])
def test_float32_against_float16_credits_fusing_with_nothing(
    conversion: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = pair(tmp_path, FLOAT32, **conversion)
    assert main([str(before), str(after)]) == 0
    headline, caution, *_ = capsys.readouterr().out.splitlines()
    assert "net.onnx (FP32)" in headline and "cutefuse.onnx (FP16)" in headline and "not of fusing alone" in headline
    assert "not like with like" in caution and "FP32" in caution and "FP16" in caution
    page = (after / "compare.html").read_text()
    assert "net.onnx (FP32) → net.cutefuse.onnx (FP16)" in page and "not like with like" in page.lower()
    assert 'class="tile good"' not in page and "groups fused into plugins" not in page
    assert "fused into a plugin; FP32 became FP16" in page
    data = json.loads((after / "compare.json").read_text())
    assert data["unlike"] and list(data["types"][0]) == ["FP32"] and list(data["types"][1]) == ["FP16"]


def test_a_model_that_was_converted_and_runs_in_float32_is_told_by_its_patch_report(tmp_path: Path) -> None:
    """ONNX Runtime computes float16 convolutions in float32 on a CPU, with casts around them."""
    before, after = pair(tmp_path, FLOAT32, **LOWERED)
    ef.write_engine(after, "net.cutefuse.onnx", [in_float32(la) for la in ef.PATCHED], ef.PATCHED_US, 0.08)
    engines = [read_engine(find_engines(folder)[0]) for folder in (before, after)]
    assert "converted to FP16" in compare(engines).unlike
    engines[0].name = "net.plain.onnx"  # of the converted model, undone
    assert compare(engines).unlike == ""


def test_like_with_like_keeps_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair(tmp_path, ef.PLAIN)
    assert main([str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert "not like with like" not in out and "(FP16)" not in out and "next:" not in out
    page = (after / "compare.html").read_text()
    assert 'class="tile good"' in page and "groups fused into plugins" in page


@pytest.mark.parametrize(("times_us", "same"), [([6.0, 11.0, 21.0, 9.5, 10.5, 40.0, 37.0], True), (ef.PLAIN_US, False)])
def test_an_engine_of_both_types_is_no_other_type(times_us: list[float], same: bool, tmp_path: Path) -> None:
    """TensorRT 10 chooses types layer by layer: a third of the work in the other type is a mixed engine."""
    mixed = [*ef.PLAIN[:6], in_float32(ef.PLAIN[6])]
    ef.write_engine(tmp_path / "a", "a", [in_float32(la) for la in ef.PLAIN[:6]] + [ef.PLAIN[6]], times_us, 0.1)
    ef.write_engine(tmp_path / "b", "b", mixed, times_us, 0.1)
    engines = [read_engine(find_engines(tmp_path / n)[0]) for n in "ab"]
    assert (compare(engines).unlike == "") is same


def test_engines_of_other_devices_and_back_ends_are_unlike(tmp_path: Path) -> None:
    before, after = pair(tmp_path, ef.PLAIN)
    path = after / "net.cutefuse.onnx.engine.profile.metadata.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({**given, "device_information": {"Selected Device": "NVIDIA L4"}}))
    engines = [read_engine(find_engines(folder)[0]) for folder in (before, after)]
    assert "NVIDIA H200" in compare(engines).unlike and "NVIDIA L4" in compare_terminal(compare(engines))
    path.write_text(json.dumps({**given, "backend": "onnxruntime"}))
    engines = [read_engine(find_engines(folder)[0]) for folder in (before, after)]
    assert "ONNX Runtime" in compare(engines).unlike


def test_compare_names_the_commands_of_a_fair_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair(tmp_path, FLOAT32, **LOWERED)
    assert main([str(before), str(after)]) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert [s.split()[2 if "-m" not in s else 4] for s in steps] == ["unpatch", "process", "compare"]
    assert "net.plain.onnx" in steps[1] and str(after) in steps[2]


def test_what_unpatch_wrote_is_aligned_with_the_fused_node(tmp_path: Path) -> None:
    """`unpatch` calls the Concat of a site by the site's name, since the model no longer tells its own."""
    concat = {"Name": "/up/Conv/Concat", "LayerType": "Concat", "ParameterType": "Concatenation",
              "Metadata": "[ONNX Layer: /up/Conv/Concat]", "Inputs": ef.PLUGIN["Inputs"][:2],
              "Outputs": [ef.tensor("cat", [1, 128, 64, 64])]}  # fmt: skip
    before, after = pair(tmp_path, ef.PLAIN, **LOWERED)
    ef.write_engine(before, "net.onnx", [*ef.PLAIN[:3], concat, *ef.PLAIN[5:]], [6.0, 11.0, 21.0, 20.0, 40.0, 7.0], 0.1)
    rows = compare([read_engine(find_engines(folder)[0]) for folder in (before, after)]).rows
    assert rows[0].times_us == [pytest.approx(60.0), pytest.approx(32.0)]
    assert not [r for r in rows if "only in" in r.change]
