"""Peaks of boards against published figures, and the names by which they are found."""

from __future__ import annotations

import pytest

from cutefuse.errors import CutefuseError
from cutefuse.roofline.peaks import Peaks, board, boards, by_device, by_name

# Dense TFLOP/s and GB/s as NVIDIA's datasheets and white papers print them.
PUBLISHED = [
    ("V100 SXM2", "FP16", 125, 900),
    ("A100 SXM4 80GB", "FP16", 312, 2039),
    ("A100 SXM4 80GB", "TF32", 156, 2039),
    ("A100 80GB PCIe", "INT8", 624, 1935),
    ("A10", "FP16", 125, 600),
    ("A10", "TF32", 62.5, 600),
    ("RTX 3090", "FP16", 142, 936),
    ("RTX 3090", "TF32", 35.6, 936),
    ("RTX 3080", "FP16", 119, 760),
    ("RTX 4090", "FP16", 330.3, 1008),
    ("RTX 4090", "TF32", 82.6, 1008),
    ("RTX 4080", "INT8", 389.9, 717),
    ("Jetson AGX Orin 64GB", "INT8", 85, 204.8),
    ("L4", "FP16", 121, 300),
    ("H100 SXM", "FP16", 989.4, 3352),
    ("H100 SXM", "FP8", 1978.9, 3352),
    ("H100 PCIe", "BF16", 756, 2039),
    ("H200", "FP16", 989.4, 4800),
    ("H200", "TF32", 494.7, 4800),
    ("H200", "FP32", 67, 4800),
    ("B200", "FP16", 2250, 8000),
    ("B200", "FP8", 4500, 8000),
]


@pytest.mark.parametrize(("board", "precision", "tflops", "bandwidth_gbs"), PUBLISHED)
def test_peaks_are_the_published_ones(board: str, precision: str, tflops: float, bandwidth_gbs: float) -> None:
    peaks = by_name(board)
    assert peaks is not None and peaks.device == board
    assert peaks.tflops[precision] == pytest.approx(tflops, rel=0.015)
    assert peaks.bandwidth_gbs == bandwidth_gbs


def test_every_board_has_a_source_and_a_unique_name() -> None:
    table = boards()
    assert len({p.device for p in table}) == len(table)
    assert all(p.source.startswith("https://") and "nvidia.com" in p.source for p in table)
    assert all(by_name(p.device) == p for p in table)


@pytest.mark.parametrize(
    ("device", "sms", "board"),
    [
        ("NVIDIA H200", 132, "H200"),
        ("NVIDIA H100 80GB HBM3", 132, "H100 SXM"),
        ("NVIDIA H100 PCIe", 114, "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", 108, "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", 108, "A100 80GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", 108, "A100 40GB"),
        ("NVIDIA GeForce RTX 3090 Ti", 84, "RTX 3090 Ti"),
        ("NVIDIA GeForce RTX 3090", 82, "RTX 3090"),
        ("Tesla V100-SXM2-16GB", 80, "V100 SXM2"),
        ("NVIDIA A10", 72, "A10"),
        ("NVIDIA A10G", 80, "A10G"),
        ("Orin", 16, "Jetson AGX Orin 64GB"),
        ("Orin", 8, "Jetson Orin NX 16GB"),
        ("NVIDIA L40S", 142, "L40S"),
        ("NVIDIA L4", 58, "L4"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 66, "RTX 4070 Ti SUPER"),
    ],
)
def test_device_names_find_their_board(device: str, sms: int, board: str) -> None:
    found = by_device({"Selected Device": device, "SMs": float(sms)})
    assert found is not None and found.device == board


@pytest.mark.parametrize("device", ["NVIDIA RTX A1000", "NVIDIA GH200 480GB", "Tesla V100S-PCIE-32GB", "NVIDIA A100X"])
def test_a_name_that_only_contains_a_boards_is_not_that_board(device: str) -> None:
    assert by_device({"Selected Device": device, "SMs": 80.0}) is None


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("A100", "A100 80GB PCIe, A100 SXM4 80GB, A100 40GB"),
        ("v100", "V100 SXM2, V100 PCIe"),
        ("Tesla V100", "V100 SXM2, V100 PCIe"),
        ("A100 80GB", "A100 80GB PCIe, A100 SXM4 80GB"),
        ("H100 80GB", "H100 PCIe, H100 SXM"),
        ("Orin", "3 boards"),
        ("4070", "4 boards"),
    ],
)
def test_a_name_that_several_boards_share_lists_them(name: str, shared: str) -> None:
    with pytest.raises(CutefuseError) as error:
        board(name)
    assert shared in str(error.value) and str(error.value).startswith(f"--peaks is {name},")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", "H200"),  # its own name, though the H200 NVL holds the word too
        ("RTX 4070", "RTX 4070"),
        ("h100 sxm", "H100 SXM"),
        ("V100-SXM", "V100 SXM2"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ],
)
def test_a_name_that_one_board_has_finds_it(name: str, found: str) -> None:
    assert board(name).device == found


# Cores and memory as the datasheets print them.
@pytest.mark.parametrize(
    ("name", "cores", "memory_gb"),
    [("V100 SXM2", 5120, "16/32"), ("A100 40GB", 6912, "40"), ("A100 SXM4 80GB", 6912, "80"), ("H100 SXM", 16896, "80"),
     ("H100 PCIe", 14592, "80"), ("RTX 3090", 10496, "24"), ("RTX 4090", 16384, "24"), ("T4", 2560, "16"),
     ("Jetson AGX Orin 64GB", 2048, "64"), ("H200", 16896, "141"), ("RTX 5090", 21760, "32")],
)  # fmt: skip
def test_cores_and_memory_are_the_published_ones(name: str, cores: int, memory_gb: str) -> None:
    assert (board(name).cores, board(name).memory_gb) == (cores, memory_gb)


def test_peaks_of_no_board_have_no_cores() -> None:
    assert Peaks("mine", 100.0, {"FP32": 1.0}, "test").cores == 0
    assert all(p.cores > 0 and p.memory_gb for p in boards())


def test_an_unknown_gpu_is_computed_from_its_clocks() -> None:
    device = {
        "Selected Device": "NVIDIA RTX A5000",
        "Compute Capability": 8.6,
        "SMs": 64.0,
        "Compute Clock Rate": 1.695,
        "Memory Clock Rate": 8.001,
        "Memory Bus Width": 384.0,
    }
    found = by_device(device)
    assert found is not None and found.bandwidth_gbs == pytest.approx(768, rel=0.01)
    assert found.tflops["FP16"] == pytest.approx(111.1, rel=0.01)  # its datasheet
    assert by_device({"Selected Device": "CPU"}) is None and by_device({}) is None
