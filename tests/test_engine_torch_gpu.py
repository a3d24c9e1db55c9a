"""The PyTorch back end on a GPU: kernels for fused nodes, CUDA graphs, layer times. One run takes under a minute:

python -m pytest -q -m gpu tests/test_engine_torch_gpu.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import float64
import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, graph, weights
from onnx import numpy_helper

import models

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

NETWORKS = ("bevfusion_fuser", "deeplabv3p_head", "hrnet_head", "raft_update", "unet_pp", "vit_block", "yolo_elan",
            "yolo_neck")  # fmt: skip


def patched(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    from cutefuse.rewrite.patch import Options, patch

    onnx.save(model, str(folder / "plain.onnx"))
    assert patch(folder / "plain.onnx", folder / "patched.onnx", Options(all_sites=True)).output is not None
    return onnx.load(str(folder / "patched.onnx"))


def build(model: Any, mode: str = "cudnn", device: str = "cuda", **options: Any) -> Any:
    from cutefuse.engines.pytorch.run import TorchEngine

    return TorchEngine.build(model, mode, device, **options)


@dataclass(frozen=True)
class Limits:
    """The float64 values of a network, and the errors against them that its two forms may have on a GPU.

    The arithmetic is tried on the CPU, on the same network and inputs. float16 rounds the result of every layer there
    too, if at other places; TF32 is float64 whose convolutions take factors of 11 bits, which is what our float32
    kernels multiply. Twice that is allowed, because the largest of many random errors is random itself, and two
    roundings. The plain network runs without TF32.
    """

    exact: float64.Outputs
    plain: float
    patched: float

    @classmethod
    def of(cls, model: onnx.ModelProto, dtype: str) -> Limits:
        exact = float64.exact(model)
        if dtype == "float32":
            return cls(exact, 1e-4, 2 * float64.error(float64.in_tf32(model), exact) + 1e-5)
        on_cpu, once = float64.error(build(model, device="cpu")(), exact), 2.0**-11
        return cls(exact, 2 * on_cpu + 2 * once, 2 * on_cpu + 2 * once)


def worst(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Largest difference over the largest output; NaN counts as infinity."""
    result = 0.0
    assert list(got) == list(want)
    for a, b in zip(got.values(), want.values(), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        error = float((a.cpu().double() - b.double()).abs().max() / b.double().abs().max())
        result = max(result, error if error == error else float("inf"))
    return result


def fused_nodes(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.domain == "cutefuse"]


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float16") for name in NETWORKS), ("unet", "float32"), ("yolo_elan", "float32")]
)
def test_plain_and_patched_networks_compute_what_the_cpu_computes(name: str, dtype: str, tmp_path: Path) -> None:
    plain = models.build(name, dtype, small=True)
    limits = Limits.of(plain, dtype)
    assert float64.error(build(plain, tf32=False)(), limits.exact) < limits.plain
    model = patched(plain, tmp_path)
    engine = build(model, tf32=False)
    assert engine.program.notes == [] and sorted(n.name for n in engine.program.fused) == sorted(fused_nodes(model))
    assert float64.error(engine(), limits.exact) < limits.patched


