"""cuDNN's graph API as a peer: what a model has, what cuDNN is asked for, and, on a GPU, what comes of it."""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from benchmarks import networks, page
from benchmarks.lib import convolutions, cudnn, network_bare, network_table
from benchmarks.lib.convolutions import Convolution
from benchmarks.lib.cudnn import Best, Job
from benchmarks.lib.network_work import Task
from cutefuse.errors import CutefuseError

SMALL = Convolution(1, 8, 9, 7, 16, 3, 3)


def model(*nodes: onnx.NodeProto, x: Any = (2, 8, 9, 7), **filters: Any) -> onnx.ModelProto:
    """A model on an input x, of filters of the given sizes."""
    half = TensorProto.FLOAT16
    stored = [helper.make_tensor(n, half, dims, [0] * onnx.numpy_helper.np.prod(dims)) for n, dims in filters.items()]
    outputs = [helper.make_tensor_value_info(n.output[0], half, None) for n in nodes]
    graph = helper.make_graph(nodes, "test", [helper.make_tensor_value_info("x", half, x)], outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def conv(output: str, filter_: str = "w", x: str = "x", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node("Conv", [x, filter_], [output], name=f"conv_{output}", **attrs)


class TestConvolutions:
    def test_equal_ones_count_once_each_with_its_attributes(self) -> None:
        nodes = [
            conv("a", strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2]),
            conv("b", "d", group=8, pads=[1, 1, 1, 1]),
            conv("c", "v", x="b"),
            conv("d2", "v", x="b"),
            conv("e", "w", x="b", auto_pad="SAME_LOWER", strides=[2, 2]),
        ]
        found = convolutions.of(model(*nodes, w=(16, 8, 3, 3), d=(8, 1, 3, 3), v=(4, 8, 1, 1)))
        assert found.counts == {
            Convolution(2, 8, 9, 7, 16, 3, 3, (2, 1), (1, 0, 1, 2), (1, 2)): 1,
            Convolution(2, 8, 9, 7, 8, 3, 3, (1, 1), (1, 1, 1, 1), (1, 1), 8): 1,
            Convolution(2, 8, 9, 7, 4, 1, 1): 2,
            Convolution(2, 8, 9, 7, 16, 3, 3, (2, 2), (1, 1, 1, 1)): 1,
        }
        assert found.left_out == 0 and not found.unknown

    def test_sizes_and_operations_are_those_of_hand(self) -> None:
        one = Convolution(2, 8, 9, 7, 16, 3, 3, (2, 1), (1, 0, 1, 2), (1, 2))
        assert one.output == (2, 16, 5, 5) and one.flops == 2 * 2 * 16 * 5 * 5 * 8 * 9
        grouped = Convolution(1, 8, 4, 4, 8, 3, 3, pads=(1, 1, 1, 1), groups=4)
        assert grouped.flops == 2 * 8 * 16 * 2 * 9 and str(grouped) == "1x8x4x4 -> 8, 3x3 pads 1 groups 4"
        assert str(one) == "2x8x9x7 -> 16, 3x3 stride 2,1 pads 1,0,1,2 dilation 1,2"

    @pytest.mark.parametrize(("x", "w"), [((2, 8, 9), (16, 8, 3)), ((2, 8, 9, 7, 5), (16, 8, 3, 3, 3))])
    def test_those_of_other_ranks_are_counted_apart(self, x: Any, w: Any) -> None:
        found = convolutions.of(model(conv("a"), conv("b"), x=x, w=w))
        assert (found.counts, found.other_ranks, found.left_out, found.unknown) == ({}, 2, 2, [])

    @pytest.mark.parametrize(
        ("x", "w", "attrs", "words"),
        [
            (("n", 8, 9, 7), (16, 8, 3, 3), {}, "not known or 0"),
            ((2, 8, 0, 7), (16, 8, 3, 3), {}, "not known or 0"),
            ((2, 9, 9, 7), (16, 8, 3, 3), {}, "do not suit 1 groups"),
            ((2, 8, 9, 7), (15, 4, 3, 3), {"group": 2}, "do not suit 2 groups"),
            ((2, 8, 9, 7), (16, 8, 3, 3), {"kernel_shape": [1, 1]}, "kernel_shape"),
            ((2, 8, 9, 7), (16, 8, 3, 3), {"strides": [1]}, "strides"),
            ((2, 8, 9, 7), (16, 8, 3, 3), {"strides": [0, 1]}, "below 1"),
            ((2, 8, 9, 7), (16, 8, 3, 3), {"pads": [-1, 0, 0, 0]}, "below 0"),
            ((2, 8, 9, 7), (16, 8, 3, 9), {}, "larger than its padded input"),
            ((2, 8, 9), (16, 8, 3, 3), {}, "rank 3"),
            (None, (16, 8, 3, 3), {}, "rank of 'x'"),
        ],
    )
    def test_what_has_no_sizes_is_named(self, x: Any, w: Any, attrs: Any, words: str) -> None:
        found = convolutions.of(model(conv("a", **attrs), x=x, w=w))
        (sentence,) = found.unknown
        assert sentence.startswith("Conv 'conv_a': ") and words in sentence and not found.counts

    def test_those_in_bodies_are_named(self) -> None:
        body = helper.make_graph([conv("a")], "b", [], [helper.make_tensor_value_info("a", TensorProto.FLOAT16, None)])
        true = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
        either = helper.make_node("If", ["t"], ["y"], name="if", then_branch=body, else_branch=body)
        found = convolutions.of(model(true, either, w=(16, 8, 3, 3)))
        assert len(found.unknown) == 2 and "'if'" in found.unknown[0]


class Tensor:
    """A tensor of cudnn-frontend; its setters chain."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self


class Frontend(types.SimpleNamespace):
    """Stands for the package: keeps what graphs are asked for; `broken` plans do not build."""

    def __init__(self, plans: int = 4, broken: tuple[int, ...] = (1,)) -> None:
        names = types.SimpleNamespace(HALF="half", FLOAT="float", A="A", B="B", FALLBACK="F")
        super().__init__(data_type=names, heur_mode=names, calls=[], plans=plans, broken=broken)

    def create_device_properties(self, device: int) -> str:
        return f"device {device}"

    def pygraph(self, **where: Any) -> Any:
        package, built = self, []

        class Graph:
            def __getattr__(self, name: str) -> Any:
                def call(*given: Any, **named: Any) -> Any:
                    package.calls.append((name, named or given))
                    return Tensor()

                return call

            def get_execution_plan_count(self) -> int:
                return package.plans

            def get_plan_name_at_index(self, i: int) -> str:
                return f"eng{i}"

            def build_plan_at_index(self, i: int) -> None:
                if i in package.broken:
                    raise RuntimeError("no engine")
                built.append(i)

            def serialize(self, as_bytes: bool) -> bytes:
                return b"plan %d" % built[-1]

        self.calls.append(("pygraph", where))
        return Graph()

    def named(self, name: str) -> list[Any]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    fake = Frontend()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "cudnn", fake)  # type: ignore[arg-type]
    return fake


class TestPlans:
    def test_a_bare_graph_has_pads_on_both_sides_and_pixels_of_channels(self, frontend: Frontend) -> None:
        one = Convolution(2, 8, 9, 7, 16, 3, 3, (2, 1), (1, 0, 1, 2), (1, 2), 2)
        _, names = cudnn.planned(frontend, Job(one))
        (asked,) = frontend.named("conv_fprop")
        assert (asked["pre_padding"], asked["post_padding"]) == ([1, 0], [1, 2])
        assert (asked["stride"], asked["dilation"]) == ([2, 1], [1, 2])
        x, w = frontend.named("tensor")
        assert (x["dim"], x["stride"]) == ([2, 8, 9, 7], [504, 1, 56, 8])
        assert (w["dim"], w["stride"]) == ([16, 4, 3, 3], [36, 1, 12, 4]) and names == ["eng0", "eng1", "eng2", "eng3"]
        assert frontend.named("create_execution_plans") == [(["A", "B", "F"],)] and not frontend.named("bias")

    @pytest.mark.parametrize(
        ("residual", "order"),
        [("", ["bias", "swish"]), ("before", ["bias", "add", "swish"]), ("after", ["bias", "swish", "add"])],
    )
    def test_a_fused_graph_has_its_residual_where_it_belongs(
        self, residual: str, order: list[str], frontend: Frontend
    ) -> None:
        cudnn.planned(frontend, Job(SMALL, True, "Silu", residual))
        assert [name for name, _ in frontend.calls if name in ("bias", "add", "swish")] == order

    def test_an_activation_that_cudnn_has_not_is_refused(self, frontend: Frontend) -> None:
        with pytest.raises(CutefuseError, match="no Clip .* Relu"):
            cudnn.planned(frontend, Job(SMALL, True, "Clip"))

    def test_odd_channels_are_also_asked_for_in_whole_vectors(self) -> None:
        odd = Convolution(1, 3, 9, 7, 17, 3, 3)
        assert [(f.conv.C, f.conv.K) for f in Job(odd).forms()] == [(3, 17), (8, 24)]
        assert Job(SMALL).forms() == [Job(SMALL)]
        assert len(Job(Convolution(1, 3, 9, 7, 3, 3, 3, groups=3)).forms()) == 1

    def test_all_plans_that_build_are_kept(self, frontend: Frontend) -> None:
        jobs = (Job(SMALL), Job(SMALL, True, "Clip"))
        found = cudnn.build_plans(cudnn.Chunk(jobs, time.monotonic() + 60), None)  # type: ignore[arg-type]
        assert found == {Job(SMALL): {"eng0": b"plan 0", "eng2": b"plan 2", "eng3": b"plan 3"}}
        assert frontend.named("pygraph")[0]["device_property"] == "device 0"

    def test_at_the_end_of_its_time_it_hands_over_what_it_has(self, frontend: Frontend) -> None:
        found = cudnn.build_plans(cudnn.Chunk((Job(SMALL),), time.monotonic() - 1), None)  # type: ignore[arg-type]
        assert found == {Job(SMALL): {}}

    @pytest.mark.parametrize("missing", ["torch", "cudnn"])
    def test_a_missing_package_is_one_sentence(
        self, missing: str, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert cudnn.frontend() is frontend
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(CutefuseError, match=f"{missing}.*pip install .*nvidia-cudnn-frontend"):
            cudnn.frontend()
        task = cudnn.Measuring((), Path("none"), Path("none"), frozenset(), 0.0)
        cudnn.gpu.cache_clear()
        with pytest.raises(CutefuseError, match="nvidia-cudnn-frontend"):
            cudnn.measure(task, None)  # type: ignore[arg-type]


class TestTimes:
    """The process that measures is played by `play`: for each attempt the lines of its journal, and how it ended."""

    JOBS = [Job(Convolution(1, 8, size, size, 8, 1, 1)) for size in (1, 2, 3)]

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        monkeypatch.setattr(cudnn, "compiled", lambda *_: {})
        return []

    def play(self, monkeypatch: pytest.MonkeyPatch, asked: list[Any], *attempts: tuple[list[Any], str]) -> None:
        def run(work: Any, tasks: Any, jobs: int, folder: Path, limit_s: float, say: Any) -> Iterator[Any]:
            (task,) = tasks
            lines, failure = attempts[min(len(asked), len(attempts) - 1)]
            asked.append(task)
            task.journal.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
            yield task, None, failure

        monkeypatch.setattr(cudnn.pool, "run", run)

    def done(self, job: int, us: float) -> dict[str, Any]:
        return {"job": job, "us": us, "plan": "p"}

    def test_each_job_has_its_time_or_its_reason(
        self, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = [{"job": 0, "tries": "p"}, self.done(0, 2.0), {"job": 1, "failure": "no plan"}]
        self.play(monkeypatch, asked, (lines, ""))
        found = cudnn.times(self.JOBS, 1, 60, tmp_path / "new")
        assert found == {self.JOBS[0]: Best(2.0, "p"), self.JOBS[1]: "no plan"} and len(asked) == 1

    def test_a_plan_that_ends_the_process_is_left_out_and_the_rest_goes_on(
        self, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = [self.done(0, 2.0), {"job": 1, "tries": "good"}, {"job": 1, "tries": "bad"}, '{"job": 1, "tr']
        self.play(monkeypatch, asked, (first, "code 139"), ([self.done(0, 3.0), self.done(1, 4.0)], ""))
        found = cudnn.times(self.JOBS, 1, 60, tmp_path)
        assert found == {job: Best(us, "p") for job, us in zip(self.JOBS, (2.0, 3.0, 4.0), strict=True)}
        assert asked[1].jobs == tuple(self.JOBS[1:]) and asked[1].skip == {(self.JOBS[1], "bad")}

    @pytest.mark.parametrize("lines", [[], [{"job": 0, "tries": "p"}]])
    def test_a_process_that_never_gets_anywhere_is_not_begun_for_ever(
        self, lines: list[Any], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.play(monkeypatch, asked, (lines, "no driver"))
        assert cudnn.times(self.JOBS, 1, 60, tmp_path) == dict.fromkeys(self.JOBS, "no driver")
        assert len(asked) == (cudnn.RESTARTS if lines else 1)

    def test_without_time_nothing_is_begun(
        self, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.play(monkeypatch, asked, ([], ""))
        assert cudnn.times(self.JOBS, 1, 5, tmp_path) == {} and not asked


ONCE, TWICE = SMALL, Convolution(1, 16, 9, 7, 16, 1, 1)
FOUND = convolutions.Found({ONCE: 1, TWICE: 2}, 1, ["Conv 'a': no"])
TIMES: dict[Job, Best | str] = {Job(ONCE): Best(3.0, "p"), Job(TWICE): Best(2.0, "q")}


def measured(network: str = "net", **more: Any) -> dict[str, Any]:
    own = {"cudnn_us": 9.0, "compile_us": 6.0, "best_us": 6.0, "ratio": 0.6, "sites": 1, "candidates": 2}
    plain = {"cudnn_us": 20.0, "compile_us": 10.0, "best_us": 10.0}
    return {"network": network, "batch": 1, "variants": {"plain": plain, "default": own}, "failures": {}} | more


class TestBare:
    def test_the_sum_counts_each_as_often_as_it_occurs(self) -> None:
        row = network_bare.summed(FOUND, TIMES, True)
        assert (row["us"], row["convolutions"], row["distinct"], row["left_out"]) == (7.0, 3, 2, 2)
        assert [(s["bare_us"], s["occurrences"], s["plan"]) for s in row["shapes"]] == [(3.0, 1, "p"), (2.0, 2, "q")]
        assert "reason" not in row and "shapes" not in network_bare.summed(FOUND, TIMES, False)

    @pytest.mark.parametrize(
        ("found", "times", "words"),
        [
            (FOUND, {Job(ONCE): Best(3.0, "p")}, "1 of 2 sizes were not reached.*--bare"),
            (FOUND, TIMES | {Job(TWICE): "no plan"}, "1 of 2 sizes .*1x16x9x7.*no plan"),
            (FOUND, {Job(ONCE): "none", Job(TWICE): "none"}, "^none$"),
            (convolutions.Found(), {}, "no 2-D"),
        ],
    )
    def test_a_sum_that_lacks_something_is_none(self, found: Any, times: Any, words: str) -> None:
        row = network_bare.summed(found, times, True)
        assert row["us"] is None
        with pytest.raises(CutefuseError, match=words):
            raise CutefuseError(row["reason"])

    def test_rows_get_their_sums_and_each_size_is_timed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(cudnn, "times", lambda jobs, *more: asked.append((jobs, *more)) or TIMES)
        tasks = [Task(name, 1, (), tmp_path) for name in ("a", "b", "failed")]
        for task in tasks[:2]:
            task.own_folder.mkdir()
            node = conv("y", "w"), conv("z", "v", x="y", pads=[1, 1, 1, 1])
            onnx.save(model(*node, x=(1, 8, 9, 7), w=(16, 8, 3, 3), v=(16, 16, 1, 1)), str(task.plain))
        rows = [measured("a"), measured("b"), {"network": "failed", "batch": 1, "failure": "no"}]
        times = {Job(SMALL): Best(3.0, "p"), Job(Convolution(1, 16, 7, 5, 16, 1, 1, pads=(1, 1, 1, 1))): Best(1.0, "q")}
        monkeypatch.setattr(cudnn, "times", lambda jobs, *more: asked.append((jobs, *more)) or times)
        network_bare.add(rows, tasks, 4, 60.0, tmp_path, False)
        assert [(jobs, more) for jobs, *more in asked] == [(list(times), [4, 60.0, tmp_path])]
        assert rows[0]["bare"]["us"] == 4.0 and rows[1]["variants"]["default"]["over_bare"] == 1.5
        assert "bare" not in rows[2] and "over_bare" not in rows[0]["variants"]["plain"]


class TestTables:
    def rows(self) -> list[dict[str, Any]]:
        full = measured("full", bare={"us": 8.0, "left_out": 1})
        full["variants"]["default"]["over_bare"] = 0.75
        without = {"us": None, "left_out": 0, "reason": "no package"}
        return [full, measured("lacks", bare=without), measured("lacks_too", bare=without)]

    def test_the_last_columns_are_the_sum_and_what_is_ours_over_it(self) -> None:
        head, *lines = network_table.lines(self.rows())
        assert head[-2:] == ["bare", "over bare"]
        assert [line[-2:] for line in lines] == [["8", "0.75"], ["n/a", "n/a"], ["n/a", "n/a"]]
        said = network_table.remarks(self.rows())
        assert sum("no package" in text for text in said) == 1 and any(
            "lacks b1, lacks_too b1" in text for text in said
        )
        assert any("over bare convolutions: geometric mean 0.750 over 1" in text for text in said)
        assert any("1 Convs are not in the sum (full b1)" in text for text in said)
        assert "|full|10|6|0.60|8|0.75|" in network_table.short(self.rows())

    def test_rows_of_a_run_without_it_have_no_such_columns(self) -> None:
        assert "bare" not in network_table.text([measured()], True) + network_table.short([measured()])
        facts = {"gpu": "G", "torch": "2", "cudnn": 91900}
        assert "bare" not in "".join(page.networks([measured() | facts]))

    def test_the_page_shows_it_for_the_batches_that_have_it(self) -> None:
        lines = page.networks([*self.rows(), measured("full") | {"batch": 8}])
        assert lines[0].startswith("|network|plain, 1|patched, 1|ratio, 1|bare, 1|over bare, 1|plain, 8|")
        assert lines[2] == "|full|10|6|0.600|8|0.75|10|6|0.600|"
        assert lines[3] == "|lacks|10|6|0.600|n/a|n/a|-|-|-|"


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--bare", "60", "--limit-s", "60"], "--limit-s"),
            (["--bare", "0"], "--bare 0"),
            (["--bare", "--device", "cpu"], "--device cpu"),
        ],
    )
    def test_what_cannot_be_is_refused(self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert networks.main(["--networks", "unet", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line

    def test_convolutions_are_listed_without_a_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        onnx.save(model(conv("y"), conv("z"), w=(16, 8, 3, 3)), str(tmp_path / "mine.onnx"))
        assert networks.main(["--networks", f"{tmp_path}/mine.onnx", "--list"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == "mine.onnx b2: 1 distinct of 2 convolutions, 0 left out"
        assert second.split() == "2 2x8x9x7 -> 16, 3x3 0.000 GFLOP".split()

    def test_the_networks_get_the_time_that_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        monkeypatch.setattr(networks.pool, "run", lambda *a: given.append(a[4]) or [(a[1][0], measured("unet"), "")])
        monkeypatch.setattr(networks.network_bare, "add", lambda *a: given.append(a[3]) or a[0][0].update(bare={}))
        args = networks.parse(["--networks", "unet", "--batch", "1", "--limit-s", "100", "--bare", "30"])
        args.json = tmp_path / "rows.json"
        (row,) = networks.measure(args, tmp_path)
        assert given == [70.0, 30.0] and json.loads(args.json.read_text())[0]["bare"] == row["bare"] == {}


class TestLayers:
    """The peers of benchmarks/concat_conv.py."""

    def test_a_problem_is_asked_for_on_the_concatenation(self) -> None:
        from problems import Problem

        from benchmarks.lib import peers

        problem = Problem(2, 9, 7, (5, 3), 16, 3, 1, (2, 1), (1, 0, 2, 0), (1, 2), "Silu", residual="after")
        conv = Convolution(2, 8, 9, 7, 16, 3, 1, (2, 1), (1, 0, 2, 0), (1, 2))
        assert peers._job(problem, False) == Job(conv)
        assert peers._job(problem, True) == Job(conv, True, "Silu", "after")

    def test_without_the_package_both_are_left_out_in_one_sentence(
        self, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from benchmarks.lib import peers

        monkeypatch.setitem(sys.modules, "cudnn", None)
        assert peers.build_cudnn(["ours", "eager"], [], 1, 1.0) == {}
        found = peers.build_cudnn(["ours", "cudnn_bare", "cudnn_fused"], [], 1, 1.0)
        assert list(found) == ["cudnn_bare", "cudnn_fused"] and "nvidia-cudnn-frontend" in found["cudnn_bare"]

    def test_plans_are_compiled_once_for_all_shapes(self, frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
        from problems import Problem

        from benchmarks.lib import peers

        asked: list[Any] = []
        monkeypatch.setattr(peers, "_PLANS", {})
        monkeypatch.setattr(cudnn, "compiled", lambda jobs, *more: asked.append(jobs) or {Job(SMALL): {"p": b""}})
        shapes = [Problem(1, 9, 7, (4, 4), 16, 3, 3), Problem(1, 9, 7, (8,), 8)]
        assert peers.build_cudnn(["cudnn_bare", "cudnn_fused"], shapes, 1, 1.0) == {}
        assert [(j.conv.K, j.fused) for j in asked[0]] == [(16, False), (8, False), (16, True), (8, True)]
        assert peers._PLANS == {Job(SMALL): {"p": b""}}

    def test_every_peer_can_be_drawn(self) -> None:
        from benchmarks.lib import peers, plots

        assert {*peers.NAMES} <= {*plots.LABELS}

    def test_other_types_are_refused(self) -> None:
        from benchmarks.lib import peers

        with pytest.raises(CutefuseError, match="float32"):
            peers.cudnn_plan(types.SimpleNamespace(dtype="float32"), "cudnn_bare")  # type: ignore[arg-type]


ODD = Convolution(2, 19, 23, 17, 35, 3, 3, (2, 1), (1, 2, 1, 2))
DILATED = Convolution(1, 3, 31, 29, 17, 3, 5, (1, 2), (2, 0, 1, 3), (2, 1))


@pytest.mark.torch
@pytest.mark.parametrize("conv", [ODD, DILATED, Convolution(1, 12, 9, 8, 6, 3, 3, pads=(1, 1, 1, 1), groups=3)])
def test_plans_are_judged_by_what_onnx_computes(conv: Convolution) -> None:
    first, second = cudnn.operands(Job(conv, True, "Relu", "after"), 2, "cpu")
    assert first[cudnn.W] is second[cudnn.W] and not first[cudnn.X].equal(second[cudnn.X])
    assert first[cudnn.X].stride() == (conv.C * conv.H * conv.W, 1, conv.C * conv.W, conv.C)
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], strides=conv.strides, pads=conv.pads, dilations=conv.dilations, group=conv.groups
    )
    values = {name: first[uid].double().numpy() for name, uid in (("x", cudnn.X), ("w", cudnn.W))}
    (y,) = ReferenceEvaluator(node).run(None, values)
    assert y.shape == conv.output
    bias, residual = (first[uid].double().numpy() for uid in (cudnn.BIAS, cudnn.RESIDUAL))
    jobs = {
        Job(conv): y,
        Job(conv, True, "Relu", "after"): (y + bias).clip(0) + residual,
        Job(conv, True, "Relu", "before"): (y + bias + residual).clip(0),
    }
    for job, exact in jobs.items():
        assert abs(cudnn.computed(job, first).double().numpy() - exact).max() < 1e-4, job


@pytest.mark.torch
class TestCandidates:
    """On the CPU: a plan is a word that says what it does, and `us` how long it takes."""

    us = {"good": 2.0, "better": 1.0, "slow": 9.0, "wrong": 0.1, "late": 1.2}

    @pytest.fixture(autouse=True)
    def played(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        us = self.us

        class Plan:
            def __init__(self, job: Job, name: str) -> None:
                self.job, self.name = job, name

            def run(self, given: Any) -> None:
                if self.name == "fails":
                    raise RuntimeError("not supported\nmore")
                if self.name != "silent":
                    given[cudnn.Y].copy_(cudnn.computed(self.job, given) + (self.name == "wrong") * 0.01)

        monkeypatch.setattr(cudnn, "gpu", lambda: types.SimpleNamespace(cudnn=None, handle=None))
        monkeypatch.setattr(cudnn, "planned", lambda *_, **__: (None, self.names))
        monkeypatch.setattr(cudnn.Source, "make", lambda source, name: Plan(source.job, name))
        monkeypatch.setattr(cudnn, "operands", partial(cudnn.operands, device="cpu"))
        monkeypatch.setattr(cudnn, "_rough_us", lambda launch, sets: us[launch.args[0].name])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        self.names = ["good", "fails", "slow", "silent", "better", "wrong", "late"]

    def test_those_that_are_right_and_near_the_fastest_stay(self) -> None:
        noted: list[str] = []
        found = cudnn.candidates(Job(SMALL), {}, 2, ["late"], noted.append)
        assert list(found) == ["better"] and noted == [n for n in self.names if n != "late"]
        assert list(cudnn.candidates(Job(SMALL), {}, 1)) == ["better", "late"]
        found["better"](1)  # the second set

    def test_odd_channels_compete_in_both_forms(self) -> None:
        self.names = ["better", "late"]
        found = cudnn.candidates(Job(Convolution(1, 3, 9, 7, 8, 3, 3)), {}, 1)
        assert sorted(found) == ["better", "better, padded", "late", "late, padded"]

    @pytest.mark.parametrize("names", [["wrong"], ["silent"], ["fails"], []])
    def test_without_a_right_one_there_is_a_reason(self, names: list[str]) -> None:
        self.names = names
        with pytest.raises(CutefuseError, match="no plan of cuDNN"):
            cudnn.candidates(Job(SMALL), {}, 1)

    def test_a_plan_that_breaks_the_gpu_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        def broken() -> None:
            raise RuntimeError("illegal memory access")

        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            cudnn.candidates(Job(SMALL), {}, 1)

    def test_the_best_is_chosen_in_turns_and_what_happened_is_journalled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from cutefuse.engines.pytorch import tile_times

        class Repeated:
            def __init__(self, work: Any, effort: Any) -> None:
                work()

        turns: list[list[int]] = []

        def in_turns(graphs: Any, rounds: int) -> Any:
            turns.append(list(graphs))
            return {i: 5.0 - i for i in graphs}  # in a graph the later one is the faster

        monkeypatch.setattr(tile_times, "Repeated", Repeated)
        monkeypatch.setattr(tile_times, "in_turns", in_turns)
        monkeypatch.setattr(cudnn.timing, "l2_bytes", lambda: 1 << 20)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        (tmp_path / "plans").write_bytes(pickle.dumps({}))
        odd = Job(SMALL, True, "Clip")
        monkeypatch.setattr(cudnn, "planned", self.refuse_fused)
        jobs = (Job(SMALL), odd)
        task = cudnn.Measuring(jobs, tmp_path / "plans", tmp_path / "j", frozenset(), time.monotonic() + 60)
        cudnn.measure(task, None)  # type: ignore[arg-type]
        found: dict[Job, Best | str] = {}
        assert cudnn._read(task, found) is None
        assert found[Job(SMALL)] == Best(4.0, "late") and turns == [[0, 1], [1]]
        assert "no plan" in found[odd] and "\n" not in found[odd]  # type: ignore[operator]
        cudnn.measure(replace(task, until=0.0), None)  # type: ignore[arg-type]
        gc.unfreeze()
        assert task.journal.read_text() == ""

    def refuse_fused(self, package: Any, job: Job, **where: Any) -> Any:
        if job.fused:
            raise CutefuseError("no Clip")
        return None, self.names


@pytest.mark.gpu
class TestGpu:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("torch")  # first: it brings cuDNN
        pytest.importorskip("cudnn")

    @pytest.mark.parametrize("conv", [ODD, DILATED])
    @pytest.mark.parametrize(
        ("fused", "activation", "residual"), [(False, "", ""), (True, "Silu", ""), (True, "Relu", "before")]
    )
    def test_every_candidate_is_near_float64(
        self, conv: Convolution, fused: bool, activation: str, residual: str
    ) -> None:
        import torch
        import torch.nn.functional as F

        job = Job(conv, fused, activation, residual)
        launches = cudnn.candidates(job, {}, 1)
        assert launches
        for name, launch in launches.items():
            (given,) = launch.args[1]  # type: ignore[attr-defined]
            given[cudnn.Y].fill_(float("nan"))
            launch(0)
            torch.cuda.synchronize()
            exact = {uid: t.cpu().double() for uid, t in given.items()}
            top, left, bottom, right = conv.pads
            x = F.pad(exact[cudnn.X], (left, right, top, bottom))
            y = F.conv2d(x, exact[cudnn.W], None, conv.strides, 0, conv.dilations, conv.groups)
            if fused:
                y = y + exact[cudnn.BIAS] + (exact[cudnn.RESIDUAL] if residual else 0)
                y = F.silu(y) if activation == "Silu" else F.relu(y)
            error = (exact[cudnn.Y] - y).abs()
            assert bool((error <= 1e-2 * (1 + y.abs())).all()), (name, float(error.max()))

    def test_processes_compile_and_one_measures(self, tmp_path: Path) -> None:
        jobs = [Job(ODD), Job(DILATED, True, "Silu")]
        plans = cudnn.compiled(jobs, 2, time.monotonic() + 60, tmp_path / "build")
        assert plans[Job(ODD)]
        found = cudnn.times(jobs, 2, 120, tmp_path)
        assert all(isinstance(best, Best) and 0.5 < best.time_us < 1000 for best in found.values()), found
        assert list(found) == jobs
