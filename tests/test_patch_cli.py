"""The command: files, exit codes, options, losslessness, errors in one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import engine_files as ef
import onnx
import pytest
from graphs import TWO, fused_types, graph

import cutefuse
from cutefuse.commands.patch import main
from cutefuse.rewrite import apply as rewrite
from cutefuse.rewrite.patch import Options, patch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(path))
    return path


def test_patching_writes_model_and_report_beside_the_input(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = source.read_bytes()
    shapes = ["--input-shape", "a:1x8x9x7", "--input-shape", "b:1x16x9x7"]
    assert main([str(source), "--all", "--verify", *shapes]) == 0
    assert {p.name for p in source.parent.iterdir()} == {"model.onnx", "model.cutefuse.onnx", "model.patch.json"}
    assert source.read_bytes() == before
    out = capsys.readouterr().out
    assert "2 candidates: 2 fused" in out and "verified with onnxruntime" in out and "\x1b" not in out
    report = json.loads((source.parent / "model.patch.json").read_text())
    assert report["schema"] == 1 and report["tool"] == {"name": "cutefuse", "version": cutefuse.__version__}
    assert report["input"] == {"path": str(source), "sha256": hashlib.sha256(before).hexdigest()}
    first = report["sites"][0]
    assert (first["name"], first["operator"], first["op_type"]) == ("Conv_1", "concat_conv", "CuteConcatConv2Relu")
    assert first["nodes"] == ["Concat_0", "Conv_1", "Relu_2"] and first["status"] == "fused" and first["reason"] == ""
    assert first["inputs"] == ["a", "b"] and first["outputs"] == ["y1"] and first["dtype"] == "float32"
    assert first["shapes"]["outputs"] == [[-1, 12, 7, 5]] and first["flops"] == 2 * 12 * 35 * 24 * 9
    assert first["bytes_saved"] == 2 * 24 * 63 * 4
    assert report["verify"]["passed"] and report["summary"]["fused"] == 2
    assert [s["name"] for s in report["verify"]["sites"]] == ["Conv_1", "Conv_4"]


def test_figures_of_unknown_sizes_are_question_marks(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = source.with_name("wide.onnx")
    onnx.save(graph(TWO, outputs=("y1", "y2"), inputs={"a": "n,8,h,7", "b": "n,16,h,7"}), str(wide))
    assert main([str(wide), "--all", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "? MB of traffic gone" in out and "--input-shape a:?x8x?x7 --input-shape b:?x16x?x7" in out
    assert main([str(source), "--all", "--dry-run", "--input-shape", "a:1x8x9x7", "--input-shape", "b:1x16x9x7"]) == 0
    assert "?" not in capsys.readouterr().out


def test_an_input_shape_reaches_every_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"
    onnx.save(graph(body, inputs={"a": "n,8,h,q", "b": "n,16,h,q"}), str(tmp_path / "m.onnx"))
    words = [str(tmp_path / "m.onnx"), "--all", "--dry-run"]
    assert main(words) == 0
    assert "@?x?" in (out := capsys.readouterr().out), out
    assert main([*words, "--input-shape", "a:2x8x9x7", "--input-shape", "b:2x16x9x7"]) == 0
    assert "@7x5" in (out := capsys.readouterr().out) and "?" not in out


def test_an_input_shape_of_no_input_is_a_sentence(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--input-shape", "images:1x3x8x8"]) == 2
    assert "--input-shape names 'images'; the model's inputs are a, b" in capsys.readouterr().err
    assert not source.with_name("model.cutefuse.onnx").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--exclude", "nothing*"], "--exclude 'nothing*' names no node of a candidate"),
        (["--keep-float32", "Conv_1"], "--keep-float32 'Conv_1' does nothing without --dtype"),
        (["--dtype", "fp16", "--keep-float32", "head*"], "--keep-float32 'head*' names no node of the model"),
        (["--scope", "sites"], "--scope does nothing without --dtype"),
        (["--min-gain", "5us", "--all"], "--min-gain does nothing with --all"),
        (["--min-gain", "5us", "--exclude", "*"], "--min-gain does nothing: there is no site to choose"),
        (["--include", "Relu_0"], "--include 'Relu_0' names no node of a candidate"),
        (["--include-op", "row_norm"], "--include-op row_norm names no candidate's operator"),
        (["--exclude-op", "row_norm"], "--exclude-op row_norm names no candidate's operator"),
        (["--without", "residual"], "--without residual does nothing: no candidate is followed by the Add of a"),
        (["--without", "single"], "--without single does nothing: no candidate reads a single tensor"),
        (["--dtype", "bf16", "--keep-float32", "head*"], "names no node of a candidate, and --scope sites lowers"),
        (["--dtype", "fp16", "--scope", "sites", "--include", "z"], "--dtype does nothing: no site that can be fused"),
        (["--seed", "3"], "--seed does nothing without --verify"),
        (["--verify"], "--verify does nothing with --dry-run"),
        (["--rival", "cudnn"], "--rival does nothing without --tune"),
    ],
)
def test_an_option_that_changes_nothing_says_so(
    options: list[str], words: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(source), "--dry-run", *options])
    assert words in capsys.readouterr().out


def test_a_type_that_the_model_has_is_no_conversion(source: Path, tmp_path: Path) -> None:
    lower = tmp_path / "half.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2"), dtype="float16"), str(lower))
    said = patch(lower, tmp_path / "out.onnx", Options(dtype="float16", dry_run=True)).report
    (line,) = said["unused_options"]
    assert "--dtype does nothing" in line and "no float32" in line
    said = patch(source, tmp_path / "out.onnx", Options(dtype="float16", dry_run=True)).report
    assert said["unused_options"] == [] and said["conversion"]["changed"]


def test_an_input_shape_that_the_model_has_is_idle(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2"), inputs={"a": "1,8,9,7", "b": "n,16,9,7"}), str(fixed))
    shapes = {"a": (1, 8, 9, 7), "b": (1, 16, 9, 7)}
    said = patch(fixed, tmp_path / "out.onnx", Options(shapes=shapes, dry_run=True)).report["unused_options"]
    assert said == ["--input-shape a:1x8x9x7 does nothing: the model has that size"]


def test_beside_a_profile_the_engine_and_the_gpu_price_only_the_rest(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.commands import patch as command

    monkeypatch.setattr(command, "profiled", lambda profile, model: None)
    main([str(source), "--dry-run", "--profile", "plain/", "--gpu", "H200", "--trt-version", "10.3"])
    out = capsys.readouterr().out
    assert "--gpu prices only what --profile has not timed: what stands beside the sites" in out
    assert "--trt-version prices only what --profile has not timed" in out
    main([str(source), "--dry-run", "--gpu", "H200", "--trt-version", "10.3"])
    assert "prices only" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--exclude", "Conv_1", "--dtype", "fp16", "--keep-float32", "Conv_4"],
        ["--dtype", "bf16", "--keep-float32", "Conv_4"],
        ["--include-op", "concat_conv", "--min-gain", "1us", "--sm", "90", "--gpu", "H200"],
        ["--without", "parallel", "--scope", "sites", "--dtype", "fp16"],
        ["--input-shape", "a:1x8x9x7", "--all", "--seed", "0"],
    ],
)
def test_options_that_do_something_are_not_called_idle(
    options: list[str], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(source), "--dry-run", *options])
    assert "does nothing" not in (out := capsys.readouterr().out) and "names no" not in out


def test_the_output_option_names_model_and_report(source: Path, tmp_path: Path) -> None:
    assert main([str(source), "-o", str(tmp_path / "out.onnx")]) == 0
    assert (tmp_path / "out.onnx").exists() and (tmp_path / "out.patch.json").exists()


def test_patching_twice_finds_nothing_more(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source)]) == 0
    capsys.readouterr()
    assert main([str(source.with_name("model.cutefuse.onnx"))]) == 3
    assert "" not in (lines := capsys.readouterr().out.splitlines()) and lines[-1].startswith("nothing to patch")
    assert not source.with_name("model.cutefuse.cutefuse.onnx").exists()


def test_a_second_patch_of_the_rest_keeps_the_first(source: Path, tmp_path: Path) -> None:
    half, whole = tmp_path / "half.onnx", tmp_path / "whole.onnx"
    assert main([str(source), "-o", str(half), "--include", "Conv_1"]) == 0
    assert main([str(half), "-o", str(whole), "--verify"]) == 0
    assert fused_types(onnx.load(str(whole))) == ["CuteConcatConv2Relu", "CuteConcatConv2Tanh"]


def test_a_dry_run_predicts_and_writes_nothing(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--dry-run", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert [p.name for p in source.parent.iterdir()] == ["model.onnx"]
    assert main([str(source), "--json"]) == 0
    real = json.loads(capsys.readouterr().out)
    for report in (predicted, real):
        report["summary"].pop("seconds")
    assert predicted == real


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        (["--include", "Conv_1"], ["Conv_1"]),
        (["--include", "*_1", "--include", "Tanh*"], ["Conv_1", "Conv_4"]),
        (["--exclude", "Relu_*"], ["Conv_4"]),
        (["--include", "Conv_*", "--exclude", "y2"], ["Conv_1"]),
        (["--include-op", "concat_conv"], ["Conv_1", "Conv_4"]),
    ],
)
def test_filters_choose_sites_by_node_tensor_or_operator(source: Path, options: list[str], fused: list[str]) -> None:
    assert main([str(source), *options]) == 0
    sites = json.loads(source.with_name("model.patch.json").read_text())["sites"]
    assert [s["name"] for s in sites if s["status"] == "fused"] == fused
    assert all(s["reason"] for s in sites if s["status"] == "excluded") and len(sites) == 2


@pytest.mark.parametrize("options", [["--exclude", "*"], ["--include", "nobody"], ["--exclude-op", "concat_conv"]])
def test_excluding_everything_is_nothing_to_patch(source: Path, options: list[str]) -> None:
    assert main([str(source), *options]) == 3
    assert [p.name for p in source.parent.iterdir()] == ["model.onnx"]


def test_min_gain_skips_sites_that_the_profile_calls_cheap(source: Path, tmp_path: Path) -> None:
    names = ["Concat_0", "Conv_1", "Concat_3", "Conv_4"]
    layers = [{"Name": n, "LayerType": n[:-2], "Metadata": f"[ONNX Layer: {n}]"} for n in names]
    ef.write_engine(tmp_path / "profile", "model.onnx", layers, [12.0, 90.0, 2.0, 90.0])
    assert main([str(source), "--profile", str(tmp_path / "profile"), "--min-gain", "0.005ms"]) == 0
    first, second = json.loads(source.with_name("model.patch.json").read_text())["sites"]
    assert first["status"] == "fused"
    assert second["status"] == "left out" and "saves 2.0 us, less than --min-gain 5 us" in second["reason"]
    assert (first["basis"], second["basis"], first["gain_us"]) == ("profile", "profile", 12.0)


def test_a_wrong_packing_fails_verification_and_leaves_no_model(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cutefuse.match.conv import read as conv_facts

    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w[:, ::-1], *of))
    assert main([str(source), "--verify"]) == 1
    assert "verification failed" in capsys.readouterr().err
    assert {p.name for p in source.parent.iterdir()} == {"model.onnx", "model.patch.json"}
    proof = json.loads(source.with_name("model.patch.json").read_text())["verify"]
    assert not proof["passed"] and proof["first_wrong_site"] == "Conv_1"


def test_verification_needs_no_function_bodies_in_the_written_file(source: Path) -> None:
    assert main([str(source), "--no-functions", "--verify"]) == 0
    patched = onnx.load(str(source.with_name("model.cutefuse.onnx")))
    assert not patched.functions and fused_types(patched) == ["CuteConcatConv2Relu", "CuteConcatConv2Tanh"]
    assert patched.ir_version == onnx.load(str(source)).ir_version


def test_an_input_shape_reaches_the_verification(tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"
    onnx.save(graph(body, inputs={"a": "n,8,h,q", "b": "n,16,h,q"}), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--verify", "--input-shape", "a:3x8x12x10"]) == 0
    proof = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    assert proof["inputs"] == {"a": [3, 8, 12, 10], "b": [3, 16, 12, 10]}


def test_the_output_must_not_be_the_input(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = source.read_bytes()
    assert main([str(source), "-o", str(source)]) == 2
    assert "choose another -o" in capsys.readouterr().err and source.read_bytes() == before


def test_an_output_in_a_missing_folder_is_an_error(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "-o", str(source.parent / "no" / "out.onnx")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_unknown_operator_is_named(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--include-op", "attention"]) == 2
    assert "no operator 'attention'; choose one of concat_conv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--input-shape", "a:1x"], ["--input-shape", "1x2"], ["--min-gain", "fast"], ["--seed=-1"], ["--sm=9.0"]],
)
def test_malformed_options_exit_2(source: Path, option: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(source), *option])
    assert exit_.value.code == 2


def test_a_failure_while_writing_leaves_nothing_behind(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise cutefuse.CutefuseError("the disk is full; free some space")

    monkeypatch.setattr(rewrite._Operands, "add", fail)
    assert main([str(source)]) == 2
    assert [p.name for p in source.parent.iterdir()] == ["model.onnx"]


def test_the_script_runs_from_anywhere(source: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/patch_onnx.py"), "model.onnx", "--dry-run"]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "2 fused" in done.stdout, done.stderr


def test_a_missing_library_is_one_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, str(ROOT / "scripts/patch_onnx.py"), str(source)], capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 2 and "libcutefuse.so was not found" in done.stderr and done.stderr.count("\n") == 1


def test_a_library_of_another_system_is_one_sentence(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcutefuse.so").write_bytes(b"no library")
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, str(ROOT / "scripts/patch_onnx.py"), str(source)], capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 2 and "does not load on this system" in done.stderr and done.stderr.count("\n") == 1


def test_of_two_sites_over_the_same_nodes_one_is_refused_until_the_other_is_excluded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.match import find
    from cutefuse.match.conv.build import ConvSites
    from cutefuse.operators.concat_conv import ConcatConv
    from cutefuse.rewrite.passes import filter as filtering

    class RivalOp(ConcatConv):
        stem = "rival"

    class Rival(ConvSites):
        op = RivalOp()
        anchors = frozenset({"Relu"})

        def match(self, graph, node):  # type: ignore[no-untyped-def]
            return super().match(graph, graph.producer(node.input[0]))

    monkeypatch.setattr(find, "finders", lambda *_: (ConvSites(), Rival()))
    monkeypatch.setattr(filtering, "operators", lambda: (ConvSites.op, Rival.op))
    assert main([str(source), "--verify"]) == 0
    found = json.loads(source.with_name("model.patch.json").read_text())["sites"]
    assert [(s["name"], s["status"]) for s in found] == [
        ("Conv_1", "fused"),
        ("Relu_2", "refused"),
        ("Conv_4", "fused"),
    ]
    assert found[1]["reason"].startswith("it overlaps with the concat_conv site 'Conv_1'")
    assert main([str(source), "--verify", "--exclude-op", "concat_conv"]) == 0
    found = json.loads(source.with_name("model.patch.json").read_text())["sites"]
    assert [s["status"] for s in found] == ["excluded", "fused", "excluded"]


def test_the_function_can_be_used_without_the_command(source: Path) -> None:
    result = patch(source, source.with_name("out.onnx"), Options(all_sites=True, exclude=["Conv_4"]))
    assert result.exit_code == 0 and [s.status for s in result.sites] == ["fused", "excluded"]


def test_only_the_named_sites_are_patched(source: Path) -> None:
    result = patch(source, source.with_name("out.onnx"), Options(only=frozenset({"Conv_1"})))
    assert [(s.name, s.status) for s in result.sites] == [("Conv_1", "fused"), ("Conv_4", "excluded")]
    assert "not among the sites" in result.sites[1].reason
    assert fused_types(onnx.load(str(source.with_name("out.onnx")))) == ["CuteConcatConv2Relu"]
    assert patch(source, source.with_name("none.onnx"), Options(only=frozenset())).exit_code == 3
