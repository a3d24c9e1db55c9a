"""The loop of `cutefuse optimize`: build, time, take back the sites that did not pay, until nothing improves.

It knows an engine only through `Bench` and the rewriter only through `Patcher`. Layer times rank the sites; the times
of whole inferences, taken in turns, decide between engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from cutefuse.engines.artifacts import Artifacts
from cutefuse.errors import CutefuseError
from cutefuse.timing.noise import HOW, Verdict, compare

NEAR = 1.05  # a mode this much slower than the best one of its graph is not built again
PAYS, UNCLEAR, LOSES, UNKNOWN = "pays", "within noise", "costs time", "not in the profile"


@dataclass(frozen=True)
class Graph:
    """A model to build: the plain one, or one with `sites` fused."""

    name: str
    model: Path
    sites: tuple[str, ...] = ()


@dataclass(eq=False)
class Built:
    """One engine with its files. `mode` says how the back end runs the graph, "" where there is one way; `runner` is
    what times it, None once its memory was freed."""

    graph: Graph
    mode: str
    files: Artifacts
    runner: Any = None

    @property
    def title(self) -> str:
        return f"{self.graph.name}, {self.mode}" if self.mode else self.graph.name


@dataclass(frozen=True)
class Worth:
    """Measured layer times of sites that can only be judged together: in the plain engine, and in the patched one with
    the copies that fusing them brought. None where the profile has no layer for them. `shares_us`: for each site an
    estimate of its part of the gain, where there are several."""

    sites: tuple[str, ...]
    plain_us: float | None
    patched_us: float | None
    noise_us: float = 0.0
    shares_us: tuple[float, ...] = ()

    @property
    def gain_us(self) -> float | None:
        return None if self.plain_us is None or self.patched_us is None else self.plain_us - self.patched_us

    @property
    def verdict(self) -> str:
        if self.gain_us is None:
            return UNKNOWN
        return PAYS if self.gain_us > self.noise_us else LOSES if self.gain_us < -self.noise_us else UNCLEAR

    @property
    def to_blame(self) -> tuple[str, ...]:
        """The sites whose estimated part is a loss; all where none is."""
        losing = tuple(s for s, us in zip(self.sites, self.shares_us, strict=False) if us < 0)
        return losing or self.sites

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "gain_us": self.gain_us, "verdict": self.verdict}


class Bench(Protocol):
    """Builds engines, times them and hands one over. Its errors end the loop."""

    modes: Sequence[str]

    def build(self, graph: Graph, modes: Sequence[str]) -> Sequence[Built]:
        """Build and profile a graph, in one or more of the modes, which are one build. Raises where none could be."""

    def race(self, engines: Sequence[Built]) -> list[list[float]]:
        """For each engine the time of one inference in each round, in microseconds; the rounds interleave engines."""

    def check(self, plain: Built, patched: Built) -> None:
        """Raise VerificationError where the two compute different outputs; nothing unless that was asked for."""

    def keep(self, engine: Built) -> None:
        """Make this engine the one that is handed over, whole or not at all."""

    def release(self, engine: Built) -> None:
        """Free the memory of an engine that is not timed again."""


class Patcher(Protocol):
    """Writes the graphs and reads from two profiles what each fused site is worth."""

    def plain(self) -> Graph: ...

    def patched(self, only: frozenset[str] | None) -> Graph | None:
        """The model with these sites fused, or with all that may pay; None where none can be fused."""

    def why_none(self) -> str:
        """Why there was no graph, in words."""

    def worth(self, plain: Built, patched: Built) -> Sequence[Worth]: ...


@dataclass(frozen=True)
class Limits:
    """`builds` counts the plain engine; all modes of one graph are one build."""

    builds: int = 4
    time_s: float | None = None


@dataclass
class Round:
    """One graph: its engines' times in one race, what its sites are worth, and what was decided."""

    graph: Graph
    times_us: dict[str, float] = field(default_factory=dict)  # mode -> median
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # mode -> against the faster plain engine
    worths: list[Worth] = field(default_factory=list)
    taken_back: list[str] = field(default_factory=list)
    decision: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "graph": self.graph.name, "sites": list(self.graph.sites), "times_us": self.times_us,
            "against_plain": {mode: v.as_json() for mode, v in self.verdicts.items()},
            "worth": [w.as_json() for w in self.worths], "taken_back": self.taken_back,
            "decision": self.decision, "seconds": round(self.seconds, 3),
        }  # fmt: skip


