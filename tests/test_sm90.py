"""Hopper tiles: which problems they take, what their machine code holds, and on an H100/H200 what they compute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import gpu
import gpu_checks
import problems
import pytest

from cutefuse import kernels, plugin_path
from cutefuse.errors import CutefuseError

# Ids are stored in engines: a row may be added, none may change its meaning; one that goes names an heir.
TILES = {
    105: "sm90_128x128",
    113: "sm90_128x200",
    121: "sm90_halo_64x16x32",
    124: "sm90_halo_128x8x16",
    126: "sm90_halo_128x8x15",
    129: "sm90_halo_64x8x16",
    130: "sm90_halo_64x16x16",
    131: "sm90_pp_128x104",
    152: "sm90_small_64x32",
    153: "sm90_small_64x40",
    154: "sm90_small_64x64",
    155: "sm90_small_64x80",
    156: "sm90_small_128x64",
    157: "sm90_small_128x80",
    158: "sm90_small_64x104",
    171: "sm90_small_160x64",
    173: "sm90_small_192x128",
    174: "sm90_pp_160x128",
    175: "sm90_pp_128x152",
    176: "sm90_halo_64x16x14",
    180: "sm90_four_64x128",
    181: "sm90_four_128x112",
}
PRE_ACTIVATED = {160: "sm90_small_64x128"}  # for pre-activated sources alone
ENLARGING = {163: "sm90_up_64x64", 165: "sm90_up_64x128", 166: "sm90_up_64x160"}
BESIDE = {167: "sm90_two_32x32x24"}
PATCHES = {  # of stride 1, filters three taps wide
    182: "sm90_small_64x8x7",
    183: "sm90_small_64x8x8",
    184: "sm90_small_64x8x10",
    185: "sm90_small_64x8x16",
}
ROWS = {177: "sm90_rows_16x8x32", 178: "sm90_rows_16x8x16", 179: "sm90_rows_32x8x16"}  # for few filters alone
TF32 = {127: "sm90_halo_tf32_64x16x32", 128: "sm90_halo_tf32_128x8x16"}  # float32; TILES are of 16-bit types
SMALL = {i: name for i, name in TILES.items() if "small" in name}
HALO = {i for i, name in TILES.items() if "halo" in name}
IM2COL = set(TILES) - HALO
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}


def library_or_skip() -> Path:
    try:
        return plugin_path()
    except CutefuseError as error:
        pytest.skip(str(error))


def call(problem: problems.Problem, dtype: str = "float16", sm: int = 90) -> kernels.Call:
    """The problem as a call without device memory; sizes of -1 are dynamic."""
    p = problem
    operands = [kernels.Tensor((p.N, c, p.H, p.W), dtype, kernels.CHANNELS_LAST) for c in p.C]
    filters = (p.R * p.S, p.K) if p.depthwise else (p.K, sum(p.columns))
    operands += [kernels.Tensor(filters, dtype), kernels.Tensor((p.K,), "float32")]
    return kernels.Call(
        p.op_type,
        operands,
        [kernels.Tensor(dims, dtype, kernels.CHANNELS_LAST) for dims in p.stored],
        {
            "channels": p.C, "kernel_shape": (p.R, p.S), "strides": p.strides, "pads": p.pads,
            "dilations": p.dilations, "packed_sizes": p.columns,
        },
        sm=sm,
        sm_count=132,
    )  # fmt: skip


def hopper_tiles(problem: problems.Problem, dtype: str = "float16", sm: int = 90) -> set[int]:
    library_or_skip()
    return {i for i in kernels.configs(call(problem, dtype, sm)) if i >= 100}


def archs() -> list[str]:
    library_or_skip()
    return str(kernels.describe()["targets"]).split()


@pytest.fixture
def hopper_library() -> None:
    if "90a" not in archs():
        pytest.skip("the library was built without sm_90a")


def test_ids_and_names_of_the_tiles_never_change() -> None:
    library_or_skip()
    (op,) = (op for op in kernels.describe()["ops"] if op["name"] == "concat_conv")
    found = {c["id"]: c["name"] for c in op["configs"] if c["name"].startswith("sm90_")}
    known = TILES | TF32 | PRE_ACTIVATED | ENLARGING | BESIDE | PATCHES | ROWS
    assert {i: found.get(i) for i in known} == known


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    base = problems.Problem(2, 40, 40, (64, 48), 256, **SAME)

    def test_stride_one_filters_take_every_tile(self) -> None:
        assert hopper_tiles(self.base) == set(TILES) | set(BESIDE) | set(PATCHES)
        assert hopper_tiles(self.base, "bfloat16") == set(TILES) | set(BESIDE) | set(PATCHES)

    def test_float32_has_tiles_of_its_own_for_filters_of_stride_up_to_two_with_several_taps(self) -> None:
        assert hopper_tiles(self.base, "float32") == set(TF32)
        assert hopper_tiles(replace(self.base, strides=(2, 1)), "float32") == set(TF32)
        for change in ({"strides": (3, 2)}, {"R": 1, "S": 1, "pads": (0, 0, 0, 0)}, {"dilations": (40, 1)}):
            assert hopper_tiles(replace(self.base, H=200, W=200, **change), "float32") == set()
        seven = replace(self.base, R=7, S=7, pads=(3, 3, 3, 3))
        assert hopper_tiles(seven, "float32") == {128}, "two stages of the larger patch leave no room for filters"

    @pytest.mark.parametrize("channels", [(64, 47), (2, 126), (66,)])
    def test_float32_pixels_that_are_no_multiple_of_sixteen_bytes_stay_on_ampere(self, channels: tuple[int]) -> None:
        problem = replace(self.base, C=channels)
        assert hopper_tiles(problem, "float32") == set() and kernels.configs(call(problem, "float32"))
        assert hopper_tiles(replace(problem, C=(64, 4)), "float32") == set(TF32)

    @pytest.mark.parametrize("sm", [80, 86, 89, 100, 120])
    def test_no_other_architecture_runs_them(self, sm: int) -> None:
        assert hopper_tiles(self.base, sm=sm) == set()
        assert bool(kernels.configs(call(self.base, sm=sm))) == (kernels.reject_device(sm) is None)

    def test_an_unknown_device_tries_the_ampere_tiles_first(self) -> None:
        ids = kernels.configs(call(self.base, sm=0))
        assert ids[0] < 100 and set(TILES) <= set(ids)

    @pytest.mark.parametrize(
        "change",
        [
            {"strides": (3, 1)},
            {"strides": (1, 3)},
            {"strides": (2, 2), "dilations": (1, 2)},
            {"strides": (1, 2), "dilations": (2, 1)},
            {"R": 1, "S": 1, "pads": (0, 0, 0, 0)},
            {"R": 1, "S": 1, "pads": (0, 0, 0, 0), "strides": (2, 2)},
            {"dilations": (40, 1)},
        ],
    )
    def test_the_halo_tiles_need_a_stride_up_to_two_and_a_filter_whose_halo_fits(
        self, change: dict[str, object]
    ) -> None:
        assert hopper_tiles(replace(self.base, H=200, W=200, **change)) & HALO == set()

    @pytest.mark.parametrize("strides", [(2, 2), (1, 2), (2, 1)])
    def test_the_halo_tiles_take_strides_of_two(self, strides: tuple[int, int]) -> None:
        assert hopper_tiles(replace(self.base, strides=strides)) & HALO == HALO

    @pytest.mark.parametrize("size", [2, 3, 5, 7])
    def test_square_filters_up_to_seven_take_a_halo_tile_for_many_and_for_few_filters(self, size: int) -> None:
        pads = (size // 2,) * 4
        found = hopper_tiles(replace(self.base, R=size, S=size, pads=pads))
        assert 121 in found and 126 in found

    @pytest.mark.parametrize(
        "change",
        [
            {"strides": (9, 1)},
            {"R": 2, "S": 1, "dilations": (256, 1), "pads": (128, 0, 129, 0)},
            {"pads": (129, 1, 1, 1)},
            {"pads": (1, 1, 1, 131)},
        ],
    )
    def test_what_tensor_maps_cannot_express_falls_back_to_ampere(self, change: dict[str, object]) -> None:
        problem = replace(self.base, H=300, W=300, **change)
        assert hopper_tiles(problem) & IM2COL == set()
        assert kernels.configs(call(problem)), kernels.reject(call(problem))

    def test_the_last_expressible_stride_and_pad_are_taken(self) -> None:
        problem = replace(self.base, H=300, W=300, strides=(8, 8), pads=(128, 128, 1, 129))
        assert hopper_tiles(problem) == IM2COL

    def test_a_dynamic_shape_offers_what_runs_at_every_size(self) -> None:
        dynamic = hopper_tiles(replace(self.base, N=-1, H=-1, W=-1))
        assert dynamic == hopper_tiles(self.base)

    def test_every_benchmark_shape_starts_with_a_hopper_tile(self) -> None:
        for problem in problems.benchmark_shapes():
            assert kernels.configs(call(problem))[0] in TILES | ROWS | PATCHES, problem.name


def hopper_sass() -> dict[str, str]:
    """Machine code of the library's sm_90a ConcatConv kernels by mangled name."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        import nvidia

        candidates = [p for root in nvidia.__path__ for p in Path(root).glob("*/bin/cuobjdump")]
        if not candidates:
            pytest.skip("cuobjdump is not installed; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        tool = str(candidates[0])
    environment = os.environ | {"PATH": f"{Path(tool).parent}:{os.environ['PATH']}"}
    text = subprocess.run(
        [tool, "-arch", "sm_90a", "-sass", str(library_or_skip())],
        capture_output=True, text=True, check=True, env=environment,
    ).stdout  # fmt: skip
    functions = {}
    for part in text.split("Function : ")[1:]:
        name, body = part.split("\n", 1)
        if "conv_sm90_" in name:
            functions[name] = body
    return functions


def traits_of(name: str) -> tuple[bool, bool, bool]:
    """Of a kernel by its mangled name: whether it activates sources, pixels are rows of wgmma, pixels are patches."""
    bits = [bit == "1" for bit in re.findall(r"Lb([01])E", name)]
    if "Sm90Small" in name:
        activates, _, rows, patch = bits[-4:]
        return activates, rows, patch
    if "Sm90Im2col" in name:
        return bits[-3], bits[-1], False
    return False, "patch_rows" in name, True


# A kernel's number type, the first argument of its template, as mangled -> its wgmma.
WGMMA = {
    "N7cutlass6half_tE": r"HGMMA\.64x\d+x16\.F32 ",
    "N7cutlass10bfloat16_tE": r"HGMMA\.64x\d+x16\.F32\.BF16 ",
    "N7cutlass10tfloat32_tE": r"HGMMA\.64x\d+x8\.F32\.TF32 ",
    "N7cutlass12float_e4m3_tE": r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3 ",
    "a": r"IGMMA\.64x\d+x32\.S8\.S8 ",
}


@pytest.mark.usefixtures("hopper_library")
def test_machine_code_uses_the_tensor_memory_accelerator_and_wgmma_and_no_local_memory() -> None:
    if "90a" not in kernels.describe()["archs"]:
        pytest.skip("the library was built without the code for sm_90a")
    functions = hopper_sass()
    assert len(functions) >= 24
    seen = set()
    for name, body in functions.items():
        found = re.search(rf"conv_sm90_\w+?INS0_\d+Sm90[A-Za-z0-9]+?I({'|'.join(WGMMA)})", name)
        assert found, f"{name} is of no known type"
        seen.add(found[1])
        products = re.findall(r"[A-Z]GMMA\.\S+ ", body)
        assert products and all(re.fullmatch(WGMMA[found[1]], p) for p in products), (name, set(products))
        assert "UTMALDG" in body, name
        activates, rows, patch = traits_of(name)  # pixels that are rows give outputs that are not transposed
        assert ("UTMALDG.4D.IM2COL" in body) == (not patch), name
        activated, direct = rows and activates, rows or "tfloat32" in name
        plain = "STG.E" if direct else "MOVM.16.MT88" if "small" in name else "STSM.16.MT88.4"
        assert ("LDGSTS" if activated else plain) in body, name
        assert ("MOVM" in body) == ("small" in name and not rows), name
        assert not re.search(r"\b(LDL|STL)\b", body), f"{name} spills"
        assert not re.search(r"\b[HI]MMA\b", body), name
    assert seen == WGMMA.keys()


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper_gpu() -> None:
    if gpu.device_facts()[0] != 90:
        pytest.skip("needs a Hopper GPU")


def check(problem: problems.Problem, dtype: str, seed: int = 0) -> None:
    problem = problems.affordable(problem)
    instance = problems.instantiate(problem, dtype, seed)
    gpu_checks.assert_every_tile_is_right(instance, [i for i in kernels.configs(instance.call) if i in TILES | PATCHES])


CORNERS = [
    problems.Problem(1, 1, 1, (8,), 1, **SAME),
    problems.Problem(1, 300, 1, (16,), 8, **SAME),
    problems.Problem(1, 1, 300, (16,), 8, **SAME),
    problems.Problem(5, 7, 9, (8,) * 8, 129, **SAME, activation="Sigmoid"),
    problems.Problem(1, 33, 65, (2048, 16), 64, **SAME, activation="Relu"),
    problems.Problem(1, 17, 19, (40, 2, 19), 2047, 1, 1, activation="Clip"),
    problems.Problem(2, 40, 36, (48, 80), 96, 7, 7, pads=(3, 3, 3, 3), activation="Silu"),
    problems.Problem(2, 30, 36, (64,), 200, 5, 1, pads=(2, 0, 2, 0), activation="Tanh"),
    problems.Problem(1, 40, 40, (72,), 64, 3, 3, pads=(5, 0, 1, 4), dilations=(3, 2)),
    problems.Problem(2, 31, 200, (64, 40), 136, **SAME, activation="Relu"),  # rows wider than a tile
    problems.Problem(1, 9, 300, (24,), 64, 1, 5, pads=(0, 2, 0, 2)),
    problems.Problem(1, 15, 15, (72,), 72, **SAME),  # a pixel beyond a patch of 14
    problems.Problem(2, 37, 90, (72, 24), 136, 3, 3, strides=(2, 2), pads=(1, 1, 1, 1), activation="Silu"),
    problems.Problem(1, 40, 33, (40,), 72, 4, 5, strides=(2, 2), pads=(2, 1, 1, 3), activation="Relu"),
    problems.Problem(2, 23, 38, (24,), 64, 3, 3, strides=(1, 2), pads=(1, 0, 1, 2)),
    problems.Problem(1, 50, 31, (136,), 24, 7, 1, strides=(2, 2), pads=(3, 0, 3, 0), activation="Tanh"),
    problems.Problem(3, 3, 2, (16,), 8, 3, 3, strides=(2, 2), pads=(1, 1, 1, 1)),
    problems.Problem(1, 37, 41, (24, 130), 320, 3, 3, strides=(3, 2), pads=(2, 1, 0, 1), activation="LeakyRelu"),
    problems.Problem(4, 120, 150, (72, 24), 328, 1, 1, activation="Silu"),  # more tiles than all turns of all blocks
]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, dtype: str) -> None:
        check(CORNERS[index], dtype, seed=index)

    @pytest.mark.parametrize("config", [154, 157, 171, *PATCHES])
    def test_a_divided_reduction_gives_the_same_bits_every_time(self, config: int) -> None:
        instance = problems.instantiate(problems.Problem(1, 20, 20, (512, 512), 256, **SAME), "float16")
        gpu_checks.assert_the_same_bits(instance, config)

    def test_a_chain_of_launches_sees_each_result(self) -> None:
        """Programmatic dependent launch starts a kernel early; its loads must still wait for the one before."""
        shape = problems.Problem(1, 64, 64, (64,), 64, **SAME, activation="Tanh")
        shape = problems.emulable(shape)
        for config in (105, 113, 121, 126, 131, 154, 180, 181, *PATCHES):
            stages = gpu_checks.chained([problems.instantiate(shape, "float16", seed) for seed in range(6)])
            gpu_checks.assert_dependent_launches_wait(stages, config)

    @pytest.mark.skipif(problems.SANITIZED, reason="times mean nothing under compute-sanitizer")
    def test_a_call_costs_the_host_less_than_five_microseconds_beyond_the_launch(self) -> None:
        """With cached tensor maps a call is the launch itself, some 2-3 us, plus this library's share."""
        import time

        instance = problems.instantiate(problems.Problem(1, 8, 8, (64,) * 8, 64, **SAME), "float16")
        launch = kernels.Launcher(replace(instance.call, config=105))
        stream = gpu.current_stream()
        best = float("inf")
        for _ in range(20):
            gpu.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                launch(stream)
            best = min(best, (time.perf_counter() - start) / 100)
        assert best < 12e-6, f"{best * 1e6:.1f} us a call"

    @pytest.mark.slow
    @pytest.mark.skipif(problems.SANITIZED, reason="times mean nothing under compute-sanitizer")
    def test_the_first_guess_is_within_ten_percent_of_the_best_tile_on_most_shapes(self) -> None:
        from benchmarks.lib import peers, timing

        close = {}
        for problem in problems.benchmark_shapes():
            sets = timing.rotation_sets(problem.bytes_moved(2), timing.l2_bytes())
            work = peers.Workload.of(problem, "float16", sets)
            ids = [i for i in kernels.configs(work.instances[0].call) if i in TILES]
            found = timing.interleaved({str(i): peers.ours(work, i) for i in ids}, work.sets, rounds=3)
            times = {i: found[str(i)] for i in ids}
            assert all(isinstance(t, timing.Timing) for t in times.values()), times
            best = min(t.median_us for t in times.values() if isinstance(t, timing.Timing))
            guess = times[ids[0]]
            assert isinstance(guess, timing.Timing)
            close[problem.name] = guess.median_us <= 1.1 * best
        assert sum(close.values()) >= 0.8 * len(close), [name for name, good in close.items() if not good]
