"""The choice of sites over the graph: what pays is fused, what does not is left out with its figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import graphs
import onnx
import pytest

import models
from cutefuse.commands.patch import main
from cutefuse.match.find import find_sites
from cutefuse.match.site import Site
from cutefuse.rewrite.patch import Options, Result, patch
from cutefuse.select.engines import engine_of
from cutefuse.select.gain import Model, Pricer
from cutefuse.select.policy import LEAST_SHARE, LEAST_US, Policy
from cutefuse.select.price import TIMED, Price, Pricing
from cutefuse.select.times import device_of
from cutefuse.select.wiring import Wiring, wiring

INPUTS = {"a": "1,64,128,128", "b": "1,64,128,128"}
PAIR = "c = Concat<axis=1>(a, b) x1 = Conv(c, w) y1 = Relu(x1) x2 = Conv(c, w) y2 = Tanh(x2)"  # one Concat, two sites
CHAIN = (
    "c = Concat<axis=1>(a, b) x1 = Conv(c, w) u = Relu(x1) "
    "d = Concat<axis=1>(u, a) x2 = Conv(d, w) y = Relu(x2)"
)  # fmt: skip


def priced(**gains: float | None) -> Pricing:
    """A pricing with a gain for the site of each name."""
    return lambda graph, sites: lambda site: Price(gains.get(site.name), TIMED, "a stand-in", "told so")


def run(body: str, folder: Path, outputs: Sequence[str] = ("y",), **options: object) -> Result:
    values = graphs.weights(dtype="float16", w=(64, 128, 1, 1))
    model = graphs.graph(body, values, inputs=INPUTS, outputs=outputs, dtype="float16")
    given = {"all_sites": False, "verify": False, "sm": 90, **options}
    return graphs.run_patch(model, folder, **given)[0]


def statuses(result: Result) -> dict[str, str]:
    return {s.name: s.status for s in result.sites}


# ------------------------------------------------------------------------------------------------- by the model
def test_a_googlenet_comes_back_unchanged_where_no_concat_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "googlenet.onnx"
    onnx.save(models.build("googlenet", "float16", batch=8), str(source))
    assert main([str(source), "--sm", "80", "--without", "single"]) == 3
    out = capsys.readouterr().out
    assert "18 left out, would cost time" in out and "0 fused, 18 left out" in out and "--all fuses" in out
    reasons = [s.reason for s in patch(source, tmp_path / "o.onnx", Options(sm=80, without=["single"])).sites]
    assert any("merges 3 1x1 convolutions of this tensor" in reason for reason in reasons)
    assert [p.name for p in tmp_path.iterdir()] == ["googlenet.onnx"]
    assert main([str(source), "--sm", "90", "--without", "single", "--all"]) == 0


def test_a_report_says_the_same_each_time(tmp_path: Path) -> None:
    """Groups of sites are gone through in the graph's order, not in that of their addresses."""
    onnx.save(models.build("inception_v3", "float32", small=True, batch=1), str(tmp_path / "plain.onnx"))
    said, kept = set(), []
    for _ in range(6):
        kept.append(patch(tmp_path / "plain.onnx", tmp_path / "o.onnx", Options(sm=90)).sites)  # keeps the addresses
        said.add(tuple((s.name, s.status, s.reason, s.gain_us) for s in kept[-1]))
    assert len(said) == 1


def test_a_unet_is_fused_and_its_report_carries_figures_and_their_basis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "unet.onnx"
    onnx.save(models.build("unet", "float16", batch=1, size=256), str(source))
    assert main([str(source), "--sm", "90"]) == 0
    report = json.loads((tmp_path / "unet.patch.json").read_text())
    fused = [s for s in report["sites"] if s["status"] == "fused"]
    assert fused and all(s["gain_us"] > LEAST_US and s["basis"] == "model" for s in fused)
    # What two sites need each other for counts for each of them, and once together.
    assert 0 < report["summary"]["gain_us"] <= sum(s["gain_us"] for s in fused) + 1e-3
    told = ("engine", "engine_assumed", "gpu", "gpu_assumed", "gpu_others")
    assert {k: report["prediction"][k] for k in told} == {
        "engine": "TensorRT 11.3",
        "engine_assumed": True,
        "gpu": "H200",
        "gpu_assumed": True,
        "gpu_others": [],
    }
    out = capsys.readouterr().out
    gain, whole = report["summary"]["gain_us"], report["summary"]["plain_us"]
    assert gain < 0.8 * whole and f"predicted: {gain:.1f} us saved of about {whole:.0f} us" in out
    assert f"({len(fused)} sites)" in out and "--trt-version names another" in out


