"""Tiles of the PyTorch engine's fused nodes, with times from a table: what is timed, what is taken, who decides."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import problems
import pytest
from graphs import graph, run_patch

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.timing.cache import TuneCache
from cutefuse.timing.calls import TileTuner

pytestmark = pytest.mark.torch
# Two sites of one call, and one of another whose tiles are guessed in the same order, since a change of tile costs.
BODY = """c = Concat<axis=1>(a, b) p = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(p)
          d = Concat<axis=1>(f, g) q = Conv<pads=[1,1,1,1]>(d, w, k) y2 = Relu(q)
          e = Concat<axis=1>(a, b) r = Conv<pads=[2,2,2,2]>(e, w, k) y3 = Relu(r)"""
SIZED = {"a": "1,8,5,5", "b": "1,16,5,5", "f": "1,8,5,5", "g": "1,16,5,5"}


class FakeTimer:
    """The first guess takes 10 us, the third one `third_us`, all others more."""

    tiles_machine = "GPU X, driver 1, cutefuse 0 abc"

    def __init__(self, third_us: float = 5.0, most_tiles: int = 8) -> None:
        self.third_us, self.most_tiles = third_us, most_tiles
        self.notes: list[str] = []
        self.calls: list[kernels.Call] = []

    def tiles_us(self, call: kernels.Call) -> dict[int, float]:
        self.calls.append(call)
        ids = kernels.configs(replace(call, sm=90, sm_count=132, _keep=[]))[: self.most_tiles or None]
        return {tile: {0: 10.0, 2: self.third_us}.get(i, 20.0 + i) for i, tile in enumerate(ids)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    plain = graph(BODY, dtype="float16", inputs=SIZED, outputs=("y", "y2", "y3"))
    _, patched = run_patch(plain, tmp_path_factory.mktemp("tiles"))
    assert patched is not None
    return patched


@pytest.fixture
def load(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes the program of three kernel calls, on an H200."""
    from cutefuse.engines.inputs import input_specs, resolve
    from cutefuse.engines.pytorch.onnx_ops import fused, program

    monkeypatch.setattr(fused, "_sm", lambda: 90)
    monkeypatch.setattr(fused, "_sm_count", lambda: 132)

    def loaded(given: onnx.ModelProto = model, calls: int = 3) -> Any:
        found = program.load(given, resolve(input_specs(given), {}), fused=True)
        assert len(found.fused) == calls
        return found

    return loaded


@pytest.fixture
def cache(tmp_path: Path) -> TuneCache:
    return TuneCache(tmp_path / "tune.json")


def choose(program: Any, tuner: TileTuner | None, tiles: Mapping[str, int] | str = "timed") -> list[int]:
    """The place of each node's tile among its guesses, 0 for the first."""
    from cutefuse.engines.pytorch.tiles import choose_tiles

    names = {node.name for node in program.fused}
    choose_tiles(program, tiles, names, tuner)
    return [node.tiles().index(node.tile) for node in program.fused]


