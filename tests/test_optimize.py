"""`cutefuse optimize` from file to folder: over the stand-in for trtexec."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import graph
from optimize_runs import BAD, COSTS, good, good_name, names, record, run

from cutefuse.engines import build as engine
from cutefuse.optimize import bench
from cutefuse.optimize.run import Request, engine_shapes, optimize
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.rewrite.patch import Options
from cutefuse.select.price import TIMED, Price

pytestmark = pytest.mark.slow

pytest_plugins = ("optimize_runs",)
ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------------------------------- trtexec
def test_trtexec_ends_with_the_site_that_pays(model: Path, trtexec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert run(model) == 0
    out, data = model.parent / "out", record(model)
    assert names(out) == {f"compare.{s}" for s in ("html", "csv", "json")} | {"plain", "best", "optimize.json"}
    assert {s["name"]: (s["status"], s["measured_us"], s["verdict"]) for s in data["sites"]} == {
        "Conv_1": ("kept", pytest.approx(70), "pays"), "Conv_4": ("taken back", pytest.approx(-45), "costs time"),
    }  # fmt: skip
    assert data["builds"] == 3 and data["paid"] and data["backend"] == "trtexec"
    assert data["verdict"]["ratio"] == pytest.approx(100 / 170, rel=0.02)
    assert {n.op_type for n in onnx.load(str(out / "best" / "two.cutefuse.onnx")).graph.node} >= {"CuteConcatConv2Relu"}
    suffixes = ("", ".graph.json", ".build.log", ".build.metadata.json", ".profile.json", ".profile.log",
                ".profile.metadata.json", ".timing.json", ".report.html")  # fmt: skip
    assert names(out / "best") >= {"two.patch.json", *(f"two.cutefuse.onnx.engine{s}" for s in suffixes)}
    assert names(out / "plain") >= {f"two.onnx.engine{s}" for s in suffixes}
    best = read_engine(find_engines(out / "best")[0])
    assert best.patch and best.build["Model"] == str(out / "best" / "two.cutefuse.onnx")
    assert best.patch["output"]["path"] == best.build["Model"] and model.read_bytes() == before
    text = capsys.readouterr()
    assert "plain (" in text.err and "1 of 2 sites taken back" in text.err
    table = text.out.splitlines()
    assert [line.split()[0] for line in table if line.startswith("    ")] == ["Conv_1", "Conv_4"]
    assert "faster: patched 2, " in text.out and "sign test" in text.out


def test_where_nothing_pays_the_plain_engine_comes_back(
    model: Path, stub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, costs=BAD) == 3
    assert "nothing pays: no site pays" in capsys.readouterr().out
    out = model.parent / "out"
    assert names(out) == {"plain", "best", "optimize.json"}
    assert (out / "best" / "two.onnx.engine").read_bytes() == (out / "plain" / "two.onnx.engine").read_bytes()
    assert not list((out / "best").glob("*.cutefuse.*")) and record(model)["kept"] == "plain"


def test_a_model_without_sites_says_so(tmp_path: Path, stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph("y = Relu(a)", {}), str(tmp_path / "m.onnx"))
    assert run(tmp_path / "m.onnx") == 3
    assert "nothing pays: no site can be fused" in capsys.readouterr().out


def test_layers_that_did_not_change_keep_their_tactics(
    model: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = engine.build

    def build(source: Path, outdir: Path, *args: Any, **more: Any) -> Any:
        seen.append((outdir / "timing.cache").is_file())
        return real(source, outdir, *args, **more)

    monkeypatch.setattr(engine, "build", build)
    assert run(model) == 0 and seen == [False, True, True]


def test_json_is_all_that_is_printed(model: Path, stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--json") == 0
    assert json.loads(capsys.readouterr().out) == record(model)


def test_a_dry_run_writes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--dry-run") == 0
    assert "2 candidates: 2 fused" in capsys.readouterr().out and not (model.parent / "out").exists()


def test_options_without_effect_are_named(model: Path, stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--exclude", "head*", "--keep-float32", "Conv_1")
    said = [f"{a} '{b}' " for a, b in zip(options[::2], options[1::2], strict=True)]
    assert run(model, *options, "--dry-run") == 0
    out = capsys.readouterr().out
    assert all(s in out for s in said) and "--min-gain" not in out
    assert run(model, *options) == 0
    out = capsys.readouterr().out
    assert all(s in out for s in said) and "--min-gain" not in out
    assert [note.split("'")[0] for note in record(model)["notes"]] == ["--keep-float32 ", "--exclude "]


def test_a_dry_run_without_a_site_blames_no_option_that_nobody_gave(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, "--exclude", "*", "--dry-run")
    assert "does nothing" not in capsys.readouterr().out


def test_a_dry_run_shows_the_converted_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--dry-run", "--dtype", "fp16", "--keep-float32", "Conv_1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["conversion"]["kept_float32"] == ["Conv_1"] and report["unused_options"] == []
    assert report["sites"][-1]["dtype"] == "float16"


def test_filters_and_the_comparison_in_onnx_runtime(model: Path, stub: Path) -> None:
    assert (
        run(model, "--exclude", "Conv_4", "--verify", "--input-shape", "a:1x8x9x7", "--input-shape", "b:1x16x9x7") == 0
    )
    data = record(model)
    assert [s["status"] for s in data["sites"]] == ["kept", "excluded"] and data["builds"] == 2
    report = json.loads((model.parent / "out" / "best" / "two.patch.json").read_text())
    assert report["verify"]["passed"] and "--shapes=a:1x8x9x7,b:1x16x9x7" in (
        (model.parent / "out" / "best" / "two.cutefuse.onnx.engine.build.log").read_text()
    )


def test_the_first_graph_takes_what_may_pay(model: Path, stub: Path) -> None:
    """Predicted to lose little, a site is tried; predicted to lose much, it is left out with its figure."""
    (model.parent / "costs.json").write_text(json.dumps(COSTS))
    predicted = {"Conv_1": -0.5, "Conv_4": -40.0}
    data = optimize(
        Request(
            model, model.parent / "out", patch=Options(shapes={"a": [1, 8, 9, 7], "b": [1, 16, 9, 7]}),
            price=lambda graph, sites: lambda site: Price(predicted[site.name], TIMED, "", "said so"),
        )
    )  # fmt: skip
    assert [s["status"] for s in data["sites"]] == ["kept", "left out"] and data["builds"] == 2
    assert "costs 40" in data["sites"][1]["reason"] and data["sites"][0]["predicted_us"] == -0.5


@pytest.mark.parametrize(
    "dims, kind, given, want",
    [
        ("n,3,8,8", "trtexec", {}, {"a": (1, 3, 8, 8)}),
        ("n,3,8,8", "torch", {}, {"a": (1, 3, 8, 8)}),
        ("n,3,8,8", "torch", {"a": [4, 3, 8, 8]}, {"a": (4, 3, 8, 8)}),
        ("1,3,8,8", "trtexec", {}, {}),
        ("n,3,h,w", "torch", {}, {"a": (1, 3, 64, 64)}),
        ("n,3,h,w", "trtexec", {}, {}),
        ("n,3,h,w", "trtexec", {"a": [1, 3, 8, 8]}, {"a": (1, 3, 8, 8)}),
    ],
)
def test_predictions_are_for_the_sizes_of_the_engine(
    tmp_path: Path, dims: str, kind: str, given: dict[str, list[int]], want: dict[str, tuple[int, ...]]
) -> None:
    onnx.save(graph("y = Relu(a)", {}, inputs={"a": dims}), str(tmp_path / "m.onnx"))
    assert engine_shapes(tmp_path / "m.onnx", given, kind) == want


def test_where_nothing_should_pay_nothing_is_tried_and_it_says_so(model: Path, stub: Path) -> None:
    (model.parent / "costs.json").write_text(json.dumps(COSTS))
    data = optimize(
        Request(
            model, model.parent / "out", patch=Options(shapes={"a": [1, 8, 9, 7], "b": [1, 16, 9, 7]}),
            price=lambda graph, sites: lambda site: Price(-40.0, TIMED, "", "said so"),
        )
    )  # fmt: skip
    assert not data["paid"] and data["ended"] == "by prediction none of 2 sites pays" and data["builds"] == 1


def test_old_tensorrt_gets_no_function_bodies(model: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_VERSION", "100300")
    assert run(model) == 0
    assert not onnx.load(str(model.parent / "out" / "best" / "two.cutefuse.onnx")).functions


def test_float16_is_compared_with_float16(model: Path, stub: Path) -> None:
    assert run(model, "--dtype", "fp16") == 0
    for folder, name in (("plain", "two.onnx"), ("best", "two.cutefuse.onnx")):
        made = onnx.load(str(model.parent / "out" / folder / name))
        assert onnx.TensorProto.FLOAT16 in {i.data_type for i in made.graph.initializer}


# -------------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    "words, text",
    [
        (["--builds=1"], "--builds is 1"),
        (["--nonsense"], "--nonsense"),
        (["--input-shape", "q:1x2"], "q"),
        (["stray"], "--stray is not an option"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, stub: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert run(model, *words) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_model_is_named(tmp_path: Path, stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.onnx") == 2
    assert "none.onnx does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("fails_at, left", [(2, "two.onnx"), (3, "two.cutefuse.onnx")])
def test_a_build_that_fails_leaves_the_last_good_engine(
    model: Path,
    stub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_at: int,
    left: str,
) -> None:
    real, count = engine.build, [0]

    def build(*args: Any, **more: Any) -> Any:
        count[0] += 1
        if count[0] == fails_at:
            monkeypatch.setenv("STUB_FAIL", "out of memory")
        return real(*args, **more)

    monkeypatch.setattr(engine, "build", build)
    costs = {**COSTS, "fused Conv_4": 80.0}  # both sites together are faster than none
    assert run(model, costs=costs) == 2
    error = capsys.readouterr().err
    assert "out of memory" in error and "best holds the last good engine" in error
    assert good(model.parent / "out") == left and record(model)["ended"].startswith("ended early: trtexec failed")


def test_a_full_disk_leaves_the_last_good_engine(
    model: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.copy2

    def copy(source: Path, target: Path) -> Any:
        if "cutefuse" in Path(target).name:
            raise OSError(28, "No space left on device")
        return real(source, target)

    monkeypatch.setattr(bench.shutil, "copy2", copy)
    assert run(model) == 2
    assert "No space left on device" in capsys.readouterr().err and good(model.parent / "out") == "two.onnx"


def test_an_engine_that_runs_bodies_ends_it(model: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = stub.read_text().replace('"PluginV3" if plugin', '"CaskConvolution" if plugin')
    stub.write_text(text)
    assert run(model) == 1 and good(model.parent / "out") == "two.onnx"


def test_a_patched_graph_that_computes_something_else_is_not_built(
    model: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"passed": False, "outputs": [], "sites": [], "why": "it differs"}
    monkeypatch.setattr("cutefuse.rewrite.passes.verify.verify", lambda *args: wrong)
    assert run(model, "--verify") == 1
    assert "it differs" in capsys.readouterr().err and good(model.parent / "out") == "two.onnx"


@pytest.mark.parametrize("sign, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_last_good_engine(model: Path, stub: Path, sign: int, code: int) -> None:
    (model.parent / "costs.json").write_text(json.dumps(COSTS))
    slow = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script begins with it ignored
from cutefuse.commands.optimize import main
from cutefuse.engines import build
real, count = build.build, [0]
def slow(*args, **more):
    count[0] += 1
    if count[0] == 2:
        os.environ["STUB_SLEEP"], os.environ["STUB_PID"] = "60", {str(model.parent / "pid")!r}
    return real(*args, **more)
build.build = slow
import sys, cutefuse
from pathlib import Path
cutefuse.plugin_path = lambda: Path({str(model.parent / "lib" / "libcutefuse.so")!r})
sys.exit(main([{str(model)!r}, "-o", {str(model.parent / "out")!r}, "--sm", "0"]))
"""
    child = subprocess.Popen([sys.executable, "-c", slow], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (model.parent / "pid").is_file() or not (model.parent / "pid").read_text():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(sign)
    _, error = child.communicate(timeout=60)
    assert child.returncode == code and "best holds the last good engine" in error
    assert good(model.parent / "out") == "two.onnx"
    with pytest.raises(ProcessLookupError):
        os.kill(int((model.parent / "pid").read_text()), 0)


def test_what_a_killed_run_set_aside_comes_back(model: Path, stub: Path) -> None:
    assert run(model) == 0
    out = model.parent / "out"
    (out / "best").rename(out / ".best.previous")
    with bench.Shelf(out).open():
        assert good_name(out) == "two.cutefuse.onnx"
    assert not (out / ".best.previous").exists()


def test_a_second_run_replaces_the_first(model: Path, stub: Path) -> None:
    assert run(model) == 0 and run(model, costs=BAD) == 3
    assert good(model.parent / "out") == "two.onnx"
    assert not [p for p in (model.parent / "out" / "best").iterdir() if "cutefuse" in p.name]
