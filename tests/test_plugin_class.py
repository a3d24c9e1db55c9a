"""The plugin class with a toy operator: several outputs, a workspace, tiles for some shapes only, and exceptions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cutefuse_host import RUNTIME, Field, Host, HostError, Input, Raw, field_of
from cutefuse_host.abi import CDynamicDesc, dynamic_desc

pytestmark = pytest.mark.slow  # compiles a plugin

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "cutlass_kernels/architecture.cpp",
    "cutlass_kernels/c_api.cpp",
    "cutlass_kernels/device.cpp",
    "cutlass_kernels/capture.cpp",
    "cutlass_kernels/op.cpp",
    "plugins/attributes.cpp",
    "plugins/fused_plugin.cpp",
    "plugins/entry.cpp",
    "tests/cpp/plugin_toy.cpp",
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    folder = tmp_path_factory.mktemp("toy")
    for name in ("op_list.inc", "plugin_list.inc"):
        (folder / name).write_text("CUTEFUSE_OP(toy)\n")
    macros = ['-DCUTEFUSE_VERSION="0"', '-DCUTEFUSE_ARCHS="none"', '-DCUTEFUSE_TARGETS="80"']
    macros += ['-DCUTEFUSE_HAS_CUDA="false"', '-DCUTEFUSE_CUDA_VERSION="13.0"']
    include = [f"-I{ROOT}/cutlass_kernels", f"-I{ROOT}/plugins", f"-I{folder}"]
    flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *macros, *include]
    subprocess.run(["g++", *flags, *(ROOT / s for s in SOURCES), "-o", folder / "libtoy.so"], check=True)
    return Host(folder / "libtoy.so")


def tensors(dtype: str = "float16", gamma: str = "float16", rank: int = 3, width: int = 64) -> list[Input]:
    shape = (-1, *[5] * (rank - 2), width)
    low, high = (1, *shape[1:]), (32, *shape[1:])
    x = Input(shape, dtype, low, (4, *shape[1:]), high)
    return [x, Input((width,), gamma)]


def toy(host: Host, fault: int = 0) -> Raw:
    made = host.create("ToyNorm", [field_of("fault", fault)])
    assert made is not None
    return made


def static(batch: int, width: int = 64) -> list[Input]:
    return [Input((batch, 5, width), "float16"), Input((width,), "float32"), *[Input((batch, 5, width), "float16")],
            Input((batch, 5, width), "float32")]  # fmt: skip


@pytest.mark.parametrize("rank", range(2, 9))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_rank_two_outputs_and_a_mixed_input_live_through_the_host(host: Host, rank: int, dtype: str) -> None:
    for gamma in {dtype, "float32"}:
        plugin = host.build(("ToyNorm", {}), tensors(dtype, gamma, rank), outputs=2).check()
        assert plugin.findings == []
        assert plugin.report["output_types"] == [dtype, "float32"]
        [combination] = plugin.report["combinations"]
        assert combination["formats"] == ["kLINEAR"] * 4
        assert combination["types"] == [dtype, gamma, dtype, "float32"]


def test_the_workspace_serves_the_largest_shape_of_the_profile(host: Host) -> None:
    plugin = host.build(("ToyNorm", {}), tensors(), outputs=2).check()
    assert plugin.report["combinations"][0]["workspace_bytes"] == 256 * 32


def test_only_tiles_that_serve_the_whole_profile_are_offered_best_first(host: Host) -> None:
    for width, tactics in ((64, [7, 1]), (60, [1])):
        plugin = host.build(("ToyNorm", {}), tensors(width=width), outputs=2).check()
        assert plugin.report["combinations"][0]["tactics"] == tactics


def enqueue(raw: Raw, items: list[Input], workspace: int, capfd: pytest.CaptureFixture[str]) -> str:
    descs = [dynamic_desc(i).desc for i in items]
    assert raw.configure([CDynamicDesc(d, d.dims, d.dims, d.dims) for d in descs], 2, 2) == 0
    assert raw.shape_change(descs, 2, 2) == 0
    capfd.readouterr()
    assert raw.enqueue(descs, [4096, 4096], [4096, 4096], workspace) != 0
    return capfd.readouterr().err


def test_a_null_workspace_is_refused_where_one_is_needed_and_only_there(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "the plan needs 1024" in enqueue(toy(host), static(4), 0, capfd)
    assert "the plan needs 1024" in enqueue(toy(host), static(4), 4100, capfd)
    assert "toy: config 7, workspace given, 1024 bytes" in enqueue(toy(host), static(4), 4096, capfd)
    assert "toy: config 7, workspace null, 0 bytes" in enqueue(toy(host), static(1), 0, capfd)


def test_a_tactic_is_used_where_it_is_legal_and_the_best_guess_elsewhere(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = toy(host)
    assert raw.set_tactic(1) == 0
    assert "config 1," in enqueue(raw, static(1), 0, capfd)
    for tactic in (7, 3):  # 3 has been retired, and 7 does its work
        assert raw.set_tactic(tactic) == 0
        assert "config 7," in enqueue(raw, static(1), 0, capfd)
        assert "config 1," in enqueue(raw, static(1, 60), 0, capfd)
    assert "config 7," in enqueue(raw, static(1), 0, capfd)
    clone = raw.clone(attach=True)
    assert "config 7," in enqueue(clone, static(1), 0, capfd)


def runtime_fields(host: Host, **changes: int | None) -> list[Field]:
    """What an engine holds of a toy; None leaves a field out."""
    fields = {"fault": 0, "eps": 1e-5, "workspace_bytes": 2048} | changes
    return [field_of(name, value) for name, value in fields.items() if value is not None]


@pytest.mark.parametrize(
    ("promise", "bytes_"),
    [(2048, 1024), (1024, 1024), (512, 512), (0, 0), (None, 0)],  # None: an engine from before the field
)
def test_an_engine_plans_within_what_its_builder_was_told(
    host: Host, capfd: pytest.CaptureFixture[str], promise: int | None, bytes_: int
) -> None:
    raw = host.create("ToyNorm", runtime_fields(host, workspace_bytes=promise), phase=RUNTIME)
    assert raw is not None
    descs = [dynamic_desc(i).desc for i in static(4)]
    for engine in (raw, raw.clone(attach=True)):
        assert engine.shape_change(descs, 2, 2) == 0
        assert engine.enqueue(descs, [4096, 4096], [4096, 4096], 4096) != 0
        assert f"workspace given, {bytes_} bytes" in capfd.readouterr().err


@pytest.mark.parametrize("change", [{"workspace_bytes": -1}, {"workspace_bytes": [1, 2]}, {"workspace_bytes": 1.0}])
def test_a_promise_that_is_no_size_makes_no_plugin(
    host: Host, capfd: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    assert host.create("ToyNorm", runtime_fields(host, **change), phase=RUNTIME) is None
    assert "field workspace_bytes" in capfd.readouterr().err


def test_an_engine_that_holds_the_promise_alone_takes_every_default(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    assert host.create("ToyNorm", runtime_fields(host, fault=None, eps=None), phase=RUNTIME) is not None
    assert capfd.readouterr().err == ""


def test_a_node_of_a_model_promises_nothing(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    assert host.create("ToyNorm", runtime_fields(host)) is None
    assert "attribute 'workspace_bytes' does not exist" in capfd.readouterr().err


def test_the_smaller_of_two_profiles_is_promised_and_other_formats_start_anew(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = toy(host)

    def told(batch: int, gamma: str) -> str:
        items = static(batch)
        items[1] = Input((64,), gamma)
        descs = [dynamic_desc(i).desc for i in items]
        assert raw.configure([CDynamicDesc(d, d.dims, d.dims, d.dims) for d in descs], 2, 2) == 0
        run = [dynamic_desc(i).desc for i in [*static(32)[:1], items[1], *static(32)[2:]]]
        assert raw.shape_change(run, 2, 2) == 0
        assert raw.enqueue(run, [4096, 4096], [4096, 4096], 4096) != 0
        return capfd.readouterr().err

    assert "4096 bytes" in told(16, "float32")
    assert "1024 bytes" in told(4, "float32")
    assert "1024 bytes" in told(16, "float32")
    assert "4096 bytes" in told(16, "float16")


def test_enqueue_without_a_plan_is_refused(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    descs = [dynamic_desc(i).desc for i in static(4)]
    assert toy(host).enqueue(descs, [4096, 4096], [4096, 4096], 4096) != 0
    assert "enqueue has no plan" in capfd.readouterr().err


def test_defaults_reach_the_operator(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    assert "eps 1e-05" in enqueue(toy(host), static(1), 0, capfd)


@pytest.mark.parametrize("fault", range(1, 6))
def test_an_exception_never_leaves_the_plugin(host: Host, capfd: pytest.CaptureFixture[str], fault: int) -> None:
    raw = toy(host, fault)
    descs = [dynamic_desc(i) for i in static(4)]
    fixed = [d.desc for d in descs]
    bounded = [CDynamicDesc(d, d.dims, d.dims, d.dims) for d in fixed]
    failed = {
        "supports": not raw.supports(3, bounded, 2, 2),
        "configure": raw.configure(bounded, 2, 2) != 0,
        "shape": raw.shape_change(fixed, 2, 2) != 0,
        "enqueue": raw.enqueue(fixed, [4096, 4096], [4096, 4096], 4096) != 0,
    }
    thrown = {1: {"supports", "configure", "shape"}, 2: {"configure", "shape"}, 3: {"configure", "shape"}, 4: {"shape"}}
    thrown = thrown.get(fault, set())
    # The toy's launch() never succeeds.
    assert {name for name, yes in failed.items() if yes} == thrown | {"enqueue"}
    plugin = host.build(("ToyNorm", {"fault": fault}), tensors(), outputs=2)
    if fault in (1, 2, 3, 5):
        with pytest.raises(HostError, match="failure in"):
            plugin.check()
    said = capfd.readouterr().err
    assert ("no integer attribute" if fault == 5 else "toy") in said
