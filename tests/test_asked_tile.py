"""Attribute `tile`: the one tile that a node asks for, in the kernel library and in the plugin host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plugin_nodes import CHANNELS, FILTERS, attributes, good_node, inputs_of

from cutefuse import kernels
from cutefuse.kernels import Call
from cutefuse.operators import operators
from cutefuse_host import RUNTIME, Field, Host, HostError, Input, Plugin, field_of
from cutefuse_host.abi import dynamic_desc

DTYPES = {"concat_conv": "float16", "quant_concat_conv": "float16", "row_norm": "bfloat16"}
CALLS = {op.stem: op.call(op.cases()[0], DTYPES[op.stem]) for op in operators()}
UNKNOWN = (-1, 60, 9999, 2**31 - 1, -(2**31))


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def asking(call: Call, tile: int) -> Call:
    return replace(call, attrs={**call.attrs, "tile": [tile]}, _keep=[])


def ids_of(call: Call, column: str = "configs") -> list[int]:
    return [int(row["id"]) for row in kernels.operator_of(call.op_type)[column]]


# ---- the kernel library ----


def test_every_operator_of_graphs_has_the_attribute_last_and_none_else() -> None:
    for op in kernels.describe()["ops"]:
        places = [i for i, a in enumerate(op["attributes"], 1) if a["name"] == "tile"]
        assert places == ([len(op["attributes"])] if op["name"] in DTYPES else []), op["name"]
        for spec in (op["attributes"][i - 1] for i in places):
            assert (spec["kind"], spec["default_count"], spec["default_value"], spec["max_count"]) == ("ints", 1, 0, 1)


@pytest.mark.parametrize("stem", CALLS)
def test_every_tile_of_the_operator_may_be_asked_for_wherever_it_runs(stem: str) -> None:
    call = CALLS[stem]
    tiles = [0, *ids_of(call), *ids_of(call, "retired")]
    assert len(tiles) > len(kernels.configs(replace(call, sm=80, _keep=[]))) + 1, "some of them do not run this call"
    for sm in (0, 80, 90):
        assert {kernels.reject(replace(asking(call, tile), sm=sm, _keep=[])) for tile in tiles} == {None}


@pytest.mark.parametrize("stem", CALLS)
def test_the_kernels_choice_is_not_the_attributes_business(stem: str) -> None:
    legal = kernels.configs(CALLS[stem])
    assert len(legal) > 1 and kernels.configs(asking(CALLS[stem], legal[-1])) == legal


@pytest.mark.parametrize("stem", CALLS)
@pytest.mark.parametrize("tile", [*UNKNOWN, 2**31, 2**40 + 1, -(2**63)])
def test_a_number_that_is_no_tile_is_refused_in_one_sentence(stem: str, tile: int) -> None:
    ids = ids_of(CALLS[stem])
    assert tile not in ids
    words = f"attribute tile is {tile}, and the operator's tiles are among {min(ids)} to {max(ids)}; write an id"
    reason = kernels.reject(asking(CALLS[stem], tile))
    assert reason == f"{stem}: {words} that kernels.describe() lists, or 0 for any"
    assert kernels.configs(asking(CALLS[stem], tile)) == []


@pytest.mark.parametrize("values", [[], [158, 158]])
def test_the_attribute_is_one_number(values: list[int]) -> None:
    call = CALLS["concat_conv"]
    reason = kernels.reject(replace(call, attrs={**call.attrs, "tile": values}, _keep=[]))
    assert reason is not None and f"'tile' has {len(values)} values, 1 to 1 are allowed" in reason


def test_an_operator_without_the_attribute_refuses_it() -> None:
    call = Call("CuteRowNormForward", [], [], {"epsilon": 1e-5, "layer": 0, "tile": 1})
    with pytest.raises(kernels.KernelError, match="attribute 'tile' does not exist"):
        kernels.reject(call)


# ---- the plugin ----


def built(host: Host, call: Call, tile: int | None = None) -> Plugin:
    attrs: dict[str, Any] = dict(call.attrs) | ({} if tile is None else {"tile": tile})
    inputs = [Input(t.dims, t.dtype) for t in call.inputs]
    return host.build((call.op_type, attrs), inputs, outputs=len(call.outputs))


def tactics_of(plugin: Plugin) -> list[list[int]]:
    return [c["tactics"] for c in plugin.check().report["combinations"]]


@pytest.mark.parametrize("stem", CALLS)
def test_a_legal_tile_is_the_only_tactic(stem: str, host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    offered = tactics_of(built(host, CALLS[stem]))
    tiles = kernels.configs(CALLS[stem])
    assert tiles in offered and all(len(legal) > 1 for legal in offered)
    for tile in tiles:  # int8 has two formats, and one of them not every tile
        asked = tactics_of(built(host, CALLS[stem], tile))
        assert asked == [[tile] if tile in legal else legal for legal in offered]
    plugin = built(host, CALLS[stem], tiles[-1])
    plugin.context(tactic=tiles[-1]).set_shapes([t.dims for t in CALLS[stem].inputs])
    assert plugin.findings == []
    capfd.readouterr()
    assert tactics_of(built(host, CALLS[stem], 0)) == offered and capfd.readouterr().err == ""


@pytest.mark.parametrize("stem", CALLS)
def test_a_retired_tile_is_offered_as_its_heir(stem: str, host: Host) -> None:
    op = next(op for op in operators() if op.stem == stem)
    calls = [op.call(case, dtype) for case in op.cases() for dtype in case.dtypes]
    row = kernels.operator_of(calls[0].op_type)["retired"][-1]
    call = next(c for c in calls if row["heir"] in kernels.configs(c))
    assert [row["heir"]] in tactics_of(built(host, call, row["id"]))


@pytest.mark.parametrize("stem", CALLS)
def test_a_tile_that_cannot_run_the_call_leaves_all_and_says_so(
    stem: str, host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    offered = tactics_of(built(host, CALLS[stem]))
    others = [tile for tile in ids_of(CALLS[stem]) if not any(tile in legal for legal in offered)]
    assert others
    for tile in others:
        assert tactics_of(built(host, CALLS[stem], tile)) == offered
        lines = set(capfd.readouterr().err.splitlines())
        words = f"attribute tile asks for {tile}, which cannot run this configuration here"
        who = f"cutefuse: {CALLS[stem].op_type}"
        assert lines == {f"{who}: {words}; all {len(legal)} tiles that can are timed" for legal in offered}


@pytest.mark.parametrize("stem", CALLS)
@pytest.mark.parametrize("tile", UNKNOWN)
def test_the_plugin_refuses_what_is_no_tile(
    stem: str, tile: int, host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HostError, match="no combination of types and formats is accepted"):
        built(host, CALLS[stem], tile).check()
    lines = set(capfd.readouterr().err.splitlines())
    assert lines == {f"cutefuse: {CALLS[stem].op_type}: {kernels.reject(asking(CALLS[stem], tile))}"}


@pytest.mark.parametrize(("value", "words"), [(1.0, "write it as INT or INTS"), ([158, 154], "'tile' has 2 values")])
def test_an_attribute_that_is_no_integer_makes_no_plugin(
    value: Any, words: str, host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = host.fields(host.find("CuteConcatConv2Relu"), attributes(CHANNELS[:2]))
    assert host.create("CuteConcatConv2Relu", [*fields, field_of("tile", value)]) is None
    assert words in capfd.readouterr().err


def test_a_weakly_typed_builder_times_one_tile_in_its_type_and_all_in_the_others(host: Host) -> None:
    attrs = attributes((64, 32))
    for tile, dtype in ((4, "float16"), (23, "float32")):
        node = ("CuteConcatConv2", attrs | {"tile": tile})
        plugin = host.build(node, inputs_of(attrs, "float32"), strongly_typed=False).check()
        found = {c["types"][0]: c["tactics"] for c in plugin.report["combinations"]}
        assert len(found) == 3 and found[dtype] == [tile]
        assert all(len(tactics) > 4 for other, tactics in found.items() if other[-2:] != dtype[-2:])


def sizes(smallest: int, largest: int) -> list[Input]:
    """The tensors of a two-source node, the output last, in one optimisation profile."""

    def image(c: int) -> Input:
        bounds = [(1, c, side, side) for side in (smallest, largest, largest)]
        return Input((-1, c, -1, -1), "float16", *bounds)

    _, tensors, _ = good_node()
    return [*(image(c) for c in CHANNELS[:2]), *tensors[2:4], image(FILTERS)]


def test_each_optimisation_profile_decides_for_itself(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    attrs, _, layouts = good_node()
    name = "CuteConcatConv2Relu"

    def configured(plugin: Any, smallest: int, largest: int) -> list[int]:
        described = [dynamic_desc(t, layout) for t, layout in zip(sizes(smallest, largest), layouts, strict=True)]
        assert plugin.configure(described, 4, 1) == 0
        return list(plugin.tactics())

    plain = host.create(name, host.fields(host.find(name), attrs))
    small, large, both = (configured(plain, *sides) for sides in ((2, 2), (64, 64), (2, 64)))
    tile = next(t for t in large if t not in small)
    assert tile not in both and both
    asking_it = host.create(name, host.fields(host.find(name), attrs | {"tile": tile}))
    assert configured(asking_it, 64, 64) == [tile] and capfd.readouterr().err == ""
    assert configured(asking_it, 2, 2) == small
    assert configured(asking_it, 2, 64) == both
    assert capfd.readouterr().err.count(f"tile asks for {tile}, which cannot run this configuration here") == 2
    assert configured(asking_it, 64, 64) == [tile] and capfd.readouterr().err == "", "as if it had never failed"


# ---- engines ----


def test_an_engine_keeps_the_attribute(host: Host) -> None:
    attrs, tensors, _ = good_node()
    for tile in (0, 4):
        plugin = host.build(("CuteConcatConv2Relu", attrs | {"tile": tile}), tensors[:4]).check()
        kept = [(f["name"], f["type"], f["values"]) for f in plugin.report["serialized"] if f["name"] == "tile"]
        assert kept == [("tile", field_of("tile", 0).type, [tile])]
        context = plugin.context(tactic=4)  # made anew from those fields
        context.set_shapes([t.dims for t in tensors[:4]])
        assert context.output_size(0) == (2, FILTERS, 40, 24)


def test_an_engine_from_before_the_attribute_loads_and_a_damaged_one_does_not(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    attrs, _, _ = good_node()
    old = host.fields(host.find("CuteConcatConv2Relu"), attrs)
    assert "tile" not in {f.name for f in old}
    assert host.create("CuteConcatConv2Relu", old, RUNTIME) is not None
    assert capfd.readouterr().err == ""
    assert host.create("CuteConcatConv2Relu", [*old, Field("tile", 5, 0, b"")], RUNTIME) is None
    assert "'tile' has 0 values" in capfd.readouterr().err


def test_the_timing_cache_tells_nodes_apart_that_ask_for_other_tiles(host: Host) -> None:
    attrs, tensors, _ = good_node()
    nodes = [attrs, attrs | {"tile": 0}, attrs | {"tile": 4}, attrs | {"tile": 42}]
    ids = [host.build(("CuteConcatConv2Relu", a), tensors[:4]).report["timing_cache_id"] for a in nodes]
    assert ids[0] == ids[1] and len(set(ids)) == 3
