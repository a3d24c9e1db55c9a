"""Small Hopper tiles of 8-bit sources: which problems they take, and on an H100/H200 what every cluster computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import gpu
import gpu_checks
import problems
import pytest
import quant_problems
from quant_problems import SMALL, SMALL_NAMES
from test_quant_calls import good, in_float8, of_filters, on, strided, to_type
from test_sm90 import SAME, hopper_library
from test_sm90_small import MULTIPROCESSORS, hopper_gpu

from cutefuse import kernels

__all__ = ["hopper_gpu", "hopper_library"]

GEOMETRY = "this filter, stride, padding or number of channels"
TYPES = ["int8", gpu.FLOAT8]


def to_float16(call: kernels.Call, dtype: str = "int8") -> kernels.Call:
    call = to_type(call, "float16", 10)
    return on(call if dtype == "int8" else in_float8(call), 90)


def to_bytes(call: kernels.Call, dtype: str = "int8") -> kernels.Call:
    return on(call if dtype == "int8" else in_float8(call), 90)


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    def test_ids_keep_their_meaning(self) -> None:
        op = next(op for op in kernels.describe()["ops"] if op["name"] == "quant_concat_conv")
        assert {c["id"]: c["name"] for c in op["configs"] if "small" in c["name"]} == SMALL_NAMES

    @pytest.mark.parametrize("scales", [(0.1, 0.1), (0.1, 0.2)])
    @pytest.mark.parametrize("dtype", TYPES)
    def test_float16_and_8_bit_outputs_are_taken_with_any_scales(self, dtype: str, scales: tuple[float, ...]) -> None:
        assert SMALL <= set(kernels.configs(to_float16(good(input_scales=scales), dtype)))
        assert SMALL <= set(kernels.configs(to_bytes(good("CuteQConcatConv2ReluQ", input_scales=scales), dtype)))

    def test_tails_of_filters_and_strides_are_taken(self) -> None:
        assert SMALL <= set(kernels.configs(to_float16(of_filters(good(), 37))))
        assert SMALL <= set(kernels.configs(to_float16(strided(good(), 8, (2, 32, 3, 3)))))

    @pytest.mark.parametrize(("call", "why"), [
        (to_type(good(), "float32", 1), GEOMETRY),
        (to_type(good(), "bfloat16", 16), GEOMETRY),
        (of_filters(good("CuteQConcatConv2ReluQ"), 40), GEOMETRY),
        (to_type(strided(good(), 9, (2, 32, 3, 3)), "float16", 10), GEOMETRY),
        (good("CuteQConcatConv2ReluQ", kernels.BLOCKS32), "blocks of 32 channels"),
    ], ids=["float32", "bfloat16", "part of a vector of int8", "stride 9", "kCHW32"])  # fmt: skip
    def test_what_is_refused_is_named(self, call: kernels.Call, why: str) -> None:
        call = on(call, 90)
        assert not SMALL & set(kernels.configs(call))
        for config in SMALL:
            with pytest.raises(kernels.KernelError, match=f"tile {config} cannot run {why}"):
                kernels.Plan(replace(call, config=config, _keep=[]))

    def test_no_other_architecture_has_them(self) -> None:
        for sm in (80, 100):
            assert not SMALL & set(kernels.configs(replace(to_float16(good()), sm=sm, _keep=[])))

    @pytest.mark.parametrize("dtype", TYPES)
    def test_few_pixels_and_a_long_sum_start_with_one(self, dtype: str) -> None:
        attrs: dict[str, Any] = {"channels": (512, 512), "packed_sizes": (4608, 4608)}
        call = good(**attrs)
        sources = [replace(t, dims=(1, 512, 20, 20)) for t in call.inputs[:2]]
        inputs = [*sources, replace(call.inputs[2], dims=(32, 9216)), *call.inputs[3:]]
        call = of_filters(replace(call, inputs=inputs, outputs=[replace(call.outputs[0], dims=(1, 32, 20, 20))]), 256)
        assert kernels.configs(replace(to_float16(call, dtype), sm_count=132, _keep=[]))[0] in SMALL
        wide = [replace(t, dims=(8, 512, 128, 128)) for t in sources]
        call = replace(
            call, inputs=[*wide, *call.inputs[2:]], outputs=[replace(call.outputs[0], dims=(8, 256, 128, 128))]
        )
        assert kernels.configs(replace(to_float16(call, dtype), sm_count=132, _keep=[]))[0] not in SMALL


# ---- on the GPU -----------------------------------------------------------------------------------------------------

# A k-tile is two blocks of 64 channels: sources with an even number of blocks, an odd one, or one alone; tails in the
# first block of two and in the second. Of the last sources of one block, and of the last block of an odd number, it is
# two taps; under one tap two such sources.
SHAPES = [
    problems.Problem(1, 20, 20, (256, 512), 512, activation="Silu"),
    problems.Problem(1, 7, 7, (256, 320, 128, 192), 384, activation="Relu"),
    problems.Problem(1, 1, 1, (2040,), 16),  # a long sum of one pixel
    problems.Problem(3, 11, 13, (72, 8, 200), 144, activation="HardSwish"),
    problems.Problem(1, 21, 19, (130, 64), 80, **SAME, activation="Sigmoid"),
    problems.Problem(2, 15, 17, (24,), 64, 5, 3, pads=(2, 0, 1, 2), strides=(2, 1), activation="Tanh"),
    problems.Problem(1, 33, 31, (96, 16, 190), 48, **SAME, dilations=(2, 1), activation="LeakyRelu"),
    problems.Problem(1, 20, 20, (448,), 64, 7, 7, pads=(3, 3, 3, 3), activation="Clip"),
    problems.Problem(2, 11, 13, (32, 24, 100, 8), 160, **SAME, strides=(2, 1), activation="Relu"),
    problems.Problem(1, 9, 10, (64,), 64),
    problems.Problem(1, 13, 12, (80,), 64, pads=(1, 2, 0, 1)),  # im2col of one tap
    problems.Problem(1, 10, 11, (192, 40), 32, 2, 1, activation="Silu"),
    problems.Problem(2, 9, 14, (128, 40, 64), 64, **SAME, activation="Silu"),
    problems.Problem(1, 20, 20, (64, 64, 64), 96, 1, 5, pads=(0, 2, 0, 2), activation="Relu"),
    problems.Problem(1, 12, 9, (48,), 32, 4, 4, pads=(1, 2, 2, 1)),
    problems.Problem(1, 14, 14, (40, 320), 64, **SAME, activation="Relu"),
    problems.Problem(1, 13, 14, (320, 40), 64, **SAME, activation="Silu"),
    problems.Problem(2, 9, 8, (16, 24, 8, 40, 64, 48, 8, 168), 32, **SAME, activation="Relu"),  # no room for a ninth
    problems.Problem(1, 14, 14, (64, 64, 64, 64), 64, activation="Silu"),
    problems.Problem(2, 10, 11, (136, 56, 40, 8), 96, activation="Relu"),
    problems.Problem(1, 15, 13, (24, 64, 40, 16, 8), 64, pads=(1, 0, 2, 1), strides=(2, 2)),
]
NARROW = (200, 40, 8, 64, 16, 56, 64, 48)
# The scale of each, or of all but the first: an odd number of joined ones, and an even one.
SCALES_OF = [
    (0, 1, 2, 2, 2, 2, 2), (0, 0, 1, 2, 2, 2, 3), (0, 0, 0, 0, 0, 1, 1), (0, 1, 1, 1, 1, 1, 1),
    (0, 0, 1, 1, 2, 3, 3, 3), (0, 0, 0, 0, 0, 1, 2, 2), (1, 0, 0, 0, 0, 0, 0, 1),
]  # fmt: skip
TAILS = {2: 9, 3: 130, 4: 75, 6: 37, 8: 149}  # filters in part of a vector, which float16 outputs may have


def tiles_of(instance: quant_problems.Instance) -> list[int]:
    tiles = [i for i in kernels.configs(instance.call) if i in SMALL]
    assert len(tiles) == len(SMALL)
    return tiles


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    @pytest.mark.parametrize("one_scale", [True, False], ids=["one_scale", "own_scales"])
    @pytest.mark.parametrize("to_byte", [False, True], ids=["to_float16", "to_8_bits"])
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_every_cluster_matches_float64(self, index: int, dtype: str, to_byte: bool, one_scale: bool) -> None:
        shape = SHAPES[index]
        problem = replace(problems.affordable(shape), C=shape.C)  # in pairs of blocks as they are
        if not to_byte:
            problem = replace(problem, K=TAILS.get(index, problem.K))
        output_type = dtype if to_byte else "float16"
        instance = quant_problems.instantiate(problem, output_type, one_scale=one_scale, seed=index, dtype=dtype)
        tiles = tiles_of(instance)
        for sm_count in MULTIPROCESSORS:
            other = replace(instance, call=replace(instance.call, sm_count=sm_count, _keep=[]))
            gpu_checks.assert_every_tile_is_right(other, tiles)

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("scale_of", SCALES_OF, ids=str)
    def test_sources_of_a_k_tile_may_have_two_scales(self, scale_of: tuple[int, ...], dtype: str) -> None:
        problem = problems.Problem(1, 3, 5, NARROW[-len(scale_of) :], 64, activation="Relu")
        instance = quant_problems.instantiate(problem, dtype=dtype, seed=len(scale_of), scale_of=scale_of)
        parts = set()
        for sm_count in MULTIPROCESSORS:
            other = replace(instance, call=replace(instance.call, sm_count=sm_count, _keep=[]))
            tiles = tiles_of(other)
            parts |= {kernels.Plan(replace(other.call, config=config, _keep=[])).splits for config in tiles}
            gpu_checks.assert_every_tile_is_right(other, tiles)
        assert max(parts) > 1, "a part of a sum has to begin behind others' sources"

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("channels", [(64,), (1, 65), (63, 64, 129), (192, 320, 128)])
    @pytest.mark.parametrize("taps", [1, 3])
    def test_filters_of_nan_stay_with_their_own_output(self, taps: int, channels: tuple[int, ...], dtype: str) -> None:
        """A k-tile whose second block does not exist reads on in its filter's row, and never in another's."""
        import torch

        pads = (taps // 2,) * 4
        problem = problems.Problem(1, 6, 7, channels, 48, taps, taps, pads=pads)
        instance = quant_problems.instantiate(problem, dtype=dtype, one_scale=True)
        others = [k for k in range(48) if k % 3 != 1]
        packed = instance.buffers[len(channels)].view.view(48, -1)
        if dtype == "int8":  # which has no NaN: whatever else they hold must not matter
            packed[1::3] = 127
        else:
            packed[1::3] = gpu.FLOAT8_NAN
        truth = problems.convolve(instance.exact, torch.float64)[:, others]
        for config in emulated.compiled(instance, tiles_of(instance)):
            instance.run(config)
            y = instance.output()[0]
            assert torch.allclose(y[:, others].double(), truth, atol=2e-2, rtol=2e-2), f"tile {config}"
            assert dtype == "int8" or y[:, 1::3].isnan().all(), f"tile {config}"

    @pytest.mark.parametrize("dtype", TYPES)
    def test_the_clusters_divide_sums_within_a_source(self, dtype: str) -> None:
        problem = problems.Problem(1, 9, 9, (512, 512), 64, **SAME)
        instance = quant_problems.instantiate(problem, dtype=dtype)
        parts = {kernels.Plan(replace(instance.call, config=config, _keep=[])).splits for config in SMALL}
        assert max(parts) >= 4, parts

    @pytest.mark.parametrize("config", sorted(SMALL))
    def test_the_same_bits_every_time(self, config: int) -> None:
        instance = quant_problems.instantiate(problems.Problem(1, 20, 20, (512, 512), 256))
        gpu_checks.assert_the_same_bits(instance, config)

    def test_integers_are_exact_and_drained_before_they_overflow(self) -> None:
        problem = problems.Problem(1, 3, 5, (8192, 8192), 32, **SAME)
        instance = quant_problems.instantiate(problem, one_scale=True)
        for buffer in instance.buffers[:3]:  # sources and filter
            buffer.view.fill_(-128)
        exact, scale = instance.exact, instance.call.attrs["input_scales"][0]
        exact.x = [x * 0 - 128 * scale for x in exact.x]
        exact.w = exact.w * 0 - 128 * instance.buffers[3].view.double().view(-1, 1, 1, 1)
        gpu_checks.assert_every_tile_is_right(instance, tiles_of(instance))
