"""How PyTorch tensors reach the library, on a machine without a GPU: the library's run is a stand-in that looks on."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cutefuse import kernels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Library:
    """What `run` was given, and how often something was planned or described."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cutefuse.torch import launch

        self.calls: list[dict[str, Any]] = []
        self.planned: list[kernels.Call] = []
        self.described = 0
        self.reason: bytes | None = None
        plan_of, tensor_of = kernels.Plan.__init__, kernels.Tensor.__init__

        def plan(plan: kernels.Plan, call: kernels.Call) -> None:
            self.planned.append(call)
            plan_of(plan, replace(call, sm=80, sm_count=108, _keep=[]))

        def described(t: kernels.Tensor, *args: Any, **named: Any) -> None:
            self.described += 1
            tensor_of(t, *args, **named)

        monkeypatch.setattr(kernels.Plan, "__init__", plan)
        monkeypatch.setattr(kernels.Tensor, "__init__", described)
        monkeypatch.setattr(kernels, "_run_at", lambda: self.run)
        monkeypatch.setattr(launch, "_kept", launch._Kept())
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=77))

    def run(self, plan: int, operands: int) -> bytes | None:
        head = kernels._PlanHead.from_address(plan)
        raw = kernels._Operands.from_address(operands)
        self.calls.append({
            "config": head.config, "inputs": [raw.inputs[i] or 0 for i in range(head.num_inputs)],
            "outputs": [raw.outputs[i] or 0 for i in range(head.num_outputs)],
            "workspace": raw.workspace or 0, "bytes": raw.workspace_bytes, "stream": raw.stream or 0,
        })  # fmt: skip
        return self.reason


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def norm(rows: int = 8, columns: int = 64, epsilon: float = 1e-5) -> list[int]:
    """Runs a norm; the addresses of its operands."""
    from cutefuse.torch.launch import run

    x, gamma, y, rstd = (torch.empty(s) for s in ((rows, columns), columns, (rows, columns), rows))
    run("CuteRowNormForward", [x, None, gamma, None], [y, None, None, rstd], {"epsilon": epsilon, "layer": 0})
    return [0 if t is None else t.data_ptr() for t in (x, None, gamma, None, y, None, None, rstd)]


def test_a_second_call_of_a_shape_plans_and_describes_nothing(library: Library) -> None:
    first = norm()
    described = library.described
    assert len(library.planned) == 1 and described > 0
    second = norm()
    assert len(library.planned) == 1 and library.described == described
    for call, at in zip(library.calls, (first, second), strict=True):
        assert call["inputs"] + call["outputs"] == at and call["stream"] == 77


@pytest.mark.parametrize("change", [{"rows": 9}, {"columns": 128}, {"epsilon": 1e-6}])
def test_another_call_has_its_own_plan(change: dict[str, Any], library: Library) -> None:
    norm()
    norm(**change)
    assert len(library.planned) == 2


def conv(*channels: int, activation: str = "Relu", side: int = 20, filters: int = 64) -> None:
    from cutefuse.torch import compiled, concat_conv
    from cutefuse.torch import conv as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "runs_in_library", lambda _: True)
        patch.setattr(compiled, "ensure", lambda: None)
        xs = [torch.randn(1, c, side, side) for c in channels]
        concat_conv(xs, torch.randn(filters, sum(channels), 3, 3), None, padding=(1, 1, 1, 1), activation=activation)


def test_a_convolution_is_planned_once_and_gets_the_workspace_of_its_plan(library: Library) -> None:
    conv(512)
    described = library.described
    conv(512)
    assert len(library.planned) == 1 and library.described == described > 0
    call = library.planned[0]
    assert call.op_type == "CuteConcatConv1Relu" and call.attrs["pads"] == [1, 1, 1, 1]
    wanted = kernels.Plan(call).workspace_bytes
    assert wanted > 0 and all(c["bytes"] == wanted and c["workspace"] > 0 for c in library.calls)


def test_convolutions_that_differ_in_one_thing_have_plans_of_their_own(library: Library) -> None:
    for given in ({}, {"activation": ""}, {"side": 10}, {"filters": 32}):
        conv(24, 40, **given)
    conv(40, 24)
    conv(64)
    assert len(library.planned) == 6


def test_threads_do_not_write_each_others_addresses(library: Library) -> None:
    bound: list[kernels.Bound] = []

    def work() -> None:
        from cutefuse.torch import launch

        norm()
        bound.extend(launch._kept.bound.values())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(bound) == 2 and bound[0] is not bound[1]


def test_shapes_that_never_come_back_do_not_stay(library: Library) -> None:
    from cutefuse.torch import launch

    for rows in range(1, 1030):
        norm(rows, 8)
    assert len(launch._kept.bound) < 10


def test_what_the_library_refuses_is_raised(library: Library) -> None:
    library.reason = b"row_norm: no"
    with pytest.raises(kernels.KernelError, match="row_norm: no"):
        norm()
    from cutefuse.errors import CutefuseError
    from cutefuse.torch.launch import run

    x = torch.empty(8, 64, dtype=torch.float64)
    with pytest.raises(CutefuseError, match=r"a parameter is torch.float64; use float32"):
        run("CuteRowNormForward", [x, None, None, None], [x, None, None, None], {"epsilon": 0.1, "layer": 0})


def test_a_bound_plan_takes_exactly_its_addresses_and_keeps_its_stream(library: Library) -> None:
    x, gamma = kernels.Tensor((4, 64), "float32", data=64), kernels.Tensor((64,), "float32", data=128)
    launch = kernels.Launcher(kernels.Call("CuteRMSNorm", [x, gamma], [x], {}, stream=5))
    launch()
    launch.bind([16, 32, 48])(9)
    launch()
    assert [c["stream"] for c in library.calls] == [5, 9, 9]
    assert [c["inputs"] + c["outputs"] for c in library.calls] == [[64, 128, 64], *[[16, 32, 48]] * 2]
    with pytest.raises(ValueError, match="same size"):
        launch.bind([16, 32])
