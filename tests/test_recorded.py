"""Gains by what a compiler recorded of the plain graph: every node that goes with a site takes its share along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, weights
from test_rules_tensorrt import CONV, HALF, decoder

from cutefuse.graph.read import Graph, label
from cutefuse.match.find import find_sites
from cutefuse.match.site import Site
from cutefuse.select.compiled import Kernel, Record
from cutefuse.select.engines import engine_of
from cutefuse.select.gain import Model, Pricer
from cutefuse.select.times import device_of

RTX, DEVICE = engine_of("rtx"), device_of(120)
MB = 1_000_000


def priced(model: onnx.ModelProto, *kernels: tuple[str, bool], engine: str = "rtx") -> tuple[Model, list[Site]]:
    """A model by a record of kernels of one MB, each the outputs of its nodes and whether it only moves."""
    cleaned, sites = find_sites(model, Path())
    whole: Graph = cleaned.whole
    names = [(tuple(label(n) for n in whole.nodes if n.output[0] in made.split()), moves) for made, moves in kernels]
    record = Record(tuple(Kernel(n, MB, moves) for n, moves in names), frozenset(map(label, whole.nodes)))
    return Model(whole, engine_of(engine), DEVICE, record), [s for s in sites if s.match]


def beside_us(model: Model, sites: list[Site], *outputs: str) -> float:
    """What copies and passes take less where the sites that make these outputs are fused."""
    chosen = [s for s in sites if s.match and set(outputs) & set(s.match.outputs)]
    assert len(chosen) == len(outputs)
    fused = model.plain.fused(*(s.match for s in chosen if s.match))
    return Pricer(model, {}).parts(chosen, fused).get("neighbours", 0.0)


def dense(tail: str = "", outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """A layer of a DenseNet."""
    body = "c = Concat<axis=1>(a, b) n = BatchNormalization(c, g, g, g, v) r = Relu(n) k = Conv(r, w1) y = Relu(k)"
    values = weights(w1=(64, 64, 1, 1), g=(64,)) | {"v": np.ones(64, np.float32)}
    return graph(f"{body} {tail}", values, inputs={"a": "1,32,28,28", "b": "1,32,28,28"}, outputs=outputs)


@pytest.mark.parametrize("kernels", [
    [("c n r", True)], [("c", True), ("n r", False)], [("c", True), ("n", False), ("r", True)], [("c r", True)],
])  # fmt: skip
def test_every_recorded_kernel_of_a_site_goes_once(kernels: list[tuple[str, bool]]) -> None:
    model, sites = priced(dense(), *kernels)
    assert beside_us(model, sites, "y") == pytest.approx(len(kernels) * DEVICE.pass_us(MB))


def test_a_kernel_whose_nodes_are_needed_besides_stays() -> None:
    model, sites = priced(dense("z = Neg(r)", ("y", "z")), ("c n r", True))
    assert beside_us(model, sites, "y") == 0.0


def test_a_share_stays_with_the_nodes_that_are_not_of_the_site() -> None:
    model, sites = priced(dense("z = Neg(b)", ("y", "z")), ("c n r z", True))
    two_of_three = DEVICE.pass_us(MB) * 2 / 3  # the ReLU would be computed behind anything
    assert 0 < beside_us(model, sites, "y") == pytest.approx(two_of_three)


def test_a_kernel_of_a_concat_that_two_sites_read_goes_with_both() -> None:
    body = "c = Concat<axis=1>(a, b) k = Conv(c, w1) y = Relu(k) j = Conv(c, w1) z = Relu(j)"
    inputs = {"a": "1,32,28,28", "b": "1,32,28,28"}
    model, sites = priced(graph(body, weights(w1=(64, 64, 1, 1)), inputs=inputs, outputs=("y", "z")), ("c", True))
    assert beside_us(model, sites, "y") == beside_us(model, sites, "z") == 0.0
    assert beside_us(model, sites, "y", "z") == pytest.approx(DEVICE.pass_us(MB))


@pytest.mark.parametrize("moves", [True, False])
def test_a_pass_behind_a_site_is_taken_for_what_was_recorded(moves: bool) -> None:
    """The pass stays where the site is fused, and costs what rules say then."""
    body = f"e = {CONV}(a, w1) p = Sigmoid(e) y = Mul(p, b)"
    model, sites = priced(
        graph(body, weights(w1=(8, 8, 3, 3)), inputs={"a": "1,8,28,28", "b": "1,8,28,28"}), ("y", moves)
    )
    own_us = DEVICE.pass_us(3 * model.plain.size_of("y"))
    assert beside_us(model, sites, "p") == pytest.approx(DEVICE.pass_us(MB) - own_us)


def test_an_enlargement_that_a_copy_did_is_a_kernel_where_the_copy_goes() -> None:
    model, sites = priced(decoder(f"d = {HALF}(a, w1)"), ("t c", True))
    size_of = model.plain.size_of
    assert beside_us(model, sites, "y") == pytest.approx(
        DEVICE.pass_us(MB) - DEVICE.pass_us(size_of("d") + size_of("t"))
    )


def test_a_copy_that_enlarges_what_a_fused_node_makes_is_priced_by_rules() -> None:
    """Half of the recorded kernel is the Concat's: the other half is not lost, while the Concat is there or goes."""
    model, sites = priced(decoder(f"d0 = {HALF}(a, w1) d = Relu(d0)"), ("t c", True))
    match = next(s.match for s in sites if s.match and "d" in s.match.outputs)
    concat, resize = (model.graph.producer(t) for t in ("c", "t"))
    assert match and concat and resize
    beside, size_of = model.plain.fused(match), model.plain.size_of
    once = DEVICE.pass_us(size_of("s") + size_of("d") + size_of("c"))
    assert model.node_us(concat, beside) == pytest.approx(once)
    assert model.node_us(resize, beside) == pytest.approx(DEVICE.pass_us(2 * size_of("d")))
    assert model.node_us(concat, model.plain) == model.node_us(resize, model.plain) == DEVICE.pass_us(MB) / 2


def test_an_activation_that_a_copy_computed_takes_no_share_of_the_copy_along() -> None:
    """As `__myl_DivErfAddMulMulResiConc`, which is `ResiConc` then, and moves as much."""
    body = "k = Conv(a, w1) d = HardSwish(k) t = Resize(d, , scales) c = Concat<axis=1>(t, b) y = Neg(c)"
    values = weights(w1=(64, 64, 1, 1)) | {"scales": np.float32([1, 1, 2, 2])}
    inputs = {"a": "1,64,28,28", "b": "1,64,56,56"}
    model, sites = priced(graph(body, values, inputs=inputs), ("d t c", True))
    assert beside_us(model, sites, "d") == 0.0


def test_a_copy_in_two_kernels_costs_a_start_more() -> None:
    """Whatever its size: both move as much."""
    large = graph("c = Concat<axis=1>(a, b) y = Conv(c, w1)", weights(w1=(64, 64, 1, 1)),
                  inputs={"a": "1,32,512,512", "b": "1,32,512,512"})  # fmt: skip
    model, _ = priced(large)
    whole_us, half_us = (model.device.pass_us(2 * model.plain.size_of(t)) for t in ("c", "a"))
    assert 2 * half_us - whole_us == pytest.approx(DEVICE.pass_us(0))
    assert DEVICE.pass_us(2 * model.plain.size_of("c")) > 2 * DEVICE.pass_us(2 * model.plain.size_of("a"))
