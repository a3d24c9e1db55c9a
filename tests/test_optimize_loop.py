"""The loop of `cutefuse optimize` over engines whose sites have a known worth: what it keeps, takes back and leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cutefuse.engines.artifacts import Artifacts
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.optimize.loop import LOSES, PAYS, UNCLEAR, UNKNOWN, Built, Graph, Limits, Loop, Outcome, Worth

PLAIN_US = 1000.0


@dataclass
class World:
    """Bench and patcher at once. `gains`: what each site really saves; `pairs`: what two sites save on top when both
    are fused; `seen`: what the layer times say instead of the truth; `slow`: mode -> factor."""

    gains: dict[str, float]
    pairs: dict[frozenset[str], float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    joined: list[tuple[str, ...]] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=lambda: {"": 1.0})
    slow_patched: dict[str, float] = field(default_factory=dict)
    noise: float = 0.005
    layer_noise_us: float = 1.0
    fail: Callable[[str], BaseException | None] = lambda step: None
    steps: list[str] = field(default_factory=list)
    kept: Built | None = None

    def __post_init__(self) -> None:
        self.modes = tuple(self.slow)
        self.random = np.random.default_rng(7)

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if error := self.fail(name):
            raise error

    def truth(self, sites: Iterable[str]) -> float:
        fused = set(sites)
        return PLAIN_US - sum(self.gains[s] for s in fused) - sum(v for p, v in self.pairs.items() if p <= fused)

    # ---------------------------------------------------------------------------------------------------- Bench
    def build(self, graph: Graph, modes: Sequence[str]) -> list[Built]:
        self._step(f"build {graph.name}")
        factor = {**self.slow, **(self.slow_patched if graph.sites else {})}
        return [Built(graph, m, Artifacts(Path("e")), self.truth(graph.sites) * factor[m]) for m in modes]

    def race(self, engines: Sequence[Built]) -> list[list[float]]:
        self._step("race")
        assert all(e.runner for e in engines), "an engine was timed after its memory was freed"
        drift = np.linspace(1, 1.2, 15)
        return [list(e.runner * drift * self.random.normal(1, self.noise, 15)) for e in engines]

    def check(self, plain: Built, patched: Built) -> None:
        self._step("check")

    def keep(self, engine: Built) -> None:
        self._step(f"keep {engine.graph.name}")
        self.kept = engine

    def release(self, engine: Built) -> None:
        engine.runner = None

    # -------------------------------------------------------------------------------------------------- Patcher
    def plain(self) -> Graph:
        return Graph("plain", Path("m.onnx"))

    def patched(self, only: frozenset[str] | None) -> Graph | None:
        self._step("patch")
        names = tuple(s for s in self.gains if only is None or s in only)
        number = sum(s.startswith("build") for s in self.steps)
        return Graph(f"patched {number}", Path("p.onnx"), names) if names else None

    def why_none(self) -> str:
        return "no site can be fused"

    def worth(self, plain: Built, patched: Built) -> list[Worth]:
        self._step("worth")
        fused = set(patched.graph.sites)
        groups = [g for g in self.joined if set(g) <= fused]
        alone = [(s,) for s in patched.graph.sites if not any(s in g for g in groups)]
        shares = {s: self.seen.get(s, self.gains[s]) for s in fused}
        for pair, bonus in self.pairs.items():
            for s in pair & fused:
                shares[s] += bonus / len(pair) if pair <= fused else 0.0
        return [Worth(g, 100.0, 100.0 - sum(shares[s] for s in g), self.layer_noise_us) for g in (*groups, *alone)]


def run(world: World, **limits: object) -> Outcome:
    outcome = Loop(world, world, Limits(**limits)).run()  # type: ignore[arg-type]
    assert outcome.kept is world.kept, "what the loop says and what lies in the folder differ"
    return outcome


def builds(world: World) -> int:
    return sum(s.startswith("build") for s in world.steps)


# ------------------------------------------------------------------------------------------------ what is kept
def test_sites_that_pay_stay_and_the_others_are_taken_back() -> None:
    world = World({"a": 100.0, "b": -40.0, "c": 60.0, "d": -30.0})
    outcome = run(world)
    assert outcome.paid and outcome.kept and set(outcome.kept.graph.sites) == {"a", "c"}
    assert outcome.rounds[1].taken_back == ["b", "d"] and builds(world) == 3
    assert outcome.verdict and outcome.verdict.ratio == pytest.approx(0.84, abs=0.01)
    assert outcome.ended == "every site pays or is within noise"
    assert [w.verdict for w in outcome.rounds[1].worths] == [PAYS, LOSES, PAYS, LOSES]


def test_where_all_pay_two_builds_do() -> None:
    world = World({"a": 100.0, "b": 50.0})
    assert set(run(world).kept.graph.sites) == {"a", "b"} and builds(world) == 2  # type: ignore[union-attr]


def test_a_loss_that_shows_only_after_another_site_went_is_taken_back_too() -> None:
    """b pays only while a is fused beside it, as a producer does whose output needs a copy elsewhere."""
    world = World({"a": -200.0, "b": -50.0, "c": 150.0}, pairs={frozenset("ab"): 110.0})
    outcome = run(world)
    assert [r.taken_back for r in outcome.rounds] == [[], ["a"], ["b"], []]
    assert outcome.kept and outcome.kept.graph.sites == ("c",) and builds(world) == 4


def test_a_take_back_that_made_it_slower_is_undone_by_halves() -> None:
    """The layer times blame a and b; the truth is that b is worth keeping."""
    world = World({"a": -80.0, "b": 60.0, "c": 100.0}, seen={"a": -80.0, "b": -10.0})
    world.gains["b"] = 120.0
    outcome = run(world)
    assert outcome.rounds[1].taken_back == ["a", "b"]
    assert outcome.rounds[2].decision.startswith("not faster than patched 1, so undone; 1 of 3")
    assert outcome.rounds[2].taken_back == ["a"]
    assert outcome.kept and set(outcome.kept.graph.sites) == {"b", "c"} and builds(world) == 4


def test_sites_of_one_layer_are_judged_together() -> None:
    world = World({"a": 50.0, "b": -90.0, "c": 100.0}, joined=[("a", "b")])
    outcome = run(world)
    assert outcome.rounds[1].taken_back == ["a", "b"]
    assert outcome.kept and outcome.kept.graph.sites == ("c",)


def test_of_sites_that_lose_together_only_the_blamed_one_goes_first() -> None:
    world = World({"a": 50.0, "b": -90.0, "c": 100.0})
    world.worth = lambda p, q: [  # type: ignore[method-assign]
        Worth(("a", "b"), 100.0, 140.0, 1.0, (30.0, -70.0)) if "b" in q.graph.sites else Worth(("a",), 100.0, 50.0),
        Worth(("c",), 100.0, 0.0),
    ]
    outcome = run(world)
    assert outcome.rounds[1].taken_back == ["b"] and outcome.kept and set(outcome.kept.graph.sites) == {"a", "c"}


def test_noise_in_the_layer_times_takes_nothing_back() -> None:
    world = World({"a": 100.0, "b": 50.0}, seen={"b": -3.0}, layer_noise_us=5.0)
    outcome = run(world)
    assert outcome.kept and set(outcome.kept.graph.sites) == {"a", "b"} and builds(world) == 2


def test_unclear_sites_go_where_the_whole_is_not_faster() -> None:
    world = World({"a": 30.0, "b": -25.0}, seen={"b": -3.0}, layer_noise_us=5.0)
    outcome = run(world)
    assert outcome.rounds[1].taken_back == ["b"] and outcome.kept and outcome.kept.graph.sites == ("a",)


# ----------------------------------------------------------------------------------------------- never slower
@pytest.mark.parametrize(
    "gains, ended",
    [({"a": -40.0, "b": -60.0}, "no site pays"), ({}, "no site can be fused"), ({"a": 2.0, "b": 1.0}, "")],
    ids=["all lose", "none", "all within noise"],
)
def test_where_nothing_pays_the_plain_engine_comes_back(gains: dict[str, float], ended: str) -> None:
    world = World(gains)
    outcome = run(world)
    assert not outcome.paid and outcome.kept is outcome.rival and outcome.kept
    assert outcome.kept.graph.name == "plain" and (not ended or outcome.ended == ended)


def test_of_engines_that_are_all_alike_none_is_called_faster() -> None:
    worlds = [World({"a": 0.0, "b": 0.0}, noise=0.03) for _ in range(60)]
    for i, world in enumerate(worlds):
        world.random = np.random.default_rng(i)
    assert sum(run(w).paid for w in worlds) <= 2


@pytest.mark.parametrize("seed", range(25))
def test_what_is_kept_is_never_slower_than_the_plain_engine(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = "abcdefgh"
    pairs = itertools.combinations(names, 2)
    world = World(
        {n: float(random.normal(0, 40)) for n in names},
        pairs={frozenset(p): float(random.normal(0, 20)) for p in pairs if random.random() < 0.2},
        seen={n: float(random.normal(0, 60)) for n in names if random.random() < 0.3},
        slow={"cudnn": 1.1, "compile": 1.0},
    )  # fmt: skip
    outcome = run(world)
    assert outcome.kept and outcome.rival and outcome.kept.runner <= outcome.rival.runner
    assert builds(world) <= 4


# ------------------------------------------------------------------------------------------------------ modes
def test_the_rival_is_the_better_plain_mode_and_the_better_patched_mode_is_kept() -> None:
    world = World({"a": 100.0}, slow={"cudnn": 1.5, "compile": 1.0}, slow_patched={"cudnn": 0.8, "compile": 1.0})
    outcome = run(world)
    assert outcome.rival and (outcome.rival.mode, outcome.rival.graph.name) == ("compile", "plain")
    assert outcome.kept and outcome.kept.mode == "cudnn" and outcome.kept.runner == pytest.approx(720)
    assert builds(world) == 2  # both modes of a graph are one build


def test_a_patched_engine_that_beats_only_the_slower_mode_is_not_kept() -> None:
    world = World({"a": 100.0}, slow={"cudnn": 1.5, "compile": 1.0}, slow_patched={"compile": 1.3})
    outcome = run(world)
    assert not outcome.paid and outcome.kept and outcome.kept.mode == "compile"


def test_a_mode_that_is_far_behind_is_not_built_again() -> None:
    world = World({"a": 100.0, "b": -50.0}, slow={"cudnn": 1.5, "compile": 1.0})
    outcome = run(world)
    assert [sorted(r.times_us) for r in outcome.rounds] == [["compile", "cudnn"], ["compile", "cudnn"], ["compile"]]


def test_sites_that_one_mode_does_not_show_are_judged_by_the_other() -> None:
    world = World({"a": 100.0, "b": -50.0, "c": 20.0}, slow={"cudnn": 1.02, "compile": 1.0})
    worth = world.worth

    def half_blind(plain: Built, patched: Built) -> list[Worth]:
        assert plain.mode == patched.mode
        found = worth(plain, patched)
        blind = {"compile": ("b", "c"), "cudnn": ("c",)}[patched.mode]
        return [Worth(w.sites, None, None) if w.sites[0] in blind else w for w in found]

    world.worth = half_blind  # type: ignore[method-assign]
    outcome = run(world)
    verdicts = {w.sites: w.verdict for w in outcome.rounds[1].worths}
    assert verdicts == {("a",): PAYS, ("b",): LOSES, ("c",): UNKNOWN}
    assert outcome.kept and set(outcome.kept.graph.sites) == {"a", "c"}


# ----------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("most", [2, 3, 4, 9])
def test_no_more_builds_than_allowed(most: int) -> None:
    """Every round shows one more loss, so that only the limit ends the loop."""
    world = World({n: -10.0 for n in "abcdefghijkl"} | {"z": 300.0})
    worth = world.worth
    world.worth = lambda p, q: [
        w if w.sites in ((q.graph.sites[0],), ("z",)) else Worth(w.sites, 1.0, 1.0) for w in worth(p, q)
    ]  # type: ignore[method-assign]  # noqa: E501
    outcome = run(world, builds=most)
    assert builds(world) == most == outcome.builds
    assert outcome.ended == f"{most} engine builds were allowed (--builds)" and outcome.paid


def test_one_build_is_no_optimisation() -> None:
    with pytest.raises(CutefuseError, match="give 2 or more"):
        Loop(World({}), World({}), Limits(builds=1))


def test_no_build_begins_that_would_pass_the_time_limit() -> None:
    world = World({"a": 100.0, "b": -50.0})
    ticks = itertools.count()
    slow = world.build
    now = [0.0]

    def build(graph: Graph, modes: Sequence[str]) -> list[Built]:
        now[0] += 50
        return slow(graph, modes)

    world.build = build  # type: ignore[method-assign]
    outcome = Loop(world, world, Limits(time_s=120), clock=lambda: now[0] + next(ticks) * 1e-6).run()
    assert builds(world) == 2 and "--time-limit" in outcome.ended and outcome.paid


# --------------------------------------------------------------------------------------------------- failures
STEPS = ["build patched 1", "race", "worth", "check", "keep patched 1", "patch", "build patched 2", "keep patched 2"]


@pytest.mark.parametrize("error", [CutefuseError("full disk"), KeyboardInterrupt(), OSError(28, "No space left")])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_an_engine_that_was_good(step: str, error: BaseException) -> None:
    world = World({"a": 100.0, "b": -50.0}, fail=lambda s: error if s == step else None)
    seen: list[Outcome] = []
    loop = Loop(world, world, seen=seen.append)
    with pytest.raises(type(error)):
        loop.run()
    assert world.kept and world.kept is loop.outcome.kept and world.kept.runner <= PLAIN_US
    assert seen and (world.kept.graph.name == "patched 1") == (step in ("build patched 2", "keep patched 2", "worth"))


def test_an_engine_that_is_slower_is_not_kept_in_between() -> None:
    world = World({"a": 50.0, "b": -80.0}, fail=lambda s: CutefuseError("no") if s == "build patched 2" else None)
    with pytest.raises(CutefuseError):
        Loop(world, world).run()
    assert world.kept and world.kept.graph.name == "plain" and "check" not in world.steps


def test_a_failure_of_the_plain_build_leaves_nothing() -> None:
    world = World({"a": 1.0}, fail=lambda s: CutefuseError("no") if s == "build plain" else None)
    with pytest.raises(CutefuseError):
        Loop(world, world).run()
    assert world.kept is None


def test_outputs_are_compared_before_an_engine_is_handed_over() -> None:
    world = World({"a": 100.0}, fail=lambda s: VerificationError("differs") if s == "check" else None)
    with pytest.raises(VerificationError):
        Loop(world, world).run()
    assert world.kept and world.kept.graph.name == "plain"
    good = World({"a": 100.0})
    run(good)
    assert good.steps.index("check") < good.steps.index("keep patched 1")


# ---------------------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize(
    "plain, patched, verdict",
    [(10.0, 5.0, PAYS), (10.0, 9.5, UNCLEAR), (10.0, 10.5, UNCLEAR), (10.0, 12.0, LOSES), (None, 5.0, UNKNOWN)],
)
def test_a_worth_is_a_gain_a_loss_or_noise(plain: float | None, patched: float, verdict: str) -> None:
    assert Worth(("a",), plain, patched, 1.0).verdict == verdict


def test_the_record_holds_every_round() -> None:
    data = run(World({"a": 100.0, "b": -50.0})).as_json()
    assert data["kept"] == "patched 2" and data["rival"] == "plain" and data["builds"] == 3
    assert [r["graph"] for r in data["rounds"]] == ["plain", "patched 1", "patched 2"]
    assert data["rounds"][1]["worth"][1]["verdict"] == LOSES and data["verdict"]["faster"]
    assert "interleaved" in data["statistic"]
