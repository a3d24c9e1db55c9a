"""Engines of PyTorch for `cutefuse optimize`: each graph by cuDNN and by torch.compile, timed in one process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutefuse.engines.pytorch.files import build_and_profile
from cutefuse.engines.pytorch.lock import alone
from cutefuse.engines.pytorch.run import MODES, TorchEngine
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.closeness import compare
from cutefuse.optimize.bench import Shelf, race
from cutefuse.optimize.loop import Built, Graph

# Of a channel's largest value, over a whole network in its own type; more where the network amplifies rounding.
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-6}
TOLERANCE_16_BIT = 3e-2
_AMPLIFIED = 4.0


@dataclass
class TorchBench:
    """`options`: of the PyTorch back end, without `--mode`. `verify`: compare the outputs of engines on the device."""

    shelf: Shelf
    options: list[str]
    verify: bool = False
    modes: Sequence[str] = MODES
    notes: list[str] = field(default_factory=list)

    def build(self, graph: Graph, modes: Sequence[str]) -> list[Built]:
        """One engine for each mode that can take the graph. Raises CutefuseError where none can."""
        built: list[Built] = []
        reasons: list[CutefuseError] = []
        for mode in modes:
            words = [*self.options, f"--mode={mode}"]
            try:
                engine, files = build_and_profile(graph.model, self.shelf.folder(graph, mode), words)
            except CutefuseError as error:
                reasons.append(error)
                self.notes.append(f"{graph.name} could not be built with {mode}: {error}")
                continue
            built.append(Built(graph, mode, files, engine))
        if not built:
            raise reasons[0]
        return built

    def race(self, engines: Sequence[Built]) -> list[list[float]]:
        with alone():
            return race(engines)

    def check(self, plain: Built, patched: Built) -> None:
        """Raise VerificationError where the outputs differ by more than rounding, on the same inputs."""
        if self.verify:
            wrong = differences(plain.runner, patched.runner)
            if wrong:
                raise VerificationError(
                    f"{patched.graph.name} ({patched.mode}) computes other outputs than the plain engine: "
                    f"{'; '.join(wrong)}; the plain engine stays"
                )

    def keep(self, engine: Built) -> None:
        self.shelf.hand_over(engine)

    def release(self, engine: Built) -> None:
        engine.runner = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def differences(plain: TorchEngine, patched: TorchEngine) -> list[str]:
    """A sentence for each output that differs too much.

    What is too much depends on the network: it is measured by changing each input of the plain engine by its last bit.
    """
    before = {name: t.clone() for name, t in plain.inputs.items()}
    want, got = plain(before), patched(before)
    wrong = {name: text for name in want if (text := _far(want[name], got[name], _tolerance(want[name])))}
    if wrong:
        moved = plain({name: _last_bit(t) for name, t in before.items()})
        for name in list(wrong):
            own = _worst(compare(_array(want[name]), _array(moved[name]), 1.0))
            if own is not None and not _far(want[name], got[name], max(_AMPLIFIED * own, _tolerance(want[name]))):
                del wrong[name]
        plain(before)
    return [f"output {name}: {text}" for name, text in wrong.items()]


def _tolerance(t: Tensor) -> float:
    return TOLERANCE.get(t.dtype, TOLERANCE_16_BIT)


def _far(want: Tensor, got: Tensor, tolerance: float) -> str:
    found = compare(_array(want), _array(got), tolerance)
    if found["passed"]:
        return ""
    return str(
        found.get("why") or f"worst error {_worst(found):.2g} of a channel's largest value, {tolerance:g} is allowed"
    )


def _worst(found: dict[str, Any]) -> float | None:
    return found.get("max_rel_error", found.get("mismatch_share"))


def _array(t: Tensor) -> object:
    return (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy()


def _last_bit(t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return t
    sign = torch.ones_like(t).masked_fill_(torch.arange(t.numel(), device=t.device).reshape(t.shape) % 2 == 0, -1.0)
    return t * (1 + sign * torch.finfo(t.dtype).eps)
