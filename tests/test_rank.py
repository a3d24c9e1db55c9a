"""The ranking and `patch --profile` find the same sites, and price them by the layers that would go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import engine_files as ef
import graphs
import numpy as np
import onnx
import pytest

from cutefuse.commands.patch import main as patch_main
from cutefuse.commands.rank import main as rank_main
from cutefuse.match.find import find_sites
from cutefuse.match.site import FUSED
from cutefuse.report.analyse.rank import Candidate, candidates, engine_peaks, profile_of
from cutefuse.report.write import write

RMS = "q = Mul(x, x) m = ReduceMean<axes=[-1]>(q) v = Add(m, eps) r = Sqrt(v) n = Div(x, r) y = Mul(n, g)"
RMS_VALUES = {"eps": np.float32([1e-5]), "g": np.ones(4096, np.float32)}
CONV = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k)"
INPUTS = {"a": "1,8,9,7", "b": "1,16,9,7"}


def norm_model() -> onnx.ModelProto:
    return graphs.graph(RMS, RMS_VALUES, inputs={"x": "1,1024,4096"}, rank=3)


def profiled(
    model: onnx.ModelProto, folder: Path, us: float = 10.0, merged: Sequence[str] = (), **times_us: float
) -> Path:
    """The model, and the profile of an engine that runs a layer a node; those of the operators `merged` are one."""
    onnx.save(model, str(folder / "model.onnx"))
    groups = [[n] for n in model.graph.node if n.op_type not in merged]
    groups += [[n for n in model.graph.node if n.op_type in merged]] if merged else []
    layers = [
        {
            "Name": " + ".join(n.name for n in group), "LayerType": group[0].op_type, "Inputs": [], "Outputs": [],
            "Metadata": "\x1e".join(f"[ONNX Layer: {n.name}]" for n in group),
        }
        for group in groups
    ]  # fmt: skip
    times = [times_us.get(group[0].op_type, us) for group in groups]
    ef.write_engine(folder / "profile", "model.onnx", layers, times, 1.0)
    return folder / "profile"


def ranked(folder: Path) -> list[Candidate]:
    engine = profile_of(folder / "profile", folder / "model.onnx")
    return candidates(engine, folder / "model.onnx", engine_peaks(engine))


def patched(folder: Path, *words: str) -> dict:
    """The only site as patch.json holds it, or as the dry run decides it."""
    code = patch_main([str(folder / "model.onnx"), "--profile", str(folder / "profile"), *words])
    assert code == 0
    (site,) = json.loads((folder / "model.patch.json").read_text())["sites"]
    return site


MODELS = {
    "a norm in parts": norm_model,
    "a concat behind Identity": lambda: graphs.graph(
        "c = Concat<axis=1>(a, b) i = Identity(c) d = Conv(i, w, k) y = Relu(d)", inputs=INPUTS
    ),
    "a concat of a concat": lambda: graphs.graph(
        "h = Concat<axis=1>(a, a) c = Concat<axis=1>(h, e) y = Conv(c, w, k)", inputs={"a": "1,8,9,7", "e": "1,8,9,7"}
    ),
    "a channel axis counted from the end": lambda: graphs.graph(
        "c = Concat<axis=-3>(a, b) y = Conv(c, w, k)", inputs=INPUTS
    ),
    "two groups": lambda: graphs.graph(
        "c = Concat<axis=1>(a, b) y = Conv<group=2>(c, w)", graphs.weights(w=(12, 12, 3, 3)), inputs=INPUTS
    ),
    "nothing": lambda: graphs.graph("y = Relu(a)", {}, inputs={"a": "1,8,9,7"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_ranking_lists_the_sites_that_patch_finds(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    profiled(model, tmp_path)
    _, sites = find_sites(model, tmp_path)
    found = ranked(tmp_path)
    assert {(c.node, c.operator, c.refused) for c in found} == {(s.name, s.op.stem, s.status != FUSED) for s in sites}
    assert all(c.note == f"cannot be fused: {s.reason}" for c, s in zip(found, sites, strict=True) if c.refused)


def test_a_norm_in_parts_saves_its_layers_less_one_pass_over_its_tensors(tmp_path: Path) -> None:
    profiled(norm_model(), tmp_path)
    (norm,) = ranked(tmp_path)
    moved = 2 * 1024 * 4096 * 4 + 4096 * 4  # x, y and gamma in float32
    floor_us = moved / 4800e9 * 1e6
    assert norm.compute_us == pytest.approx(60.0) and len(norm.layers) == 6
    assert norm.gain_us == pytest.approx(60.0 - floor_us / 0.8, rel=1e-3)
    assert norm.roof_gain_us == pytest.approx(60.0 - floor_us, rel=1e-3)


def test_min_gain_takes_a_norm_in_parts_by_what_it_saves(tmp_path: Path) -> None:
    profiled(norm_model(), tmp_path)
    site = patched(tmp_path, "--min-gain", "30us")
    assert site["status"] == "fused" and site["gain_us"] == pytest.approx(51.26, abs=0.1)


def test_min_gain_leaves_out_what_saves_less_and_says_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(norm_model(), tmp_path)
    words = [str(tmp_path / "model.onnx"), "--profile", str(tmp_path / "profile"), "--min-gain", "90us"]
    assert patch_main(words) == 3
    assert "saves 51.3 us, less than --min-gain 90 us" in capsys.readouterr().out


def test_a_norm_inside_a_larger_layer_is_not_known_instead_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = graphs.graph(RMS.replace("y = ", "z = ") + " y = Relu(z)", RMS_VALUES, inputs={"x": "1,8,4096"}, rank=3)
    profiled(model, tmp_path, merged=["Mul", "ReduceMean", "Add", "Sqrt", "Div", "Relu"])
    (norm,) = ranked(tmp_path)
    assert norm.gain_us is None and "inside a larger layer" in norm.note
    words = [str(tmp_path / "model.onnx"), "--profile", str(tmp_path / "profile")]
    assert patch_main(words) == 3
    assert "it runs inside a larger layer" in capsys.readouterr().out
    assert rank_main([str(tmp_path / "profile"), str(tmp_path / "model.onnx")]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[0] == "?"
    page = write(tmp_path / "profile", tmp_path / "report", tmp_path / "model.onnx", quiet=True).read_text()
    assert "<strong>not known</strong>" in page


def test_a_norm_of_unknown_size_is_not_priced_as_one_element(tmp_path: Path) -> None:
    profiled(graphs.graph(RMS, RMS_VALUES, inputs={"x": "n,s,4096"}, rank=3), tmp_path)
    (norm,) = ranked(tmp_path)
    assert norm.gain_us is None and norm.note.startswith("its sizes are not known")


def test_nodes_that_the_fused_node_takes_in_are_saved_with_the_copy(tmp_path: Path) -> None:
    body = CONV + " s = Sigmoid(d) y = Mul(d, s)"
    profiled(graphs.graph(body, inputs=INPUTS), tmp_path, Concat=7.0, Sigmoid=3.0, Mul=2.0)
    (site,) = ranked(tmp_path)
    assert (site.copy_us, site.compute_us, site.separate_us) == (7.0, 10.0, 5.0) and site.gain_us == 12.0


def test_an_activation_that_something_else_reads_too_saves_nothing(tmp_path: Path) -> None:
    body = CONV + " y = Relu(d) z = Tanh(d)"
    profiled(graphs.graph(body, inputs=INPUTS, outputs=("y", "z")), tmp_path, Concat=7.0, Relu=3.0)
    (site,) = ranked(tmp_path)
    assert site.gain_us == 7.0 and site.separate_us == 0.0


def test_a_layer_that_also_computes_a_node_outside_of_the_site_stays(tmp_path: Path) -> None:
    profiled(graphs.graph(CONV + " r = Relu(d) y = Tanh(r)", inputs=INPUTS), tmp_path, merged=["Relu", "Tanh"])
    (site,) = ranked(tmp_path)
    assert "Relu_2" in site.nodes and site.separate_us == 0.0 and site.gain_us == site.copy_us == 10.0


def test_an_enlargement_that_two_sites_take_in_is_shared(tmp_path: Path) -> None:
    body = """u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(a, , s)
    c = Concat<axis=1>(u, b) d = Concat<axis=1>(b, u) y = Conv(c, w, k) z = Conv(d, w, k)"""
    values = {**graphs.weights(w=graphs.FILTER, k=(12,)), "s": np.float32([1, 1, 2, 2])}
    model = graphs.graph(body, values, inputs={"a": "1,8,4,4", "b": "1,16,8,8"}, outputs=("y", "z"))
    profiled(model, tmp_path, Concat=7.0, Resize=6.0)
    assert [(c.copy_us, c.separate_us, c.gain_us) for c in ranked(tmp_path)] == [(7.0, 3.0, 10.0)] * 2


def test_a_site_that_patch_refuses_is_last_and_saves_nothing(tmp_path: Path) -> None:
    body = CONV + " e = Concat<axis=1>(a, b) z = Conv<group=2>(e, v) y = Relu(d)"
    values = {**graphs.weights(w=graphs.FILTER, k=(12,)), **graphs.weights(v=(12, 12, 3, 3))}
    profiled(graphs.graph(body, values, inputs=INPUTS, outputs=("y", "z")), tmp_path, us=1.0, Conv=50.0)
    first, last = ranked(tmp_path)
    assert not first.refused and first.gain_us and last.refused and last.gain_us == 0 and "group" in last.note
