"""The check that every GPU test of a convolution rests on goes red for each kind of wrong output, shown on the CPU."""

from __future__ import annotations

from typing import Any

import gpu
import gpu_checks
import problems
import pytest

from cutefuse import kernels

pytestmark = pytest.mark.torch

PIXELS, CHANNELS = 6, 5  # three pad lanes


class Ran:
    """Stands for an instance whose kernel wrote the truth, and then did one thing wrong in tile 2."""

    def __init__(self, wrong: str) -> None:
        import torch

        guards = torch.full((2 * gpu.GUARD_ELEMENTS + PIXELS * 8,), gpu.GUARD_VALUE)
        view = guards[gpu.GUARD_ELEMENTS : -gpu.GUARD_ELEMENTS]
        self.call = kernels.Call("CuteConcatConv1", [], [], {})
        self.buffers, self.wrong, self.kind = [gpu.Buffer(guards, view)], wrong, "stand-in"
        self.truth = torch.linspace(-1, 1, PIXELS * CHANNELS, dtype=torch.float64).view(PIXELS, CHANNELS)

    def run(self, config: int) -> None:
        storage, pixels = self.buffers[0].storage, self.buffers[0].view.view(PIXELS, 8)
        pixels[:, :CHANNELS], pixels[:, CHANNELS:] = self.truth, 0
        if config == 2:
            where: dict[str, tuple[Any, Any, float]] = {
                "value": (pixels, (3, 2), 0.9), "nan": (pixels, (3, 2), float("nan")), "pad": (pixels, (0, 7), 1e-6),
                "before": (storage, gpu.GUARD_ELEMENTS - 1, 0.0), "after": (storage, -gpu.GUARD_ELEMENTS, 0.0),
            }  # fmt: skip
            for target, index, value in [where[self.wrong]] if self.wrong else []:
                target[index] = value

    def output(self) -> tuple[Any, Any]:
        pixels = self.buffers[0].view.view(PIXELS, 8)
        return pixels[:, :CHANNELS], pixels[:, CHANNELS:]

    def error_ratio(self) -> Any:
        return problems.worst_ratio(self.output()[0], self.truth, self.truth.abs() * 0 + 1e-6)


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "WORST", {})


def test_a_right_output_passes_and_its_error_is_kept() -> None:
    gpu_checks.assert_every_tile_is_right(Ran(""), [1, 2])
    assert 0 < gpu_checks.WORST["stand-in"] < 1  # the rounding of the truth to float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("value", "times its bound"),
        ("nan", "error inf times"),
        ("pad", "pad lanes"),
        ("before", "wrote outside"),
        ("after", "wrote outside"),
    ],
)
def test_each_kind_of_wrong_output_is_named_with_its_tile(wrong: str, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)tile 2 of .*{message}"):
        gpu_checks.assert_every_tile_is_right(Ran(wrong), [1, 2])


@pytest.mark.parametrize(
    ("tool", "op_type", "kept"),
    [("racecheck", "CutePreConcatConv2Relu", [5]), ("racecheck", "CuteConcatConv2Relu", [5, 113]),
     ("memcheck", "CutePreConcatConv2Relu", [5, 113]), (None, "CutePreConcatConv2Relu", [5, 113])],
)  # fmt: skip
def test_racecheck_alone_leaves_out_hoppers_tiles_of_pre_activated_sources_alone(
    tool: str | None, op_type: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUTEFUSE_SANITIZED", raising=False)
    if tool:
        monkeypatch.setenv("CUTEFUSE_SANITIZED", tool)
    assert gpu_checks.judged(kernels.Call(op_type, [], [], {}), [5, 113]) == kept
