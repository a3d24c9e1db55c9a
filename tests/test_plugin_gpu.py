"""The real plugin on a GPU, driven by the plugin host: results, formats, tactics, streams and CUDA graphs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plugin_nodes import as_node, has_layouts, in_layout

from cutefuse import kernels
from cutefuse.operators import operators
from cutefuse.operators.op import Case as OpCase
from cutefuse.operators.op import FusedOp
from cutefuse_host import Host, HostError, Input, Plugin, memory, reference_ops

pytestmark = pytest.mark.gpu

# Rounding unit of each type's products; TF32 keeps 10 bits of a float32 factor.
EPSILON = {"float32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DTYPES = tuple(EPSILON)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    if not memory.device_count():
        pytest.skip("the plugin host was built without CUDA")
    yield Host()


def convolve(x: np.ndarray, w: np.ndarray, b: np.ndarray, strides: list[int], pads: list[int]) -> np.ndarray:
    """float64 convolution of NCHW `x` with KCRS `w`."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], axis=(2, 3))
    return np.einsum("nchwrs,kcrs->nkhw", windows[:, :, :: strides[0], :: strides[1]], w) + b[:, None, None]


def pack(w: np.ndarray, channels: list[int]) -> np.ndarray:
    """The filter matrix [K][source][ceil(C/64)][R][S][64] of a KCRS filter."""
    parts, first = [], 0
    for c in channels:
        blocks = -(-c // 64)
        wide = np.zeros((w.shape[0], blocks * 64, *w.shape[2:]), w.dtype)
        wide[:, :c] = w[:, first : first + c]
        parts.append(
            wide.reshape(w.shape[0], blocks, 64, *w.shape[2:]).transpose(0, 1, 3, 4, 2).reshape(w.shape[0], -1)
        )
        first += c
    return np.concatenate(parts, axis=1)


class Case:
    """A ConcatConv node with seeded data, and what it must give."""

    def __init__(
        self, dtype: str, channels: list[int], filters: int, size: tuple[int, int, int], seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        kind = memory.numpy_type(dtype)
        n, h, w = size
        self.attrs: dict[str, Any] = {
            "channels": channels,
            "kernel_shape": [3, 3],
            "strides": [1, 2],
            "pads": [1, 0, 1, 2],
            "packed_sizes": [-(-c // 64) * 9 * 64 for c in channels],
        }
        self.op_type, self.dtype = f"CuteConcatConv{len(channels)}Relu", dtype
        sources = [rng.standard_normal((n, c, h, w)).astype(kind) for c in channels]
        weights = (rng.standard_normal((filters, sum(channels), 3, 3)) / np.sqrt(9 * sum(channels))).astype(kind)
        bias = rng.standard_normal(filters).astype(np.float32)
        self.arrays = [*sources, pack(weights, channels), bias]
        wide = np.concatenate([s.astype(np.float64) for s in sources], axis=1)
        exact = (weights.astype(np.float64), bias.astype(np.float64))
        strides, pads = self.attrs["strides"], self.attrs["pads"]
        self.expected = np.maximum(convolve(wide, *exact, strides, pads), 0)
        # Every product may be off by one rounding of its factors, the sum by one rounding of the result.
        bound = convolve(abs(wide), abs(exact[0]), abs(exact[1]), strides, pads)
        self.bound = EPSILON[dtype] * (abs(self.expected) + 2 * bound)

    def build(self, host: Host) -> Plugin:
        inputs = [Input(a.shape, memory.dtype_name(a)) for a in self.arrays]
        return host.build((self.op_type, self.attrs), inputs).check()

    def assert_right(self, y: np.ndarray) -> None:
        assert y.shape == self.expected.shape and memory.dtype_name(y) == self.dtype
        error = abs(y.astype(np.float64) - self.expected)
        assert (error <= self.bound).all(), f"worst error {np.nanmax(error / self.bound)} of the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [[64], [64, 32], [24, 8, 136], [16, 40, 72, 8, 24, 64, 32, 8]])
def test_every_tactic_gives_the_convolution(host: Host, dtype: str, channels: list[int]) -> None:
    case = Case(dtype, channels, 48, (2, 13, 18))
    plugin = case.build(host)
    for tactic in [0, *plugin.report["combinations"][0]["tactics"]]:
        [y] = plugin.run(case.arrays, tactic)
        case.assert_right(y)


# What float64 on the CPU can follow in a blink. Cases that are there for their op_type alone are 700: every fifth runs,
# which still is every form, every number of sources and every activation, though not every combination of the three.
CASES = [
    (op, case)
    for op in operators()
    for i, case in enumerate(op.cases())
    if op.cost(op.call(case, case.dtypes[0])).flops < 50_000_000 and (f"Cute{case.name}" != case.op_type or i % 5 == 0)
]


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op.stem}-{case.name}" for op, case in CASES])
def test_every_small_case_of_every_operator_is_right_through_the_plugin(host: Host, op: FusedOp, case: OpCase) -> None:
    for dtype, layout in itertools.product(case.dtypes, (0, 1) if has_layouts(case.op_type) else (0,)):
        call = op.call(case, dtype)
        values = op.operands(call, np.random.default_rng(1))
        arrays = [v.astype(memory.numpy_type(t.dtype)) for v, t in zip(values, call.inputs, strict=True)]
        expected = op.reference(call, [a.astype(np.float64) for a in arrays])
        arrays = [
            a if t.layout == kernels.LINEAR else as_node(a, layout) for t, a in zip(call.inputs, arrays, strict=True)
        ]
        call = in_layout(call, layout)
        inputs = [Input(t.dims, t.dtype) for t in call.inputs]
        plugin = host.build((call.op_type, call.attrs), inputs, outputs=len(call.outputs)).check()
        for y, truth in zip(plugin.run(arrays), expected, strict=True):
            truth = as_node(truth, layout)
            assert y.shape == truth.shape
            error = np.abs(y.astype(np.float64) - truth).max(initial=0)
            step = 1 if y.dtype == np.int8 else 0  # float32 may fall on the other side of a tie
            assert error <= step + 2 * EPSILON[dtype] * max(1.0, np.abs(truth).max(initial=0)), dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nan_in_the_pad_lanes_of_inputs_stays_out_and_pad_lanes_of_the_output_are_zero(host: Host, dtype: str) -> None:
    case = Case(dtype, [20, 12], 13, (1, 9, 10))
    plugin = case.build(host)
    with memory.Session() as session:
        [packed] = plugin._bind(session, plugin.context(), case.arrays).packed()
    case.assert_right(memory.unpack(packed, case.expected.shape, "kHWC8"))
    pad = memory.pad_lanes(packed, case.expected.shape, "kHWC8")
    assert pad.shape[-1] == 3 and (pad.astype(np.float32) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tactic_can_be_captured_in_a_cuda_graph_and_timed(host: Host, dtype: str) -> None:
    case = Case(dtype, [64, 32], 64, (2, 32, 32))
    plugin = case.build(host)
    times = plugin.time(case.arrays, repeats=5)
    assert sorted(times) == sorted([0, *plugin.report["combinations"][0]["tactics"]])
    assert all(t > 0.5 for t in times.values()), f"no kernel of this size is so short: {times}"


def test_eight_contexts_on_eight_streams_equal_serial_runs_bit_for_bit(host: Host) -> None:
    cases = [Case("float16", [32, 24], 40, (1 + i % 3, 8 + i, 20 - i), seed=i) for i in range(8)]
    plugins = [case.build(host) for case in cases]
    serial = [plugin.run(case.arrays)[0] for plugin, case in zip(plugins, cases, strict=True)]
    different = 0
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        nonlocal different
        try:
            with memory.Session() as session:
                bound = plugins[i]._bind(session, plugins[i].context(), cases[i].arrays)
                start.wait()
                for _ in range(50):
                    bound.run()
                different += int((bound.results()[0] != serial[i]).any())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == [] and different == 0


def test_one_context_serves_one_shape_after_another(host: Host) -> None:
    first, second = Case("float16", [32, 24], 40, (1, 8, 8)), Case("float16", [32, 24], 40, (3, 17, 9))
    inputs = [
        Input((-1, c, -1, -1), "float16", (1, c, 4, 4), (2, c, 8, 8), (4, c, 32, 32)) for c in first.attrs["channels"]
    ]
    inputs += [Input(a.shape, memory.dtype_name(a)) for a in first.arrays[-2:]]
    plugin = host.build((first.op_type, first.attrs), inputs).check()
    context = plugin.context()
    for case in (first, second, first):
        with memory.Session() as session:
            case.assert_right(plugin._bind(session, context, case.arrays).results()[0])


def test_a_model_runs_through_the_real_plugin_inside_the_reference_evaluator(host: Host) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    case = Case("float16", [16, 8], 24, (1, 9, 12))
    names = ["x0", "x1", "w", "b"]
    attrs = {"plugin_version": "1", "plugin_namespace": "cutefuse", **case.attrs}
    node = helper.make_node(case.op_type, names, ["y"], domain="cutefuse", **attrs)
    after = helper.make_node("Neg", ["y"], ["z"])
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT16, list(a.shape))
        for n, a in zip(names[:2], case.arrays[:2], strict=True)
    ]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT16, list(case.expected.shape))
    weights = [numpy_helper.from_array(a, n) for n, a in zip(names[2:], case.arrays[2:], strict=True)]
    graph = helper.make_graph([node, after], "g", values, [output], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("cutefuse", 1)])
    onnx.checker.check_model(model)
    [z] = ReferenceEvaluator(model, new_ops=reference_ops(host)).run(
        None, dict(zip(names[:2], case.arrays[:2], strict=True))
    )
    case.assert_right(-z)


def test_a_misaligned_pointer_is_refused_and_the_device_stays_usable(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case("float16", [16, 8], 24, (1, 9, 12))
    plugin = case.build(host)
    with memory.Session() as session:
        context = plugin.context()
        bound = plugin._bind(session, context, case.arrays)
        with pytest.raises(HostError, match="enqueue returned 1"):
            context.enqueue([bound.inputs[0] + 2, *bound.inputs[1:]], bound.outputs, bound.workspace, session.stream)
        assert "aligned to 16 bytes" in capfd.readouterr().err
        case.assert_right(bound.results()[0])