@pytest.fixture(scope="module")
def limits(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> Limits:
    return Limits.of(unet[0], "float16")


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    plain = models.build("unet", "float16", small=True)
    return plain, patched(plain, tmp_path_factory.mktemp("unet"))


def test_a_graph_replay_reads_new_inputs(unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits) -> None:
    engine = build(unet[1])
    ((name, own),) = engine.inputs.items()
    random = np.random.default_rng(5)
    for _ in range(2):
        feed = {name: random.standard_normal(tuple(own.shape)).astype(np.float16)}
        assert float64.error(engine(feed), float64.exact(unet[0], feed)) < limits.patched


def test_no_image_is_copied_between_fused_nodes(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode

    engine, copied = build(unet[1]), []
    real = FusedNode._operand

    def watched(self: Any, x: Any, i: int) -> Any:
        read, pixel = real(self, x, i)
        if read.data_ptr() != x.data_ptr():
            copied.append((self.name, tuple(x.shape), x.stride()))
        return read, pixel

    monkeypatch.setattr(FusedNode, "_operand", watched)
    engine.run_outside_graph()
    assert copied == []


def test_what_lay_in_memory_before_does_not_matter(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits
) -> None:
    import torch

    for model, limit in zip(unet, (limits.plain, limits.patched), strict=True):
        engine = build(model)
        for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26):  # the allocator hands these blocks out next
            poison = [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
            del poison
        got = dict(zip(engine.program.outputs, engine.run_outside_graph(), strict=True))
        assert float64.error(got, limits.exact) < limit


def test_layers_have_the_times_of_their_kernels(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    for model in unet:
        engine = build(model)
        total_us, layers = engine.time_us(), engine.layers(10)
        assert 5 < total_us < 5000
        inside = sum(float(np.median(layer.times_us)) for layer in layers if layer.times_us)
        assert 0.3 * total_us < inside < 1.5 * total_us, (inside, total_us)
        timed = {layer.name: layer for layer in layers if layer.times_us}
        assert all(layer.kernels for layer in timed.values())
        for name in fused_nodes(model):
            assert any("cutefuse" in k or "conv" in k.lower() for k in timed[name].kernels), timed[name].kernels


def test_the_times_of_layers_come_from_graph_replays(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    """Fewer than asked for would mean that the trace does not show what is inside of a graph."""
    layers = build(unet[1]).layers(7)
    assert {len(layer.times_us) for layer in layers} - {0} == {7}


def test_engines_are_timed_in_turns(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    from cutefuse.engines.pytorch.run import time_interleaved_us

    rows = time_interleaved_us([build(m) for m in unet], rounds=5, sample_ms=1)
    assert [len(r) for r in rows] == [5, 5] and all(1 < t < 1e4 for r in rows for t in r)


def test_a_tile_can_be_chosen(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    import torch

    from cutefuse import kernels
    from cutefuse.errors import CutefuseError

    first = build(unet[1])
    node = first.program.fused[0]
    major, minor = torch.cuda.get_device_capability()
    ids = kernels.configs(node.call(sm=10 * major + minor))
    assert len(ids) > 1
    other = build(unet[1], tiles={node.name: ids[-1]})
    assert other.program.fused[0].config == ids[-1] and worst(other(), {k: t.cpu() for k, t in first().items()}) < 1e-2
    with pytest.raises(CutefuseError, match="which are no fused nodes"):
        build(unet[1], tiles={"nobody": 1})


def untimed(self: Any, call: Any) -> dict[int, float]:
    raise AssertionError(f"tiles of {call.op_type} are timed")


def test_tiles_are_timed_once_for_both_modes(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.engines.pytorch import tile_times
    from cutefuse.timing.order import LEAST_GAIN, SWITCH_US

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    first = build(unet[1])
    assert first.program.notes == [] and (tmp_path / "fresh" / "cutefuse" / "tune.json").is_file()
    for node in first.program.fused:
        times = node.tiles_us
        assert node.tile_from == "timed" and 1 < len(times) <= tile_times.QUICK.tiles
        assert list(times) == node.tiles()[: len(times)] and all(0.5 < t < 1e4 for t in times.values())
        bound = (1 - LEAST_GAIN) * times[node.tile] - 2 * SWITCH_US
        faster = [tile for tile, time_us in times.items() if time_us < bound]
        assert not faster, "another kernel than before and after it costs two switches at most"
    assert float64.error(first(), limits.exact) < limits.patched
    monkeypatch.setattr(tile_times.TileTimer, "tiles_us", untimed)
    again = build(unet[1], "compile")
    assert [n.tile for n in again.program.fused] == [n.tile for n in first.program.fused]
    assert float64.error(again(), limits.exact) < limits.patched


def test_nothing_is_timed_where_the_guess_is_asked_for(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.engines.pytorch.tile_times import TileTimer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    monkeypatch.setattr(TileTimer, "tiles_us", untimed)
    nodes = build(unet[1], tiles="guess").program.fused
    assert [n.tile for n in nodes] == [n.tiles()[0] for n in nodes]
    with pytest.raises(AssertionError, match="are timed"):
        build(unet[1])


@pytest.mark.parametrize("place", range(8))
def test_every_tile_that_is_timed_runs_in_the_graph(
    place: int, unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits
) -> None:
    """With its own plan and its own part of the workspace."""
    nodes = build(unet[1], tiles="guess").program.fused
    tiles = {n.name: n.tiles()[min(place, len(n.tiles()) - 1)] for n in nodes}
    engine = build(unet[1], tiles=tiles)
    assert {n.name: n.tile for n in engine.program.fused} == tiles
    room = 0 if engine._workspace is None else engine._workspace.numel()
    plans = [bound.plan for n in engine.program.fused for bound in n._bound.values()]
    assert plans and all(plan.workspace_bytes <= room for plan in plans)
    for _ in range(2):  # a replay finds what the one before left in the workspace
        assert float64.error(engine(), limits.exact) < limits.patched


@pytest.mark.parametrize("mode", ["cudnn", "compile"])
@pytest.mark.parametrize("network", ["yolov8n", "googlenet"])
def test_branches_that_run_side_by_side_compute_what_they_do_one_by_one(
    network: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, and so do the layers' times, which a graph without branches gives."""
    import torch

    model = patched(models.build(network, "float16", small=True, batch=1), tmp_path)
    monkeypatch.setenv("CUTEFUSE_SIDE_BY_SIDE", "0")
    alone = build(model, mode, tiles="guess")
    monkeypatch.delenv("CUTEFUSE_SIDE_BY_SIDE")
    beside = build(model, mode, tiles="guess")
    expected = alone()
    assert all(n.kept is None for n in beside.program.fused)
    for turn in range(50):
        got = beside()
        assert all(torch.equal(got[name], expected[name]) for name in expected), turn
    layers = [layer.name for layer in beside.layers(3)]
    assert layers == [layer.name for layer in alone.layers(3)]
    assert all(torch.equal(beside()[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", ["cudnn", "compile"])
@pytest.mark.parametrize("network", ["googlenet", "hrnet_head"])
def test_pools_and_resizes_between_fused_nodes_run_by_our_kernels(network: str, mode: str, tmp_path: Path) -> None:
    from cutefuse.engines.pytorch.files import describe

    plain = models.build(network, "float16", small=True)
    engine = build(patched(plain, tmp_path), mode)
    windows = [step for step in engine.program.steps if not getattr(step.run, "named", True)]
    assert len(windows) >= 3
    assert float64.error(engine(), float64.exact(plain)) < Limits.of(plain, "float16").patched
    layers = [describe(engine.program, layer) for layer in engine.layers(2)]
    names = {step.name for step in windows}
    types = {layer["LayerType"] for layer in layers if layer["Name"] in names}
    assert types <= {"MaxPool", "Resize", "GlobalAveragePool", "Gemm", "Concat"}


def test_timing_the_tiles_of_a_whole_network_takes_less_than_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from cutefuse.engines.pytorch import run as torch_gpu

    seconds, real = [], torch_gpu.choose_tiles

    def clocked(*given: Any) -> None:
        begin = time.perf_counter()
        real(*given)
        seconds.append(time.perf_counter() - begin)

    model = patched(models.build("yolov8s", "float16", batch=1), tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    monkeypatch.setattr(torch_gpu, "choose_tiles", clocked)
    cold, warm = build(model), build(model)
    nodes = cold.program.fused
    others = sum(n.tile != n.tiles()[0] for n in nodes)
    print(f"{len(nodes)} nodes, {others} take another tile, {seconds[0]:.2f} s, from the cache {seconds[1]:.2f} s")
    assert len(nodes) > 40 and seconds[0] < 5 and seconds[1] < 0.5
    assert [n.tile for n in warm.program.fused] == [n.tile for n in nodes]


def test_a_compiled_network_keeps_its_fused_nodes(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits
) -> None:
    engine = build(unet[1], "compile")
    assert float64.error(engine(), limits.exact) < limits.patched
    layers = [layer for layer in engine.layers(5) if layer.times_us]
    names = {step.name for layer in layers for step in layer.steps}
    assert set(fused_nodes(unet[1])) <= names
    assert sum(1 for layer in layers if layer.steps) > 0.7 * len(layers), [layer.name for layer in layers]


@pytest.mark.parametrize("mode", ["cudnn", "compile"])
def test_kernels_are_tried_inside_of_quiet(
    mode: str, unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    entered = []

    @contextlib.contextmanager
    def quiet() -> Any:
        entered.append(mode)
        yield

    monkeypatch.setattr("cutefuse.engines.pytorch.lock._quiet", quiet)
    engine = build(unet[1], mode)
    assert len(entered) >= 2  # the first run and the capture
    assert float64.error(engine(), limits.exact) < limits.patched
    assert mode == "cudnn" or engine.kernel_sources


BODY = """c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k)
          n = BatchNormalization(d, gamma, beta, mean, var) y = Relu(n)"""


@pytest.mark.parametrize("shapes", [{"a": (1, 8, 9, 7)}, {"a": (3, 8, 9, 7)}, {"a": (2, 8, 9, 7)}])
def test_odd_sizes_and_batches_run(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    plain = graph(BODY, weights(w=FILTER, k=(12,)) | bn_weights())
    want = build(plain, device="cpu", shapes=shapes)()
    assert worst(build(plain, shapes=shapes, tf32=False)(), want) < 1e-4
    # Our float32 kernels multiply on TF32 tensor cores, whose factors have 11 bits.
    assert worst(build(patched(plain, tmp_path), shapes=shapes, tf32=False)(), want) < 2e-3


def test_a_grouped_convolution_with_relu_runs_merged_or_apart() -> None:
    values = {"w": np.random.default_rng(0).standard_normal((9, 3, 3, 3)).astype(np.float32)}
    model = graph("c = Conv<group=3, pads=[1,1,1,1]>(a, w) y = Relu(c)", values, inputs={"a": "2,9,5,7"})
    want = build(model, device="cpu")()
    assert worst(build(model, tf32=False)(), want) < 1e-4


def test_int8_nodes_run_as_kernels(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    quantised = random.integers(-127, 128, (16, 32, 3, 3)).astype(np.int8)
    values = {"s": np.array(0.05, np.float32), "z": np.array(0, np.int8), "w": quantised,
              "ws": np.full(16, 0.002, np.float32), "wz": np.zeros(16, np.int8)}  # fmt: skip
    body = """
        qa = QuantizeLinear(a, s, z) da = DequantizeLinear(qa, s, z)
        qb = QuantizeLinear(b, s, z) db = DequantizeLinear(qb, s, z)
        c = Concat<axis=1>(da, db) dw = DequantizeLinear<axis=0>(w, ws, wz)
        d = Conv<pads=[1,1,1,1]>(c, dw) y = Relu(d)
    """
    plain = graph(body, values, inputs={"a": "1,16,9,8", "b": "1,16,9,8"})
    model = patched(plain, tmp_path)
    engine = build(model)
    assert [n.op_type for n in engine.program.fused] == ["CuteQConcatConv2Relu"]
    assert worst(engine(), build(plain, device="cpu")()) < 1e-3


def test_process_takes_the_gpu_by_default_and_the_report_has_its_roof(
    unet: tuple[onnx.ModelProto, onnx.ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.commands.process import main
    from cutefuse.engines import build as engine
    from cutefuse.report.read.reader import find_engines, read_engine

    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    found = engine.importlib.util.find_spec
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda n: None if n == "tensorrt" else found(n))
    onnx.save(unet[1], str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), str(tmp_path / "out"), "--iterations=5", "--duration=0.1"]) == 0
    made = read_engine(find_engines(tmp_path / "out")[0])
    assert made.backend == "torch" and not made.on_cpu and made.inference["CUDA Graph"] == "Enabled"
    plugins = [layer for layer in made.layers if layer.kind == "plugin"]
    assert sorted(layer.name for layer in plugins) == sorted(fused_nodes(unet[1]))
    assert all(layer.time_us and layer.precision == "FP16" for layer in plugins)
    report = json.loads((tmp_path / "out" / "m.onnx.engine.report.json").read_text())
    assert report["backend"] == "torch"


def test_an_engine_leaves_pytorchs_switches_as_they_were(unet: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    import torch

    def switches() -> tuple[Any, ...]:
        c = torch.backends.cudnn
        return c.enabled, c.benchmark, c.deterministic, c.allow_tf32, torch.get_float32_matmul_precision()

    before = switches()
    build(unet[0]).time_us(rounds=1, sample_ms=0.5)
    assert switches() == before


def test_a_device_that_is_not_there_is_refused() -> None:
    import torch

    from cutefuse.errors import CutefuseError

    with pytest.raises(CutefuseError, match="does not exist"):
        build(models.build("unet", small=True), device=f"cuda:{torch.cuda.device_count()}")


def test_wrong_weights_would_be_seen(unet: tuple[onnx.ModelProto, onnx.ModelProto], limits: Limits) -> None:
    """The comparisons above can fail: a filter that is off by one element is found."""
    model = onnx.ModelProto()
    model.CopyFrom(unet[1])
    packed = next(i for i in model.graph.initializer if i.name.endswith(".packed_weight"))
    values = numpy_helper.to_array(packed).copy()
    values[0, 0] += np.float16(8)
    packed.CopyFrom(numpy_helper.from_array(values, packed.name))
    assert float64.error(build(model)(), limits.exact) > limits.plain
