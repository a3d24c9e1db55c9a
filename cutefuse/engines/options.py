"""trtexec's options, as the engines that run in this process take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutefuse.engines.inputs import parse_shapes
from cutefuse.errors import CutefuseError

# About TensorRT's builder and how it runs, which an engine without a builder passes over.
BUILDER = ("--minShapes", "--maxShapes", "--fp16", "--bf16", "--int8", "--best", "--stronglyTyped",
           "--builderOptimizationLevel", "--memPoolSize", "--verbose", "--useCudaGraph", "--noDataTransfers",
           "--useSpinWait", "--separateProfileRun", "--dynamicPlugins")  # fmt: skip
_NUMBERS = ("--iterations", "--duration", "--warmUp", "--threads", "--builderOptimizationLevel", "--maxAuxStreams")


def options_of(words: Iterable[str], known: Sequence[str], refusal: str, idle: Sequence[str] = ()) -> dict[str, str]:
    """Name -> value of each option. `known`: those that an engine takes; `idle`: those that it passes over.

    Raises CutefuseError for any other, with what `refusal` says ("... {name} ... {known} ..."), and where a number is
    none.
    """
    options: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in (*known, *idle):
            raise CutefuseError(refusal.format(name=name, known=", ".join(known)))
        if name in _NUMBERS and name not in idle and not value.replace(".", "", 1).isdigit():
            raise CutefuseError(f"{name}={value} needs a number, such as {name}=3")
        options[name] = value
    return options


def one_of(options: Mapping[str, str], name: str, default: str, choices: Iterable[str]) -> str:
    """The value of an option. Raises CutefuseError where it is none of the choices."""
    value = options.get(name, default)
    if value not in choices:
        raise CutefuseError(f"{name}={value} is unknown; choose one of {', '.join(choices)}")
    return value


def say_idle(words: Iterable[str], engine: str, idle: Sequence[str] = BUILDER) -> None:
    """Print which options an engine passes over."""
    if found := [word for word in words if word.partition("=")[0] in idle]:
        print(f"no effect on {engine}, which runs the model as it is: {' '.join(found)}")


def shapes_of(options: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the timed run: --shapes, or --optShapes."""
    return parse_shapes(options.get("--shapes") or options.get("--optShapes") or "")


@dataclass(frozen=True)
class Effort:
    """How long is timed: after `warm_up_s` for `duration_s`, and at least `least` inferences."""

    least: int
    duration_s: float
    warm_up_s: float

    @classmethod
    def of(cls, options: Mapping[str, str], duration_s: float = 1.0) -> Effort:
        """By --iterations, --duration and --warmUp (ms)."""
        seconds = float(options.get("--duration") or duration_s)
        warm_up_s = float(options.get("--warmUp") or 200) / 1000
        return cls(int(float(options.get("--iterations") or 10)), seconds, warm_up_s)

    def times(self, sample: Callable[[], Sequence[float]]) -> tuple[list[float], float]:
        """What `sample` returned, call by call, and the seconds that it took; the warm-up is not part of either."""
        repeat(sample, self.warm_up_s, 1)
        begin = time.perf_counter()
        return repeat(sample, self.duration_s, self.least), time.perf_counter() - begin


def repeat(sample: Callable[[], Sequence[float]], seconds: float, least: int) -> list[float]:
    """The samples of so many seconds, and at least `least` of them."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        found += sample()
    return found