@dataclass
class Outcome:
    """What the loop knows so far. `kept` is the engine that is handed over."""

    rounds: list[Round] = field(default_factory=list)
    rival: Built | None = None
    kept: Built | None = None
    verdict: Verdict | None = None  # of the best patched engine, in a race of its own
    rival_us: float | None = None
    best_us: float | None = None
    ended: str = ""

    @property
    def builds(self) -> int:
        return len(self.rounds)

    @property
    def paid(self) -> bool:
        return bool(self.kept and self.kept.graph.sites)

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.kept.title if self.kept else None, "rival": self.rival.title if self.rival else None,
            "plain_us": self.rival_us, "best_us": self.best_us, "statistic": HOW,
            "verdict": self.verdict.as_json() if self.verdict else None, "builds": self.builds, "ended": self.ended,
            "rounds": [r.as_json() for r in self.rounds],
        }  # fmt: skip


class Loop:
    """One optimisation. `outcome` is true after every step; `seen` is called when it changed."""

    def __init__(
        self, bench: Bench, patcher: Patcher, limits: Limits = Limits(),
        seen: Callable[[Outcome], None] = lambda outcome: None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if limits.builds < 2:
            raise CutefuseError(f"--builds is {limits.builds}; give 2 or more: the plain engine and a patched one")
        self.bench, self.patcher, self.limits, self.seen, self.clock = bench, patcher, limits, seen, clock
        self.outcome: Outcome = Outcome()
        self.began = clock()
        self._plain: dict[str, Built] = {}
        self._best: Built | None = None  # the fastest patched engine
        self._beats = False  # whether it is faster than the plain ones by more than noise
        self._lost: list[Worth] = []  # what was taken back from its graph last, the greatest loss first

    def run(self) -> Outcome:
        """Run to the end. Whatever is raised on the way, the last engine that was kept stays."""
        self._start()
        only: frozenset[str] | None = None
        modes: Sequence[str] = self.bench.modes
        while not self._spent():
            graph = self.patcher.patched(only)
            if graph is None:
                self.outcome.ended = self.patcher.why_none()
                break
            only, modes = self._try(graph, modes)
            if only is None:
                break
        self._finish()
        return self.outcome

    # ------------------------------------------------------------------------------------------------------- steps
    def _start(self) -> None:
        begin = self.clock()
        engines = self.bench.build(self.patcher.plain(), self.bench.modes)
        times = self.bench.race(engines) if len(engines) > 1 else [[0.0]]  # alone: timed beside its first rival
        rival = self._note(engines, times, begin)
        self._plain = {e.mode: e for e in engines}
        self.outcome.rival = rival
        self._keep(rival)
        self.outcome.rounds[-1].decision = f"the rival is {rival.title}"
        for engine in engines:
            if engine is not rival:
                self.bench.release(engine)
        self.seen(self.outcome)

    def _try(self, graph: Graph, modes: Sequence[str]) -> tuple[frozenset[str] | None, Sequence[str]]:
        """Build a patched graph and judge it; returns the sites and the modes of the next one, None to end."""
        begin, rival, best = self.clock(), self._rival, self._best
        engines = self.bench.build(graph, modes)
        runners = [rival, *([best] if best else []), *engines]
        times = self.bench.race(runners)
        own = times[len(runners) - len(engines) :]
        front = self._note(engines, own, begin, times[0])
        this = self.outcome.rounds[-1]
        self.outcome.rounds[0].times_us = self.outcome.rounds[0].times_us or {rival.mode: median(times[0])}
        beats = this.verdicts[front.mode].faster
        mine = own[engines.index(front)]
        improved = best is None or compare(mine, times[1]).ratio <= 1 and beats >= self._beats
        if improved:
            if beats:
                self.bench.check(rival, front)
                self._keep(front)
            self._best, self._beats = front, beats
            this.worths = self._worths([front, *(e for e in engines if e is not front)])
        for engine in (*engines, *([best] if best else [])):
            if engine is not self._best and engine is not self.outcome.kept:
                self.bench.release(engine)
        near = [m for m in modes if this.times_us.get(m, float("inf")) <= NEAR * min(this.times_us.values())]
        only = self._next(this, improved)
        self.seen(self.outcome)
        return only, near

    def _next(self, this: Round, improved: bool) -> frozenset[str] | None:
        """The sites of the next graph, and the decision in words."""
        assert self._best is not None
        if improved:
            back = [w for w in this.worths if w.verdict == LOSES]
            if not back and not self._beats:
                back = [w for w in this.worths if w.verdict == UNCLEAR]
            back.sort(key=lambda w: w.gain_us or 0.0)
        else:  # too much was taken back, since sites change what their neighbours cost: try the greater half
            back = self._lost[: len(self._lost) // 2]
        self._lost = back
        names = {s for w in back for s in w.to_blame}
        this.taken_back = sorted(names)
        left = frozenset(self._best.graph.sites) - names
        head = "" if improved else f"not faster than {self._best.title}, so undone; "
        if not names:
            pays = "every site pays or is within noise" if self._beats else "no site costs time by the layer times"
            this.decision = self.outcome.ended = head + (pays if improved else "nothing smaller to take back")
            return None
        this.decision = f"{head}{len(names)} of {len(self._best.graph.sites)} sites taken back"
        if not left:
            self.outcome.ended = "no site pays"
            return None
        return left

    def _finish(self) -> None:
        """A race of its own decides: the best of several engines in one race is partly the luckiest."""
        outcome, rival, best = self.outcome, self._rival, self._best
        if best is not None:
            times = self.bench.race([rival, best])
            outcome.verdict = compare(times[1], times[0])
            outcome.rival_us, outcome.best_us = median(times[0]), median(times[1])
            if not outcome.verdict.faster:
                self._keep(rival)
            elif outcome.kept is not best:
                self.bench.check(rival, best)
                self._keep(best)
        self.seen(outcome)

    # ------------------------------------------------------------------------------------------------------- parts
    @property
    def _rival(self) -> Built:
        assert self.outcome.rival is not None
        return self.outcome.rival

    def _note(
        self, engines: Sequence[Built], times: Sequence[Sequence[float]], begin: float, rival: Sequence[float] = ()
    ) -> Built:
        """Record a round; returns its fastest engine."""
        medians = [median(t) for t in times]
        this = Round(engines[0].graph, {e.mode: m for e, m in zip(engines, medians, strict=True) if m})
        if rival:
            this.verdicts = {e.mode: compare(t, rival) for e, t in zip(engines, times, strict=True)}
        this.seconds = self.clock() - begin
        self.outcome.rounds.append(this)
        return engines[medians.index(min(medians))]

    def _worths(self, engines: Sequence[Built]) -> list[Worth]:
        """By the layers of the first engine; sites that they do not show by those of the next mode."""
        found: list[Worth] = []
        for engine in (e for e in engines if e.mode in self._plain):
            own = list(self.patcher.worth(self._plain[engine.mode], engine))
            dark = {s for w in found if w.verdict == UNKNOWN for s in w.sites} if found else set(engine.graph.sites)
            more = [w for w in own if set(w.sites) <= dark and (not found or w.verdict != UNKNOWN)]
            seen = {s for w in more for s in w.sites}
            found = [w for w in found if not seen & set(w.sites)] + more
        return found

    def _keep(self, engine: Built) -> None:
        if self.outcome.kept is not engine:
            self.bench.keep(engine)
            self.outcome.kept = engine

    def _spent(self) -> bool:
        """Whether no further build may begin; says which limit it was."""
        if self.outcome.builds >= self.limits.builds:
            self.outcome.ended = f"{self.limits.builds} engine builds were allowed (--builds)"
            return True
        if self.limits.time_s is not None:
            longest = max(r.seconds for r in self.outcome.rounds)
            if self.clock() - self.began + longest > self.limits.time_s:
                self.outcome.ended = f"another build would pass the {self.limits.time_s:g} s of --time-limit"
                return True
        return False
