"""The passes of `patch`, each alone over a state: what it reads, what it leaves, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import TWO, graph

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import op_counts
from cutefuse.graph.store import writer
from cutefuse.match.site import EXCLUDED, FUSED, LEFT_OUT, MERGED, REFUSED
from cutefuse.rewrite.options import Options
from cutefuse.rewrite.passes import apply, clean, convert, filter, find, idle, legal, merge, plan, select, verify
from cutefuse.rewrite.patch import begin
from cutefuse.rewrite.record import report_of
from cutefuse.rewrite.state import State
from cutefuse.select.price import TIMED, Price

SIZED = {"a": "1,8,9,7", "b": "1,16,9,7"}
SAME = "c = Concat<axis=1>(a, b) x1 = Conv(c, w) y1 = Relu(x1) x2 = Conv(c, w) y2 = Tanh(x2)"
NO_OP = "i = Identity(a) c = Concat<axis=1>(i, b) x = Conv(c, w, k) y = Relu(x)"
RIVALS = (
    "c = Concat<axis=1>(a, b) x1 = Conv(c, w) u = Relu(x1) d = Concat<axis=1>(b, a) x2 = Conv(d, w) v = Tanh(x2) "
    "y = Add(u, v)"
)
BEFORE = (convert.run, clean.run, find.run)
Step = Callable[[State], None]


def state_of(
    body: str, folder: Path, steps: Sequence[Step], outputs: Sequence[str] = ("y1", "y2"), **options: Any
) -> State:
    """A model that went through some passes."""
    source = folder / "m.onnx"
    onnx.save(graph(body, inputs=SIZED, outputs=outputs), str(source))
    state = begin(source, folder / "o.onnx", Options(**{"all_sites": True, **options}))
    for step in steps:
        step(state)
    return state


def statuses(state: State) -> list[str]:
    return [s.status for s in state.sites]


# --------------------------------------------------------------------------------------------------- convert, clean
def test_convert_leaves_the_model_in_float16_and_a_copy_for_the_proof(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, [convert.run], dtype="float16", verify=True)
    kinds = {t.name: t.data_type for t in state.model.graph.initializer}
    assert kinds["w"] == onnx.TensorProto.FLOAT16 and state.conversion and state.conversion.changed
    assert state.converted == state.model and state.converted is not state.model


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "float16", "scope": "sites"}])
def test_convert_leaves_the_model_alone_where_sites_or_nothing_is_converted(
    options: dict[str, Any], tmp_path: Path
) -> None:
    state = state_of(TWO, tmp_path, [convert.run], verify=True, **options)
    assert {t.data_type for t in state.model.graph.initializer} == {onnx.TensorProto.FLOAT}
    assert state.converted is None and (state.conversion is None) == (not options)


def test_sites_are_converted_once_they_are_known(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, [*BEFORE, convert.sites], dtype="bfloat16", keep_float32=["Conv_1"])
    assert [s.match.call.inputs[0].dtype for s in state.sites if s.match] == ["float32", "bfloat16"]
    assert state.conversion and state.conversion.kept_float32 == ["Conv_1"]


@pytest.mark.parametrize("asked", [False, True])
def test_clean_changes_the_model_only_where_it_is_asked_to(asked: bool, tmp_path: Path) -> None:
    state = state_of(NO_OP, tmp_path, [convert.run, clean.run], ("y",), clean=asked)
    assert state.cleaning["no_ops"] == ["i"] and op_counts(state.model.graph)["Identity"] == (not asked)
    assert "Identity" not in op_counts(state.cleaned.graph.proto)


# --------------------------------------------------------------------------------------------------- find, filter
def test_find_leaves_every_candidate_and_judges_it_for_the_gpu(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, BEFORE, sm=90)
    assert statuses(state) == [FUSED, FUSED] and [s.name for s in state.sites] == ["Conv_1", "Conv_4"]
    assert state.graph.sizes("a") == (1, 8, 9, 7) and state.sites[0].sized_call is not None


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"exclude": ["Conv_1"]}, [EXCLUDED, FUSED]),
        ({"include": ["Conv_1"]}, [FUSED, EXCLUDED]),
        ({"exclude_op": ["concat_conv"]}, [EXCLUDED, EXCLUDED]),
        ({"only": ["Conv_4"]}, [EXCLUDED, FUSED]),
        ({"outweighed": {"Conv_4": "copies"}}, [FUSED, LEFT_OUT]),
        ({"include_op": ["row_norm"]}, [EXCLUDED, EXCLUDED]),
        ({"without": ["residual"]}, [FUSED, FUSED]),
    ],
)
def test_filter_leaves_out_what_the_user_names(options: dict[str, Any], left: list[str], tmp_path: Path) -> None:
    assert statuses(state_of(TWO, tmp_path, [*BEFORE, filter.run], **options)) == left


def test_filter_refuses_an_operator_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="no operator 'conv'"):
        state_of(TWO, tmp_path, [*BEFORE, filter.run], exclude_op=["conv"])


# ------------------------------------------------------------------------------------------- legal, merge, select
def test_legal_gives_a_node_to_one_site_alone(tmp_path: Path) -> None:
    state = state_of(RIVALS, tmp_path, BEFORE, ("y",))
    takes = [s.match.takes for s in state.sites if s.match]
    assert takes == [{"residual"}] * 2
    legal.run(state)
    assert [s.match.takes for s in state.sites if s.match] == [{"residual"}, frozenset()]


@pytest.mark.parametrize(("opset", "functions", "left"), [(7, True, REFUSED), (7, False, FUSED), (17, True, FUSED)])
def test_legal_asks_for_a_body_where_bodies_are_written(opset: int, functions: bool, left: str, tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"
    onnx.save(graph(body, inputs=SIZED, opset=opset), str(source))
    state = begin(source, tmp_path / "o.onnx", Options(functions=functions))
    for step in (*BEFORE, legal.run):
        step(state)
    assert statuses(state) == [left]


@pytest.mark.parametrize(("without", "left"), [((), [FUSED, MERGED]), (("parallel",), [FUSED, FUSED])])
def test_merge_lets_one_site_compute_those_on_the_same_tensors(
    without: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    body = SAME.replace("Tanh", "Relu")
    state = state_of(body, tmp_path, [*BEFORE, legal.run, merge.run], without=without)
    assert statuses(state) == left


def test_merge_leaves_sites_alone_that_lose_by_it(tmp_path: Path) -> None:
    state = state_of(SAME.replace("Tanh", "Relu"), tmp_path, [*BEFORE, legal.run])
    merge.run(state, {id(state.sites[1])})
    assert statuses(state) == [FUSED, FUSED]


def test_select_asks_for_prices_and_tiles_and_leaves_out_what_does_not_pay(tmp_path: Path) -> None:
    gains = {"Conv_1": -3.0, "Conv_4": 9.0}
    asked: list[int] = []

    def tiles(calls: Sequence[object]) -> list[int]:
        asked.append(len(calls))
        return [7] * len(calls)

    state = state_of(TWO, tmp_path, BEFORE, all_sites=False)
    select.run(state, lambda graph, sites: lambda site: Price(gains[site.name], TIMED, "a clock", "told"), tiles)
    assert statuses(state) == [LEFT_OUT, FUSED] and [s.tile for s in state.sites] == [0, 7] and asked == [1]
    assert state.saving.gain_us is not None


# --------------------------------------------------------------------------------------- plan, idle, apply, verify
PLANNED = (*BEFORE, filter.run, convert.sites, select.run, plan.run, idle.run)


def test_plan_foretells_what_apply_does_and_changes_nothing(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, PLANNED)
    foretold, untouched = state.after, state.model.SerializeToString()
    assert untouched == (tmp_path / "m.onnx").read_bytes() and all(s.bytes_saved for s in state.sites)
    with writer(state.output, False, state.source) as out:
        apply.run(state, out)
    assert state.after == foretold and foretold["Conv"] == 0 and state.model.SerializeToString() != untouched


def test_casts_are_counted_of_sites_in_another_type(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, PLANNED, dtype="bfloat16")
    assert state.conversion and state.conversion.casts == 4 and state.after["Cast"] == 4
    assert state.conversion.cast_bytes == 6 * (24 * 63 + 12 * (7 * 5 + 4 * 3))


def test_idle_names_the_options_without_effect_after_those_of_the_caller(tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, PLANNED, exclude=["nobody"], scope="sites", idle=["said before"])
    first, second, third = state.unused_options
    assert first == "said before" and "'nobody'" in second and "--scope" in third
    assert state_of(TWO, tmp_path, PLANNED, exclude=["Conv_1"]).unused_options == []


@pytest.mark.parametrize("asked", [False, True])
def test_verify_runs_where_it_is_asked_for_and_finds_a_wrong_model(asked: bool, tmp_path: Path) -> None:
    state = state_of(TWO, tmp_path, PLANNED, verify=asked)
    with writer(state.output, False, state.source) as out:
        apply.run(state, out)
        verify.run(state, out.folder)
        assert (state.proof is not None) == asked and (not asked or state.proof["passed"])  # type: ignore[index]
        body = next(f for f in state.model.functions if f.name.endswith("Relu"))
        next(n for n in body.node if n.op_type == "Relu").op_type = "Neg"
        verify.run(state, out.folder)
    assert (state.proof is not None) == asked and (not asked or not state.proof["passed"])  # type: ignore[index]


def test_the_report_has_the_fields_of_patch_json_in_their_order(tmp_path: Path) -> None:
    report = report_of(state_of(TWO, tmp_path, PLANNED))
    assert list(report)[:5] == ["schema", "tool", "input", "output", "opset"] and "compiled" not in report
    told = report_of(state_of(TWO, tmp_path, PLANNED, compiler_said={"note": "not asked"}))
    assert told["compiled"] == {"note": "not asked"} and report["conversion"] is None
    assert [s["status"] for s in report["sites"]] == [FUSED, FUSED] and report["summary"]["fused"] == 2
