"""What fused sites are worth by the layer times of two engines: copies, merged layers, shared Concats, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_files as ef
import pytest

from cutefuse.optimize.loop import LOSES, PAYS, UNCLEAR, UNKNOWN, Worth
from cutefuse.optimize.worth import LEAST_NOISE_US, USUAL_NOISE, worths
from cutefuse.report.read.reader import Engine, find_engines, read_engine


def engine(folder: Path, name: str, layers: list[Any], times_us: list[float]) -> Engine:
    return read_engine(find_engines(ef.write_engine(folder, name, layers, times_us))[0])


def layer(name: str, inputs: str, outputs: str, nodes: str = "", kind: str = "CaskConvolution") -> dict[str, Any]:
    """A layer of tensors that are named by one letter each; `nodes` are its ONNX nodes."""
    return {
        "Name": name, "LayerType": kind, "Inputs": [ef.tensor(t, [1, 64, 8, 8]) for t in inputs],
        "Outputs": [ef.tensor(t, [1, 64, 8, 8]) for t in outputs], "TacticName": "", "StreamId": 0,
        "Metadata": "\x1e".join(f"[ONNX Layer: {n}]" for n in (nodes or name).split()),
    }  # fmt: skip


def plugin(name: str, inputs: str, outputs: str) -> dict[str, Any]:
    return layer(name, inputs, outputs, kind="PluginV3")


def copy(name: str, source: str, out: str) -> dict[str, Any]:
    return ef.copy(name, ef.tensor(source, [1, 64, 8, 8]), ef.tensor(out, [1, 64, 8, 8]))


def site(name: str, nodes: str, status: str = "fused") -> dict[str, Any]:
    return {"name": name, "status": status, "nodes": nodes.split()}


def judge(
    folder: Path, plain: list[tuple[dict[str, Any], float]], patched: list[tuple[dict[str, Any], float]], *sites: Any
) -> dict[tuple[str, ...], Worth]:
    a, b = (
        engine(folder / n, n, [la for la, _ in side], [us for _, us in side])
        for n, side in (("plain", plain), ("patched", patched))
    )
    return {w.sites: w for w in worths(a, b, sites)}


def test_the_copies_of_its_concat_belong_to_a_site(tmp_path: Path) -> None:
    plain = engine(tmp_path / "a", "net", ef.PLAIN, ef.PLAIN_US)
    patched = engine(tmp_path / "b", "net.cutefuse", ef.PATCHED, ef.PATCHED_US)
    (worth,) = worths(plain, patched, ef.PATCH_REPORT["sites"])  # type: ignore[arg-type]
    assert worth.sites == ("/up/Conv",) and (worth.plain_us, worth.patched_us) == (60.0, 32.0)
    assert worth.gain_us == 28.0 and worth.verdict == PAYS


def test_a_copy_that_fusing_brought_belongs_to_the_fused_node_beside_it(tmp_path: Path) -> None:
    """The plugin's output cannot be retargeted into the Concat of a convolution that stays outside."""
    plain = [(layer("A", "x", "a"), 10.0), (layer("B", "x", "b"), 5.0), (layer("C", "ab", "y", "Cat C"), 20.0)]
    patched = [
        (plugin("A", "x", "a"), 9.0), (layer("B", "x", "b"), 5.0), (copy("a copy", "a", "c"), 4.0),
        (layer("C", "cb", "y", "Cat C"), 20.0),
    ]  # fmt: skip
    found = judge(tmp_path, plain, patched, site("A", "A"))
    assert found[("A",)].patched_us == 13.0 and found[("A",)].verdict == LOSES


def test_a_copy_that_was_there_before_stays_where_it_was(tmp_path: Path) -> None:
    plain = [(layer("A", "x", "a"), 10.0), (copy("a copy", "a", "c"), 4.0), (layer("C", "c", "y", "Cat C"), 20.0)]
    patched = [(plugin("A", "x", "a"), 9.0), (copy("a copy", "a", "c"), 4.0), (layer("C", "c", "y", "Cat C"), 20.0)]
    assert judge(tmp_path, plain, patched, site("A", "A"))[("A",)].patched_us == 9.0


