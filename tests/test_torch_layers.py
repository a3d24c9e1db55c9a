"""Layer times of the PyTorch back end, from traces and code of Inductor as they are written on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": list(events)}


def region(step: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"cutefuse step {step}", "ts": ts, "dur": dur, "tid": 1}


def launch(correlation: int, ts: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "tid": tid,
            "args": {"correlation": correlation}}  # fmt: skip


def kernel(name: str, correlation: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7, "args": {"correlation": correlation}}


def test_a_kernel_belongs_to_the_step_whose_region_holds_its_launch() -> None:
    from cutefuse.engines.pytorch.layers import read_trace

    found = read_trace(trace(
        kernel("b", 2, 90, 5), kernel("a", 1, 50, 3), kernel("c", 3, 99, 1), kernel("d", 4, 120, 1),
        region(0, 10, 10), region(1, 30, 10), launch(1, 12), launch(2, 35), launch(3, 36), launch(4, 38, tid=2),
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 96, "dur": 2, "args": {"correlation": 9}},
    ))  # fmt: skip
    assert [(k.name, k.step, k.time_us) for k in found] == [
        ("a", 0, 3), ("b", 1, 5), ("Memset (Device)", None, 2), ("c", 1, 1), ("d", None, 1),
    ]  # fmt: skip


def test_kernels_that_overlap_share_the_time_they_took_together() -> None:
    """A dependent kernel is launched early, beside the one it waits for: c ends last, d inside of b adds nothing."""
    from cutefuse.engines.pytorch.layers import read_trace

    found = read_trace(trace(
        kernel("a", 1, 10, 10), kernel("b", 2, 12, 14), kernel("d", 4, 20, 2), kernel("c", 3, 22, 7),
        kernel("e", 5, 40, 3),
    ))  # fmt: skip
    assert [(k.name, k.time_us) for k in found] == [("a", 10), ("b", 6), ("d", 0), ("c", 3), ("e", 3)]
    assert sum(k.time_us for k in found) == 19 + 3


def test_an_empty_trace_has_no_kernels() -> None:
    from cutefuse.engines.pytorch.layers import read_trace, replays

    assert replays(read_trace({})) == []


def steps_of(*names: str) -> list[Any]:
    from cutefuse.engines.pytorch.onnx_ops.program import Step

    return [Step(abs, [f"t{i}"], [f"t{i + 1}"], n, "Relu", {}, [n]) for i, n in enumerate(names)]


def kernels(*rows: tuple[str, float, int | None], launch: int = 1) -> list[Any]:
    from cutefuse.engines.pytorch.layers import Kernel

    return [Kernel(name, i, time, launch, step) for i, (name, time, step) in enumerate(rows)]


def test_steps_take_their_times_from_the_replays() -> None:
    from cutefuse.engines.pytorch.layers import replays, step_layers

    by_step = kernels(("k", 9, 0), ("fill", 9, 1), ("m", 9, 1))
    runs = replays([*kernels(("k", 2, None), ("fill", 1, None), ("m", 3, None), launch=5),
                    *kernels(("k", 4, None), ("fill", 1, None), ("m", 5, None), launch=6)])  # fmt: skip
    layers = step_layers(steps_of("one", "two", "view"), by_step, runs)
    assert [(la.name, la.kernels, la.times_us) for la in layers] == [
        ("one", ["k"], [2, 4]), ("two", ["fill", "m"], [4, 6]), ("view", [], []),
    ]  # fmt: skip


CODE = '''
class Runner:
    def call(self, args):
        arg0_1, = args
        # Topologically Sorted Source Nodes: [t1], Original ATen: [aten.convolution]
        buf0 = extern_kernels.convolution(arg0_1, arg1_1, stride=(1, 1), bias=None)
        # Topologically Sorted Source Nodes: [t2, t3], Original ATen: [aten.relu, aten.add]
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_relu_0.run(buf0, 64, stream=stream0)
        # Topologically Sorted Source Nodes: [fused_node], Original ATen: [cutefuse.fused_node]
        buf2 = torch.ops.cutefuse.fused_node.default([buf0, arg2_1], 41)
        # Topologically Sorted Source Nodes: [t5], Original ATen: [aten.relu]
        triton_poi_fused_relu_1.run(buf2, 64, stream=stream0)
        return (buf2, )
        triton_poi_fused_never_2.run(buf2)
'''  # fmt: skip


def test_inductors_code_says_what_each_launch_computes() -> None:
    from cutefuse.engines.pytorch.layers import KernelSource, kernel_sources

    assert kernel_sources(CODE) == [
        KernelSource("", ("t1",)), KernelSource("triton_poi_fused_add_relu_0", ("t2", "t3")),
        KernelSource("", ("fused_node",), 41), KernelSource("triton_poi_fused_relu_1", ("t5",)),
    ]  # fmt: skip
    assert kernel_sources("print('something else')") == []


@pytest.mark.parametrize(
    "names, want",
    [
        (["cudnn", "triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"], [0, 1, 2, 3]),
        (["nchw", "cudnn", "triton_poi_fused_add_relu_0", "ours", "split", "triton_poi_fused_relu_1"],
         [0, 0, 1, 2, 2, 3]),
        (["triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"], [1, 2, 3]),
        (["cudnn", "triton_other_9", "ours"], [0, None, None]),
        (["a", "b"], [0, 0]),
        ([], []),
    ],
    ids=["one each", "several of a call", "a call without a kernel", "other code", "no triton", "nothing"],
)  # fmt: skip
def test_kernels_are_laid_beside_the_launches(names: list[str], want: list[int | None]) -> None:
    from cutefuse.engines.pytorch.layers import align, kernel_sources

    assert align(names, kernel_sources(CODE)) == want


def test_kernels_between_two_of_triton_are_shared_among_the_calls_there() -> None:
    from cutefuse.engines.pytorch.layers import KernelSource, align

    sources = [KernelSource(""), KernelSource(""), KernelSource("triton_0"), KernelSource("")]
    assert align(["c", "d", "triton_0", "e", "f"], sources) == [0, 1, 2, 3, 3]
    assert align(["c", "c2", "d", "d2", "triton_0"], sources) == [0, 0, 1, 1, 2]


def test_a_fused_node_ends_with_its_kernel() -> None:
    """Copies and fills before the first one are its own, not the next one's; a library's calls share the rest."""
    from cutefuse.engines.pytorch.layers import KernelSource, align

    ours = "void cutefuse::conv::conv_sm90_im2col"
    fused = [KernelSource("", (), 7), KernelSource("", (), 8), KernelSource("")]
    assert align(["fill", "copy", ours, ours, "nchw", "cudnn"], fused) == [0, 0, 0, 1, 2, 2]
    assert align([ours, ours], fused) == [0, 1]
    assert align(["cudnn", ours, "cudnn", ours], [fused[2], fused[0], fused[2], fused[1]]) == [0, 1, 2, 3]
    assert align([ours, ours, ours, "cudnn"], fused) == [0, 0, 1, 2], "one node has two kernels: nothing tells which"
    assert align(["fill", ours, "more"], fused[:1]) == [0, 0, 0]


def test_a_compiled_layer_knows_its_steps() -> None:
    from cutefuse.engines.pytorch.layers import compiled_layers, kernel_sources

    names = ["cudnn", "triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"]
    runs = [kernels(*((n, 1.0 + i, None) for n in names)) for i in range(2)]
    layers = compiled_layers(steps_of("conv", "relu", "add", "fused", "last"), kernel_sources(CODE), runs)
    assert [(la.name, [s.name for s in la.steps]) for la in layers] == [
        ("conv", ["conv"]), ("triton_poi_fused_add_relu_0", ["relu", "add"]), ("ours", []), ("last", ["last"]),
    ]  # fmt: skip
    assert all(la.times_us == [1.0, 2.0] for la in layers)
    unknown = compiled_layers(steps_of("conv"), [], runs)
    assert [la.name for la in unknown] == names and not any(la.steps for la in unknown)
    assert compiled_layers(steps_of("conv"), [], []) == []


def test_a_compiled_layer_has_what_no_earlier_one_computed() -> None:
    """Inductor's comments list all that leads to a kernel: the second convolution's, the first one and its SiLU too."""
    from cutefuse.engines.pytorch.layers import KernelSource, compiled_layers

    sources = [
        KernelSource("", ("t1",)), KernelSource("triton_0", ("t1", "t2")), KernelSource("", ("t1", "t2", "t3")),
        KernelSource("triton_1", ("t1", "t2", "t3", "t4")), KernelSource("triton_2", ("t3", "t4")),
    ]  # fmt: skip
    run = kernels(*((n, 1.0, None) for n in ("cudnn", "triton_0", "cudnn", "triton_1", "triton_2")))
    layers = compiled_layers(steps_of("c1", "act1", "c2", "act2"), sources, [run])
    assert [[s.name for s in la.steps] for la in layers] == [["c1"], ["act1"], ["c2"], ["act2"], ["act2"]]
    assert [la.name for la in layers] == ["c1", "act1", "c2", "act2", "act2 #2"]


# ------------------------------------------------------------------------------------------------- fused nodes' memory
@pytest.mark.parametrize(
    "shape, stride, want",
    [
        ((2, 16, 3, 5), (240, 1, 80, 16), 16), ((2, 8, 3, 5), (240, 1, 80, 16), 16), ((1, 8, 1, 1), (8, 1, 8, 8), 8),
        ((2, 1, 3, 5), (15, 15, 5, 1), 1), ((2, 8, 1, 5), (80, 1, 999, 16), 16), ((0, 8, 3, 5), (0, 1, 0, 0), 8),
        ((2, 16, 3, 5), (240, 15, 5, 1), 0), ((2, 16, 3, 5), (240, 1, 96, 16), 0), ((2, 16, 3, 5), (999, 1, 80, 16), 0),
        ((2, 16, 3, 5), (120, 1, 40, 8), 0), ((1, 7, 1, 1), (7, 1, 7, 7), 0),
    ],
)  # fmt: skip
def test_pixels_are_found_in_strides(shape: tuple[int, ...], stride: tuple[int, ...], want: int) -> None:
    import torch

    from cutefuse.torch.pixels import pixel_stride

    t = torch.empty(4000).as_strided(shape, stride) if 0 not in shape else torch.empty(shape)
    assert pixel_stride(t) == want
