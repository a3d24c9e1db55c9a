"""The tables of the PyTorch benchmarks, and packages that are missing, without a GPU."""

from __future__ import annotations

import sys

import pytest

from benchmarks import torch_calls, torch_fuse
from cutefuse.errors import CutefuseError


class TestTorchTables:
    def test_a_call_is_a_row_with_its_ratio(self) -> None:
        row = {"norm": "RMSNorm", "dtype": "float32", "rows": 64, "columns": 128, "direction": "forward"}
        row |= {"ours_us": 9.0, "torch_us": 12.0, "ratio": 0.75}
        assert "|RMSNorm|float32|(64, 128)|forward|9.0|12.0|0.75|" in torch_calls.text([row])

    def test_a_model_is_two_rows_whose_ratio_is_of_the_compiled_times(self) -> None:
        times = dict(zip(torch_fuse.COLUMNS, (900.0, 700.0, 800.0, 600.0), strict=True))
        row = {"model": "m", "batch": 8, "fused": 3, "left": 1, "graph_us": times, "wall_us": times}
        assert "|m|8|3 of 4|graph|900|700|800|600|0.750|" in torch_fuse.text([row])

    @pytest.mark.torch
    def test_a_package_that_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(CutefuseError, match="timm.dla34.*install timm"):
            torch_fuse.model_of("timm.dla34")
