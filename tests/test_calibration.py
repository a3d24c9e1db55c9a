"""The fit finds what rows were made with, keeps what they do not tell, and every recorded row is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from calibration import convolutions, fit, four, networks, odd_channels, patch_rows, rows, small_patches, tiles
from cutefuse import kernels
from cutefuse.select import rules_torch, times

SIZES = np.geomspace(1e4, 1e8, 40)


def predict(constants: Mapping[str, float]) -> np.ndarray:
    """A kernel that starts and moves bytes; `unseen` changes nothing."""
    return constants["start_us"] + SIZES / constants["rate"]


def test_constants_that_rows_were_made_with_are_found_again() -> None:
    truth, now = {"start_us": 3.0, "rate": 2e6, "unseen": 1.0}, {"start_us": 2.0, "rate": 4e6, "unseen": 5.0}
    found = fit.refit(predict, predict(truth), now, hold=1e-4)
    assert found["start_us"] == pytest.approx(3, rel=0.01) and found["rate"] == pytest.approx(2e6, rel=0.01)
    assert found["unseen"] == pytest.approx(5), "no row tells it"


def test_a_constant_leaves_its_value_only_as_far_as_rows_pull() -> None:
    truth, now = {"start_us": 3.0, "rate": 2e6}, {"start_us": 2.0, "rate": 4e6}
    free, held = (fit.refit(predict, predict(truth), now, hold) for hold in (1e-4, 10.0))
    assert held["rate"] == pytest.approx(4e6, rel=0.01) and abs(free["rate"] - 4e6) > 1e6


def test_the_outcome_tells_both_errors_and_both_values() -> None:
    recorded = predict({"start_us": 3.0, "rate": 2e6})
    now = {"start_us": 2.0, "rate": 2e6}
    lines = list(fit.outcome(lambda constants, chosen: predict(constants)[chosen], recorded, now, 1e-3))
    assert [line.split()[0] for line in lines] == ["now,", "refitted,", "now,", "refitted,", "start_us", "rate"]
    assert "2 -> 3" in lines[4] and fit.held_out(40).sum() == 8


def test_every_file_of_recorded_rows_is_read() -> None:
    sets = rows.tile_sets()
    read = {name: len(rows.read(name)) for name in ("tiles_h200.csv", "random_layers_h200.csv", "tiles_8bit_h200.csv")}
    assert all(count > 1000 for count in read.values()) and len(sets) == 12
    assert all(times_us and min(times_us.values()) > 0 for shapes in sets.values() for _, _, times_us in shapes)
    assert {p.name for p in rows.DATA.iterdir()} == {
        *read, *convolutions.FILES, "networks_h200.csv", "near_h200.csv", "tiles_int8_ordered_h200.csv",
        "tiles_images_h200.csv", "early_layers_h200.csv", "depthwise_h200.csv", "depthwise_cudnn_h200.csv",
        "patch_rows_h200.csv", "short_layers_h200.csv", "patch_layers_h200.csv", "odd_channels_h200.csv",
    }  # fmt: skip
    assert all(len(rows.site_rows(name)) > 200 for name in convolutions.FILES)


@pytest.mark.parametrize("part", [patch_rows, small_patches, four], ids=["patch_rows", "small_patches", "four"])
def test_tiles_that_a_script_refits_have_the_librarys_price(part: ModuleType) -> None:
    ids = {str(c["name"]): c["id"] for c in kernels.operator_of("CuteConcatConv1")["configs"]}
    recorded = part.recorded()
    assert len(recorded) > 100
    for row in recorded:
        n = {key: int(row[key]) for key in ("N", "H", "W", "K", "R", "S", "stride")}
        shape = n | {"C": [int(c) for c in row["C"].split("+")], "stride": (n["stride"],) * 2}
        shape |= {"pads": (n["R"] // 2, n["S"] // 2) * 2, "activation": row["activation"]}
        shape["residual"] = row.get("residual", "")
        asked = replace(rows.call_of(shape), config=ids[row["tile"]])
        work = {name: np.array([value]) for name, value in part.tile_work(row).items()}
        ours = float(part.times_us(work, part.NOW)[0])
        assert kernels.predicted_us(asked) == pytest.approx(ours, rel=0.01), row


def test_odd_channels_cost_what_was_recorded() -> None:
    device, off = times.device_of(rows.SM, "H200"), []
    for row in rows.read("odd_channels_h200.csv"):
        conv = odd_channels.convolution_of(row)
        us = float(row["whole_us"]) + rules_torch.odd_channels_us(device, conv)
        off.append(abs(np.log(us / float(row["odd_us"]))))
        others = replace(conv, C=conv.C // 8 * 8), replace(conv, C=3), replace(conv, dtype="float32")
        assert not any(rules_torch.odd_channels_us(device, other) for other in others)
    assert len(off) == 160 and np.mean(off) < 0.2


def test_a_tile_that_was_not_recorded_is_slower_than_all_that_were() -> None:
    _, call, recorded = rows.tile_sets()["float16, benchmark shapes"][0]
    ratios = tiles._ratios(call, recorded)
    fewer = tiles._ratios(call, dict(list(recorded.items())[:1]))
    assert min(ratios) == min(fewer) == 1 and fewer.count(float("inf")) == len(fewer) - 1


def test_constants_of_networks_are_changed_for_a_while() -> None:
    before = networks.constants()
    with networks.changed({"_KERNEL_US": 9.0}):
        assert times.device_of(90).pass_us(0) == 9.0
    assert networks.constants() == before and times.device_of(90).pass_us(0) < 9
