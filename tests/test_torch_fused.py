"""Fused nodes of a PyTorch program: kernel calls (here computed by the operators' references), bodies, compilation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import FILTER, graph, run_patch, weights

import models
from cutefuse.engines.inputs import resolve, seeded
from cutefuse.graph.numbers import INT8, NUMBERS, Number

pytestmark = pytest.mark.torch


def on_cpu(model: onnx.ModelProto) -> Any:
    """An engine that runs the bodies."""
    from cutefuse.engines.pytorch.run import TorchEngine

    return TorchEngine.build(model, device="cpu")


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernel calls computed by the operators' float64 references; returns the op_types that were called."""
    import torch

    from cutefuse import kernels
    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
    from cutefuse.operators import operators

    called: list[str] = []

    def launch(self: Any, xs: Any) -> Any:
        called.append(self.op_type)
        name = kernels.operator_of(self.op_type)["name"]
        half = next(op for op in operators() if op.stem == name)
        made = [self._empty(t, "cpu") for t in self.outputs]
        call = self.call()
        attrs = {k: v if isinstance(v, list) else [v] for k, v in call.attrs.items()}  # as the references want them
        read = [self.operand(x, i)[:, : x.shape[1]] if x.dim() == 4 and self.images else x for i, x in enumerate(xs)]
        values = half.reference(replace(call, attrs=attrs), [x.double().numpy() for x in read])
        for own, value in zip(made, values, strict=True):
            own.copy_(torch.from_numpy(value))
        return made

    monkeypatch.setattr(FusedNode, "launch", launch)
    return called


def kernel_program(model: onnx.ModelProto) -> tuple[Any, Any, list[Any]]:
    """(program with kernel calls, its function on the CPU, seeded inputs)."""
    import torch

    from cutefuse.engines.inputs import input_specs
    from cutefuse.engines.pytorch.onnx_ops.merge import merge
    from cutefuse.engines.pytorch.onnx_ops.program import load

    dims = resolve(input_specs(model), {})
    program = load(model, dims, fused=True)
    merge(program, convolutions=True)
    feed = [torch.from_numpy(v) for v in seeded(input_specs(model), dims).values()]
    images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in feed]
    return program, program.function(program.constants), images


@pytest.mark.parametrize("name", ["unet", "yolo_elan", "yolo_neck", "hrnet_head", "vit_block", "googlenet"])
def test_fused_nodes_are_kernel_calls(name: str, reference_kernels: list[str], tmp_path: Path) -> None:
    from cutefuse.rewrite.patch import Options, patch

    onnx.save(models.build(name, "float32", small=True), str(tmp_path / "m.onnx"))
    patch(tmp_path / "m.onnx", tmp_path / "p.onnx", Options(all_sites=True))
    patched = onnx.load(str(tmp_path / "p.onnx"))
    fused = [node for node in patched.graph.node if node.domain == "cutefuse"]
    program, function, inputs = kernel_program(patched)
    assert program.notes == [] and sorted(n.name for n in program.fused) == sorted(n.name for n in fused)
    made = function(*inputs)
    assert sorted(reference_kernels) == sorted(n.op_type for n in fused) and fused
    for slot, got, want in zip(program.outputs.values(), made, on_cpu(patched)().values(), strict=True):
        assert got.shape == want.shape == program.shapes[slot].shape
        assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def quantised_network(number: Number) -> onnx.ModelProto:
    """One convolution, of int8 in float32 or of float8 in float16, as the kernels write."""
    random = np.random.default_rng(1)
    kind, dtype = np.dtype(number.name), "float32" if number is INT8 else "float16"
    values = {"s": np.array(0.05, dtype), "z": np.zeros((), kind), "wz": np.zeros(16, kind),
              "w": random.integers(-127, 128, (16, 32, 3, 3)).astype(kind),
              "ws": np.full(16, 0.002, dtype)}  # fmt: skip
    body = """
        qa = QuantizeLinear(a, s, z) da = DequantizeLinear(qa, s, z)
        qb = QuantizeLinear(b, s, z) db = DequantizeLinear(qb, s, z)
        c = Concat<axis=1>(da, db) dw = DequantizeLinear<axis=0>(w, ws, wz)
        d = Conv<pads=[1,1,1,1]>(c, dw) y = Relu(d)
    """
    return graph(body, values, inputs={"a": "1,16,9,8", "b": "1,16,9,8"}, dtype=dtype, opset=19, ir=9)


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_quantised_nodes_are_kernel_calls(
    number: Number, functions: bool, reference_kernels: list[str], tmp_path: Path
) -> None:
    _, patched = run_patch(quantised_network(number), tmp_path, functions=functions)
    assert patched is not None
    _, function, inputs = kernel_program(patched)
    (made,) = function(*inputs)
    assert reference_kernels == ["CuteQConcatConv2Relu"]
    for want in (on_cpu(quantised_network(number))()["y"], on_cpu(patched)()["y"]):
        assert made.dtype == want.dtype
        assert float((made - want).abs().max() / want.abs().max()) < (1e-4 if number is INT8 else 2e-3)


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_depthwise_nodes_of_different_widths_are_kernel_calls(
    layout: str, functions: bool, reference_kernels: list[str], tmp_path: Path
) -> None:
    values = weights(dtype="float16", w=(24, 1, 3, 3), k=(24,), u=(16, 24, 1, 1), v=(16, 1, 5, 5))
    body = "x = Conv<group=24>(i, w, k) a = Relu(x) b = Conv(a, u) d = Conv<group=16,strides=[2,1]>(b, v) y = Relu(d)"
    model = graph(body, values, inputs={"i": "1,24,12,9"}, dtype="float16")
    _, patched = run_patch(model, tmp_path, functions=functions, layout=layout)
    assert patched is not None
    program, function, inputs = kernel_program(patched)
    (made,) = function(*inputs)
    assert program.notes == [] and reference_kernels == ["CuteDepthwiseConcatConv1Relu"] * 2
    for want in (on_cpu(model)()["y"], on_cpu(patched)()["y"]):
        assert made.shape == want.shape and float((made - want).abs().max() / want.abs().max()) < 4e-3


