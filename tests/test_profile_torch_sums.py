"""`profile-torch`: sums over recorded events, what is a hot spot, whose backward step it is, and the tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutefuse.commands.profile_torch import replaced, shown
from cutefuse.profilers.torch.events import BACKWARD, REGION, Event, backward_of, events_of
from cutefuse.profilers.torch.spots import hot_spots
from cutefuse.profilers.torch.sums import by_class, by_operator, by_region, compared, total


def event(
    name: str, start: float, device: float, parent: int = -1, shapes: list[Any] | None = None,
    own: float | None = None, **more: Any,
) -> Event:  # fmt: skip
    """One microsecond on the host."""
    return Event(
        name, start, start + 1, device, device if own is None else own, 1.0, shapes or [], parent=parent, **more
    )


def unet_block() -> list[Event]:
    """A region that concatenates, convolves, normalises and activates; the convolution calls cuDNN inside."""
    return [
        event(f"{REGION}up (UpBlock)", 0, 100, own=0),
        event("aten::cat", 1, 20, 0, [[[1, 64, 8, 8], [1, 32, 8, 8]], []]),
        event(f"{REGION}up.conv (Conv2d)", 2, 50, 0, own=0),
        event("aten::conv2d", 3, 50, 2, [[1, 96, 8, 8], [64, 96, 3, 3]], own=0),
        event("aten::cudnn_convolution", 4, 50, 3),
        event("aten::batch_norm", 5, 10, 0),
        event("aten::relu", 6, 5, 0),
        event("aten::add", 7, 15, 0),
    ]


def trained() -> list[Event]:
    """One training step: a module with two norms, one inside the other's class, and the backward of what they did."""
    return [
        event(f"{REGION}(whole) (Net)", 0, 60, own=0, device_bytes=3 << 20),
        event(f"{REGION}n (RMSNorm)", 1, 30, 0, own=0, device_bytes=2 << 20),
        event("aten::mul", 2, 20, 1, sequence=7, thread=1),
        event(f"{REGION}n.inner (RMSNorm)", 3, 10, 1, own=0, device_bytes=1 << 20),
        event("aten::pow", 4, 10, 3, sequence=8, thread=1),
        event("aten::linear", 5, 30, 0, sequence=9, thread=1),
        event("aten::addmm", 6, 30, 5, sequence=9, thread=1),
        event(f"{BACKWARD}AddmmBackward0", 7, 5, sequence=9, thread=2, forward_thread=1),
        event("AddmmBackward0", 7.1, 5, 7, sequence=9, thread=1, forward_thread=1),
        event(f"{BACKWARD}PowBackward0", 8, 3, sequence=8, thread=2, forward_thread=1),
        event(f"{BACKWARD}MulBackward0", 9, 2, sequence=7, thread=2, forward_thread=1),
        event(f"{BACKWARD}torch::autograd::AccumulateGrad", 10, 1, thread=2),
    ]


def rms(start: float) -> list[tuple[str, float]]:
    return [("aten::pow", 4.0), ("aten::mean", 3.0), ("aten::rsqrt", 1.0), ("aten::mul", 4.0)]


def test_operators_are_sorted_by_their_own_device_time() -> None:
    rows = by_operator(unet_block(), 1)
    assert [r["name"] for r in rows[:2]] == ["aten::cudnn_convolution", "aten::cat"]
    assert next(r for r in rows if r["name"] == "aten::conv2d")["self_device_us"] == 0
    assert not any(REGION in r["name"] for r in rows)
    assert rows[0]["share"] == 50 and sum(r["share"] for r in rows) == pytest.approx(100)


def test_averages_are_of_a_call_and_sums_of_an_iteration() -> None:
    events = [event("aten::mul", i, 4 + i, cpu_bytes=8, self_cpu_bytes=4) for i in range(6)]
    (row,) = by_operator(events, 2)
    assert (row["calls"], row["device_us"], row["device_us_avg"], row["cpu_us_avg"]) == (3, 19.5, 6.5, 1)
    assert (row["cpu_bytes"], row["self_cpu_bytes"], row["device_bytes"]) == (24, 12, 0)


def test_modules_are_sorted_by_all_that_they_contain() -> None:
    rows = by_region(unet_block(), 2)
    assert [(r["name"], r["device_us"], r["share"]) for r in rows] == [
        ("up (UpBlock)", 50, 100),
        ("up.conv (Conv2d)", 25, 50),
    ]


def test_without_a_device_the_cpu_counts() -> None:
    events = [Event("aten::a", 0, 9, self_cpu_us=9), Event("aten::b", 9, 10, self_cpu_us=1)]
    assert [(r["name"], r["share"]) for r in by_operator(events, 1)] == [("aten::a", 90), ("aten::b", 10)]


def test_a_step_of_the_backward_pass_belongs_to_the_modules_whose_operator_made_it() -> None:
    events = trained()
    assert backward_of(events) == {0: [7, 9, 10], 1: [9, 10], 3: [9]}


@pytest.mark.parametrize(
    "change",
    [{"sequence": 99}, {"forward_thread": 5}, {"sequence": -1}, {"name": "aten::mm"}],
    ids=["no such node", "another thread", "no number", "no step"],
)
def test_other_steps_belong_to_no_module(change: dict[str, Any]) -> None:
    events = trained()
    for key, value in change.items():
        setattr(events[9], key, value)
    assert backward_of(events) == {0: [7, 10], 1: [10]}


