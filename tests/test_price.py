"""One price of a site, whichever of three sources it has: what it saves, on what basis, and against whose kernels."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import graphs
import onnx
import pytest
import test_tune
from test_rank import CONV, INPUTS, profiled

from cutefuse.commands.patch import main
from cutefuse.errors import CutefuseError
from cutefuse.match.find import find_sites
from cutefuse.match.site import Site
from cutefuse.optimize import site_times
from cutefuse.report.analyse import rank
from cutefuse.select import engines
from cutefuse.select.engines import engine_of
from cutefuse.select.gain import Model
from cutefuse.select.price import MODELLED, PROFILED, TIMED, Price
from cutefuse.select.times import device_of
from cutefuse.timing.cache import TuneCache
from cutefuse.timing.calls import Tuner

BODY = CONV + " y = Relu(d)"


def found(inputs: dict[str, str] = INPUTS) -> tuple[onnx.ModelProto, Model, Site]:
    """A model with one site, and the model of its time in TensorRT on an L4."""
    model = graphs.graph(BODY, inputs=inputs)
    cleaned, (site,) = find_sites(model, Path())
    return model, Model(cleaned.whole, engine_of("tensorrt", "10.3"), device_of(0, "L4")), site


def prices(folder: Path, inputs: dict[str, str] = INPUTS) -> list[Price]:
    """What the three sources say of the site, in the order modelled, profiled, timed."""
    model, modelled, site = found(inputs)
    directory = profiled(model, folder, 10.0)
    tuner = Tuner(test_tune.FakeTimer(), TuneCache(folder / "times.json"), "cudnn")
    measured = [rank.pricing(directory, folder / "model.onnx"), site_times.pricing(tuner)]
    return [modelled.price(site), *(source(modelled.graph, [site])(site) for source in measured)]


def test_each_source_says_on_what_basis_and_against_whose_kernels(tmp_path: Path) -> None:
    modelled, profile, timed = prices(tmp_path)
    assert [p.basis for p in (modelled, profile, timed)] == [MODELLED, PROFILED, TIMED]
    assert None not in (modelled.saved_us, profile.saved_us, timed.saved_us)
    for word in ("cuDNN", "H200", "scaled to L4", "never checked in TensorRT"):
        assert word in modelled.engine
    assert "model.onnx" in profile.engine and "cuDNN" not in profile.engine
    assert "cuDNN" in timed.engine and "not TensorRT" in timed.engine


def test_a_time_model_is_checked_in_the_engine_that_it_was_fitted_in(tmp_path: Path) -> None:
    _, modelled, site = found()
    same = Model(modelled.graph, engine_of("torch"), device_of(0, "H200")).price(site)
    assert "never checked" not in same.engine and "scaled" not in same.engine


def test_a_source_that_does_not_know_gives_no_figure_and_a_reason(tmp_path: Path) -> None:
    modelled, _, timed = prices(tmp_path, {"a": "1,8,h,v", "b": "1,16,h,v"})
    for price in (modelled, timed):
        assert price.saved_us is None and "sizes" in price.note


def test_a_profile_is_read_when_a_price_is_asked_for(tmp_path: Path) -> None:
    _, modelled, site = found()
    source = rank.pricing(tmp_path / "nowhere", tmp_path / "model.onnx")
    with pytest.raises(CutefuseError):
        source(modelled.graph, [site])


def test_patch_prints_and_writes_against_whose_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = profiled(found()[0], tmp_path, 10.0)
    told = {}
    for basis, more in ((PROFILED, ["--profile", str(directory)]), (MODELLED, ["--sm", "90", "--all"])):
        assert main([str(tmp_path / "model.onnx"), *more]) == 0
        (site,) = json.loads((tmp_path / "model.patch.json").read_text())["sites"]
        assert site["basis"] == basis and site["priced_by"] in capsys.readouterr().out
        told[basis] = site["priced_by"]
    assert told[PROFILED] != told[MODELLED]


def test_one_file_names_engines() -> None:
    folder = Path(engines.__file__).parent
    names = {"TENSORRT", "RTX", "TORCH"}
    naming = {
        path.stem for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}
        or isinstance(node, ast.Attribute) and node.attr == "name" and ast.unparse(node).endswith("engine.name")
    }  # fmt: skip
    assert naming == {"engines"}
