"""`profile-torch`: the analysis of events, and the command with a stand-in for torch's absence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutefuse.commands.profile_torch import (
    REGION,
    Event,
    by_operator,
    by_region,
    events_of,
    hot_spots,
    load,
    main,
    parse_shapes,
    write,
)
from cutefuse.errors import CutefuseError


def event(
    name: str, start: float, device: float, parent: int = -1, shapes: list[Any] | None = None, own: float | None = None
) -> Event:
    return Event(name, start, start + 1, device, device if own is None else own, 1.0, shapes or [], 0, parent)


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


def rms(start: float) -> list[tuple[str, float]]:
    return [("aten::pow", 4.0), ("aten::mean", 3.0), ("aten::rsqrt", 1.0), ("aten::mul", 4.0)]


def test_operators_are_sorted_by_their_own_device_time() -> None:
    rows = by_operator(unet_block() * 1, 1)
    assert [r["name"] for r in rows[:2]] == ["aten::cudnn_convolution", "aten::cat"]
    assert next(r for r in rows if r["name"] == "aten::conv2d")["self_device_us"] == 0
    assert not any(REGION in r["name"] for r in rows)


def test_modules_are_sorted_by_all_that_they_contain() -> None:
    rows = by_region(unet_block(), 2)
    assert [(r["name"], r["device_us"]) for r in rows] == [("up (UpBlock)", 50), ("up.conv (Conv2d)", 25)]


def test_without_a_device_the_cpu_counts() -> None:
    events = [Event("aten::a", 0, 9, 0, 0, 9), Event("aten::b", 9, 10, 0, 0, 1)]
    assert [r["name"] for r in by_operator(events, 1)] == ["aten::a", "aten::b"]


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


def test_torch_events_of_old_and_new_names_are_understood() -> None:
    span = SimpleNamespace(start=1.0, end=4.0)
    common = {"time_range": span, "self_cpu_time_total": 1.0, "device_type": "DeviceType.CPU"}
    times = {"device_time_total": 3.0, "self_device_time_total": 2.0, "self_device_memory_usage": 8}
    new = SimpleNamespace(name="a", input_shapes=[[1]], cpu_parent=None, thread=1, **common, **times)
    older = {name.replace("device", "cuda"): value for name, value in times.items()}
    old = SimpleNamespace(name="b", cpu_parent=new, **common, **older)
    kernel = SimpleNamespace(name="k", time_range=span, device_type="DeviceType.CUDA")
    first, second = events_of([new, old, kernel])
    assert (first.device_us, first.parent, first.memory_bytes) == (3.0, -1, 8)
    assert (second.device_us, second.self_device_us, second.parent, second.memory_bytes) == (3.0, 2.0, 0, 8)


def test_tables_and_json_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(unet_block(), 1, tmp_path, 5)
    out = capsys.readouterr().out
    assert "self device µs" in out and "ConcatConv at up.conv (Conv2d)" in out
    assert (tmp_path / "profile.json").is_file()


@pytest.mark.parametrize("target", ["nocolon", "no_such_module:f", "os:no_such_function", "os.path:join"])
def test_a_factory_that_cannot_be_called_is_one_sentence(target: str) -> None:
    with pytest.raises(CutefuseError, match="give for example|cannot be"):
        load(target)


def test_shapes_are_read_and_refused() -> None:
    assert parse_shapes(["1x3x8x8", "5"]) == [(1, 3, 8, 8), (5,)]
    with pytest.raises(CutefuseError):
        parse_shapes(["1,3"])


def test_without_torch_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["os:getcwd"]) == 2
    err = capsys.readouterr().err
    assert "pip install torch" in err and err.count("\n") == 1


@pytest.mark.torch
def test_a_real_module_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "tiny_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(16, 8, 3, padding=1)\n"
        "        self.norm = torch.nn.LayerNorm(16)\n"
        "    def forward(self, x):\n"
        "        y = self.a(x)\n"
        "        return self.norm(torch.relu(self.b(torch.cat([y, y], 1))))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["tiny_net:Net", "--shape", "2x3x16x16", "--iterations", "2", "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "ConcatConv at b (Conv2d)" in out and "LayerNorm at norm (LayerNorm)" in out
    assert (tmp_path / "out" / "trace.json").is_file()
