"""benchmarks/networks.py without a GPU: its processes, its figures from given times, its tables."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pool_work
import pytest
from onnx import TensorProto

import models
from benchmarks import networks
from benchmarks.lib import network_model, network_sites, network_table, network_work, pool
from benchmarks.lib import rows as table_rows
from benchmarks.lib.network_work import Task, Variant
from cutefuse.errors import CutefuseError


def run_pool(work: Any, tasks: list[Any], folder: Path, jobs: int = 3, limit_s: float = 60) -> dict[Any, Any]:
    said: list[tuple[Any, str]] = []
    found = {t: (r, f) for t, r, f in pool.run(work, tasks, jobs, folder, limit_s, lambda t, s: said.append((t, s)))}
    return found | {"said": said}


class TestPool:
    def test_a_long_result_comes_whole_and_a_failure_is_a_sentence(self, tmp_path: Path) -> None:
        found = run_pool(pool_work.by_word, ["a", "raise", "die"], tmp_path)
        assert found["a"] == ("a" * pool_work.BIG, "") and ("a", "began") in found["said"]
        assert found["raise"] == (None, "ValueError: no such")
        assert found["die"][0] is None and re.search("code 7.*Segmentation fault", found["die"][1])

    def test_what_takes_too_long_is_ended_and_what_never_began_is_named(self, tmp_path: Path) -> None:
        found = run_pool(pool_work.by_word, ["sleep", "a"], tmp_path, jobs=1, limit_s=2)
        assert found["sleep"] == found["a"] and found["a"][0] is None and "--limit-s" in found["a"][1]

    def test_a_worker_that_is_alone_is_alone(self, tmp_path: Path) -> None:
        found = run_pool(pool_work.tick, [("first", tmp_path), ("b", tmp_path), ("c", tmp_path)], tmp_path / "pool")
        (begin, end, _), _ = found["first", tmp_path]
        for name in "bc":
            times = found[name, tmp_path][0][2]
            assert any(t > end for t in times), "it was never let go on"
            assert not [t for t in times if begin + 0.05 < t < end - 0.05]

    def test_the_others_go_on_when_the_one_that_was_alone_dies(self, tmp_path: Path) -> None:
        found = run_pool(pool_work.die_alone, ["die", "b"], tmp_path, limit_s=30)
        assert found["b"] == ("went on", "") and "code 3" in found["die"][1]

    def test_one_that_is_stopped_on_its_way_out_keeps_nobody_waiting(self, tmp_path: Path) -> None:
        def say(task: Any, text: str) -> None:
            (tmp_path / "busy").touch()
            time.sleep(1.5)  # a result and a request for the machine arrive together

        tasks = [(name, tmp_path) for name in ("alone", "leaves", "third")]
        found = {t[0]: (r, f) for t, r, f in pool.run(pool_work.leave, tasks, 3, tmp_path / "pool", 30, say)}
        assert found == {name: (name, "") for name in ("alone", "leaves", "third")}

    def test_only_one_is_quiet_at_a_time(self, tmp_path: Path) -> None:
        tasks = [tmp_path, Path(f"{tmp_path}/"), Path(f"{tmp_path}/../{tmp_path.name}")]
        results = [r for _, r, _ in pool.run(pool_work.locked, tasks, 3, tmp_path / "p", 60, lambda t, s: None)]
        assert results == [1, 1, 1]


def variant(gains: list[float | None], model: Path | None = Path("m"), same_as: str = "") -> Variant:
    sites = [{"name": f"s{i}", "status": "fused", "gain_us": g} for i, g in enumerate(gains)]
    known = [g for g in gains if g is not None]
    summary = {"gain_us": sum(known), "gain_unknown": len(gains) - len(known), "plain_us": 8.0}
    report = {"sites": [*sites, {"name": "r", "status": "refused", "gain_us": None}], "summary": summary}
    return Variant(report, [], model, same_as=same_as)


SAMPLES = {
    ("plain", "cudnn"): [20.0, 20.0, 20.0],
    ("plain", "compile"): [10.0, 11.0, 10.0],
    ("default", "cudnn"): [8.0, 8.0, 9.0],
    ("default", "compile"): [9.0, 9.0, 9.0],
}


class TestSummary:
    def test_the_ratio_is_best_over_best(self) -> None:
        found = network_work.summary(SAMPLES, {"default": variant([1.5, 0.5])})["variants"]
        assert found["plain"]["best"] == "compile" and found["default"]["best"] == "cudnn"
        own = found["default"]
        assert own["ratio"] == pytest.approx(0.8) and own["ratio_p20"] == pytest.approx(8 / 11)
        assert own["predicted"] == pytest.approx(1 - 2 / 8) and (own["sites"], own["candidates"]) == (2, 3)

    def test_a_gain_is_against_torch_compile_where_cudnn_alone_is_faster(self) -> None:
        samples = SAMPLES | {("plain", "cudnn"): [8.0, 8.0, 8.0]}
        found = network_work.summary(samples, {"default": variant([2.0]), "none": variant([], None)})["variants"]
        assert found["plain"]["best"] == "cudnn"
        assert found["default"]["predicted"] == pytest.approx(0.75 * 10 / 8) and found["none"]["predicted"] == 1

    def test_an_unknown_gain_predicts_nothing(self) -> None:
        assert (
            "predicted" not in network_work.summary(SAMPLES, {"default": variant([1.5, None])})["variants"]["default"]
        )

    def test_a_network_in_which_nothing_was_fused_is_the_plain_one(self) -> None:
        own = network_work.summary(SAMPLES, {"default": variant([], None)})["variants"]["default"]
        assert own["ratio"] == own["predicted"] == 1 and own["sites"] == 0

    def test_equal_choices_share_their_times(self) -> None:
        found = network_work.summary(SAMPLES, {"default": variant([1.0]), "all": variant([1.0], same_as="default")})
        assert found["variants"]["all"]["ratio"] == found["variants"]["default"]["ratio"]

    def test_a_patched_network_that_no_engine_takes_has_no_ratio(self) -> None:
        plain = {k: v for k, v in SAMPLES.items() if k[0] == "plain"}
        assert "ratio" not in network_work.summary(plain, {"default": variant([1.0])})["variants"]["default"]


class TestSites:
    LAYERS = [
        {"name": "conv", "nodes": ["c1"], "us": 4.0},
        {"name": "cat+silu", "nodes": ["k1", "a1", "a2", "x"], "us": 8.0},
        {"name": "copy", "nodes": [], "us": 1.0},
    ]

    def test_a_shared_layer_is_divided_by_its_nodes(self) -> None:
        assert network_sites.share_us(self.LAYERS, ["c1", "k1", "a1"]) == 8.0
        assert network_sites.share_us(self.LAYERS, ["nobody"]) == 0.0

    def test_layers_without_a_kernel_are_left_out(self) -> None:
        step = SimpleNamespace(nodes=["a", "b"])
        layers = [
            SimpleNamespace(name="l", steps=[step, step], kernels=["k" * 200], times_us=[1.0, 9.0, 2.0]),
            SimpleNamespace(name="none", steps=[step], kernels=[], times_us=[]),
        ]
        assert network_sites.layer_rows(layers) == [{"name": "l", "nodes": ["a", "b"], "us": 2.0, "kernel": "k" * 80}]

    def test_every_fused_site_of_a_network_has_its_sizes_and_times(self, tmp_path: Path) -> None:
        import onnx

        import models

        onnx.save(models.build("unet", "float16", small=True, batch=2), str(tmp_path / "plain.onnx"))
        found = network_work.take_default(tmp_path / "plain.onnx", tmp_path / "p.onnx", 90)
        site = next(s for s in found.sites if "Concat" in [n.op_type for n in s.nodes])
        nodes = site.as_json()["nodes"]
        plain = {"cudnn": [{"name": "x", "nodes": nodes[:1], "us": 3.0}]}
        (row,) = network_sites.fitted(
            [site], plain, {"cudnn": [{"name": "y", "nodes": [site.name], "us": 2.0}]}, {site.name: "sm90"}
        )
        assert row["ours_us"] == {"cudnn": 2.0} and row["plain_us"] == {"cudnn": 3.0} and row["tile"] == "sm90"
        assert row["N"] == 2 and len(row["C"]) == 2 and (row["R"], row["S"]) == (3, 3) and row["activation"] == "Relu"
        assert json.loads(json.dumps(row)) == row


def net(name: str, ratio: float, predicted: float | None = None, error: float | None = 1e-3, **more: Any) -> Any:
    own = {"cudnn_us": 9.0, "compile_us": 8.0, "best_us": 8.0, "ratio": ratio, "sites": 2, "candidates": 3}
    own |= {} if predicted is None else {"predicted": predicted}
    plain = {"cudnn_us": 20.0, "compile_us": 10.0, "best_us": 10.0}
    return {
        "network": name, "batch": 1, "dtype": "float16", "variants": {"plain": plain, "default": own}, "failures": {},
        "errors": {"plain compile": {"y": 2e-3, "z": 1e-3}, "default cudnn": {"y": 1e-4, "z": error}},
    } | more  # fmt: skip


class TestTable:
    def test_means_losses_and_predictions_are_told(self) -> None:
        rows = [net("unet", 0.5, 0.52), net("googlenet", 1.08, 0.98), net("dla34", 1.009)]
        mean, told = network_table.remarks(rows)
        assert "0.817 over 3" in mean and "worst 1.080 (googlenet b1)" in mean
        assert "1 of 2" in told and "googlenet b1 0.980 for 1.080" in told

    @pytest.mark.parametrize("error, found", [(None, "NaN"), (0.3, "differs by 3.0e-01"), (float("inf"), "NaN")])
    def test_wrong_outputs_are_named(self, error: float | None, found: str) -> None:
        assert found in network_table.wrong([net("unet", 0.5, error=error)])[0]
        assert network_table.wrong([net("unet", 0.5)]) == []

    def test_a_network_that_amplifies_roundings_has_a_wider_limit(self) -> None:
        row = net("unet", 0.5, error=0.05)
        assert network_table.wrong([row])
        row["errors"]["plain compile"]["y"] = 0.025
        assert network_table.wrong([row]) == []

    def test_a_plain_network_that_overflows_is_named(self) -> None:
        row = net("unet", 0.5)
        row["errors"]["plain compile"]["y"] = None
        assert network_table.wrong([row]) == ["unet b1 plain has NaN where it should not"]

    def test_a_failed_network_has_a_line_and_a_reason(self) -> None:
        rows = [net("unet", 0.5), {"network": "vovnet39", "batch": 8, "failure": "RuntimeError: no"}]
        text = network_table.text(rows, markdown=True)
        assert "- vovnet39 b8: RuntimeError: no" in text and "|vovnet39|8|-|-|" in text
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1
        rows[0]["failures"]["default compile"] = "Error: x"
        assert "unet b1 default compile: Error: x" in network_table.remarks(rows)

    def test_the_table_of_the_readme_has_the_better_times_and_leaves_failures_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [net("unet", 0.8), net("dla34", 0.9) | {"batch": 8}, {"network": "x", "batch": 1, "failure": "no"}]
        table_rows.write(tmp_path / "n.json", rows)
        networks.main(["--from", str(tmp_path / "n.json"), "--short"])
        out = capsys.readouterr().out.splitlines()
        assert [line for line in out if line.startswith("|")] == [
            "|network|plain|default|ratio|", "|---|---:|---:|---:|",
            "|unet|10|8|0.80|", "|dla34 b8|10|8|0.90|",
        ]  # fmt: skip
        assert out[-1].startswith("- default: geometric mean 0.849 over 2")

    def test_a_file_of_rows_is_tabulated_without_a_gpu(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        table_rows.write(tmp_path / "n.json", [net("unet", 1 / 3)])
        assert networks.main(["--from", str(tmp_path / "n.json")]) == 0
        assert "0.333" in capsys.readouterr().out and [p.name for p in tmp_path.iterdir()] == ["n.json"]
        table_rows.write(tmp_path / "n.json", [net("unet", 0.5, error=math.inf)])
        assert networks.main(["--from", str(tmp_path / "n.json")]) == 1


class TestArguments:
    def test_tasks_are_the_chosen_networks_longest_first(self, tmp_path: Path) -> None:
        args = networks.parse(["--networks", "yolov8?,unet", "--batch", "1,8", "--layers"])
        found = networks.tasks_of(args, tmp_path)
        assert [t.key for t in found][:4] == [("yolov8m", 1), ("yolov8s", 1), ("yolov8n", 1), ("unet", 1)]
        assert len(found) == 8 and all(t.layers for t in found)

    def test_parts_are_measured_where_they_are_named(self, tmp_path: Path) -> None:
        names = [t.network for t in networks.tasks_of(networks.parse(["--batch", "1"]), tmp_path)]
        assert set(names) >= {"unet", "hrnet_head"} and "vit_block" not in names
        (found,) = networks.tasks_of(networks.parse(["--networks", "vit_*", "--batch", "2"]), tmp_path)
        assert found.key == ("vit_block", 2)

    def test_a_file_is_a_network_with_its_own_batch(self, tmp_path: Path) -> None:
        onnx.save(models.build("squeezenet1_1", small=True, batch=3), str(tmp_path / "mine.onnx"))
        args = networks.parse(["--networks", f"{tmp_path}/*.onnx,unet", "--batch", "8"])
        mine, unet = networks.tasks_of(args, tmp_path)
        assert mine.key == ("mine.onnx", 3) and unet.key == ("unet", 8) and unet.file is None
        weights = network_model.in_float16(mine).graph.initializer
        assert all(t.data_type == TensorProto.FLOAT16 for t in weights if len(t.dims) == 4)
        assert [r["network"] for r in networks.ordered([net("mine.onnx", 1), net("unet", 1)])] == ["unet", "mine.onnx"]

    def test_a_float16_file_stays_as_it_is(self, tmp_path: Path) -> None:
        model = models.build("squeezenet1_1", "float16", small=True, batch=1)
        onnx.save(model, str(tmp_path / "half.onnx"))
        (task,) = networks.tasks_of(networks.parse(["--networks", f"{tmp_path}/half.onnx"]), tmp_path)
        assert network_model.in_float16(task) == model

    def test_a_file_without_all_its_sizes_is_refused(self, tmp_path: Path) -> None:
        onnx.save(models.build("squeezenet1_1", small=True), str(tmp_path / "mine.onnx"))
        with pytest.raises(CutefuseError, match=r"input \w+ .*not fixed"):
            networks.tasks_of(networks.parse(["--networks", f"{tmp_path}/mine.onnx"]), tmp_path)

    def test_two_files_of_one_name_are_refused(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            onnx.save(models.build("squeezenet1_1", small=True, batch=1), str(tmp_path / name / "mine.onnx"))
        with pytest.raises(CutefuseError, match="two files are called mine.onnx"):
            networks.tasks_of(networks.parse(["--networks", f"{tmp_path}/*/mine.onnx"]), tmp_path)

    @pytest.mark.parametrize(
        "words, message",
        [
            (["--networks", "gone.onnx"], "'gone.onnx' is no file"),
            (["--networks", "alexnet"], "'alexnet' matches none of bevfusion_decoder"),
            (["--batch", "1,x"], "'1,x' is no comma list"),
            (["--batch", "0"], "is no comma list"),
            (["--variants", "default,best"], "'best'.*choose from default"),
        ],
    )
    def test_what_names_nothing_is_refused(self, words: list[str], message: str, tmp_path: Path) -> None:
        with pytest.raises(CutefuseError, match=message):
            networks.tasks_of(networks.parse(words), tmp_path)

    def test_without_a_gpu_it_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("cutefuse.engines.cuda_memory.local_sm", lambda: 0)
        assert networks.main([]) == 2 and "no CUDA device was found" in capsys.readouterr().err


class Line:
    """A worker's line to nobody."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.say = self.said.append

    @contextlib.contextmanager
    def alone(self) -> Any:
        yield

    quiet = alone


