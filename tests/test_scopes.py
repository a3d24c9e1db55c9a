"""Sites chosen by the module paths that PyTorch's dynamo exporter stores in the metadata of nodes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import TWO, graph, run_patch
from onnx import helper

from cutefuse.graph.scopes import NAMESPACE, SCOPES, names_of, scopes

# Paths as torch 2.5 and newer writes them, for the six nodes of TWO: both sites in a neck, each with a Conv of its own.
PATHS = (
    ["", "neck", "cat"],
    ["", "neck", "neck.top", "neck.top.conv", "conv2d"],
    ["", "neck", "neck.top", "neck.top.act", "relu"],
    ["", "neck", "cat_1"],
    ["", "neck", "neck.low", "neck.low.conv", "conv2d_1"],
    ["", "neck", "neck.low", "neck.low.act", "tanh"],
)


def exported(key: str = SCOPES) -> onnx.ModelProto:
    model = graph(TWO, outputs=("y1", "y2"), ir=10)
    for i, (node, paths) in enumerate(zip(model.graph.node, PATHS, strict=True)):
        node.name = f"node_{i}"
        text = repr(paths) if key == SCOPES else "/".join(f"{p}: some.Module" for p in paths)
        node.metadata_props.add(key=key, value=text)
    return model


def fused(folder: Path, model: onnx.ModelProto, **options: object) -> tuple[list[str], list[str]]:
    """(names of the fused sites, sentences about options without effect)."""
    result, _ = run_patch(model, folder, dry_run=True, **options)
    return [s.name for s in result.sites if s.status == "fused"], result.report["unused_options"]


@pytest.mark.parametrize("key", [SCOPES, NAMESPACE])
@pytest.mark.parametrize(
    "options, names",
    [
        ({"include": ["neck.top"]}, ["node_1"]),
        ({"include": ["neck.low.*"]}, ["node_4"]),
        ({"include": ["neck"]}, ["node_1", "node_4"]),
        ({"exclude": ["neck.*.act"]}, []),
        ({"exclude": ["neck.low"]}, ["node_1"]),
        ({"include": ["neck"], "exclude": ["conv2d"]}, ["node_4"]),
        ({"include": ["node_4"]}, ["node_4"]),  # a node's own name still does
    ],
)
def test_a_module_path_names_what_is_inside(
    key: str, options: dict[str, object], names: list[str], tmp_path: Path
) -> None:
    assert fused(tmp_path, exported(key), **options) == (names, [])


@pytest.mark.parametrize("pattern", ["top", "neck.to", "backbone", "neck.top.conv.weight", "some.Module", "Neck"])
def test_a_pattern_that_names_no_module_chooses_nothing_and_is_told(pattern: str, tmp_path: Path) -> None:
    names, unused = fused(tmp_path, exported(), include=[pattern])
    assert names == [] and unused == [f"--include '{pattern}' names no node of a candidate; nothing was chosen by it"]


def test_a_site_says_which_pattern_excluded_it(tmp_path: Path) -> None:
    result, _ = run_patch(exported(), tmp_path, exclude=["neck.low"])
    assert [s.reason for s in result.sites] == ["", "--exclude 'neck.low' names it"]


def test_a_module_is_kept_in_float32_by_its_path(tmp_path: Path) -> None:
    result, _ = run_patch(exported(), tmp_path, dtype="float16", keep_float32=["neck.low"], dry_run=True)
    assert set(result.report["conversion"]["kept_float32"]) == {"node_4", "node_5"}
    assert result.report["unused_options"] == []
    result, _ = run_patch(exported(), tmp_path, dtype="float16", keep_float32=["low"], dry_run=True)
    assert result.report["conversion"]["kept_float32"] == [] and "names no node" in result.report["unused_options"][0]


@pytest.mark.parametrize(
    "text", ["", "neck.top", "['', 'neck'", "7", "{'a': 1}", "None", "('neck' * 3)", "[" * 99, "__import__('os')", "\0"]
)
def test_metadata_of_another_tool_names_nothing(text: str) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="own")
    node.metadata_props.add(key=SCOPES, value=text)
    assert scopes(node) == [] and names_of(node) == {"own", "y"}


def test_entries_that_are_no_paths_are_left_out() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y", ""])
    node.metadata_props.add(key=SCOPES, value="['', 'neck', 7, None, ['a']]")
    assert scopes(node) == ["neck"] and names_of(node) == {"neck", "y"}


def test_without_metadata_there_is_no_scope() -> None:
    assert scopes(helper.make_node("Relu", ["x"], ["y"])) == []
    broken = helper.make_node("Relu", ["x"], ["y"])
    broken.metadata_props.add(key=NAMESPACE, value="no colon/here")
    assert scopes(broken) == []
