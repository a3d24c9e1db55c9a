"""Plans on a GPU: engines of GPUs with other multiprocessor counts, workspaces without a byte to spare, two devices."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import gpu_checks
import numpy as np
import problems
import pytest
import quant_problems
from test_plugin_gpu import Case

from cutefuse import kernels
from cutefuse_host import RUNTIME, Host, field_of, memory
from cutefuse_host.abi import dynamic_desc
from cutefuse_host.host import Input

pytestmark = pytest.mark.gpu

# Multiprocessors of the GPU that built, and of the one that runs.
SMALL = (16, 132) if problems.SANITIZED else (16, 56, 132, 400)
SHAPES = {
    "20x20": problems.Problem(1, 20, 20, (512,), 136, 3, 3, pads=(1, 1, 1, 1), activation="Silu"),
    "1x1": problems.Problem(1, 9, 11, (256, 320), 67, activation="Relu"),
    "odd": problems.Problem(2, 7, 5, (64, 200), 40, 3, 3, pads=(1, 1, 1, 1), strides=(2, 1)),
}


def instances(name: str, kind: str) -> Any:
    problem = SHAPES[name]
    if problems.SANITIZED:  # fewer pixels, but all channels: a reduction of one channel block is never divided
        problem = replace(problem, H=min(problem.H, 9), W=min(problem.W, 9))
    if kind == "int8":
        return quant_problems.instantiate(problem, "float16")
    return problems.instantiate(problem, kind)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile_keeps_within_what_another_gpu_was_told(name: str, kind: str) -> None:
    instance = instances(name, kind)
    divided = 0
    for built in SMALL:
        told = kernels.workspace_bytes(replace(instance.call, sm_count=built, _keep=[]))
        for runs in SMALL:
            small = gpu_checks.with_workspace(instance, runs, told)
            tiles = kernels.configs(small.call)
            divided += sum(kernels.Plan(replace(small.call, config=t, _keep=[])).splits > 1 for t in tiles)
            gpu_checks.assert_every_tile_is_right(small, tiles if built != runs else tiles[:3])
    assert divided > 0, "no tile divides its reduction"


@pytest.mark.parametrize("kind", ["float16", "float32", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_tile_writes_a_byte_more_than_its_plan_says(name: str, kind: str) -> None:
    instance = instances(name, kind)
    for runs in SMALL:
        for tile in kernels.configs(instance.call):
            free = replace(instance.call, config=tile, sm_count=runs, workspace_bytes=-1, workspace=0, _keep=[])
            exact = gpu_checks.with_workspace(instance, runs, kernels.Plan(free).workspace_bytes)
            gpu_checks.assert_every_tile_is_right(exact, [tile])


def engine(host: Host, case: Case, promise: int | None) -> Any:
    """The node as an engine holds it whose builder was told `promise` bytes; None: one from before the field."""
    fields = host.fields(host.find(case.op_type), case.attrs)
    fields += [] if promise is None else [field_of("workspace_bytes", promise)]
    return host.create(case.op_type, fields, phase=RUNTIME)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_engine_of_a_smaller_gpu_is_right_and_writes_nowhere_else(dtype: str) -> None:
    host, case = Host(), Case(dtype, [512, 256], 64, (1, 10, 12))
    plugin = case.build(host)
    [combination] = plugin.report["combinations"]
    told, layouts = combination["workspace_bytes"], combination["formats"]
    assert told > 0
    tensors = [*case.arrays, np.zeros(case.expected.shape, memory.numpy_type(dtype))]
    descs = [dynamic_desc(Input(t.shape, memory.dtype_name(t)), f).desc for t, f in zip(tensors, layouts, strict=True)]
    for promise in (told, told // 3, told // 50, 0, None):
        made = engine(host, case, promise)
        for tactic in (0, *combination["tactics"]):
            assert made.set_tactic(tactic) == 0 and made.shape_change(descs, len(case.arrays), 1) == 0
            with memory.Session() as session:
                kinds = list(zip(layouts, combination["types"], strict=True))
                bound = session.bind(case.arrays, [case.expected.shape], kinds, promise or 0)
                bound.run = functools.partial(made.enqueue, descs, bound.inputs, bound.outputs, bound.workspace)
                case.assert_right(bound.results()[0])


two_gpus = pytest.mark.skipif(memory.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_a_plugin_runs_on_its_own_device_while_another_one_is_current() -> None:
    host, case = Host(), Case("float16", [64, 32], 48, (2, 13, 18))
    try:
        for device in (0, 1, 0, 1):  # attributes of kernels hold for one device
            memory.use_device(device)
            plugin = case.build(host)
            for tactic in [0, *plugin.report["combinations"][0]["tactics"]]:
                case.assert_right(plugin.run(case.arrays, tactic)[0])
        memory.use_device(0)
        first = case.build(host)
        memory.use_device(1)
        with memory.Session() as session:
            bound = plugin._bind(session, plugin.context(), case.arrays)
            memory.use_device(0)
            bound.run()
            case.assert_right(first.run(case.arrays)[0])  # device 0 is current again
            bound.run = lambda: None
            case.assert_right(bound.results()[0])
    finally:
        memory.use_device(0)


@two_gpus
def test_every_operator_plans_for_the_device_that_is_current() -> None:
    import torch

    for device in (1, 0, 1):
        with torch.cuda.device(device):
            for kind in ("float16", "int8"):
                instance = instances("1x1", kind)
                gpu_checks.assert_every_tile_is_right(instance, kernels.configs(instance.call))
            x = torch.randn(64, 512, device="cuda")
            y, gamma = torch.empty_like(x), torch.ones(512, device="cuda")
            operands = [kernels.Tensor(tuple(t.shape), "float32", data=t.data_ptr()) for t in (x, gamma, y)]
            kernels.run(kernels.Call("CuteRMSNorm", operands[:2], operands[2:], {"epsilon": 1e-6}))
            torch.cuda.synchronize()
            assert torch.allclose(y, x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt(), atol=1e-5)