def test_an_older_tensorrt_and_pytorch_leave_more_to_gain(tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w) s = Sigmoid(x) y = Mul(x, s)"
    gains = [
        run(body, tmp_path, dry_run=True, **kind).report["summary"]["gain_us"]
        for kind in ({"trt_version": "11.2"}, {"trt_version": "10.3"}, {"engine": "torch"})
    ]
    assert gains[0] + 1.0 < gains[1] and gains[0] + 1.0 < gains[2]  # SiLU's pass over memory is saved there too


def test_min_gain_works_without_a_profile(tmp_path: Path) -> None:
    result = run(CHAIN, tmp_path, dry_run=True)
    gains = {s.name: s.gain_us or 0.0 for s in result.sites}
    assert set(statuses(result).values()) == {"fused"} and min(gains.values()) > 2.0
    left = run(CHAIN, tmp_path, min_gain_us=max(gains.values()) + 1, dry_run=True)
    assert left.exit_code == 3 and all("less than --min-gain" in s.reason for s in left.sites)


def test_the_default_threshold_grows_with_the_site() -> None:
    assert Policy().least_us(1.0) == LEAST_US and Policy().least_us(1000.0) == 1000 * LEAST_SHARE
    assert Policy(min_gain_us=2.0).least_us(1000.0) == 2.0 and Policy().least_us(float("nan")) == LEAST_US


def test_unknown_sizes_are_said_to_be_unknown_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.onnx"
    values = graphs.weights(dtype="float16", w=(64, 128, 1, 1))
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w) y = Relu(x)"
    inputs = {"a": "n,64,h,v", "b": "n,64,h,v"}
    onnx.save(graphs.graph(body, values, inputs=inputs, dtype="float16"), str(source))
    assert main([str(source), "--sm", "90"]) == 3
    out = capsys.readouterr().out
    assert "what it would save is not known" in out and "--input-shape a:?x64x?x?" in out
    assert main([str(source), "--sm", "90", "--min-gain", "1us", "--dry-run"]) == 3
    for asked in (["--all"], ["--min-gain", "0"]):
        assert main([str(source), "--sm", "90", *asked]) == 0
        assert "what 1 of the fused sites save is not known" in capsys.readouterr().out
        assert json.loads((tmp_path / "model.patch.json").read_text())["sites"][0]["gain_us"] is None
    shapes = ["--input-shape", "a:1x64x128x128", "--input-shape", "b:1x64x128x128"]
    assert main([str(source), "--sm", "90", "--min-gain", "1us", "--dry-run", *shapes]) == 0


# ------------------------------------------------------------------------------------------------- over the graph
def gain_of(name: str, fused: Sequence[str]) -> float:
    """What a site of CHAIN saves while these are fused."""
    values = graphs.weights(dtype="float16", w=(64, 128, 1, 1))
    cleaned, sites = find_sites(graphs.graph(CHAIN, values, inputs=INPUTS, dtype="float16"), Path())
    model = Model(cleaned.whole, engine_of("tensorrt", "10.3", 90), device_of(90))
    wires = wiring(cleaned.whole, model.engine)
    for site in sites:
        if site.name in fused and site.match:
            wires = wires.fused(site.match)
    return Pricer(model, {}).gain_us([s for s in sites if s.name == name], wires)


def test_a_fused_producer_makes_the_next_concat_more_worth_fusing() -> None:
    assert gain_of("Conv_4", ["Conv_1", "Conv_4"]) > gain_of("Conv_4", ["Conv_4"]) + 1.0


def test_a_fused_output_costs_a_copy_in_a_concat_that_stays() -> None:
    assert gain_of("Conv_1", ["Conv_1"]) < gain_of("Conv_1", ["Conv_1", "Conv_4"]) - 1.0


def test_what_its_reader_costs_is_told(tmp_path: Path) -> None:
    result = run(CHAIN, tmp_path, exclude=["Conv_4"], min_gain_us=50.0)
    assert "Concat 'Concat_3' would copy its output" in result.sites[0].reason


def test_an_add_left_behind_becomes_a_kernel_of_its_own() -> None:
    """It was a part of the convolution's elementwise kernel, so nothing of that kernel is saved."""
    values = graphs.weights(dtype="float16", w=(64, 128, 1, 1))
    gains = []
    for tail in ("y = Relu(x)", "u = Relu(x) y = Add(u, a)"):
        body = f"c = Concat<axis=1>(a, b) x = Conv(c, w) {tail}"
        cleaned, (site, *_) = find_sites(graphs.graph(body, values, inputs=INPUTS, dtype="float16"), Path())
        model = Model(cleaned.whole, engine_of("torch"), device_of(90))
        while site.match and site.match.takes:
            assert site.fall_back()
        assert site.match is not None
        gains.append(Pricer(model, {}).gain_us([site], wiring(cleaned.whole, model.engine).fused(site.match)))
    assert gains[1] < gains[0] - 1.0