@pytest.mark.torch
class TestNetwork:
    def task(self, folder: Path, *variants: str) -> Task:
        return Task("squeezenet1_1", 1, variants, folder, "cpu", True, True, 2, 0.1)

    def test_a_network_is_patched_compared_and_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network_work, "MODES", ("cudnn",))
        monkeypatch.setitem(network_work.VARIANTS, "broken", lambda *_: 1 / 0)
        monkeypatch.setitem(network_work.VARIANTS, "twin", network_work.take_default)
        line = Line()
        row = network_work.measure(self.task(tmp_path, "default", "twin", "broken"), line)  # type: ignore[arg-type]
        nothing = {"timed": 0, "given": 0, "not_first_guess": 0}  # the bodies run here
        assert row["tiles"] == {"default": nothing}
        own = row["variants"]["default"]
        fused = own["sites"]
        assert fused >= 6 and own["ratio"] > 0 and row["variants"]["twin"]["same_as"] == "default"
        assert row["failures"] == {"broken": "ZeroDivisionError: division by zero"}
        assert list(row["errors"]) == ["plain cudnn", "default cudnn"] and network_table.wrong([row]) == []
        (error,) = row["errors"]["plain cudnn"].values()
        assert 0 < error < 1e-2
        assert row["layers_of"] == "default" and len(row["sites"]) == fused
        assert all(s["ours_us"]["cudnn"] >= 0 and s["plain_us"]["cudnn"] > 0 for s in row["sites"])
        assert network_table.text([json.loads(json.dumps(row))], True)
        assert [s.split(" after")[0] for s in line.said] == ["patched", "built 2 engines", "timed"]

    def test_how_the_tiles_were_chosen_is_recorded(self) -> None:
        nodes = [SimpleNamespace(tile_from=f, tile=t, tiles=lambda: [7, 3])
                 for f, t in (("timed", 3), ("timed", 7), ("given", 3), ("first guess", 7))]  # fmt: skip
        engine = SimpleNamespace(program=SimpleNamespace(fused=nodes))
        assert network_work.tile_facts(engine) == {"timed": 2, "given": 1, "not_first_guess": 2}

    def test_an_engine_that_is_wrong_is_seen(self) -> None:
        import torch

        class Engine:
            inputs = {"x": torch.zeros(1)}

            def __init__(self, *values: float) -> None:
                self.values = torch.tensor(values)

            def __call__(self, feed: Any) -> Any:
                assert feed["x"] is not self.inputs["x"]
                return {"y": self.values}

        engines = {
            ("plain", "cudnn"): Engine(1, -4), ("default", "cudnn"): Engine(1, -3),
            ("default", "compile"): Engine(float("nan"), -4),
        }  # fmt: skip
        assert network_work.compare(engines, Engine(1, -4)) == {
            "plain cudnn": {"y": 0.0}, "default cudnn": {"y": 0.25}, "default compile": {"y": None}
        }  # fmt: skip

    def test_a_network_whose_plain_engines_fail_says_why(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cutefuse.engines.pytorch.run import TorchEngine

        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA out of memory\nmore")

        monkeypatch.setattr(TorchEngine, "build", refuse)
        row = network_work.measure(self.task(tmp_path, "default"), Line())  # type: ignore[arg-type]
        assert "no plain engine" in row["failure"] and row["failure"].endswith("CUDA out of memory")