class TestChoice:
    @pytest.mark.parametrize("third_us, place", [(5.0, 2), (9.79, 2), (9.8, 0), (9.9, 0), (10.5, 0)])
    def test_another_tile_is_taken_where_it_is_faster_beyond_noise(
        self, third_us: float, place: int, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        program, timer = load(), FakeTimer(third_us)
        assert choose(program, TileTuner(timer, cache)) == [place] * 3 and program.notes == []
        assert len(timer.calls) == 2  # two of the three nodes are the same call
        assert {node.tile_from for node in program.fused} == {"timed"}

    def test_a_node_keeps_the_tile_of_the_one_before_it_for_a_little_time(
        self, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        class Near(FakeTimer):
            def tiles_us(self, call: kernels.Call) -> dict[int, float]:
                ids = list(super().tiles_us(call))
                first = self.calls[0] is call
                return {t: 5.0 if t == common else 20.0 if first else 4.6 for t in ids}

        program = load()
        common = next(t for t in program.fused[0].tiles()[:8] if t in program.fused[2].tiles()[:8])
        choose(program, TileTuner(Near(), cache))
        assert [node.tile for node in program.fused] == [common] * 3

    def test_off_means_that_nothing_is_timed(self, load: Callable[[], Any], cache: TuneCache) -> None:
        program, timer = load(), FakeTimer()
        assert choose(program, TileTuner(timer, cache), "guess") == [0] * 3 and timer.calls == []
        assert {node.tile_from for node in program.fused} == {"first guess"} and not cache.path.exists()

    def test_given_tiles_win_and_the_others_are_timed(self, load: Callable[[], Any], cache: TuneCache) -> None:
        program, timer = load(), FakeTimer()
        first, second, third = program.fused
        given = {first.name: first.tiles()[1], second.name: 0}
        assert choose(program, TileTuner(timer, cache), given) == [1, 0, 2] and len(timer.calls) == 1
        assert [n.tile_from for n in (first, second, third)] == ["given", "first guess", "timed"]

    def test_nothing_is_timed_where_every_tile_is_given(self, load: Callable[[], Any]) -> None:
        program = load()
        assert choose(program, None, {n.name: n.tiles()[1] for n in program.fused}) == [1] * 3

    def test_a_given_tile_that_cannot_run_is_told(self, load: Callable[[], Any], cache: TuneCache) -> None:
        program, timer = load(), FakeTimer()
        assert choose(program, TileTuner(timer, cache), {n.name: 9999 for n in program.fused}) == [0] * 3
        assert len(program.notes) == 3 and "tile 9999 cannot run it here" in program.notes[0] and not timer.calls

    def test_a_tile_that_a_node_asks_for_counts_as_given(self, load: Callable[[], Any], cache: TuneCache) -> None:
        program, timer = load(), FakeTimer()
        first, second, third = program.fused
        first.attrs["tile"] = first.tiles()[1]
        for tiles, places, asked in (("timed", [1, 2, 2], 2), ("guess", [1, 0, 0], 2), ({third.name: 0}, [1, 2, 0], 2)):
            assert choose(program, TileTuner(timer, cache), tiles) == places and len(timer.calls) == asked
            assert first.tile_from == "given"
        assert program.notes == []

    def test_a_tile_that_is_given_comes_before_the_one_that_the_node_asks_for(
        self, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        program = load()
        for node in program.fused:
            node.attrs["tile"] = node.tiles()[1]
        given = {n.name: n.tiles()[3] if i else 0 for i, n in enumerate(program.fused)}
        assert choose(program, None, given) == [0, 3, 3]
        assert program.fused[0].tile_from == "first guess"

    def test_a_node_that_asks_for_a_retired_tile_runs_its_heir(self, load: Callable[[], Any]) -> None:
        program = load()
        for node in program.fused:
            node.attrs["tile"] = 3
            assert {"id": 3, "heir": 4} in kernels.operator_of(node.op_type)["retired"] and 3 not in node.tiles()
        choose(program, None)
        assert [node.tile for node in program.fused] == [4] * 3 and program.notes == []

    def test_tiles_are_timed_where_a_node_asks_for_one_that_cannot_run(
        self, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        program, timer = load(), FakeTimer()
        program.fused[0].attrs["tile"] = 23  # of float32
        assert choose(program, TileTuner(timer, cache)) == [2] * 3 and len(timer.calls) == 2
        assert program.fused[0].tile_from == "timed"
        name = program.fused[0].name
        assert program.notes == [f"{name} asks for tile 23, which cannot run it here, and gets another"]

    def test_a_node_that_asks_for_what_is_no_tile_runs_its_body_with_the_reason(
        self, model: onnx.ModelProto, load: Callable[..., Any]
    ) -> None:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for node, tile in zip((n for n in changed.graph.node if n.domain == "cutefuse"), (9999, 158, -1), strict=True):
            node.attribute.append(onnx.helper.make_attribute("tile", tile))
        program = load(changed, 1)
        assert [node.asked for node in program.fused] == [158] and len(program.notes) == 2
        assert all("runs its function body: concat_conv: attribute tile is " in note for note in program.notes)

    @pytest.mark.parametrize("tiles, text", [("best", "'best' is unknown; choose timed or guess"),
                                             ({"nobody": 1}, "nobody, which are no fused nodes")])  # fmt: skip
    def test_an_unknown_choice_or_node_is_refused(self, tiles: Any, text: str, load: Callable[[], Any]) -> None:
        with pytest.raises(CutefuseError, match=text):
            choose(load(), None, tiles)

    def test_times_are_taken_while_the_gpu_is_quiet(
        self, load: Callable[[], Any], cache: TuneCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inside: list[bool] = []
        held = False

        @contextlib.contextmanager
        def quiet() -> Iterator[None]:
            nonlocal held
            held = True
            yield
            held = False

        class Watched(FakeTimer):
            def tiles_us(self, call: kernels.Call) -> dict[int, float]:
                inside.append(held)
                return super().tiles_us(call)

        monkeypatch.setattr("cutefuse.engines.pytorch.lock._quiet", quiet)
        choose(load(), TileTuner(Watched(), cache))
        assert inside == [True, True] and not held


class TestCache:
    def test_the_next_engine_takes_no_times(self, load: Callable[[], Any], cache: TuneCache) -> None:
        choose(load(), TileTuner(FakeTimer(), cache))
        timer = FakeTimer(third_us=30.0)
        assert choose(load(), TileTuner(timer, TuneCache(cache.path))) == [2] * 3 and timer.calls == []

    def test_another_machine_takes_its_own(self, load: Callable[[], Any], cache: TuneCache) -> None:
        choose(load(), TileTuner(FakeTimer(), cache))
        timer = FakeTimer(third_us=30.0)
        timer.tiles_machine = "GPU X, driver 2, cutefuse 0 abc"
        assert choose(load(), TileTuner(timer, TuneCache(cache.path))) == [0] * 3 and len(timer.calls) == 2

    def test_times_of_all_tiles_serve_those_of_the_first_ones_and_not_the_other_way(
        self, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        program = load()
        thorough = FakeTimer(most_tiles=0)
        TileTuner(FakeTimer(third_us=30.0), cache).tiles(program.fused[0].call())
        TileTuner(thorough, cache).tiles(program.fused[0].call())
        assert len(thorough.calls) == 1
        quick = FakeTimer(third_us=30.0)
        assert TileTuner(quick, cache).tiles(program.fused[0].call()).best_us == 5.0 and quick.calls == []

    def test_a_file_that_cannot_be_written_costs_a_note(self, load: Callable[[], Any], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        program, tuner = load(), TileTuner(FakeTimer(), TuneCache(tmp_path / "file" / "tune.json"))
        assert choose(program, tuner) == [2] * 3 and "were not kept for the next run" in program.notes[0]
        assert choose(load(), tuner) == [2] * 3 and tuner.timed == 2  # the same process knows them

    def test_what_was_timed_before_an_interruption_is_kept(self, load: Callable[[], Any], cache: TuneCache) -> None:
        class Interrupted(FakeTimer):
            def tiles_us(self, call: kernels.Call) -> dict[int, float]:
                if self.calls:
                    raise KeyboardInterrupt
                return super().tiles_us(call)

        with pytest.raises(KeyboardInterrupt):
            choose(load(), TileTuner(Interrupted(), cache))
        assert len(json.loads(cache.path.read_text())["tiles"][FakeTimer.tiles_machine]) == 1


class TestFailures:
    @pytest.mark.parametrize("error", [CutefuseError("no tile runs"), "out of memory"])
    def test_a_call_that_cannot_be_timed_runs_the_guess_with_a_note(
        self, error: Any, load: Callable[[], Any], cache: TuneCache
    ) -> None:
        import torch

        raised = torch.cuda.OutOfMemoryError(error) if isinstance(error, str) else error

        class Failing(FakeTimer):
            def tiles_us(self, call: kernels.Call) -> dict[int, float]:
                if list(call.attrs["pads"]) == [2, 2, 2, 2]:
                    raise raised
                return super().tiles_us(call)

        program = load()
        assert choose(program, TileTuner(Failing(), cache)) == [2, 2, 0]
        (note,) = program.notes
        assert "run the kernels' first guess, their tiles were not timed: " in note and str(error) in note

    def test_one_tile_that_fails_is_left_out_with_a_note(
        self, load: Callable[[], Any], cache: TuneCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The GPU's timer itself, over graphs that hold no work."""
        program, timer = load(), gpu_timer(monkeypatch, fails=1)
        ids = program.fused[0].tiles()
        assert choose(program, TileTuner(timer, cache)) == [2] * 3  # the second guess would be faster
        assert list(program.fused[0].tiles_us) == [ids[0], *ids[2:8]] and len(ids) > 8
        name = program.fused[0].name_of(ids[1])
        assert program.notes[0] == f"tile {name} of {program.fused[0].op_type} was not timed: no such kernel"

    def test_the_guess_itself_may_fail(
        self, load: Callable[[], Any], cache: TuneCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = load()
        assert choose(program, TileTuner(gpu_timer(monkeypatch, fails=0), cache)) == [1] * 3


def gpu_timer(monkeypatch: pytest.MonkeyPatch, fails: int) -> Any:
    """The timer of an engine's build on the CPU: the second guess is the fastest, the third one follows; the guess
    with this number has no kernel."""
    import torch

    from cutefuse.engines.pytorch import tile_times

    class Repeated:
        def __init__(self, work: Any, effort: Any) -> None:
            assert effort is tile_times.QUICK
            own = work.args[0]
            self.place = own.tiles().index(own.config)
            if self.place == fails:
                raise RuntimeError("no such kernel\nand more")

        def sample_us(self) -> float:
            return {1: 3.0, 2: 4.0}.get(self.place, 10.0)

    class OnCpu(tile_times.TileTimer):
        device, tiles_machine, l2_bytes = "cpu", "GPU X", 50 << 20  # type: ignore[assignment]

    monkeypatch.setattr(tile_times, "Repeated", Repeated)
    monkeypatch.setattr(tile_times, "_operand", lambda t: torch.empty(t.dims, dtype=getattr(torch, t.dtype)))
    return OnCpu(tile_times.QUICK)


@pytest.mark.parametrize(("read_bytes", "sets"), [(0, 1), (50, 1), (51, 2), (400, 2)])
def test_operands_that_the_cache_cannot_keep_take_turns(read_bytes: int, sets: int) -> None:
    from cutefuse.engines.pytorch.tile_times import operand_sets

    assert operand_sets(read_bytes, l2_bytes=100) == sets


class TestWorkspace:
    def test_the_workspace_of_an_engine_is_enough_for_every_tile(self, load: Callable[[], Any]) -> None:
        (node, *_) = load().fused
        size = node.workspace_bytes()
        assert size > 0  # so few pixels are divided
        for tile in node.tiles():
            node.config = tile
            assert node.workspace_bytes() == size
            plan = kernels.Plan(node.call((), size, 90, 132))
            assert plan.config == tile and plan.workspace_bytes <= size


class TestBound:
    def test_the_fastest_hopper_tile_of_every_stored_shape_is_among_the_guesses_that_are_timed(self) -> None:
        from cutefuse.engines.pytorch.tile_times import QUICK

        stored: dict[str, dict[str, float]] = {}
        with (Path(__file__).parents[1] / "calibration/data/tiles_h200.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                stored.setdefault(row["shape"], {})[row["tile"]] = float(row["time_us"])
        places = []
        for p in problems.benchmark_shapes("conv"):
            call, times = on_hopper(p), stored[p.name]
            names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
            legal = [names[i] for i in kernels.configs(call)]
            places.append(legal.index(min(legal, key=times.__getitem__)))
            assert len(legal) > QUICK.tiles
        assert len(places) == 21 and 0 < max(places) < QUICK.tiles


def on_hopper(p: problems.Problem) -> kernels.Call:
    from test_sm90 import call

    return replace(call(p, "float16"), sm=90, sm_count=132, _keep=[])


class TestFiles:
    def test_a_layer_and_a_comparison_show_the_tile(
        self, load: Callable[[], Any], cache: TuneCache, tmp_path: Path
    ) -> None:
        from cutefuse.engines.pytorch.files import describe
        from cutefuse.engines.pytorch.layers import Layer
        from cutefuse.report.analyse.compare import compare
        from cutefuse.report.read.reader import read_engine

        engines, names = [], []
        for tiles, kernel in (("guess", "k1"), ("timed", "k2")):
            program = load()
            choose(program, TileTuner(FakeTimer(), cache), tiles)
            steps = program.steps
            layers = [describe(program, Layer(s.name, [s], [kernel], [3.0])) for s in steps]
            names.append(layers[0]["TacticName"])
            path = tmp_path / f"{tiles}.graph.json"
            path.write_text(json.dumps({"Layers": layers, "Bindings": [*program.inputs, *program.outputs]}))
            times = [{"count": 1}, *({"name": s.name, "averageMs": 0.003, "medianMs": 0.003} for s in steps)]
            path.with_name(f"{tiles}.profile.json").write_text(json.dumps(times))
            engines.append(read_engine({"graph": path, "profile": path.with_name(f"{tiles}.profile.json")}))
        raw = engines[1].layers[0].raw
        assert raw["TileChoice"] == "timed" and raw["TileTimesUs"][names[1]] == 5.0 < raw["TileTimesUs"][names[0]]
        assert engines[0].layers[0].raw["TileChoice"] == "first guess" and names[0] != names[1]
        assert [engine.layers[0].tactic for engine in engines] == names
        assert compare(engines).rows[0].change == f"tile {names[0]} became {names[1]}"

    def test_the_command_switches_it_off_and_tiles_of_the_report_stay(self, tmp_path: Path) -> None:
        from cutefuse.engines.pytorch.files import _tiles, options_of

        assert options_of(["--mode=compile"]).tiles == "timed" and options_of(["--tiles=guess"]).tiles == "guess"
        with pytest.raises(CutefuseError, match="--tiles=all is unknown; choose one of timed, guess"):
            options_of(["--tiles=all"])
        result, patched = run_patch(graph(BODY, inputs=SIZED, outputs=("y", "y2", "y3")), tmp_path)
        assert patched is not None and result.output is not None
        assert _tiles(result.output, "guess") == "guess" and _tiles(result.output, "timed") == "timed"
        path = tmp_path / "model.patch.json"
        report = json.loads(path.read_text())
        first, *others = [s["name"] for s in report["sites"] if s["status"] == "fused"]
        next(s for s in report["sites"] if s["name"] == first)["tile"] = 7
        path.write_text(json.dumps(report))
        assert _tiles(result.output, "timed") == {first: 7}
        assert _tiles(result.output, "guess") == {first: 7, **dict.fromkeys(others, 0)}
        for node, tile in zip((n for n in patched.graph.node if n.domain == "cutefuse"), (7, 5, 0), strict=True):
            node.attribute.extend([onnx.helper.make_attribute("tile", tile)] if tile else [])
        onnx.save(patched, str(result.output))
        assert _tiles(result.output, "timed") == "timed" and _tiles(result.output, "guess") == "guess"
        next(s for s in report["sites"] if s["name"] == first)["tile"] = 8
        path.write_text(json.dumps(report))
        assert _tiles(result.output, "timed") == {first: 8}, "the report says something else, and wins"
        assert _tiles(result.output, "guess") == {first: 8, others[1]: 0}, "the second asks for a tile itself"