def test_sites_of_one_concat_are_also_judged_together(tmp_path: Path) -> None:
    """Each alone keeps the copies of the Concat away, which the other needs as well: they count once."""
    values = graphs.weights(dtype="float16", w=(64, 128, 3, 3))
    model = graphs.graph(PAIR, values, inputs=INPUTS, outputs=("y1", "y2"), dtype="float16")
    cleaned, sites = find_sites(model, Path())
    prices = Model(cleaned.whole, engine_of("tensorrt", "10.3", 90), device_of(90))
    wires = wiring(cleaned.whole, prices.engine)
    for site in sites:
        assert site.match is not None
        wires = wires.fused(site.match)
    pricer = Pricer(prices, {})
    single, together = [pricer.gain_us([s], wires) for s in sites], pricer.gain_us(sites, wires)
    assert together < sum(single) - 1.0
    least = together / 2 + 0.1  # each alone is above it, both together are below twice as much
    assert min(single) > least
    given = {"all_sites": False, "verify": False, "sm": 90, "trt_version": "10.3", "min_gain_us": least}
    result, _ = graphs.run_patch(model, tmp_path, **given)
    assert set(statuses(result).values()) == {"left out"} and result.exit_code == 3


def test_sites_that_pay_only_beside_each_other_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each saves time as long as the other is fused, and both together cost some, as in SqueezeNet in float32."""

    class Beside:
        given: dict[int, float] = {}

        def __init__(self, *_: object) -> None: ...

        def gain_us(self, sites: Sequence[Site], wires: Wiring) -> float:
            return together if len(sites) == 2 else 0.5

        def parts(self, sites: Sequence[Site], wires: Wiring) -> dict[str, float]:
            return {"neighbours": self.gain_us(sites, wires)}

    monkeypatch.setattr("cutefuse.select.policy.Pricer", Beside)
    together = 0.4
    assert set(statuses(run(CHAIN, tmp_path, dry_run=True)).values()) == {"fused"}
    together = -1.0
    assert set(statuses(run(CHAIN, tmp_path, dry_run=True)).values()) == {"left out"}
    asked = run(CHAIN, tmp_path, dry_run=True, min_gain_us=-1.0)  # `optimize` tries what the model says costs little
    assert set(statuses(asked).values()) == {"fused"}


def test_a_site_that_goes_frees_what_another_wanted(tmp_path: Path) -> None:
    """Both convolutions want the Add; the first has it, and when it goes the second one takes it."""
    body = (
        "c = Concat<axis=1>(a, b) x1 = Conv(c, w) u = Relu(x1) d = Concat<axis=1>(b, a) x2 = Conv(d, w) "
        "v = Tanh(x2) y = Add(u, v)"
    )
    both = run(body, tmp_path, all_sites=True, sm=0)
    assert [s.match.takes for s in both.sites if s.match] == [{"residual"}, frozenset()]
    price = priced(Conv_1=0.0, Conv_4=9.0)
    result = run(body, tmp_path, price=price, sm=0)
    assert statuses(result) == {"Conv_1": "left out", "Conv_4": "fused"}
    assert result.sites[1].match is not None and result.sites[1].match.takes == {"residual"}


# ------------------------------------------------------------------------------------------------- given figures
def test_measured_prices_come_before_the_model_and_say_so(tmp_path: Path) -> None:
    result = run(CHAIN, tmp_path, price=priced(Conv_1=7.0, Conv_4=None))
    first, second = result.sites
    assert (first.basis, second.basis) == ("tuned", "model") and first.gain_us == 7.0


def test_a_site_left_out_by_a_given_figure_says_whose_words_these_are(tmp_path: Path) -> None:
    result = run(CHAIN, tmp_path, price=priced(Conv_1=0.1, Conv_4=9.0))
    assert statuses(result) == {"Conv_1": "left out", "Conv_4": "fused"}
    assert result.sites[0].reason == "saves 0.1 us (told so)" and result.sites[0].basis == "tuned"


def test_all_takes_every_site_and_still_tells_what_it_saves(tmp_path: Path) -> None:
    result = run(CHAIN, tmp_path, all_sites=True, price=priced(Conv_1=-3.0, Conv_4=9.0))
    assert set(statuses(result).values()) == {"fused"} and result.sites[0].gain_us == -3.0


def test_a_choice_is_the_same_every_time(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(models.build("yolov8n", "float16", batch=1), str(source))
    runs = [patch(source, tmp_path / "out.onnx", Options(dry_run=True, sm=90, engine="torch")) for _ in range(2)]
    assert [[(s.name, s.status, s.gain_us) for s in r.sites] for r in runs][0] == [
        (s.name, s.status, s.gain_us) for s in runs[1].sites
    ]
