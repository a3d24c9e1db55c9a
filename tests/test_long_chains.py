"""Chains of thousands of nodes: the work grows as they do. Calls and bytes are counted, since a busy machine's clock
tells little."""

from __future__ import annotations

import cProfile
import pstats
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import run_patch
from onnx import TensorProto, helper

from cutefuse.graph.read import Graph
from cutefuse.graph.shapes import inferred
from cutefuse.match.find import find_sites
from cutefuse.operators.layouts import TENSORRT
from cutefuse.select.engines import engine_of
from cutefuse.select.tally import Tally
from cutefuse.select.wiring import wiring

pytestmark = pytest.mark.slow

FUSED = ("Conv", "Relu")
JOINED = ("Concat", "Conv", "Relu")


def chain(count: int, op_types: tuple[str, ...]) -> onnx.ModelProto:
    """`count` nodes of these types in turn; a Concat joins the two tensors before it."""
    nodes, last, before = [], "a", "a"
    channels = 16 * (1 + ("Concat" in op_types))
    stored = [onnx.numpy_helper.from_array(np.full((16, channels, 1, 1), 1e-3, np.float16), "w")]
    for i in range(count):
        kind = op_types[i % len(op_types)]
        read = {"Conv": [last, "w"], "Concat": [last, before]}.get(kind, [last])
        before = last if kind == "Concat" else before
        nodes.append(helper.make_node(kind, read, [f"t{i}"], f"n{i}"))
        nodes[-1].attribute.extend([helper.make_attribute("axis", 1)] if kind == "Concat" else [])
        last = f"t{i}"
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [1, 16, 8, 8]) for n in ("a", last)]
    made = helper.make_graph(nodes, "chain", infos[:1], infos[1:], stored if "Conv" in op_types else [])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# The engine that fuses a site leaves it out where copies alone decide, and then every site goes, one by one.
@pytest.mark.parametrize("op_types, engine, fused", [
    (("Identity",), "tensorrt", 0), (("Relu", "Neg"), "tensorrt", 0), (("Identity", "Relu"), "tensorrt", 0),
    (FUSED, "tensorrt", 1), (FUSED, "rtx", 0), (JOINED, "tensorrt", 1), (JOINED, "torch", 1),
])  # fmt: skip
def test_calls_grow_as_a_chain_does(op_types: tuple[str, ...], engine: str, fused: int, tmp_path: Path) -> None:
    calls = []
    for count in (120, 120, 960):  # the first run fills caches
        profile = cProfile.Profile()
        profile.enable()
        result, _ = run_patch(chain(count, op_types), tmp_path, dry_run=True, engine=engine, all_sites=False)
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
        assert result.report["summary"]["fused"] == fused * count // len(op_types)
    assert calls[2] < 12 * calls[1]


@pytest.mark.parametrize("op_types, most", [(FUSED, 3400), (JOINED, 6000)])
def test_a_site_costs_few_calls(op_types: tuple[str, ...], most: int, tmp_path: Path) -> None:
    calls = []
    for count in (120, 120, 960):
        profile = cProfile.Profile()
        profile.enable()
        run_patch(chain(count, op_types), tmp_path, sm=90, verify=False)
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert (calls[2] - calls[1]) / ((960 - 120) / len(op_types)) < most


@pytest.mark.parametrize("op_types", [FUSED, JOINED])
def test_a_site_leaves_and_joins_a_wiring_at_the_same_cost_in_any_network(
    op_types: tuple[str, ...], tmp_path: Path
) -> None:
    taken = []
    for count in (120, 6000):
        model = chain(count, op_types)
        sites = find_sites(model, tmp_path)[1]
        matches = [s.match for s in sites if s.match]
        whole = wiring(Graph(model, tmp_path, inferred(model)), engine_of(TENSORRT)).fused(*matches)
        whole.unfused(matches[0])  # what all copies share is made once
        tracemalloc.start()
        plain = whole.unfused(matches[1])
        plain.fused(matches[1])
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert taken[1] < 6 * taken[0]  # 54 times with copies of all that is fused


@pytest.mark.parametrize("seed", range(8))
def test_a_tally_counts_as_a_counter_does(seed: int) -> None:
    rng = random.Random(seed)
    pairs: list[tuple[Tally, Counter[int]]] = [(Tally(), Counter())]
    for _ in range(400):
        tally, counter = rng.choice(pairs)
        if rng.random() < 0.4:
            tally, counter = tally.copy(), Counter(counter)
            pairs.append((tally, counter))
        keys, number = [rng.randrange(60) for _ in range(rng.randrange(1, 12))], rng.choice((-1, 0, 1, 2))
        if rng.random() < 0.5:
            tally.add(keys, number)
            for key in keys:
                counter[key] += number
        else:
            tally.put(keys, number)
            counter.update(dict.fromkeys(keys, 0))
            for key in keys:
                counter[key] = number
    for tally, counter in pairs:
        assert [tally[k] for k in range(61)] == [counter[k] for k in range(61)]
        assert [k in tally for k in range(61)] == [counter[k] > 0 for k in range(61)]


def test_what_stands_behind_a_tensor_is_told_once_whatever_the_number_of_ways() -> None:
    body = helper.make_graph(
        [helper.make_node("Neg", ["seen"], ["r"])], "body", [], [helper.make_empty_tensor_value_info("r")]
    )
    nodes = [helper.make_node("Add", [f"x{i}", f"x{i}"], [f"x{i + 1}"]) for i in range(64)]  # 2 ** 64 ways
    nodes += [
        helper.make_node("If", ["x64"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    ends = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, []) for n in names] for names in (("x0", "seen", "u"), "y")
    ]
    found = Graph(helper.make_model(helper.make_graph(nodes, "ladder", *ends)), Path())
    behind = list(found.behind(["y"]))
    assert len(behind) == len(set(behind)) and {"y", "seen", *(f"x{i}" for i in range(65))} <= set(behind)
    assert not {"z", "u"} & set(behind) and not list(found.behind([]))
    assert "seen" in found.behind(["y"]) and "x0" in found.behind(["x0"]) and "y" not in found.behind(["x0"])
    assert found.reaching_outputs() == {id(n) for n in found.nodes[:-1]}
