"""The tiles for images, whose block copies its pixels once: what they take and what they compute."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import call, library_or_skip

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.operators import conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source

TILES = (50, 51, 53)
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
IMAGE = Problem(1, 64, 64, (3,), 32, **SAME, strides=(2, 2), activation="Silu")


def takes(problem: Problem, dtype: str = "float16", sm: int = 90) -> bool:
    library_or_skip()
    ids = kernels.configs(call(problem, dtype, sm))
    assert (TILES[0] in ids) == (TILES[1] in ids)
    return TILES[0] in ids


class TestLegality:
    @pytest.mark.parametrize("channels", [1, 3, 4, 5, 8, 9, 16, 24, 31, 32])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_up_to_32_channels(self, channels: int, dtype: str) -> None:
        assert takes(replace(IMAGE, C=(channels,)), dtype)

    def test_one_is_the_first_guess_for_images(self) -> None:
        """On the shapes on which it was timed as the fastest, out of the L2 cache of an H200."""
        library_or_skip()
        for problem in (
            replace(IMAGE, H=640, W=640, K=16),
            replace(IMAGE, H=640, W=640, N=8),
            replace(IMAGE, H=224, W=224, K=64, R=7, S=7, pads=(3, 3, 3, 3)),
        ):
            assert kernels.configs(replace(call(problem), sm_count=132, _keep=[]))[0] in TILES

    @pytest.mark.parametrize(
        ("change", "obstacle"),
        [
            ({"C": (33,)}, "this many channels"),
            ({"C": (3, 3)}, "several sources, outputs or a residual"),
            ({"R": 16, "S": 16, "K": 64}, "filters or strides this large"),
            ({"strides": (16, 63), "C": (8,)}, "filters or strides this large"),
            ({"H": 4000, "W": 4000, "dilations": (1024, 1024)}, "filters or strides this large"),
        ],
    )
    def test_all_else_has_other_tiles(self, change: dict[str, object], obstacle: str) -> None:
        problem = replace(IMAGE, **change)  # type: ignore[arg-type]
        assert not takes(problem)
        with pytest.raises(CutefuseError, match=obstacle):
            kernels.Launcher(replace(call(problem), config=TILES[0], _keep=[]))

    def test_float32_has_other_tiles(self) -> None:
        assert not takes(IMAGE, "float32")

    @pytest.mark.parametrize(
        ("form", "outputs"),
        [
            (Form(1, "Relu", pre_activated=True), [32]),
            (Form(1, "Silu", residual="after"), [32]),
            (Form(1, "Silu", outputs=2), [16, 16]),
        ],
    )
    def test_other_forms_have_other_tiles(self, form: Form, outputs: list[int]) -> None:
        library_or_skip()
        geometry = conv_math.Geometry((3, 3), pads=(1,) * 4)
        ids = kernels.configs(conv_call.make_call(form, [Source((2, 8, 20, 20), 8)], outputs, geometry, "float16", {}))
        assert ids and not {*TILES} & {*ids}


class TestPlanes:
    """What a network is given: NCHW, and in float32 perhaps."""

    @pytest.mark.parametrize("given", ["float16", "float32"])
    @pytest.mark.parametrize("layout", [0, 1])
    def test_image_tiles_alone_take_them(self, given: str, layout: int) -> None:
        library_or_skip()
        assert {*TILES} == {*kernels.configs(of_image(given=given, layout=layout))}

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"channels": 9}, "an image of 9 channels under a 3x3 float16 filter .* at most 8 channels"),
            ({"dtype": "float32", "given": "float32"}, "under a 3x3 float32 filter .* use CuteConcatConv1"),
            ({"dtype": "bfloat16", "given": "float16"}, "source 0 is float16; all sources must be bfloat16"),
            ({"given": "int32"}, "source 0 is int32; all sources must be float16"),
            ({"kernel_shape": (16, 16), "filters": 64}, "under a 16x16 float16 filter"),
            ({"layout": 2}, "layout is 2"),
        ],
    )
    def test_all_else_is_refused_in_a_sentence(self, change: dict[str, Any], reason: str) -> None:
        library_or_skip()
        assert re.search(reason, kernels.reject(of_image(**change)) or "")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"layout": kernels.BLOCKS32}, "neither dense in NCHW (TensorRT: kLINEAR) nor channels-last; pass it so"),
            ({"ld": 640}, "neither dense in NCHW"),
            ({"layout": kernels.CHANNELS_LAST, "ld": 2}, "source 0 has 3 channels in pixels of 2 float16 elements"),
            ({"layout": kernels.CHANNELS_LAST, "ld": 3}, None),
            ({"layout": kernels.CHANNELS_LAST, "ld": 0}, None),
        ],
    )
    def test_what_is_no_image_is_refused(self, change: dict[str, int], reason: str | None) -> None:
        library_or_skip()
        image = of_image()
        source = replace(image.inputs[0], **change)  # type: ignore[arg-type]
        said = kernels.reject(replace(image, inputs=[source, *image.inputs[1:]], _keep=[]))
        assert said is None if reason is None else reason in (said or "")

    @pytest.mark.parametrize(("channels", "columns"), [(1, 36), (3, 36), (4, 36), (5, 72), (8, 72), (3, 576), (8, 576)])
    def test_filters_are_packed_compactly_or_as_those_of_other_sources(self, channels: int, columns: int) -> None:
        library_or_skip()
        call = packed(of_image(channels), columns)
        assert kernels.reject(call) is None and {*TILES} == {*kernels.configs(call)}

    @pytest.mark.parametrize(
        ("channels", "columns", "stored", "reason"),
        [
            (3, 72, 72, r"packed_sizes\[0\] is 72, 3 channels of a 3x3 filter take 36 columns; repack it"),
            (5, 36, 36, r"packed_sizes\[0\] is 36, 5 channels of a 3x3 filter take 72 columns; repack it"),
            (3, 27, 27, r"packed_sizes\[0\] is 27, .* take 36 columns"),
            (3, 32, 32, r"packed_sizes\[0\] is 32, .* take 36 columns"),
            (3, 1152, 1152, r"packed_sizes\[0\] is 1152, .* take 36 columns"),
            (3, 36, 576, "the packed filter is 32x576, 36 columns and 1 to 1048576 rows are needed; repack it"),
            (3, 576, 36, "the packed filter is 32x36, 576 columns and 1 to 1048576 rows are needed; repack it"),
        ],
    )
    def test_all_other_packings_are_refused(self, channels: int, columns: int, stored: int, reason: str) -> None:
        library_or_skip()
        assert re.search(reason, kernels.reject(packed(of_image(channels), columns, stored)) or "")

    @pytest.mark.parametrize("channels", [3, 8])
    def test_other_sources_have_no_compact_packing(self, channels: int) -> None:
        library_or_skip()
        call = conv_call.make_call(
            Form(1, "Silu"), [Source((1, channels, 64, 64), channels)], [32], conv_math.Geometry((3, 3)), "float16", {}
        )
        assert kernels.reject(call) is None
        compact = packed(call, 36 if channels < 5 else 72)
        assert re.search(r"packed_sizes\[0\] is .* take 576 columns", kernels.reject(compact) or "")

    def test_no_pixel_tile_is_offered_them(self) -> None:
        library_or_skip()
        with pytest.raises(CutefuseError, match="the image of a network"):
            kernels.Launcher(replace(of_image(), config=1, _keep=[]))


def of_image(
    channels: int = 3, dtype: str = "float16", given: str = "float16", layout: int = 0, filters: int = 32,
    kernel_shape: tuple[int, int] = (3, 3),
) -> kernels.Call:  # fmt: skip
    geometry = conv_math.Geometry(kernel_shape, (2, 2), (1,) * 4)
    sources = [Source((1, channels, 64, 64), channels)]
    form = Form(1, "Silu", image=True)
    return conv_call.make_call(form, sources, [filters], geometry, dtype, {}, layout, image_dtype=given)


def packed(call: kernels.Call, columns: int, stored: int = 0) -> kernels.Call:
    """The call with packed_sizes of `columns` over a matrix of as many, or of `stored`."""
    source, w, *others = call.inputs
    w = replace(w, dims=(w.dims[0], stored or columns))
    return replace(call, attrs={**call.attrs, "packed_sizes": [columns]}, inputs=[source, w, *others], _keep=[])


CORNERS = [
    Problem(1, 20, 22, (3,), 16, **SAME, strides=(2, 2), activation="Silu"),
    Problem(1, 30, 34, (3,), 64, 7, 7, strides=(2, 2), pads=(3, 3, 3, 3), activation="Relu"),
    Problem(2, 17, 15, (8,), 72, **SAME, activation="Relu"),
    Problem(1, 13, 19, (1,), 40, 5, 1, pads=(2, 0, 2, 0)),
    Problem(1, 33, 31, (4,), 32, 6, 6, strides=(2, 2), pads=(2, 2, 2, 2), activation="Silu"),
    Problem(3, 40, 30, (6,), 65, 3, 5, pads=(3, 0, 1, 4), dilations=(3, 2), activation="Tanh"),
    Problem(1, 60, 60, (3,), 48, 8, 8, strides=(8, 8)),
    Problem(1, 60, 60, (3,), 96, 4, 4, strides=(4, 4), activation="Sigmoid"),
    Problem(2, 18, 70, (8,), 32, **SAME, strides=(2, 2), activation="Silu"),
    Problem(1, 19, 67, (7,), 64, **SAME, activation="Clip"),
    Problem(1, 21, 35, (6,), 18, 1, 1, activation="Sigmoid"),
    Problem(1, 33, 37, (5,), 130, 2, 3, pads=(1, 0, 0, 2), strides=(1, 2), activation="LeakyRelu"),
    Problem(1, 40, 41, (3,), 5, **SAME, strides=(2, 2), activation="Sigmoid", dense=True),
    Problem(1, 23, 50, (5,), 30, **SAME, activation="Sigmoid", dense=True),
    Problem(2, 16, 33, (4,), 12, 5, 5, pads=(2,) * 4, activation="HardSwish", dense=True),
    Problem(1, 12, 65, (3,), 33, **SAME, dilations=(1, 2), activation="Silu", dense=True),
    Problem(1, 17, 33, (8,), 16, **SAME, starts=(8,), tail=4, activation="Silu"),
    Problem(1, 17, 33, (6,), 16, **SAME, starts=(3,), tail=2, activation="Silu", dense=True),
    Problem(1, 320, 320, (3,), 48, **SAME, strides=(2, 2), activation="Silu"),
    Problem(1, 37, 45, (16,), 32, **SAME, strides=(2, 2), activation="Silu"),
    Problem(2, 21, 70, (32,), 16, 1, 1, activation="Relu"),
    Problem(1, 19, 67, (24,), 40, **SAME, activation="HardSwish"),
    Problem(1, 35, 41, (31,), 64, **SAME, strides=(2, 2), activation="Clip"),
    Problem(2, 17, 33, (9,), 20, 3, 5, pads=(1, 2, 1, 2), dilations=(1, 3), activation="Silu", dense=True),
    Problem(1, 18, 40, (20,), 24, **SAME, strides=(1, 2), starts=(8,), tail=4, activation="Tanh"),
]


# Rows of whole fours, which are copied four pixels at a time, and begin anywhere in one. Small: no tool crops them.
FOURS = [
    Problem(2, 7, 36, (3,), 18, **SAME, strides=(1, 2), activation="Relu"),
    Problem(1, 6, 40, (1,), 16, 3, 3, pads=(1, 0, 1, 0), activation="Silu"),
    Problem(2, 5, 44, (2,), 34, 3, 4, pads=(0, 3, 2, 0)),
    Problem(1, 9, 132, (4,), 64, 5, 3, pads=(2, 2, 2, 2), strides=(2, 1), activation="Relu"),
    Problem(1, 8, 72, (3,), 8, 2, 2, strides=(2, 2), pads=(0, 1, 0, 1), activation="Sigmoid"),
]
PLANES = [replace(p, image="own") for p in (*FOURS, *CORNERS) if not p.starts and p.C[0] <= 8]
PLANES += [replace(p, image="float32", dense=not p.dense) for p in PLANES]
PIXELS = [replace(p, image=f"pixels of {p.image}") for p in PLANES]
COMMON = [replace(p, common=True) for p in PLANES[::5]]  # whose filters are packed as those of other sources


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[index]), dtype, index)
        assert {*TILES} <= {*kernels.configs(instance.call)}
        gpu_checks.assert_every_tile_is_right(instance, TILES)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("problem", [*PLANES, *PIXELS, *COMMON], ids=str)
    def test_images_as_networks_are_given_them_match_float64(self, problem: Problem, dtype: str) -> None:
        small = problem if problem.H < 10 else problems.affordable(problem)  # FOURS keep their widths
        instance = problems.instantiate(small, dtype)
        assert {*TILES} == {*kernels.configs(instance.call)}
        gpu_checks.assert_every_tile_is_right(instance, TILES)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_dense_pixels_of_three_channels_match_float64(self, dtype: str) -> None:
        instance = problems.instantiate(replace(FOURS[0], dense=True), dtype)
        gpu_checks.assert_every_tile_is_right(instance, TILES)

    @pytest.mark.parametrize("width", [39, 40])
    @pytest.mark.parametrize("image", ["own", "float32", "pixels of own", "pixels of float32"])
    def test_nan_and_infinity_of_an_image_reach_the_outputs_under_their_taps(self, image: str, width: int) -> None:
        problem = Problem(2, 21, width, (3,), 18, **SAME, strides=(2, 1), activation="Relu", image=image)
        instance = problems.instantiate(problem, "float16")
        view = instance.buffers[0].view
        shown = view.view(2, 21, width, 3).permute(0, 3, 1, 2) if "pixels" in image else view.view(2, 3, 21, width)
        places = [(0, 1, 0, 0), (1, 0, 20, 38), (0, 0, 5, 27), (1, 0, 3, 17), (0, 2, 9, 13), (1, 1, 12, 6)]
        for (n, c, h, w), value in zip(places, ["nan"] * 4 + ["inf"] * 2, strict=True):
            shown[n, c, h, w] = instance.x[0][n, c, h, w] = float(value)
        gpu_checks.assert_only_their_outputs(instance, TILES)

    @pytest.mark.parametrize("channels", [3, 7])
    def test_nan_and_infinity_reach_the_outputs_under_their_taps_and_no_other(self, channels: int) -> None:
        """The last mma step has fewer taps than it could, whose filters are zeros: NaN times those would be NaN."""
        problem = Problem(2, 21, 39, (channels,), 18, **SAME, strides=(2, 1), activation="LeakyRelu")
        instance = problems.instantiate(problem, "float16")
        pixels = instance.buffers[0].view.view(2, 21, 39, -1)
        for (n, h, w, c), value in {(0, 0, 0, 1): "nan", (0, 9, 13, 2): "inf", (1, 20, 38, 0): "nan"}.items():
            pixels[n, h, w, c] = instance.x[0][n, c, h, w] = float(value)
        gpu_checks.assert_only_their_outputs(instance, TILES)

    def test_replays_of_a_graph_equal_eager_runs(self) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[0]), "float16")
        gpu_checks.assert_replays_equal_eager(instance, TILES)

    def test_a_chain_of_launches_sees_each_result(self) -> None:
        shape = problems.emulable(Problem(1, 64, 64, (8,), 8, **SAME, activation="Tanh"))
        stages = gpu_checks.chained([problems.instantiate(shape, "float16", seed) for seed in range(6)])
        gpu_checks.assert_dependent_launches_wait(stages, TILES[0])