def test_a_kernel_call_is_a_plugin_layer_with_its_arithmetic(reference_kernels: list[str], tmp_path: Path) -> None:
    from cutefuse.engines.pytorch.files import describe
    from cutefuse.engines.pytorch.layers import Layer
    from cutefuse.report.read.cost import layer_cost
    from cutefuse.report.read.reader import read_engine

    body = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)"
    _, patched = run_patch(graph(body, inputs={"a": "1,8,9,7", "b": "1,16,9,7"}), tmp_path)
    assert patched is not None
    program, _, _ = kernel_program(patched)
    (step,) = program.steps
    layer = describe(program, Layer(step.name, [step], ["sm80_kernel"], [3.0]))
    (tmp_path / "m.graph.json").write_text(json.dumps({"Layers": [layer], "Bindings": ["a", "b", "y"]}))
    engine = read_engine({"graph": tmp_path / "m.graph.json"})
    (plugin,) = engine.layers
    tile = step.run.tiles()[0]
    assert (plugin.kind, plugin.name, plugin.tactic) == ("plugin", step.name, step.run.name_of(tile))
    assert plugin.raw["Kernels"] == "sm80_kernel" and int(plugin.raw["TacticValue"], 16) == tile > 0
    assert plugin.raw["TileChoice"] == "first guess" and "TileTimesUs" not in plugin.raw
    assert [t.dims for t in plugin.inputs] == [(1, 8, 9, 7), (1, 16, 9, 7), (12, 2 * 64 * 9), (12,)]
    assert plugin.outputs[0].dims == (1, 12, 9, 7) and plugin.outputs[0].layout == "HWC"
    assert layer_cost(engine, plugin).flops == 2 * 12 * 9 * 7 * 24 * 9


