"""A tile that was asked for and cannot run a call is refused with what of the call it cannot run."""

from __future__ import annotations

from dataclasses import replace

import problems
import pytest
from test_kernels_forms import view
from test_plan import calls, on, quantised
from test_quant_calls import good, of_width
from test_row_norm import training
from test_sm90 import call as conv_call

from cutefuse import kernels
from cutefuse.kernels import Call, KernelError, Tensor

POINTWISE = problems.Problem(1, 8, 8, (64,), 64)
SAME = problems.Problem(1, 40, 40, (64,), 64, R=3, S=3, pads=(1, 1, 1, 1))


def norm(columns: int) -> Call:
    x = Tensor((4, columns), "float32")
    return Call("CuteRMSNorm", [x, Tensor((columns,), "float32")], [x], {})


LONG = problems.Problem(1, 40, 40, (8192, 8192), 64, R=3, S=3, pads=(1, 1, 1, 1))
CASES = {
    "no such tile": (conv_call(POINTWISE), 80, 99, "tile 99 does not exist"),
    "negative": (conv_call(POINTWISE), 80, -1, "tile -1 does not exist"),
    "type": (conv_call(POINTWISE), 80, 21, "tile 21 cannot run float16 on"),
    "Hopper's": (conv_call(POINTWISE), 80, 105, "tile 105 cannot run this call on compute capability 8.0"),
    "tails": (conv_call(replace(POINTWISE, C=(60,))), 80, 1, "channels that are no multiples of a vector"),
    "taps of one column": (conv_call(POINTWISE), 80, 15, "this filter, stride or dilation"),
    "taps of a narrow image": (conv_call(replace(SAME, W=9)), 80, 15, "images this narrow"),
    "enlarged": (view("float16"), 80, 4, "enlarged sources"),
    "enlarged on Hopper": (view("float16"), 90, 105, "enlarged sources"),
    "full size": (conv_call(POINTWISE), 80, 33, "sources of full size"),
    "odd pixels": (conv_call(replace(POINTWISE, C=(3,)), "float32"), 80, 23, "pixels of this stride"),
    "odd pixels on Hopper": (conv_call(replace(SAME, C=(62,)), "float32"), 90, 128, "pixels of this stride"),
    "even pixels": (conv_call(POINTWISE, "float32"), 80, 35, "pixels of this stride"),
    "halo of one tap": (conv_call(POINTWISE), 90, 121, "this filter, stride, padding or number of channels"),
    "scales": (good(), 80, 1, "sources of other scales"),
    "long sums": (quantised(LONG, 1), 80, 1, "sums beyond 32 bits"),
    "int8 stride": (quantised(replace(SAME, strides=(1, 2)), 1), 80, 19, "this filter, stride or dilation"),
    "int8 narrow": (of_width(17), 80, 19, "images this narrow"),
    "int8 shared memory": (of_width(43), 86, 18, "stages larger than the shared memory"),
    "rows": (norm(8192), 90, 1, "rows of 8192 float32 on compute capability 9.0"),
    "rows of clusters": (norm(512), 90, 13, "rows of 512 float32"),
    "training": (training("CuteRowNormForward"), 90, 13, "rows of 64 bfloat16"),
    "backward": (training(), 90, 3, "a backward pass, which has no tiles,"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refused_tile_says_what_it_cannot_run(name: str) -> None:
    call, sm, tile, words = CASES[name]
    call = on(call, sm, 108, config=tile)
    assert kernels.reject(call) is None
    with pytest.raises(KernelError) as failure:
        kernels.Plan(call)
    assert words in str(failure.value) and str(failure.value).endswith("; ask configs() for the legal ones")


def test_every_tile_that_is_not_legal_has_its_reason_and_every_legal_one_none() -> None:
    refused = 0
    for base in calls(40, 5):
        for sm in (80, 86, 90):
            call = on(base, sm, 108)
            legal = kernels.configs(call)
            for tile in kernels.operator_of(call.op_type)["configs"]:
                asked = replace(call, config=tile["id"], _keep=[])
                if tile["id"] in legal:
                    assert kernels.Plan(asked).config == tile["id"]
                    continue
                with pytest.raises(KernelError, match=f"tile {tile['id']} cannot run [a-z]") as failure:
                    kernels.Plan(asked)
                older = sm < tile["min_sm"] and call.inputs[0].dtype in tile["types"]
                assert ("cannot run this call" in str(failure.value)) == older, failure.value
                refused += 1
    assert refused > 500


def huge(rows: int, columns: int) -> Call:
    x = Tensor((rows, columns), "float16")
    return Call("CuteRMSNorm", [x, Tensor((columns,), "float16")], [x], {})


@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize(
    "call",
    [
        conv_call(problems.Problem(n, 256, 256, (8,), k, R=1, S=1))
        for n in (1 << 20, 1 << 21, 1 << 22) for k in (8, 64, 512)
    ]
    + [huge(rows, columns) for rows in (1 << 30, (1 << 31) - 1, 1 << 31, 1 << 33) for columns in (8, 64, 2048)],
)  # fmt: skip
def test_every_tile_that_is_listed_can_be_planned(call: Call, sm: int) -> None:
    """Also where a launch of some tiles would take more blocks than one can."""
    if kernels.reject(call):
        return
    for tile in kernels.configs(on(call, sm, 108)):
        kernels.Plan(on(call, sm, 108, config=tile))