def test_sites_of_one_layer_are_judged_together(tmp_path: Path) -> None:
    plain = [(layer("A + B", "x", "ab", "A B"), 10.0), (layer("D", "ab", "y"), 5.0)]
    patched = [(plugin("A", "x", "a"), 7.0), (plugin("B", "x", "b"), 6.0), (layer("D", "ab", "y"), 5.0)]
    found = judge(tmp_path, plain, patched, site("A", "A"), site("B", "B"))
    assert list(found) == [("A", "B")] and found[("A", "B")].gain_us == -3.0


def test_of_inseparable_sites_the_certain_ones_are_named(tmp_path: Path) -> None:
    """One kernel computes all three activations. A pays without its share of it, B loses even with all of it."""
    plain = [
        (layer("convA", "x", "p", "A"), 50.0), (layer("convB", "x", "q", "B"), 10.0),
        (layer("convC", "x", "r", "C"), 10.0), (layer("acts", "pqr", "abc", "SA SB SC", "PointWise"), 12.0),
    ]  # fmt: skip
    patched = [(plugin("A", "x", "a"), 20.0), (plugin("B", "x", "b"), 40.0), (plugin("C", "x", "c"), 15.0)]
    found = judge(tmp_path, plain, patched, site("A", "A SA"), site("B", "B SB"), site("C", "C SC"))
    assert {names: w.verdict for names, w in found.items()} == {("A",): PAYS, ("B",): LOSES, ("C",): PAYS}
    assert (found[("A",)].plain_us, found[("B",)].plain_us) == (50.0, 22.0)
    assert (found[("C",)].plain_us, found[("C",)].patched_us) == (22.0, 15.0)  # the rest, with what they shared


def test_no_gain_is_certain_where_a_layer_also_computes_other_nodes(tmp_path: Path) -> None:
    plain = [
        (layer("convA", "x", "p", "A Add"), 50.0), (layer("convB", "x", "q", "B"), 10.0),
        (layer("acts", "pq", "ab", "SA SB", "PointWise"), 4.0),
    ]  # fmt: skip
    patched = [(plugin("A", "x", "a"), 20.0), (layer("Add", "x", "p"), 40.0), (plugin("B", "x", "b"), 12.0)]
    (found,) = judge(tmp_path, plain, patched, site("A", "A SA"), site("B", "B SB")).values()
    assert set(found.sites) == {"A", "B"} and found.gain_us == -8.0


def test_a_layer_that_also_computes_other_nodes_brings_their_layers_along(tmp_path: Path) -> None:
    """Fused into one kernel before, an Add outside of the site runs alone afterwards."""
    plain = [(layer("A + Add", "xz", "y", "A Add"), 20.0)]
    patched = [(plugin("A", "x", "a"), 12.0), (layer("Add", "az", "y", kind="PointWise"), 6.0)]
    assert judge(tmp_path, plain, patched, site("A", "A"))[("A",)].gain_us == 2.0


def test_of_sites_that_lose_together_the_likely_one_is_blamed(tmp_path: Path) -> None:
    plain = [
        (layer("convA", "x", "p", "A"), 10.0), (layer("convB", "x", "q", "B"), 10.0),
        (layer("acts", "pq", "ab", "SA SB", "PointWise"), 8.0),
    ]  # fmt: skip
    patched = [(plugin("A", "x", "a"), 12.0), (plugin("B", "x", "b"), 17.5)]
    (found,) = judge(tmp_path, plain, patched, site("A", "A SA"), site("B", "B SB")).values()
    assert found.gain_us == -1.5 and dict(zip(found.sites, found.shares_us, strict=True)) == {"A": 2.0, "B": -3.5}
    assert found.to_blame == ("B",)


def test_merged_sites_are_blamed_as_one(tmp_path: Path) -> None:
    plain = [(layer("A", "x", "a"), 10.0), (layer("B + C", "xa", "bc", "B C"), 12.0)]
    patched = [(plugin("A", "x", "ab"), 20.0), (plugin("C", "a", "c"), 3.0)]
    (found,) = judge(
        tmp_path, plain, patched, site("A", "A B"), site("B", "B", "merged"), site("C", "C")
    ).values()  # fmt: skip
    assert dict(zip(found.sites, found.shares_us, strict=True)) == {"A": -4.0, "B": -4.0, "C": 3.0}
    assert set(found.to_blame) == {"A", "B"}