def test_the_tiles_of_a_node_run_on_the_pixels_that_it_makes(
    reference_kernels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three float32 channels lie in pixels of four: tiles for dense pixels of three cannot read those."""
    from cutefuse import kernels
    from cutefuse.engines.pytorch.onnx_ops import fused

    body = "d = Conv<pads=[1,1,1,1]>(a, w, k) y = Sigmoid(d)"
    values = weights(w=(12, 3, 3, 3), k=(12,))
    _, patched = run_patch(graph(body, values, inputs={"a": "1,3,9,7"}), tmp_path)
    program, _, _ = kernel_program(patched)
    _, step = program.steps
    monkeypatch.setattr(fused, "_sm", lambda: 90)
    monkeypatch.setattr(fused, "_sm_count", lambda: 132)
    tiles = step.run.tiles()
    assert len(tiles) > 1
    for tile in tiles:
        step.run.config = tile
        assert kernels.Plan(step.run.call((4, 0, 0, 12), sm=90, sm_count=132)).config == tile


@pytest.mark.parametrize(("channels", "copies"), [(3, 1), (2, 1), (4, 0)])
def test_pixels_that_are_no_whole_vectors_are_copied_once_for_all_who_read_them(
    reference_kernels: list[str], tmp_path: Path, channels: int, copies: int
) -> None:
    body = "d = Conv<pads=[1,1,1,1]>(a, w, k) y = Sigmoid(d) e = Conv<pads=[1,1,1,1]>(a, v, k) z = Relu(e)"
    values = weights(w=(12, channels, 3, 3), v=(12, channels, 3, 3), k=(12,))
    model = graph(body, values, inputs={"a": f"1,{channels},9,7"}, outputs=("y", "z"))
    _, patched = run_patch(model, tmp_path)
    program, function, inputs = kernel_program(patched)
    assert len(program.fused) == 2 and len(program.steps) == 2 + copies
    assert [s.nodes for s in program.steps if s.op_type == "Identity"] == [[]] * copies
    want = [on_cpu(model)({"a": inputs[0]})[name] for name in program.outputs]
    for got, own in zip(function(*inputs), want, strict=True):
        assert float((got - own).abs().max()) < 1e-5 < float(own.abs().max())


@pytest.mark.parametrize(("first", "copies"), [(5, 1), (8, 0)])
def test_a_range_that_begins_within_a_vector_is_copied_once(
    reference_kernels: list[str], tmp_path: Path, first: int, copies: int
) -> None:
    """Its pixels lie one whole vector after the other, but no load of 16 bytes can begin there."""
    body = """p, q = Split<axis=1>(a, sizes) d = Conv<pads=[1,1,1,1]>(q, w, k) y = Sigmoid(d)
              e = Conv<pads=[1,1,1,1]>(q, v, k) z = Relu(e) u = Neg(p)"""
    values = weights(w=(12, 8, 3, 3), v=(12, 8, 3, 3), k=(12,)) | {"sizes": np.array([first, 8])}
    model = graph(body, values, inputs={"a": f"1,{first + 8},9,7"}, outputs=("y", "z", "u"))
    _, patched = run_patch(model, tmp_path)
    program, function, inputs = kernel_program(patched)
    assert len(program.fused) == 2
    assert sum(s.name.endswith("widened") for s in program.steps) == copies
    want = [on_cpu(model)({"a": inputs[0]})[name] for name in program.outputs]
    for got, own in zip(function(*inputs), want, strict=True):
        assert float((got - own).abs().max()) < 1e-5 < float(own.abs().max())


def test_what_the_added_channels_hold_is_left_to_the_kernels_which_ignore_it() -> None:
    import torch

    from cutefuse.torch.pixels import is_narrow, pixel_stride, widened

    x = torch.randn(2, 5, 3, 4).half()
    y = widened(x)
    assert torch.equal(x, y) and pixel_stride(y) == 8 and is_narrow(x.to(memory_format=torch.channels_last))
    assert is_narrow(torch.randn(2, 16, 3, 4).half().to(memory_format=torch.channels_last)[:, 3:11])
    assert not is_narrow(y) and not is_narrow(torch.randn(5, 3)) and not is_narrow(torch.randn(2, 8, 3, 4).half())


def test_one_pixel_is_read_where_it_lies_if_its_memory_goes_on() -> None:
    import torch

    from cutefuse.torch.pixels import ALIGNMENT, as_pixels, empty_pixels

    made = empty_pixels((1, 20, 1, 1), torch.float16, "cpu")
    seen, pixel = as_pixels(made)
    at_its_place = made.data_ptr() % ALIGNMENT == 0
    assert pixel == 24 and (seen is made) == at_its_place
    for short in (torch.randn(1, 20, 1, 1).half(), torch.randn(60).half()[40:].view(1, 20, 1, 1)):
        seen, pixel = as_pixels(short)
        assert pixel == 24 and seen is not short and torch.equal(seen, short)
    apart = torch.randn(1, 40, 1, 1).half()[:, ::2]
    assert as_pixels(apart)[0] is not apart


@pytest.mark.slow
@pytest.mark.parametrize("channels", [4, 6])
def test_what_makes_an_image_lays_it_out_when_torch_compiles(
    reference_kernels: list[str], tmp_path: Path, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An InstanceNorm leaves its image in NCHW order: without `fusible` our operator copies it, by a kernel more."""
    import torch

    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
    from cutefuse.torch.pixels import pixel_stride

    body = "n = InstanceNormalization(a, s, t) d = Conv<pads=[1,1,1,1]>(n, w, k) y = Relu(d)"
    values = weights(s=(channels,), t=(channels,), w=(12, channels, 3, 3), k=(12,))
    _, patched = run_patch(graph(body, values, inputs={"a": f"1,{channels},9,7"}), tmp_path)
    assert patched is not None
    program, function, (x,) = kernel_program(patched)
    assert len(program.fused) == 1
    seen, launch = list[int](), FusedNode.launch

    def watched(self: Any, xs: Any) -> Any:
        seen.append(pixel_stride(xs[0]))
        return launch(self, xs)

    monkeypatch.setattr(FusedNode, "launch", watched)
    want = function(x)[0]
    got = torch.compile(function, fullgraph=True, dynamic=False)(x)[0]
    assert seen == [0, -(-channels // 4) * 4]
    assert float((got - want).abs().max()) < 1e-5 < float(want.abs().max())


def test_a_layer_of_several_steps_shows_what_goes_in_and_out() -> None:
    from cutefuse.engines.pytorch.files import describe
    from cutefuse.engines.pytorch.layers import Layer

    program, _, _ = kernel_program(graph("s = Neg(a) t = Exp(s) u = Add(t, b) y = Mul(u, s)", {}, inputs={
        "a": "2,3", "b": "2,3"}, rank=2))  # fmt: skip
    neg, exp, add, _ = program.steps
    layer = describe(program, Layer("triton_poi_fused_add_exp_0", [exp, add], ["triton_poi_fused_add_exp_0"]))
    assert [t["Name"] for t in layer["Inputs"]] == ["s", "b"] and [t["Name"] for t in layer["Outputs"]] == ["u"]
    assert (
        layer["LayerType"] == "PointWise"
        and layer["Metadata"] == f"[ONNX Layer: {exp.name}]\x1e[ONNX Layer: {add.name}]"
    )
    assert describe(program, Layer("k", []))["LayerType"] == "Kernel"
    assert [t["Name"] for t in describe(program, Layer("n", [neg]))["Outputs"]] == ["s"]


def test_a_call_that_the_library_refuses_runs_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse import kernels

    model = graph("c = Concat<axis=1>(a, b) y = Conv<pads=[1,1,1,1]>(c, w, k)")
    _, patched = run_patch(model, tmp_path)
    assert patched is not None
    monkeypatch.setattr(kernels, "reject", lambda call: "no kernel today; come back tomorrow")
    program, function, inputs = kernel_program(patched)
    (node,) = [n.name for n in patched.graph.node if n.domain == "cutefuse"]
    assert program.fused == [] and program.notes == [
        f"{node} runs its function body: no kernel today; come back tomorrow"
    ]
    assert float(function(*inputs)[0].abs().max()) > 0


@pytest.mark.slow
def test_a_compiled_program_calls_the_kernels(reference_kernels: list[str], tmp_path: Path) -> None:
    import torch
    from torch._inductor.utils import run_and_get_code

    from cutefuse.engines.pytorch.layers import kernel_sources

    body = """c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) s = Sigmoid(d) m = Mul(d, s)
              h = Concat<axis=1>(m, a) e = Conv(h, v) t = Tanh(e) y = Mul(t, two)"""
    values = weights(w=FILTER, k=(12,), v=(5, 20, 1, 1)) | {"two": np.array(2, np.float32)}
    _, patched = run_patch(graph(body, values, inputs={"a": "1,8,9,7", "b": "1,16,9,7"}), tmp_path)
    assert patched is not None
    program, function, inputs = kernel_program(patched)
    want = function(*inputs)[0]
    reference_kernels.clear()
    (got,), codes = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *inputs)
    assert len(reference_kernels) == len(program.fused) == 2
    assert float((got - want).abs().max()) < 1e-5 < float(want.abs().max())
    handles = [s.handle for code in codes for s in kernel_sources(code) if s.handle >= 0]
    assert sorted(handles) == sorted(node.handle for node in program.fused)
