"""The interpreter of the kernels' PTX: what it computes, which faults it names, and the GPU tests that run in it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/emulated"
EARLY, LATE, ANY = range(3)
# What CI has time for: both paths in float16 and float8, and float32 and int8 on Hopper.
SM80_UNITS = "concat_conv_kFloat16_(kPlain|kPreActivated|kImage|kDepthwise)|.*_kFloat8_"
UNITS = f"^window/window_kFloat16|^conv/(sm90/.*_(kFloat16|kFloat32|kInt8|kFloat8)_|sm80/({SM80_UNITS}))"
SUITES = [  # file, its tests, timing
    ("tests/test_sm90.py", "corner and not bfloat16", "any:1"),
    ("tests/test_kernels_gpu.py", "chain and not bfloat16 and not float32", "any:7"),
    ("tests/test_image_tiles.py", "not bfloat16", "any:11"),
    ("tests/test_window_gpu.py", "not bfloat16 and not float32", "any:5"),
    ("tests/test_sm90_forms_gpu.py", "(corner or Enlarged) and not bfloat16", "any:2"),
    ("tests/test_sm90_tf32.py", "corner or enlarged or nearest or wider", "any:6"),
    ("tests/test_sm90_small.py", "every_cluster and not bfloat16 and (1- or 3- or 15- or 16-)", "any:3"),
    ("tests/test_sm90_phases.py", "every_cluster and not bfloat16", "any:9"),
    ("tests/test_sm90_beside.py", "not bfloat16", "any:10"),
    ("tests/test_sm90_patch_rows.py", "not bfloat16", "any:4"),
    ("tests/test_pre_activation_gpu.py", "not bfloat16 and not float32", "any:4"),
    ("tests/test_quant_gpu.py", "hopper_tiles", "late"),
    ("tests/test_quant_float8_gpu.py", "match_float64 or long_sums", "any:5"),
    ("tests/test_quant_small.py", "every_cluster and (1-int8 or 6-float8 or 8-int8) or of_nan or two_scales", "any:8"),
]

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def build(*targets: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc, which makes the PTX that is interpreted")
    cmake = [shutil.which("cmake") or f"{Path(sys.executable).parent}/cmake"]
    define = {"EMULATED": "ON", "CUDA_ARCHS": "90a", "EMULATED_UNITS": UNITS}
    steps = [
        [*cmake, "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython3_EXECUTABLE={sys.executable}",
         *(f"-DCUTEFUSE_{name}={value}" for name, value in define.items())],
        [*cmake, "--build", BUILD, "--target", *targets],
    ]  # fmt: skip
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, env=os.environ | path)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tests/cpp/emulator_probe.cu as a library over the interpreter."""
    build("cutefuse_emulator")
    library = tmp_path_factory.mktemp("probe") / "libprobe.so"
    command = ["nvcc", "-std=c++17", "-O3", "--shared", "-Xcompiler=-fPIC", "-cudart", "none", "-no-compress",
               "-gencode=arch=compute_90a,code=compute_90a", "-Werror=all-warnings",
               ROOT / "tests/cpp/emulator_probe.cu", "-o", library,
               f"-L{BUILD}/lib", "-lcutefuse_emulator", "-Xlinker", f"-rpath={BUILD}/lib"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    for name in ("probe_arithmetic", "probe_exchange", "probe_float8", "probe_tf32", "probe_fault"):
        getattr(loaded, name).restype = ctypes.c_char_p
    runtime = ctypes.CDLL(str(BUILD / "lib/libcutefuse_emulator.so"))
    loaded.allow = lambda *arrays: [
        runtime.cutefuse_emulator_allow(a.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(a.nbytes)) for a in arrays
    ]
    loaded.forbid = lambda *arrays: [
        runtime.cutefuse_emulator_forbid(a.ctypes.data_as(ctypes.c_void_p)) for a in arrays
    ]
    loaded.timing = lambda how, seed=0: runtime.cutefuse_emulator_timing(how, ctypes.c_uint64(seed))
    yield loaded
    loaded.timing(ANY)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def test_integers_are_the_hosts_and_floats_differ_by_a_rounding(probe: Any) -> None:
    random = np.random.default_rng(0)
    blocks = 40
    x = random.integers(-(2**31), 2**31, 64 * blocks, dtype=np.int32)
    x[:200] = random.choice(np.array([0, 1, -1, 2**31 - 1, -(2**31), 31, 32], np.int32), 200)
    y = (random.standard_normal(64 * blocks) * 100).astype(np.float32)
    results = []
    for on_host in (True, False):
        ints, reals = np.zeros(32 * blocks * 16, np.int64), np.zeros(32 * blocks * 8, np.float32)
        probe.allow(x, y, ints, reals)
        assert probe.probe_arithmetic(blocks, *map(pointer, (x, y, ints, reals)), on_host) is None
        probe.forbid(x, y, ints, reals)
        results.append((ints.reshape(-1, 16), reals.reshape(-1, 8)))
    (ints, reals), (same, close) = results
    assert (ints == same).all(axis=0).tolist() == [True] * 16
    # The second is one rounding here and two there; the third may be a product with a reciprocal.
    np.testing.assert_allclose(close, reals, rtol=1e-6, atol=2e-3)


def test_lanes_that_part_meet_again(probe: Any) -> None:
    x, total = np.arange(128, dtype=np.int32), np.zeros(1, np.int32)
    probe.allow(x, total)
    assert probe.probe_exchange(pointer(x), pointer(total)) is None
    probe.forbid(x, total)
    warps = x.reshape(4, 32)
    expected = (x * (x % 7)).sum() + 4 * 2 + (x % 3 == 0).reshape(4, 32).sum() + (warps == 40).any()
    assert total[0] == expected


def float8_products(probe: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a (16,32) times b (32,8) plus c by one mma.sync; a and b as bytes of e4m3. Fragments as in the PTX ISA."""
    lane = np.arange(32)
    words_a, words_b = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b.T))  # (row,word), (column,word)
    in_a = np.stack([words_a[lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)] for i in range(4)])
    in_b = np.stack([words_b[lane // 4, lane % 4 + 4 * i] for i in range(2)])
    places = [(lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2) for i in range(4)]
    in_c = np.stack([c[place] for place in places]).astype(np.float32)
    out, d = np.zeros((4, 32), np.float32), np.zeros((16, 8), np.float32)
    probe.allow(in_a, in_b, in_c, out)
    assert probe.probe_float8(*map(pointer, (in_a, in_b, in_c, out))) is None
    probe.forbid(in_a, in_b, in_c, out)
    for place, sums in zip(places, out, strict=True):
        d[place] = sums
    return d


ONE, MINUS_ONE, LEAST, NAN = 0x38, 0xB8, 0x01, 0x7F  # of e4m3; the least is 2^-9


def test_products_of_float8_are_added_up_with_fourteen_bits(probe: Any) -> None:
    random = np.random.default_rng(0)
    signs_a, signs_b = random.integers(-1, 2, (16, 32)), random.integers(-1, 2, (32, 8))
    a, b = (np.choose(s + 1, [MINUS_ONE, 0, ONE]).astype(np.uint8) for s in (signs_a, signs_b))
    c = random.integers(-100, 100, (16, 8)).astype(np.float32)
    assert (float8_products(probe, a, b, c) == signs_a @ signs_b + c).all(), "small integers are exact"
    c = random.standard_normal((16, 8)).astype(np.float32)
    zeros = float8_products(probe, np.zeros_like(a), np.zeros_like(b), c)
    assert (zeros == (c.view(np.uint32) & ~np.uint32(0x3FF)).view(np.float32)).all() and (zeros != c).any()
    least, ones = np.full_like(a, LEAST), np.full_like(b, ONE)
    for sum_before, each in ((16.0, 2**-9), (31.0, 2**-9), (32.0, 0)):  # 2^-9 is the last bit beside 16, lost beside 32
        got = float8_products(probe, least, ones, np.full_like(c, sum_before))
        assert (got == sum_before + 32 * each).all(), sum_before


def test_a_product_with_nan_of_float8_is_nan_in_its_row_alone(probe: Any) -> None:
    a, b = np.full((16, 32), ONE, np.uint8), np.full((32, 8), ONE, np.uint8)
    a[5, 17] = NAN
    got = float8_products(probe, a, b, np.zeros((16, 8), np.float32))
    assert np.isnan(got[5]).all() and (np.delete(got, 5, axis=0) == 32).all()


def test_wgmma_of_tf32_cuts_off_thirteen_bits(probe: Any) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(size).astype(np.float32) for size in ((64, 8), (8, 8)))
    d = np.zeros((64, 8), np.float32)
    probe.allow(a, b, d)
    assert probe.probe_tf32(*map(pointer, (a, b, d))) is None
    probe.forbid(a, b, d)
    cut_a, cut_b = ((x.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(d, cut_a @ cut_b.T, rtol=0, atol=1e-6)
    assert np.abs(d - a.astype(np.float64) @ b.T).max() > 1e-4, "the bits that are cut off are seen"


def run_fault(probe: Any, fault: int, timing: int, seed: int = 0) -> tuple[str, np.ndarray, np.ndarray]:
    """(what is said, x, y) of a kernel that copies 64 floats with neighbours exchanged."""
    x, y = np.random.default_rng(seed).standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    probe.timing(timing, seed)
    probe.allow(x, y)
    said = probe.probe_fault(fault, pointer(x), pointer(y))
    probe.forbid(x, y)
    return (said or b"").decode(), x, y


@pytest.mark.parametrize("timing", [EARLY, LATE, ANY])
def test_a_kernel_without_a_fault(probe: Any, timing: int) -> None:
    for seed in range(20):
        said, x, y = run_fault(probe, 0, timing, seed)
        assert said == "" and (y == x[np.arange(64) ^ 1]).all()


def test_a_kernel_that_starts_early_and_waits_has_no_fault(probe: Any) -> None:
    said, x, y = run_fault(probe, 12, ANY)
    assert said == "" and (y == x[np.arange(64) ^ 1]).all()


def test_a_kernel_that_reads_before_its_copies_have_ended(probe: Any) -> None:
    assert (run_fault(probe, 1, EARLY)[2] != 0).all(), "the fault is one of timing"
    said, x, y = run_fault(probe, 1, LATE)
    assert said == "" and np.isnan(y).all()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (2, "block 0 warp 0 waits at 'bar"),
        (3, "there is no barrier at"),
        (4, "waits at 'mbarrier.try_wait"),
        (5, "more threads arrive at a barrier than it expects"),
        (6, "shared memory ends at"),
        (7, "global memory that is not its own"),
        (8, "is not aligned"),
        (9, "the warps at a barrier expect different threads"),
        (10, "block 1 of the cluster, whose memory is used, has ended"),
        (11, "the kernel has given up"),
        (13, "touches global memory before griddepcontrol.wait"),
    ],
)
def test_a_fault_is_named(probe: Any, fault: int, sentence: str) -> None:
    said, _, _ = run_fault(probe, fault, LATE)
    assert sentence in said, said
    assert said.startswith("deadlock in cluster 0:") if "waits at" in sentence else ", in '" in said, said


def test_blocks_of_a_cluster_write_to_each_other(probe: Any) -> None:
    for seed in range(10):
        said, x, y = run_fault(probe, -1, ANY, seed)
        assert said == "" and y[:2].tolist() == x[:2][::-1].tolist()


@pytest.fixture(scope="module")
def library() -> Path:
    build("cutefuse", "cutefuse_host", "cutefuse_register")
    return BUILD / "lib"


@pytest.mark.parametrize(("file", "chosen", "timing"), SUITES, ids=[Path(file).stem for file, _, _ in SUITES])
def test_gpu_tests_pass_in_the_interpreter(library: Path, file: str, chosen: str, timing: str) -> None:
    more = {
        "CUTEFUSE_EMULATED": "1", "CUTEFUSE_LIBRARY_DIR": str(library), "CUTEFUSE_EMULATED_TIMING": timing,
        "CUTEFUSE_EMULATED_MULTIPROCESSORS": "4",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file, "-k", chosen]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | more)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:]
