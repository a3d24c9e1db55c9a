"""benchmarks/quant_accuracy.py: what a scale for every source is worth, computed without a GPU."""

from __future__ import annotations

import pytest

from benchmarks import quant_accuracy


@pytest.mark.slow
def test_own_scales_keep_the_error_that_a_common_scale_loses(capsys: pytest.CaptureFixture[str]) -> None:
    assert quant_accuracy.main() == 0
    lines = capsys.readouterr().out.replace("%", "").splitlines()
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    for _, own, common, flat_own, flat_common in rows:
        assert own < 1.4 and flat_own < 1.4
        assert common > own and flat_common > flat_own
    assert rows[-1][2] > 20 * rows[-1][1], "with a common scale the narrow source is lost"