def test_sites_that_share_only_a_view_are_told_apart(tmp_path: Path) -> None:
    """The Split is in both sites, and no layer computes it."""
    plain = [(layer("A", "x", "a"), 10.0), (layer("B", "x", "b"), 10.0)]
    patched = [(plugin("A", "x", "a"), 5.0), (plugin("B", "x", "b"), 15.0)]
    found = judge(tmp_path, plain, patched, site("A", "Split A"), site("B", "Split B"))
    assert {n: w.gain_us for n, w in found.items()} == {("A",): 5.0, ("B",): -5.0}


def test_a_merged_site_goes_with_the_one_that_computes_it(tmp_path: Path) -> None:
    plain = [(layer("A", "x", "a"), 10.0), (layer("B", "x", "b"), 10.0)]
    found = judge(tmp_path, plain, [(plugin("A", "x", "ab"), 12.0)], site("A", "A B"), site("B", "B", "merged"))
    assert list(found) == [("A", "B")] and found[("A", "B")].gain_us == 8.0


def test_a_merged_site_goes_with_the_node_that_makes_its_outputs(tmp_path: Path) -> None:
    """As `patch` writes it: the nodes of a merged site are not among those of the fused one."""
    plain = [(layer("A", "x", "a"), 10.0), (layer("B", "x", "b"), 10.0)]
    sites = [site("A", "A") | {"outputs": ["a", "b"]}, site("B", "B", "merged") | {"outputs": ["b"]}]
    found = judge(tmp_path, plain, [(plugin("A", "x", "ab"), 12.0)], *sites)
    assert list(found) == [("A", "B")] and found[("A", "B")].gain_us == 8.0
    apart = [site("A", "A") | {"outputs": ["a"]}, site("B", "B", "merged") | {"outputs": ["b"]}]
    assert list(judge(tmp_path / "apart", plain, [(plugin("A", "x", "a"), 5.0)], *apart)) != [("A", "B")]


@pytest.mark.parametrize("patched", [[("other", 1.0)], []], ids=["no layer of its own", "no layers"])
def test_a_site_without_layers_is_not_known(tmp_path: Path, patched: list[tuple[str, float]]) -> None:
    after = [(layer(n, "x", "y"), us) for n, us in [*patched, ("last", 1.0)]]
    (worth,) = judge(tmp_path, [(layer("A", "x", "y"), 9.0)], after, site("A", "A")).values()
    assert worth.gain_us is None and worth.verdict == UNKNOWN


def test_refused_sites_are_no_part_of_it(tmp_path: Path) -> None:
    plain = [(layer("A", "x", "a"), 10.0)]
    assert judge(tmp_path, plain, plain, site("A", "A", "refused")) == {}


def test_the_noise_is_that_of_layers_that_were_not_touched(tmp_path: Path) -> None:
    def net(a_us: float, jitter: float, fused: bool) -> list[tuple[dict[str, Any], float]]:
        first = (plugin if fused else layer)("A", "x", "a")
        return [
            (first, a_us), *((layer(f"L{i}", "a", f"{i}"), 10 + (-1) ** i * jitter) for i in range(9))
        ]  # fmt: skip

    assert judge(tmp_path, net(100, 0, False), net(105, 0, True), site("A", "A"))[("A",)].noise_us < 5
    noisy = judge(tmp_path / "n", net(100, 0, False), net(105, 0.4, True), site("A", "A"))[("A",)]
    assert noisy.noise_us == pytest.approx(2 * 1.4826 * 0.04 * 105) and noisy.verdict == UNCLEAR
    few = judge(tmp_path / "f", net(100, 0, False)[:4], net(106, 0, True)[:4], site("A", "A"))[("A",)]
    assert few.noise_us == pytest.approx(USUAL_NOISE * 106) and few.verdict == LOSES
    tiny = judge(tmp_path / "t", net(1.0, 0, False), net(1.1, 0, True), site("A", "A"))[("A",)]
    assert tiny.noise_us == LEAST_NOISE_US and tiny.verdict == UNCLEAR
