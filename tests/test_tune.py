"""`cutefuse patch --tune` with times from a table: what is timed, what is kept, and what a site is worth by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, weights

from cutefuse import kernels
from cutefuse.commands.patch import main
from cutefuse.engines import plugins
from cutefuse.errors import CutefuseError
from cutefuse.graph.cut import cut
from cutefuse.match.find import find_sites
from cutefuse.match.site import Site
from cutefuse.optimize.site_times import best_tiles, pricing
from cutefuse.select.price import Price
from cutefuse.timing.cache import TuneCache, cache_path
from cutefuse.timing.calls import Tuner, call_key, model_key

SIZED = {"a": "1,8,9,7", "b": "1,16,9,7"}
SITE = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"
# Microseconds of an operator in every mode: what is left out costs nothing.
COST = {"Conv": 20.0, "Concat": 6.0, "Relu": 1.0, "Sigmoid": 2.0, "Mul": 2.0}


class FakeTimer:
    """Times by operator; compile runs all but convolutions twice as fast. A tile takes 5 us, the second one 4."""

    tiles_machine, plain_machine = "GPU X, driver 1, cutefuse 0 abc", "GPU X, driver 1, PyTorch 2"
    most_tiles = 0

    def __init__(self, fails: Sequence[str] = (), tile_us: float = 4.0) -> None:
        self.fails, self.tile_us = fails, tile_us
        self.calls: list[kernels.Call] = []
        self.notes: list[str] = []
        self.models: list[tuple[Counter[str], str]] = []

    def tiles_us(self, call: kernels.Call) -> dict[int, float]:
        self.calls.append(call)
        if "tiles" in self.fails:
            raise CutefuseError("no tile runs")
        first, second, *_ = kernels.configs(replace(call, sm=80, _keep=[]))
        return {first: self.tile_us + 1, second: self.tile_us}

    def model_us(self, model: onnx.ModelProto, mode: str) -> float:
        ops = Counter(n.op_type for n in model.graph.node)
        self.models.append((ops, mode))
        if mode in self.fails:
            raise CutefuseError(f"{mode} cannot take it")
        share = 0.5 if mode == "compile" else 1.0
        return sum(COST.get(op, 0.0) * n * (1.0 if op == "Conv" else share) for op, n in ops.items())


@pytest.fixture
def cache(tmp_path: Path) -> TuneCache:
    return TuneCache(tmp_path / "cache" / "tune.json")


def priced(model: onnx.ModelProto, tuner: Tuner, **shapes: Sequence[int]) -> tuple[list[Price], list[Site]]:
    cleaned, sites = find_sites(model, Path(), shapes)
    return [*map(pricing(tuner)(cleaned.whole, sites), sites)], sites


class TestCache:
    def test_the_file_lies_where_the_user_keeps_caches(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_path() == tmp_path / "cutefuse" / "tune.json"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard tells programs to ignore
        assert cache_path() == Path.home() / ".cache" / "cutefuse" / "tune.json"

    def test_times_come_back_on_the_same_machine_only(self, cache: TuneCache) -> None:
        cache.put("tiles", "gpu 1", "key", {"7": 1.25, "3": 2.0})
        cache.save()
        again = TuneCache(cache.path)
        assert list(again.get("tiles", "gpu 1", "key").items()) == [("7", 1.25), ("3", 2.0)]
        assert again.get("tiles", "gpu 2", "key") == again.get("plain", "gpu 1", "key") == {}
        assert [p.name for p in cache.path.parent.iterdir()] == ["tune.json"]

    @pytest.mark.parametrize(
        "text, note",
        [
            ("{", "cannot be read (JSONDecodeError)"),
            ("[" * 100000, "cannot be read (RecursionError)"),
            ("[]", "not what cutefuse writes"),
            ('{"schema": 1, "tiles": {}}', "not what cutefuse writes"),
            ('{"schema": 1, "tiles": {"m": {"k": {"1": "fast"}}}, "plain": {}}', "not what cutefuse writes"),
            ('{"schema": 1, "tiles": {"m": {"k": {"1": NaN}}}, "plain": {}}', "not what cutefuse writes"),
            ('{"schema": 1, "tiles": {"m": {"k": {"1": Infinity}}}, "plain": {}}', "not what cutefuse writes"),
            ('{"schema": 1, "tiles": {"m": 3}, "plain": {}}', "not what cutefuse writes"),
            ('{"schema": 99, "tiles": {}, "plain": {}}', "another format (99)"),
        ],
    )
    def test_a_damaged_file_costs_a_sentence_and_is_written_anew(self, text: str, note: str, cache: TuneCache) -> None:
        cache.path.parent.mkdir()
        cache.path.write_text(text)
        damaged = TuneCache(cache.path)
        assert note in damaged.note and "taken anew" in damaged.note and damaged.get("tiles", "m", "k") == {}
        damaged.put("tiles", "m", "k", {"1": 2.0})
        damaged.save()
        assert TuneCache(cache.path).note == "" and TuneCache(cache.path).get("tiles", "m", "k") == {"1": 2.0}

    def test_bytes_that_are_no_text_are_damage_too(self, cache: TuneCache) -> None:
        cache.path.parent.mkdir()
        cache.path.write_bytes(b"\xff\xfe\x00")
        assert "UnicodeDecodeError" in TuneCache(cache.path).note

    def test_two_runs_keep_what_each_of_them_found(self, cache: TuneCache) -> None:
        other = TuneCache(cache.path)
        for own, key in ((cache, "one"), (other, "two")):
            own.put("plain", "m", key, {"cudnn": 3.0})
            own.save()
        assert TuneCache(cache.path).get("plain", "m", "one") == TuneCache(cache.path).get("plain", "m", "two") != {}

    def test_a_folder_that_cannot_be_made_costs_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        cache = TuneCache(tmp_path / "file" / "tune.json")
        cache.put("plain", "m", "k", {"cudnn": 3.0})
        cache.save()
        assert "the times were not kept for the next run" in cache.note


class TestKeys:
    def test_names_and_weights_do_not_matter(self) -> None:
        one = graph(SITE, inputs=SIZED)
        other = graph(
            SITE.replace("x =", "z =").replace("(x)", "(z)"), weights(5, w=(12, 24, 3, 3), k=(12,)), inputs=SIZED
        )
        assert model_key(one) == model_key(other)

    @pytest.mark.parametrize(
        "other",
        [
            graph(SITE, inputs={"a": "1,8,9,8", "b": "1,16,9,8"}),
            graph(SITE, weights(w=(12, 24, 1, 1), k=(12,)), inputs=SIZED),
            graph(SITE.replace("Relu", "Tanh"), inputs=SIZED),
            graph(SITE.replace("[1,1,1,1]", "[1,1,0,0]"), inputs=SIZED),
            graph(SITE.replace("(a, b)", "(b, a)"), inputs=SIZED),
            graph(SITE, opset=14, inputs=SIZED),
        ],
    )
    def test_what_is_computed_does(self, other: onnx.ModelProto) -> None:
        assert model_key(other) != model_key(graph(SITE, inputs=SIZED))

    def test_whole_numbers_are_parameters_and_other_constants_are_not(self) -> None:
        def padded(ends: Sequence[int], value: float) -> onnx.ModelProto:
            values = {"p": np.int64([0, 0, 1, 1, 0, 0, *ends]), "v": np.float32(value)}
            return graph("y = Pad(a, p, v)", values, inputs={"a": "1,8,9,7"})

        assert model_key(padded((1, 1), 0)) == model_key(padded((1, 1), 5)) != model_key(padded((1, 2), 0))

    def test_calls_differ_by_sizes_types_and_attributes_not_by_addresses(self) -> None:
        (site,) = find_sites(graph(SITE, inputs=SIZED), Path())[1]
        call = site.sized_call
        assert call is not None
        moved = replace(call, inputs=[replace(t, data=64) for t in call.inputs], workspace=8, _keep=[])
        assert call_key(moved) == call_key(call)
        half = replace(call, inputs=[replace(t, dtype="float16") for t in call.inputs], _keep=[])
        strided = replace(call, attrs={**call.attrs, "strides": [2, 2]}, _keep=[])
        assert len({call_key(c) for c in (call, half, strided)}) == 3


class TestTuner:
    def test_equal_work_is_timed_once_and_the_next_run_knows_it(self, cache: TuneCache) -> None:
        (site,) = find_sites(graph(SITE, inputs=SIZED), Path())[1]
        timer = FakeTimer()
        tuner = Tuner(timer, cache)
        assert site.sized_call is not None
        tiles = tuner.tiles(site.sized_call)
        assert tuner.tiles(site.sized_call) == tiles and len(timer.calls) == 1
        assert tiles.best_us == 4.0 and tiles.times_us[tiles.guess] == 5.0 and tiles.best != tiles.guess
        assert tuner.replaced(graph(SITE, inputs=SIZED)).times_us == {"cudnn": 27.0, "compile": 23.5}
        cache.save()
        fresh = FakeTimer()
        again = Tuner(fresh, TuneCache(cache.path))
        assert again.tiles(site.sized_call) == tiles and again.replaced(graph(SITE, inputs=SIZED)).mode == "compile"
        assert (fresh.calls, fresh.models) == ([], []) and (again.timed, again.known) == (0, 3)

    def test_a_mode_that_fails_leaves_the_other_one(self, cache: TuneCache) -> None:
        timer = FakeTimer(fails=["compile"])
        tuner = Tuner(timer, cache)
        for _ in range(2):
            found = tuner.replaced(graph(SITE, inputs=SIZED))
            assert (found.mode, found.best_us) == ("cudnn", 27.0) and "compile" in found.failures
        assert len(timer.models) == 2  # a failure is not tried again

    def test_what_runs_anyway_is_taken_off(self, cache: TuneCache) -> None:
        inner = graph("y = Relu(a)", {}, inputs={"a": "1,8,9,7"})
        assert Tuner(FakeTimer(), cache, "cudnn").replaced(graph(SITE, inputs=SIZED), inner).times_us == {"cudnn": 26}

    def test_an_unknown_rival_is_refused(self, cache: TuneCache) -> None:
        with pytest.raises(CutefuseError, match="'tensorrt' is unknown; choose one of best, cudnn, compile"):
            Tuner(FakeTimer(), cache, "tensorrt")


class TestCut:
    def test_a_part_computes_what_the_whole_computes(self) -> None:
        from onnx.reference import ReferenceEvaluator

        model = graph(f"{SITE.replace('y =', 'r =')} y = Tanh(r)", inputs=SIZED)
        cleaned, (site,) = find_sites(model, Path())
        part = cut(cleaned.whole, site.nodes, ["r"])
        onnx.checker.check_model(part)
        assert [v.name for v in part.graph.input] == ["a", "b"] and {t.name for t in part.graph.initializer} == {
            "w",
            "k",
        }
        feed = {k: np.ones([int(d) for d in s.split(",")], np.float32) for k, s in SIZED.items()}
        assert np.allclose(
            np.tanh(ReferenceEvaluator(part).run(None, feed)[0]), ReferenceEvaluator(model).run(None, feed)[0]
        )

    def test_an_unknown_size_is_named(self) -> None:
        cleaned, (site,) = find_sites(graph(SITE), Path())
        with pytest.raises(CutefuseError, match="the sizes of a, which Concat_0 reads, are not known"):
            cut(cleaned.whole, site.nodes, ["y"])
        sizes = {"a": (2, 8, 9, 7), "b": (2, 16, 9, 7)}
        cleaned, (site,) = find_sites(graph(SITE), Path(), sizes)
        part = cut(cleaned.whole, site.nodes, ["y"])
        assert [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in part.graph.input] == [
            [2, 8, 9, 7],
            [2, 16, 9, 7],
        ]


class TestPricing:
    def test_a_site_is_worth_what_goes_less_its_best_tile(self, cache: TuneCache) -> None:
        ((price,), _) = priced(graph(SITE, inputs=SIZED), Tuner(FakeTimer(), cache))
        assert price.saved_us == 23.5 - 4 and price.basis == "tuned"
        assert "torch.compile takes 23.5 us, tile sm80_" in price.note and "us, tile" in price.note

    def test_a_site_that_loses_has_a_negative_gain(self, cache: TuneCache) -> None:
        ((price,), _) = priced(graph(SITE, inputs=SIZED), Tuner(FakeTimer(tile_us=30), cache, "cudnn"))
        assert price.saved_us == -3.0

    def test_a_concat_that_stays_is_not_counted(self, cache: TuneCache) -> None:
        model = graph(f"{SITE} y2 = Tanh(c)", inputs=SIZED, outputs=("y", "y2"))
        timer = FakeTimer()
        ((price,), _) = priced(model, Tuner(timer, cache, "cudnn"))
        assert price.saved_us == 21 - 4 and timer.models == [(Counter(Conv=1, Relu=1), "cudnn")]

    def test_sites_that_share_a_concat_share_what_goes(self, cache: TuneCache) -> None:
        model = graph(f"{SITE} y2 = Conv(c, w)", inputs=SIZED, outputs=("y", "y2"))
        prices, _ = priced(model, Tuner(FakeTimer(), cache, "cudnn"))
        assert [p.saved_us for p in prices] == [(47 - 8) / 2] * 2  # two convolutions, a Relu, one Concat
        assert all("shares what goes with 1 other" in p.note for p in prices)

    def test_what_makes_the_sources_is_timed_with_the_concat_and_taken_off_again(self, cache: TuneCache) -> None:
        model = graph(
            "q = Conv(a, v) s = Sigmoid(q) m = Mul(q, s) c = Concat<axis=1>(m, b) x = Conv(c, w) y = Relu(x)",
            weights(v=(8, 8, 1, 1), w=(12, 24, 3, 3)), inputs=SIZED,
        )  # fmt: skip
        timer = FakeTimer()
        prices, sites = priced(model, Tuner(timer, cache, "compile"))
        seen = [ops for ops, _ in timer.models]
        assert Counter(Sigmoid=1, Mul=1, Concat=1, Conv=1, Relu=1) in seen and Counter(Sigmoid=1, Mul=1) in seen
        (price,) = [p for p, s in zip(prices, sites, strict=True) if "Concat" in [n.op_type for n in s.nodes]]
        assert price.saved_us == 20 + 3 + 0.5 - 4

    def test_unknown_sizes_are_not_timed_and_given_ones_are(self, cache: TuneCache) -> None:
        timer = FakeTimer()
        ((price,), _) = priced(graph(SITE), Tuner(timer, cache))
        assert price.saved_us is None and "--input-shape" in price.note and not timer.calls
        ((price,), _) = priced(graph(SITE), Tuner(timer, cache), a=(2, 8, 9, 7), b=(2, 16, 9, 7))
        assert price.saved_us == 19.5 and timer.calls[0].inputs[0].dims == (2, 8, 9, 7)

    @pytest.mark.parametrize(
        "fails, note", [(["tiles"], "cannot be timed: no tile runs"), (["cudnn", "compile"], "cannot take it")]
    )
    def test_what_cannot_be_timed_has_no_gain_and_a_reason(self, fails: list[str], note: str, cache: TuneCache) -> None:
        ((price,), _) = priced(graph(SITE, inputs=SIZED), Tuner(FakeTimer(fails), cache))
        assert price.saved_us is None and note in price.note

    def test_times_are_kept_when_a_later_site_interrupts(self, cache: TuneCache) -> None:
        class Interrupted(FakeTimer):
            def model_us(self, model: onnx.ModelProto, mode: str) -> float:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            priced(graph(SITE, inputs=SIZED), Tuner(Interrupted(), cache))
        assert json.loads(cache.path.read_text())["tiles"]

    def test_a_call_that_no_tile_runs_has_no_best_tile(self, cache: TuneCache) -> None:
        (site,) = find_sites(graph(SITE, inputs=SIZED), Path())[1]
        assert best_tiles(Tuner(FakeTimer(["tiles"]), cache), [site.sized_call]) == [0]
        unknown, known = best_tiles(Tuner(FakeTimer(), cache), [None, site.sized_call])
        assert unknown == 0 and known > 0


@pytest.mark.torch
@pytest.mark.parametrize("name", ["yolov8n", "smp_unet", "googlenet"])
def test_what_the_sites_of_a_network_replace_runs_alone(name: str, cache: TuneCache) -> None:
    import models
    from cutefuse.engines.pytorch.run import TorchEngine

    class OnCpu(FakeTimer):
        def model_us(self, model: onnx.ModelProto, mode: str) -> float:
            assert TorchEngine.build(model, mode, "cpu").run()
            return 10.0

    prices, sites = priced(models.build(name, "float16", small=True, batch=1), Tuner(OnCpu(), cache, "cudnn"))
    fused = [p for p, s in zip(prices, sites, strict=True) if s.status == "fused"]
    assert fused and all(p.saved_us is not None for p in fused), [p.note for p in fused]


class TestCommand:
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        onnx.save(graph(SITE, inputs=SIZED), str(tmp_path / "model.onnx"))
        return tmp_path / "model.onnx"

    def with_timer(self, monkeypatch: pytest.MonkeyPatch, timer: Any) -> Any:
        monkeypatch.setattr("cutefuse.commands.choices.gpu_timer", lambda: timer)
        return timer

    def test_the_report_carries_gain_and_tile_and_the_next_run_times_nothing(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.with_timer(monkeypatch, FakeTimer())
        assert main([str(source), "--tune"]) == 0
        (site,) = json.loads(source.with_name("model.patch.json").read_text())["sites"]
        assert site["gain_us"] == 19.5 and site["tile"] > 0
        assert plugins.tuned_tiles(source.with_name("model.cutefuse.onnx")) == {site["name"]: site["tile"]}
        out = capsys.readouterr().out
        assert "tuned on GPU X, driver 1: 3 times taken" in out and "not TensorRT's" in out
        self.with_timer(monkeypatch, FakeTimer(["tiles", "cudnn", "compile"]))
        assert main([str(source), "--tune"]) == 0
        assert ": 0 times taken, 4 known from" in capsys.readouterr().out

    def test_a_site_that_loses_is_left_out_with_its_times(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.with_timer(monkeypatch, FakeTimer(tile_us=30))
        assert main([str(source), "--tune", "--rival", "cudnn"]) == 3
        assert "cuDNN takes 27 us, tile" in capsys.readouterr().out
        assert not source.with_name("model.cutefuse.onnx").exists()

    def test_a_damaged_cache_is_told(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.with_timer(monkeypatch, FakeTimer())
        cache_path().parent.mkdir(parents=True)
        cache_path().write_text("junk")
        assert main([str(source), "--tune"]) == 0 and "taken anew" in capsys.readouterr().out

    def test_a_profile_beside_it_is_refused(self, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(source), "--tune", "--profile", "x"]) == 2
        assert "--tune and --profile were both given" in capsys.readouterr().err

    @pytest.mark.torch
    def test_without_a_gpu_it_is_one_sentence(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert main([str(source), "--tune"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "PyTorch sees none here" in line and not source.with_name("model.cutefuse.onnx").exists()


class TestTilesOfAReport:
    @pytest.mark.parametrize("tile", [0, None, "4", [1]])
    def test_what_is_no_tile_is_not_handed_on(self, tile: Any, tmp_path: Path) -> None:
        sites = [{"name": "s", "status": "fused", "tile": tile}, {"name": "t", "status": "excluded", "tile": 4}]
        (tmp_path / "m.patch.json").write_text(json.dumps({"sites": sites}))
        assert plugins.tuned_tiles(tmp_path / "m.onnx") == {}

    def test_a_report_of_another_model_has_no_tiles_for_this_one(self, tmp_path: Path) -> None:
        report = {"output": {"path": "other.onnx"}, "sites": [{"name": "s", "status": "fused", "tile": 4}]}
        (tmp_path / "m.patch.json").write_text(json.dumps(report))
        assert plugins.tuned_tiles(tmp_path / "m.onnx") == {}

    @pytest.mark.torch
    def test_a_tile_that_cannot_run_is_left_with_a_note(self, tmp_path: Path) -> None:
        from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
        from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

        nodes: list[Any] = [object.__new__(FusedNode) for _ in "xy"]
        for node, name in zip(nodes, "xy", strict=True):
            node.name, node.tiles, node.config, node.named = name, lambda: [3, 5], 0, True
        steps = [Step(node, [], [], node.name, "", {}, []) for node in nodes]
        program = Program({}, {}, steps, {}, {}, {})
        program.choose_tiles({"x": 5, "y": 9, "body": 3}, ["x", "y", "body"])
        assert [n.config for n in nodes] == [5, 0]
        assert program.notes == ["y runs the kernels' first guess: tile 9 cannot run it here"]
        with pytest.raises(CutefuseError, match="nobody, which are no fused nodes here"):
            program.choose_tiles({"nobody": 3}, ["x"])
