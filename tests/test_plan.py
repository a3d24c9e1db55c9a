"""Plans on the host: the workspace that a builder is told serves every tile, on whichever GPU the engine runs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace

import problems
import pytest
from test_kernels_forms import view
from test_quant_calls import good
from test_row_norm import ABSENT, training
from test_sm90 import call as conv_call

from cutefuse import kernels
from cutefuse.kernels import CHANNELS_LAST, Call, KernelError, Tensor

# Compute capability and multiprocessors: A30, A100, MIG, RTX 3090, Orin, RTX 4090, H100, H200, a part of one, B200,
# Thor, RTX 5090, GB10.
DEVICES = [(80, 56), (80, 108), (80, 14), (86, 82), (87, 16), (89, 128), (90, 114), (90, 132), (90, 16), (100, 148)]
DEVICES += [(110, 20), (120, 170), (121, 48)]
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}


def on(call: Call, sm: int, sm_count: int, **changes: object) -> Call:
    return replace(call, sm=sm, sm_count=sm_count, _keep=[], **changes)


def with_batch(call: Call, batch: int) -> Call:
    def resize(tensors: list[Tensor]) -> list[Tensor]:
        return [replace(t, dims=(batch, *t.dims[1:])) if len(t.dims) == 4 else t for t in tensors]

    return replace(call, inputs=resize(list(call.inputs)), outputs=resize(list(call.outputs)), _keep=[])


def quantised(p: problems.Problem, scales: int) -> Call:
    """The problem over int8 sources, with that many different scales."""
    columns = [(c + 63) // 64 * 64 * p.R * p.S for c in p.C]
    inputs = [Tensor((p.N, c, p.H, p.W), "int8", CHANNELS_LAST) for c in p.C]
    inputs += [Tensor((p.K, sum(columns)), "int8"), *[Tensor((p.K,), "float32")] * 2]
    attrs = {"channels": p.C, "kernel_shape": (p.R, p.S), "strides": p.strides, "pads": p.pads,
             "dilations": p.dilations, "packed_sizes": columns, "output_type": 10,
             "input_scales": [0.1 * (1 + i % scales) for i in range(len(p.C))]}  # fmt: skip
    y = Tensor(p.output, "float16", CHANNELS_LAST)
    return Call(f"CuteQConcatConv{len(p.C)}{p.activation}", inputs, [y], attrs)


def calls(count: int, seed: int) -> Iterator[Call]:
    """Random convolutions of both operators, most of them small enough to divide the reduction."""
    rng = random.Random(seed)
    for i, p in enumerate(problems.random_problems(count, seed, channel_step=8)):
        p = replace(p, C=tuple(c * rng.choice([1, 4, 8]) for c in p.C))
        dtype = ("float16", "float32", "bfloat16", "one scale", "two scales")[i % 5]
        yield quantised(p, 1 if dtype == "one scale" else 2) if "scale" in dtype else conv_call(p, dtype)


def sums_bytes(call: Call, splits: int) -> int:
    """What the kernels leave in the workspace: [splits][N*P*Q][K up to a multiple of 8] in float32."""
    n, k, p, q = call.outputs[0].dims
    return 0 if splits == 1 else splits * n * p * q * -(-k // 8) * 8 * 4


@pytest.mark.slow
def test_what_the_builder_is_told_serves_every_tile_on_every_other_device() -> None:
    judged = [device for device in DEVICES if kernels.reject_device(device[0]) is None]
    divided = fewer = 0
    for i, base in enumerate(calls(80, 3)):
        told = {device: kernels.workspace_bytes(on(base, *device)) for device in DEVICES}
        assert {device for device in DEVICES if told[device] >= 0} == set(judged), "the others have no code here"
        for built, runs in ((judged[i % len(judged)], d) for d in judged):
            for tile in kernels.configs(on(base, *runs)):
                free = kernels.Plan(on(base, *runs, config=tile))
                plan = kernels.Plan(on(base, *runs, config=tile, workspace_bytes=told[built]))
                assert plan.config == free.config == tile
                assert plan.workspace_bytes == sums_bytes(base, plan.splits) <= told[built], (base, tile, built, runs)
                assert free.workspace_bytes == sums_bytes(base, free.splits) <= told[runs], (base, tile, runs)
                assert plan.splits <= free.splits
                divided, fewer = divided + (free.splits > 1), fewer + (plan.splits < free.splits)
    assert divided > 500 and fewer > 50, "the problems are too large to tell"


def test_the_reported_layer_of_an_engine_from_a_smaller_gpu_keeps_within_its_workspace() -> None:
    layer = conv_call(problems.Problem(1, 20, 20, (512,), 512, **SAME))
    told = {count: kernels.workspace_bytes(on(layer, 80, count)) for count in (56, 108, 132)}
    assert told == {56: 7_340_032, 108: 14_155_776, 132: 17_301_504}
    for built in told:
        for runs in told:
            plan = kernels.Plan(on(layer, 80, runs, workspace_bytes=told[built]))
            assert 1 < plan.splits and plan.workspace_bytes <= told[built]


@pytest.mark.parametrize("base", [conv_call(problems.Problem(1, 20, 20, (512,), 512, **SAME)), good()], ids=["f", "q"])
def test_a_profile_that_starts_at_an_empty_batch_is_promised_what_its_other_batches_need(base: Call) -> None:
    told = kernels.workspace_bytes(on(with_batch(base, 0), 80, 108))
    assert told == kernels.workspace_bytes(on(with_batch(base, 1), 80, 108)) > 0
    for batch in (1, 2, 3, 5, 64):
        call = on(with_batch(base, batch), 80, 108)
        for tile in kernels.configs(call):
            assert kernels.Plan(replace(call, config=tile, _keep=[])).workspace_bytes <= told, (batch, tile)
    empty = kernels.Plan(on(with_batch(base, 0), 80, 108, workspace_bytes=0))
    assert (empty.splits, empty.workspace_bytes) == (1, 0)
    kernels.run(with_batch(base, 0))  # launches nothing, so that no address is looked at


def test_every_larger_image_fits_what_the_smallest_was_told() -> None:
    for base in calls(25, 11):
        told = kernels.workspace_bytes(on(base, 80, 108))
        for batch in (2, 3, 7, 20):
            larger = on(with_batch(base, base.outputs[0].dims[0] * batch), 80, 108)
            for tile in kernels.configs(larger):
                assert kernels.Plan(replace(larger, config=tile, _keep=[])).workspace_bytes <= told


def test_a_builder_without_a_device_is_told_what_the_tile_that_is_ranked_first_asks_for() -> None:
    """Compilers that see no GPU time no tiles; the most that any tile on any GPU could use would be 14 MB a node."""
    divided = 0
    for base in calls(40, 5):
        unknown = replace(base, sm=0, sm_count=0, _keep=[])
        first, told = kernels.configs(unknown)[0], kernels.workspace_bytes(unknown)
        parts = told // max(1, sums_bytes(base, 2) // 2)
        assert told == sums_bytes(base, max(1, parts)) and parts <= 16
        for device in ((80, 108), (80, 56), (89, 128)):
            if kernels.reject_device(device[0]) is None:
                assert kernels.Plan(on(base, *device, config=first, workspace_bytes=told)).workspace_bytes <= told
        divided += told > 0
    assert divided > 5
    assert kernels.workspace_bytes(on(conv_call(problems.Problem(1, 80, 80, (64,), 64, **SAME)), 0, 0)) == 0


def test_without_a_workspace_nothing_is_divided_and_a_byte_less_means_a_part_less() -> None:
    layer = on(conv_call(problems.Problem(1, 20, 20, (512,), 512, **SAME)), 80, 108)
    free = kernels.Plan(layer)
    assert free.splits > 2
    for promise, splits in (
        (0, 1), (free.workspace_bytes // free.splits, 1), (free.workspace_bytes, free.splits),
        (free.workspace_bytes - 1, free.splits - 1), (2 * free.workspace_bytes // free.splits, 2),
    ):  # fmt: skip
        plan = kernels.Plan(replace(layer, config=free.config, workspace_bytes=promise, _keep=[]))
        assert plan.splits == splits and plan.workspace_bytes <= promise, promise


def test_the_best_guess_knows_how_much_workspace_there_is() -> None:
    layer = on(conv_call(problems.Problem(1, 28, 28, (1024,), 64, **SAME)), 80, 108)
    alone = kernels.configs(replace(layer, workspace_bytes=0, _keep=[]))
    assert sorted(alone) == sorted(kernels.configs(layer)) and alone != kernels.configs(layer)
    assert kernels.Plan(replace(layer, workspace_bytes=0, _keep=[])).config == alone[0]


def test_backward_sums_fit_the_promise_or_are_refused() -> None:
    rows, columns = 4096, 512
    x, vector = Tensor((rows, columns), "bfloat16"), Tensor((columns,), "float32")
    statistics = {"mean": Tensor((rows,), "float32"), "rstd": Tensor((rows,), "float32")}
    call = training(dy=x, x=x, dx=x, gamma=vector, dgamma=vector, dbeta=vector, **statistics)
    part, told = columns * 8, {c: kernels.workspace_bytes(on(call, 90, c)) for c in (16, 132)}
    assert told[132] > told[16] >= part
    for built, runs in ((16, 132), (132, 16)):
        plan = kernels.Plan(on(call, 90, runs, workspace_bytes=told[built]))
        assert 0 < plan.workspace_bytes <= min(told.values()) and plan.workspace_bytes % part == 0
    assert kernels.Plan(on(call, 90, 132, workspace_bytes=part)).workspace_bytes == part
    with pytest.raises(KernelError, match=f"need {part} bytes of workspace, {part - 1} are promised; pass more"):
        kernels.Plan(on(call, 90, 132, workspace_bytes=part - 1))
    without = training(dgamma=ABSENT, dbeta=ABSENT, gamma=ABSENT)
    assert kernels.Plan(replace(without, workspace_bytes=0, _keep=[])).workspace_bytes == 0


def run(plan: kernels.Plan, call: Call, workspace: int, size: int) -> str:
    bound = kernels.Bound(plan).bind([4096] * (len(call.inputs) + len(call.outputs)), workspace, size)
    with pytest.raises(KernelError) as failure:
        bound(0)
    return str(failure.value)


def test_run_refuses_a_workspace_that_is_missing_misaligned_or_too_small() -> None:
    layer = on(conv_call(problems.Problem(1, 20, 20, (512,), 512, **SAME)), 80, 108)
    plan = kernels.Plan(layer)
    needed = plan.workspace_bytes
    for workspace, size in ((0, needed), (4096, needed - 1), (4100, needed), (4096, 0)):
        assert f"the plan needs {needed}, aligned to 16" in run(plan, layer, workspace, size)
    assert "the plan needs" not in run(plan, layer, 4096, needed)


def test_a_launcher_wants_the_size_of_its_workspace() -> None:
    with pytest.raises(KernelError, match="set workspace_bytes"):
        kernels.Launcher(replace(good(), workspace=4096))


@pytest.mark.parametrize(("op_type", "dead", "heir"), [("CuteConcatConv2", 11, 1), ("CuteQConcatConv2Relu", 11, 14)])
def test_a_retired_tile_is_planned_as_its_heir(op_type: str, dead: int, heir: int) -> None:
    base = conv_call(problems.Problem(2, 40, 40, (64, 64), 256, **SAME)) if "Q" not in op_type else good()
    assert kernels.Plan(on(base, 80, 108, config=dead)).config == heir


@pytest.mark.parametrize(("call", "sm", "dead"), [
    (conv_call(problems.Problem(2, 40, 40, (64,), 256)), 80, 101),  # its heir is Hopper's
    (view("float16"), 90, 141),  # over enlarged sources, as it took them; its heir takes none
    (conv_call(problems.Problem(2, 40, 40, (60,), 256)), 80, 7),  # of channels that are no whole vectors
])  # fmt: skip
def test_a_retired_tile_whose_heir_cannot_run_the_call_is_planned_as_the_best_guess(
    call: Call, sm: int, dead: int
) -> None:
    call = on(call, sm, 108)
    heirs = {r["id"]: r["heir"] for r in kernels.operator_of(call.op_type)["retired"]}
    assert heirs[dead] not in kernels.configs(call)
    assert kernels.Plan(replace(call, config=dead, _keep=[])).config == kernels.configs(call)[0]


def test_every_retired_tile_of_the_norms_is_planned_as_its_heir_where_that_is_legal() -> None:
    long = Tensor((64, 16384), "float16")
    call = Call("CuteRMSNorm", [long, Tensor((16384,), "float16")], [long], {}, sm=90, sm_count=132)
    for tile in kernels.operator_of("CuteRMSNorm")["retired"]:
        assert kernels.Plan(replace(call, config=tile["id"], _keep=[])).config == tile["heir"]


def test_a_plan_needs_every_size() -> None:
    for call in (conv_call(problems.Problem(1, -1, -1, (64,), 64)), training(x=Tensor((-1, 64), "bfloat16"))):
        assert kernels.reject(call) is None
        with pytest.raises(KernelError, match="tensor . is still dynamic"):
            kernels.Plan(call)


@pytest.mark.parametrize("sm", [75, 70, 100, 103, 110, 120, 121, 61])
def test_a_gpu_without_code_is_refused_in_words(sm: int) -> None:
    targets = str(kernels.describe()["targets"])
    if kernels.reject_device(sm) is None:
        pytest.skip(f"this build holds code for {sm}")
    words = f"compute capability {sm // 10}.{sm % 10} is asked for, this library holds code for {targets} alone; build"
    x = Tensor((4, 64), "float16")
    norm = Call("CuteRMSNorm", [x, Tensor((64,), "float16")], [x], {})
    for call in (good(), conv_call(problems.Problem(1, 8, 8, (64,), 64)), norm, training()):
        asked = on(call, sm, 100)
        assert words in (kernels.reject(asked) or "") and words in (kernels.reject_device(sm) or "")
        assert kernels.configs(asked) == [] and kernels.workspace_bytes(asked) == -1
        with pytest.raises(KernelError, match="is asked for"):
            kernels.Plan(asked)


@pytest.mark.parametrize("base", [conv_call(problems.Problem(1, 64, 64, (8,), 8, R=3, S=3)), good()], ids=["f", "q"])
def test_a_dilation_that_leaves_32_bits_is_refused(base: Call) -> None:
    def wide(dilation: int, width: int, rows: int) -> Call:
        kind = base.inputs[0].dtype
        attrs = {**base.attrs, "kernel_shape": (rows, 1), "dilations": (dilation, 1024), "strides": (1, 1)}
        attrs |= {"pads": (4096, 0, 4096, 0), "channels": (16,), "packed_sizes": (64 * rows,)}
        x = Tensor((1, 16, 1, width), kind, CHANNELS_LAST)
        p = 1 + 8192 - dilation * (rows - 1)
        op_type = "CuteConcatConv1" if kind != "int8" else "CuteQConcatConv1"
        attrs |= {"input_scales": (0.1,)} if kind == "int8" else {}
        y = Tensor((1, 8, p, width), base.outputs[0].dtype, CHANNELS_LAST)
        vectors = [Tensor((8,), "float32")] * (2 if kind == "int8" else 1)
        return Call(op_type, [x, Tensor((8, 64 * rows), kind), *vectors], [y], attrs)

    assert kernels.reject(wide(1024, 1 << 17, 3)) is None  # 3 * 1024 * 2^17 < 2^31
    assert "3 filter rows 1024 apart" in (kernels.reject(wide(1024, 1 << 20, 3)) or "")
    assert "2 filter rows 1024 apart reach over" in (kernels.reject(wide(1024, 1 << 21, 2)) or "")
    # A filter of one row keeps no distance, so that its dilation does not count.
    assert "reach over" not in (kernels.reject(wide(1024, 1 << 21, 1)) or "")


def test_filter_columns_that_lie_over_2_gib_apart_are_refused() -> None:
    base = conv_call(problems.Problem(1, 1, 4096, (64,), 8, S=2, dilations=(1, 1024)), "float32")
    narrow, wide = (
        replace(base, inputs=[replace(base.inputs[0], ld=ld), *base.inputs[1:]]) for ld in (1 << 18, 1 << 20)
    )
    assert kernels.reject(narrow) is None
    assert "a dilation over" in (kernels.reject(wide) or "")


def test_the_c_interface_refuses_what_is_no_plan() -> None:
    lib = kernels.library()
    nothing = kernels._Operands()
    assert b"run needs a plan" in lib.cutefuse_run(None, ctypes.byref(nothing))
    blank = ctypes.create_string_buffer(b"\xff" * lib.cutefuse_plan_bytes())
    given = kernels._Operands(*((ctypes.c_void_p * 1)(0) for _ in range(2)))
    assert b"run needs a plan that cutefuse_plan has filled" in lib.cutefuse_run(blank, ctypes.byref(given))
    assert b"operator id 99 is not one of" in lib.cutefuse_plan(99, None, blank)


def test_a_plan_is_plain_data() -> None:
    layer = on(conv_call(problems.Problem(1, 20, 20, (512,), 512, **SAME)), 80, 108)
    plan = kernels.Plan(layer)
    copy = kernels.Plan(layer)
    ctypes.memmove(copy._state, plan._state, len(plan._state))
    plan._state = ctypes.create_string_buffer(len(plan._state))
    assert "the plan needs" in run(copy, layer, 0, 0)