def test_a_class_counts_every_call_and_the_time_of_the_outer_ones() -> None:
    rows = {r["name"]: r for r in by_class(trained(), 1)}
    norm = rows["RMSNorm"]
    assert (norm["calls"], norm["modules"], norm["device_us"], norm["backward_device_us"]) == (2, 2, 30, 5)
    assert norm["device_bytes"] == 2 << 20, "the inner norm's memory is part of the outer one's"
    assert norm["share"] == pytest.approx(100 * 35 / 71)
    assert rows["Net"]["share"] == pytest.approx(100 * 70 / 71), "accumulating gradients belongs to no module"
    assert total(trained(), 1)["device_us"] == 71


def test_two_profiles_are_compared_by_the_paths_of_their_modules() -> None:
    after = trained()
    for i, name in ((1, "n (OurNorm)"), (3, "n.inner (OurNorm)")):
        after[i].name = REGION + name
    after[0].device_us, after[1].device_us, after[9].device_us = 40, 10, 1
    rows = {r["name"]: r for r in compared(trained(), after, 1)}
    assert list(rows) == ["Net", "RMSNorm", "(whole)"]
    norm = rows["RMSNorm"]
    assert (norm["before_us"], norm["after_us"], norm["ratio"]) == (35, 13, pytest.approx(13 / 35))
    assert (rows["(whole)"]["before_us"], rows["(whole)"]["after_us"]) == (71, 49)


def test_modules_that_are_gone_afterwards_took_nothing() -> None:
    gone = [e for i, e in enumerate(trained()) if i == 0]
    rows = {r["name"]: r for r in compared(trained(), gone, 1)}
    assert rows["RMSNorm"]["after_us"] == 0 and rows["RMSNorm"]["before_us"] == 35
    assert compared([], [], 1)[-1]["ratio"] is None


def test_a_concatenation_before_a_convolution_is_a_hot_spot() -> None:
    (spot,) = hot_spots(unet_block(), 1)
    assert spot.operator == "ConcatConv" and spot.where == "up.conv (Conv2d)"
    assert spot.removable_us == 20 + 10 + 5 and spot.time_us == 85


@pytest.mark.parametrize("change", ["channels", "no convolution", "convolution first"])
def test_other_concatenations_are_none(change: str) -> None:
    events = unet_block()
    if change == "channels":
        events[1].shapes = [[[1, 7, 8, 8], [1, 32, 8, 8]], []]
    elif change == "no convolution":
        events[3].name = "aten::linear"
    else:
        events[1].start_us = 50
    assert hot_spots(events, 1) == []


def test_a_hand_written_norm_is_a_hot_spot_and_a_batch_norm_is_not() -> None:
    events = [event(f"{REGION}norm (LlamaRMSNorm)", 0, 12, own=0)]
    events += [event(n, 1 + i, t, 0) for i, (n, t) in enumerate(rms(1))]
    events += [event(f"{REGION}bn (BatchNorm2d)", 20, 9, own=0), event("aten::batch_norm", 21, 9, 5)]
    (spot,) = hot_spots(events, 1)
    assert spot.operator == "RMSNorm" and spot.time_us == 12 and spot.removable_us == 9


def test_a_library_norm_is_one_kernel_already() -> None:
    events = [event(f"{REGION}ln (LayerNorm)", 0, 8, own=0), event("aten::layer_norm", 1, 8, 0)]
    (spot,) = hot_spots(events, 1)
    assert spot.operator == "LayerNorm" and spot.removable_us == 0
    alone = [event("aten::layer_norm", 1, 8)]
    assert hot_spots(alone, 1)[0].where == "(top level)"


def test_torch_events_are_understood() -> None:
    span = SimpleNamespace(start=1.0, end=4.0)
    common = {"time_range": span, "self_cpu_time_total": 1.0, "device_type": "DeviceType.CPU", "cpu_memory_usage": 16}
    times = {"device_time_total": 3.0, "self_device_time_total": 2.0, "self_device_memory_usage": 8}
    made = {"sequence_nr": 4, "fwd_thread": None, "thread": 1}
    new = SimpleNamespace(name="a", input_shapes=[[1]], cpu_parent=None, **made, **common, **times)
    inner = SimpleNamespace(name="b", cpu_parent=new, **common, **times)
    kernel = SimpleNamespace(name="k", time_range=span, device_type="DeviceType.CUDA")
    first, second = events_of([new, inner, kernel])
    assert (first.device_us, first.parent, first.self_device_bytes, first.cpu_bytes) == (3.0, -1, 8, 16)
    assert (first.sequence, first.forward_thread, first.thread) == (4, -1, 1)
    assert (second.device_us, second.self_device_us, second.parent, second.self_device_bytes) == (3.0, 2.0, 0, 8)
    assert second.sequence == -1


def test_tables_name_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    figures = shown(unet_block(), 1, 5)
    out = capsys.readouterr().out
    head = out.splitlines()[0]
    for column in ("self CPU us", "CPU avg", "self CUDA us", "CUDA avg", "CPU MiB", "CUDA MiB", "calls"):
        assert column in head
    assert "ConcatConv at up.conv (Conv2d)" in out and "bwd" not in out
    assert [r["name"] for r in figures["classes"]] == ["UpBlock", "Conv2d"] and figures["device_times"]


def test_the_backward_pass_has_columns_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    shown(trained(), 1, 5, backward=True)
    out = capsys.readouterr().out
    assert "bwd CUDA us" in out
    (line,) = [row for row in out.splitlines() if row.startswith("RMSNorm ")]
    assert line.split()[1:] == ["1.0", "1.0", "2.0", "30.0", "30.0", "5.0", "49.3", "2", "0.00", "2.00"]
    replaced(trained(), trained(), 1)
    assert "1.00" in capsys.readouterr().out.splitlines()[2]
