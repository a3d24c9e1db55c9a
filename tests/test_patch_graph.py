"""`cutefuse.patch_graph`: an onnx-graphsurgeon Graph goes in, a new one with fused nodes comes out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import TWO, fused_types, graph
from onnx import helper

import cutefuse
import models
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.runner import Runner
from cutefuse.rewrite import in_memory
from cutefuse.rewrite.patch import Options, patch

gs = pytest.importorskip("onnx_graphsurgeon")
PAGE = (Path(__file__).resolve().parent.parent / "docs/patch.md").read_text()
SITE = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"


def site(body: str = SITE) -> Any:
    """A Graph with one site of a Concat, a Conv and a Relu."""
    return gs.import_onnx(graph(body))


def patched(model: onnx.ModelProto, **choices: Any) -> tuple[Any, dict[str, Any]]:
    report: dict[str, Any] = {}
    return cutefuse.patch_graph(gs.import_onnx(model), report, all_sites=True, **choices), report


def test_a_graph_is_patched_as_the_file_is(tmp_path: Path) -> None:
    onnx.save(graph(SITE), str(tmp_path / "m.onnx"))
    assert patch(tmp_path / "m.onnx", tmp_path / "p.onnx", Options(all_sites=True)).exit_code == 0
    expected = onnx.load(str(tmp_path / "p.onnx"))
    result, report = patched(graph(SITE))
    exported = gs.export_onnx(result)
    onnx.checker.check_model(exported, full_check=True)
    assert fused_types(exported) == fused_types(expected) == ["CuteConcatConv2Relu"]
    assert {f.name for f in exported.functions} == {f.name for f in expected.functions}
    rng = np.random.default_rng(0)
    feed = {"a": rng.standard_normal((2, 8, 9, 7), np.float32), "b": rng.standard_normal((2, 16, 9, 7), np.float32)}
    (a,), (b,) = Runner(expected, tmp_path)(feed), Runner(exported, tmp_path)(feed)
    assert np.array_equal(a, b)
    assert report["summary"]["fused"] == 1 and report["input"]["path"] == "test" and report["sites"][0]["name"]


def test_what_a_graph_says_of_itself_is_kept() -> None:
    model = graph(SITE)
    model.producer_name, model.producer_version, model.ir_version = "exporter", "7", 9
    model.graph.doc_string = "what it is for"
    model.opset_import.append(helper.make_opsetid("their.domain", 3))
    inner = [helper.make_node("Abs", ["x"], ["y"])]
    model.functions.append(
        helper.make_function("their.domain", "Theirs", ["x"], ["y"], inner, [helper.make_opsetid("", 17)])
    )
    model.graph.node.append(helper.make_node("Theirs", ["y"], ["z"], domain="their.domain"))
    given = gs.import_onnx(model)
    given.notes = {"owner": "they"}
    result = cutefuse.patch_graph(given, all_sites=True)
    exported = gs.export_onnx(result)
    assert (exported.producer_name, exported.producer_version, exported.ir_version) == ("exporter", "7", 9)
    assert exported.graph.doc_string == "what it is for" and exported.graph.name == "test"
    assert {o.domain: o.version for o in exported.opset_import} == {"": 17, "their.domain": 3, "cutefuse": 1}
    assert [f.name for f in exported.functions] == ["Theirs", "CuteConcatConv2Relu"]
    assert exported.functions[0] == model.functions[0]
    assert result.notes == {"owner": "they"}


def test_the_given_graph_stays_as_it_is() -> None:
    given = site()
    before = gs.export_onnx(given).SerializeToString()
    assert cutefuse.patch_graph(given, all_sites=True) is not given
    assert gs.export_onnx(given).SerializeToString() == before


def test_nodes_in_any_order_are_taken() -> None:
    given = site()
    given.nodes.reverse()
    assert [n.op for n in cutefuse.patch_graph(given, all_sites=True).nodes] == ["CuteConcatConv2Relu"]


@pytest.mark.parametrize(
    ("body", "choices"),
    [("y = Relu(a)", {"all_sites": True}), (SITE, {"exclude": ["*"]}), (SITE, {"all_sites": True, "dry_run": True})],
)
def test_where_nothing_is_fused_the_new_graph_has_the_same_nodes(body: str, choices: dict[str, Any]) -> None:
    given, report = site(body), dict[str, Any]()
    result = cutefuse.patch_graph(given, report, **choices)
    assert result is not given and [n.op for n in result.nodes] == [n.op for n in given.nodes]
    assert report["summary"]["fused"] == (1 if "dry_run" in choices else 0)


def test_weights_beyond_a_message_go_through_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutefuse.graph.store.EXTERNAL_LIMIT", 1000)
    result, _ = patched(models.build("yolo_neck", "float32", small=True))
    exported = gs.export_onnx(result)
    assert len(fused_types(exported)) == 26 and not any(t.external_data for t in exported.graph.initializer)


@pytest.mark.parametrize("wrong", [None, "model.onnx", graph(SITE), []], ids=["None", "path", "ModelProto", "list"])
def test_anything_else_than_a_graph_is_one_sentence(wrong: Any) -> None:
    with pytest.raises(CutefuseError, match=r"patch_graph was given a \w+; give an onnx_graphsurgeon.Graph"):
        cutefuse.patch_graph(wrong)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"al_sites": True}, "patch_graph has no choice 'al_sites'; choose among include, "),
        ({"output": "x.onnx"}, "no choice 'output'"),
        ({"sm": 35}, "--sm 0 takes any"),
        ({"include_op": ["no_such"]}, "there is no operator 'no_such'"),
        ({"gpu": "no such board"}, "no such board"),
    ],
)
def test_a_wrong_choice_is_one_sentence(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(CutefuseError) as error:
        cutefuse.patch_graph(site(), **choices)
    assert words in str(error.value)


def test_a_graph_that_cannot_be_exported_is_one_sentence() -> None:
    given = site()
    given.outputs[0].dtype = None
    with pytest.raises(CutefuseError, match="cannot be exported .*dtype.*; repair it"):
        cutefuse.patch_graph(given)


def test_weights_that_were_left_in_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(graph(SITE), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    given = gs.import_onnx(onnx.load(str(path), load_external_data=False))
    with pytest.raises(CutefuseError, match="lies in a file; load it with the model"):
        cutefuse.patch_graph(given, all_sites=True)


def test_a_difference_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    done, _ = in_memory.patched(graph(SITE), Options(all_sites=True, verify=True), "g")
    done.report["verify"] = {**done.report["verify"], "passed": False, "why": "output y differs"}
    monkeypatch.setattr(in_memory, "patched", lambda model, options, name: (done, None))
    with pytest.raises(VerificationError, match="computes something else: output y differs"):
        cutefuse.patch_graph(site(), verify=True)


def test_without_the_package_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_graphsurgeon", None)
    with pytest.raises(CutefuseError, match="pip install onnx-graphsurgeon"):
        in_memory.patch_graph(object())


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'patch_grap'"):
        _ = cutefuse.patch_grap


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """A model as model.onnx in the current folder, with metadata of its own."""
    made = models.build("yolo_neck", "float32", small=True)
    helper.set_model_props(made, {"author": "they"})
    onnx.save(made, str(tmp_path / "model.onnx"))
    monkeypatch.chdir(tmp_path)
    return made


def test_the_pages_examples_run(model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]) -> None:
    in_a_program, example = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    exec(compile(in_a_program, "docs/patch.md", "exec"), {})
    assert "sites fused, predicted" in capsys.readouterr().out
    exec(compile(example, "docs/patch.md", "exec"), {})
    assert "26 sites fused: {" in capsys.readouterr().out
    written = onnx.load("model.cutefuse.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert {p.key: p.value for p in written.metadata_props}["author"] == "they" and len(fused_types(written)) == 26


@pytest.mark.slow
def test_the_pages_recipe_for_polygraphy_runs(model: onnx.ModelProto, tmp_path: Path) -> None:
    pytest.importorskip("polygraphy")
    assert patch(Path("model.onnx"), Path("model.cutefuse.onnx"), Options(all_sites=True)).exit_code == 0
    lines = re.findall(r"^polygraphy (run .*--onnxrt .*)$", PAGE, re.M)
    start = "import sys; from polygraphy.tools import main; sys.argv[0] = 'polygraphy'; sys.exit(main())"
    for line in lines:
        done = subprocess.run([sys.executable, "-c", start, *line.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 2 and "PASSED" in done.stdout and "deprecated" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["include", "exclude", "without", "include_op", "exclude_op"])
def test_a_text_is_one_pattern_wherever_several_may_be_given(name: str) -> None:
    word = {"without": "parallel", "include_op": "concat_conv", "exclude_op": "concat_conv"}.get(name, "Conv_9*")
    _, one = patched(graph(TWO, outputs=("y1", "y2")), **{name: word})
    _, several = patched(graph(TWO, outputs=("y1", "y2")), **{name: [word]})
    assert [s["status"] for s in one["sites"]] == [s["status"] for s in several["sites"]]


def test_a_text_chooses_no_more_and_no_less_than_its_sites() -> None:
    model = graph(TWO, outputs=("y1", "y2"))
    for choices, fused in [
        ({"include": "Conv_4*"}, ["Conv_4"]), ({"exclude": "Conv_4*"}, ["Conv_1"]), ({"only": "Conv_4"}, ["Conv_4"]),
        ({"include": "Conv_9*"}, []), ({"include": "*"}, ["Conv_1", "Conv_4"]),
    ]:  # fmt: skip
        _, report = patched(model, **choices)
        assert [s["name"] for s in report["sites"] if s["status"] == "fused"] == fused, choices


def test_a_text_keeps_its_nodes_in_float32() -> None:
    _, report = patched(graph(TWO, outputs=("y1", "y2")), dtype="fp16", scope="sites", keep_float32="Conv_4")
    assert {s["name"]: s["dtype"] for s in report["sites"]} == {"Conv_1": "float16", "Conv_4": "float32"}


@pytest.mark.parametrize("dtype, scope", [("fp16", ""), ("half", "sites"), ("bf16", "")])
def test_types_have_their_usual_short_names(dtype: str, scope: str) -> None:
    _, report = patched(graph(SITE), dtype=dtype, scope=scope)
    assert report["conversion"]["dtype"] == {"bf16": "bfloat16"}.get(dtype, "float16")


@pytest.mark.parametrize(
    "choices, words",
    [
        ({"without": "nope"}, "residual"), ({"without": ["single", "nope"]}, "residual"), ({"sm": "90"}, "sm=90"),
        ({"sm": 9.0}, "sm=90"), ({"sm": -1}, "sm=90"), ({"dtype": "nonsense"}, "float16"), ({"dtype": 16}, "text"),
        ({"min_gain_us": "5us"}, "microseconds"), ({"verify": "no"}, "True or False"), ({"scope": "all"}, "sites"),
        ({"include": [1]}, "text"), ({"include": None}, "text"), ({"shapes": {"a": "1x8x9x7"}}, "224"),
        ({"shapes": [("a", 1)]}, "224"), ({"trt_version": 10.3}, "text"), ({"seed": -1}, "whole number"),
        ({"include_op": "nope"}, "concat_conv"), ({"engine": "nope"}, "tensorrt"), ({"all_sites": 1}, "True or False"),
    ],
)  # fmt: skip
def test_a_choice_that_there_is_not_is_refused_with_what_is_allowed(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(CutefuseError, match=words) as caught:
        cutefuse.patch_graph(site(), **choices)
    assert next(iter(choices)) in str(caught.value) or "operator" in str(caught.value) or "engine" in str(caught.value)
