"""What the first command tells: the target, whose time, of how much, what float16 would do, the sites that matter."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from graphs import graph, weights
from onnx import helper, numpy_helper, parser

import models
from cutefuse import kernels
from cutefuse.commands import patch_words
from cutefuse.commands.patch import main
from cutefuse.engines.tensorrt import rtx
from cutefuse.match.conv import read as conv_facts
from cutefuse.rewrite.outlook import USUAL, USUAL_RTX, foresee
from cutefuse.rewrite.patch import Options, patch
from cutefuse.select.gain import Model
from cutefuse.select.times import device_of

pytestmark = pytest.mark.slow

LONE_NORM = "y = LayerNormalization<axis=-1>(a, w)"
ADDED_NORM = "s = Add(a, b) y = LayerNormalization<axis=-1>(s, w)"


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unet") / "unet.onnx"
    onnx.save(models.build("unet", "float32", batch=1, size=128), str(path))
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutefuse.commands.choices.local_sm", lambda: 0)
    monkeypatch.setattr("cutefuse.commands.choices.local_gpu", lambda: "")


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int | None = 0) -> list[str]:
    ended = main([str(word) for word in words])
    assert code is None or ended == code
    return capsys.readouterr().out.splitlines()


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    main([*map(str, words), "--json"])
    return dict(json.loads(capsys.readouterr().out))


# -------------------------------------------------------------------------------------------------------- float16
def test_a_float32_model_is_told_what_float16_would_do_with_the_command(
    unet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, unet, "--dry-run", "--sm", "90", "--exclude", "*up4*", code=None)
    (line,) = [line for line in lines if "the model is float32" in line]
    command = line.partition(": ")[2]
    assert command.endswith(f"{unet} --dry-run --sm 90 --exclude '*up4*' --dtype fp16")
    report = told(capsys, unet, "--dry-run", "--sm", "90", "--exclude", "*up4*", "--dtype", "fp16")
    assert f"would fuse {report['summary']['fused']} sites" in line  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["float16", "asked"])
def test_a_model_in_16_bits_or_one_that_is_converted_is_not(
    dtype: str, unet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, more = unet, ["--dtype", "fp16"]
    if dtype == "float16":
        source, more = tmp_path / "half.onnx", []
        onnx.save(models.build("unet", "float16", batch=1, size=64), str(source))
    lines = said(capsys, source, "--dry-run", "--sm", "90", *more, code=None)
    assert not any("is float32" in line for line in lines)


def test_float16_that_costs_time_or_cannot_be_written_is_not_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss is no saving, a command that ends in an error no advice, and nothing is said to stand above."""
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w) y = Relu(x)"
    lossy = graph(body, weights(w=(8, 16, 1, 1)), inputs={"a": "1,8,4,4", "b": "1,8,4,4"})
    recursive = onnx.ModelProto()
    recursive.CopyFrom(lossy)
    recursive.opset_import.add(domain="loc", version=1)
    recursive.graph.node.add(op_type="F", domain="loc", input=["y"], output=["z"])
    recursive.graph.output[0].name = "z"
    recursive.functions.append(
        helper.make_function(
            "loc",
            "F",
            ["p"],
            ["q"],
            [helper.make_node("F", ["p"], ["q"], domain="loc")],
            [helper.make_opsetid("loc", 1)],
        )  # fmt: skip
    )
    for name, model in ("lossy", lossy), ("recursive", recursive):
        source = tmp_path / f"{name}.onnx"
        onnx.save(model, str(source))
        for options, code in ((["--all"], 0), ([], 3)):
            lines = said(capsys, source, "--dry-run", "--gpu", "RTX 4090", *options, code=code)
            assert not any("float16" in line for line in lines), lines


# ---------------------------------------------------------------------------------------------------------- target
def test_an_assumed_target_is_said_first_and_others_stand_beside_it(
    unet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = said(capsys, unet, "--dry-run", "--dtype", "fp16", code=None)
    assert "H200" in first and "assumed" in first and "--gpu" in first and "--sm" in first
    there = [name for name in USUAL if not kernels.reject_device(device_of(0, name).sm)]
    assert there and all(any(line.strip().startswith(name) for line in rest) for name in there)


@pytest.mark.parametrize("here", [0, 90, 89])
def test_tensorrt_for_rtx_is_foretold_for_gpus_that_it_supports(
    here: int, unet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cutefuse.commands.choices.local_sm", lambda: here)
    monkeypatch.setattr("cutefuse.commands.choices.local_gpu", lambda: {90: "H200", 89: "L4"}.get(here, ""))
    report = told(capsys, unet, "--dry-run", "--dtype", "fp16", "--engine", "rtx", "--no-compile")
    targets = [t["gpu"] for t in report["prediction"]["targets"]]  # type: ignore[index]
    others = [name for name in USUAL_RTX if here != 89 and not kernels.reject_device(device_of(0, name).sm)]
    assert targets == ["L4" if here == 89 else "RTX 4090", *others]
    assert {device_of(0, gpu).sm for gpu in targets} <= set(rtx.CAPABILITIES)


@pytest.mark.parametrize("sm", [103, 110, 121])
def test_a_capability_without_a_known_board_names_none(sm: int, unet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_code(sm)
    first, *rest = said(capsys, unet, "--dry-run", "--dtype", "fp16", "--sm", str(sm), "--no-compile", code=None)
    assert f"{sm / 10}" in first and "--gpu" in first
    assert not any(word in line for line in (first, *rest) for word in ("Orin", "B200"))


@pytest.mark.parametrize("named", [["--sm", "90"], ["--gpu", "H100 NVL"]])
def test_a_named_target_stands_alone(named: list[str], unet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = said(capsys, unet, "--dry-run", "--dtype", "fp16", *named, code=None)
    assert first.startswith("target:") and "assumed:" not in first
    assert not any(name in line for line in rest for name in USUAL)


def test_further_gpus_are_compared_with_the_first(unet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_code(80)
    words = [unet, "--dry-run", "--dtype", "fp16", "--gpu", "H200", "--gpu", "L4", "--gpu", "A100"]
    report = told(capsys, *words)
    targets = report["prediction"]["targets"]  # type: ignore[index]
    assert [t["gpu"] for t in targets] == ["H200", "L4", "A100 SXM4 80GB"] and report["sm"] == 90
    assert len({t["fused"] for t in targets}) > 1 or len({t["gain_us"] for t in targets}) > 1
    for target in targets[1:]:
        alone = told(capsys, *words[:4], "--gpu", target["gpu"])["summary"]
        assert (alone["fused"], alone["gain_us"]) == (target["fused"], target["gain_us"])  # type: ignore[index]


def test_a_further_gpu_that_is_not_known_is_a_sentence(unet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(unet), "--dry-run", "--gpu", "H200", "--gpu", "Voodoo 2"]) == 2
    assert "'Voodoo 2' are not known" in capsys.readouterr().err


@pytest.mark.parametrize("network", ["yolov8n", "squeezenet1_1"])
def test_a_gpu_whose_tensor_cores_we_cannot_use_promises_no_more_than_hopper(network: str, tmp_path: Path) -> None:
    skip_without_code(100)
    source = tmp_path / "m.onnx"
    onnx.save(models.build(network, "float16", batch=1), str(source))
    gains = []
    for gpu in ("H200", "B200"):
        options = Options(dry_run=True, gpu=gpu, sm=device_of(0, gpu).sm)
        summary = patch(source, tmp_path / "o.onnx", options).report["summary"]
        gains.append((summary["gain_us"], summary["gain_us"] / summary["plain_us"]))
    assert gains[1][0] <= gains[0][0] and gains[1][1] <= gains[0][1]


def test_what_was_measured_for_one_gpu_is_not_foretold_for_others(unet: Path) -> None:
    options = Options(dry_run=True)
    result = patch(unet, unet.with_name("o.onnx"), options)
    assert len(foresee(unet, options, result, USUAL, measured=True)) == 1


# ------------------------------------------------------------------------------------------------------ whose time
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "H200"], ["TensorRT", "H200", "cuDNN", "never checked in TensorRT"]),
        (["--gpu", "RTX 4090", "--engine", "rtx", "--no-compile"], ["never checked in TensorRT for RTX"]),
        (["--gpu", "H100 NVL"], ["scaled to H100 NVL", "peak rates"]),
        (["--gpu", "H200", "--engine", "torch"], ["PyTorch", "cuDNN"]),
    ],
)
def test_a_prediction_says_of_how_much_in_which_engine_and_fitted_to_what(
    options: list[str], words: Sequence[str], unet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, unet, "--dry-run", "--dtype", "fp16", *options, code=None)
    start = next(i for i, line in enumerate(lines) if line.startswith("predicted:"))
    text = " ".join(lines[start : start + 2])
    assert all(word in text for word in words), text
    saved, whole, share = map(float, re.findall(r"([\d.]+) us saved of about ([\d.]+) us, ([\d.]+)%", text)[0])
    assert 0 < saved < whole and share == pytest.approx(100 * saved / whole, abs=1)
    assert ("never checked" in text) == ("torch" not in options)


@pytest.mark.parametrize("gpu", ["H200", "A100 SXM4 80GB", "RTX 4090"])
def test_the_parts_of_a_gain_add_up_in_the_report_and_in_the_sentence(gpu: str, tmp_path: Path) -> None:
    """The engine's kernels less ours, copies, merged convolutions, and the late start that was never named."""
    skip_without_code(device_of(0, gpu).sm)
    source = tmp_path / "m.onnx"
    onnx.save(models.build("googlenet", "float16", batch=1), str(source))
    options = Options(dry_run=True, gpu=gpu, sm=device_of(0, gpu).sm)
    sites = patch(source, tmp_path / "o.onnx", options).report["sites"]
    priced = [s for s in sites if s["gain_us"] is not None and s["gain_parts"]]
    assert priced
    for site in priced:
        assert sum(site["gain_parts"].values()) == pytest.approx(site["gain_us"], abs=0.01), site["name"]
    alone = [s for s in priced if s["status"] == "left out"]
    assert alone or gpu == "H200"
    for site in alone:
        theirs, ours = map(float, re.findall(r"kernels take ([\d.]+) us, ours ([\d.]+) us", site["reason"])[0])
        rest = [
            float(us) * (1 if less == "less" else -1)
            for us, less in re.findall(r"([\d.]+) us (less|more)", site["reason"])
        ]
        assert theirs - ours + sum(rest) == pytest.approx(site["gain_us"], abs=0.06 * (3 + len(rest))), site["reason"]
    assert any("late start" in s["reason"] for s in alone) or gpu != "H200"


def test_an_open_batch_is_one_image_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.onnx"
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w) y = Relu(x)"
    values = weights(dtype="float16", w=(64, 128, 1, 1))
    gains = []
    for batch in ("n", "1"):
        inputs = {"a": f"{batch},64,96,96", "b": f"{batch},64,96,96"}
        onnx.save(graph(body, values, inputs=inputs, dtype="float16"), str(source))
        report = told(capsys, source, "--dry-run", "--sm", "90")
        gains.append(report["sites"][0]["gain_us"])  # type: ignore[index]
        assert bool(report["assumed_shapes"]) == (batch == "n")
        assert any("batch is open" in line and "a:1x64x96x96" in line
                   for line in said(capsys, source, "--dry-run", "--sm", "90")) == (batch == "n")  # fmt: skip
    assert gains[0] == gains[1] is not None


@pytest.mark.parametrize("inputs", [{"a": "n,64,h,96", "b": "n,64,h,96"}, {"a": "n,64,96,96", "b": "n,64,96,v"}])
def test_other_open_axes_are_not_assumed(
    inputs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.onnx"
    values = weights(dtype="float16", w=(64, 128, 1, 1))
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w) y = Relu(x)"
    onnx.save(graph(body, values, inputs=inputs, dtype="float16"), str(source))
    report = told(capsys, source, "--dry-run", "--sm", "90")
    assert report["assumed_shapes"] == {} and report["sites"][0]["status"] == "left out"  # type: ignore[index]
    lines = said(capsys, source, "--dry-run", "--sm", "90", code=3)
    assert any("--input-shape" in line and "?" in line for line in lines)


@pytest.mark.parametrize("sizes", ["1,4096,1024", "1,64,64"])
def test_a_norm_without_a_neighbour_is_left_out_and_one_behind_an_add_is_priced(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, width = tmp_path / "m.onnx", int(sizes.split(",")[-1])
    values = weights(dtype="float16", w=(width,))
    for body, names in ((LONE_NORM, "a"), (ADDED_NORM, "ab")):
        onnx.save(graph(body, values, inputs=dict.fromkeys(names, sizes), dtype="float16", rank=3), str(source))
        (site,) = told(capsys, source, "--dry-run", "--sm", "90")["sites"]  # type: ignore[misc]
        pays = names == "ab" and sizes != "1,64,64"
        assert (site["status"], site["basis"]) == ("fused" if pays else "left out", "model"), site
        assert (site["gain_us"] > 0) == pays
        onnx.save(graph(body, values, inputs=dict.fromkeys(names, sizes), dtype="float16", rank=3), str(source))
        assert told(capsys, source, "--dry-run", "--sm", "90", "--all")["summary"]["fused"] == 1  # type: ignore[index]


# ------------------------------------------------------------------------------------------------------- the table
def test_a_norm_that_the_engine_computes_elsewhere_is_said_with_what_ours_takes() -> None:
    """The engine's part is nothing there, and the sum still adds up."""
    said = Model.sum_in_words({"our_kernels": -1.6, "neighbours": -1.5})
    assert re.findall(r"take ([\d.]+) us, ours ([\d.]+) us", said) == [("0.0", "1.6")] and "1.5 us more" in said
    assert "ours" not in Model.sum_in_words({"measured": 2.0})


def test_many_reasons_with_long_names_stay_on_the_first_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its 40 lines of 100 columns, the table has the others; an example is cut behind its sum."""
    monkeypatch.setattr(patch_words, "cause_of", lambda reason: reason.partition(":")[0])
    sums = "costs 1.5 us (the engine's kernels take 2.7 us, ours 4.2 us; Add '{}' would become a kernel of its own)"
    sites = [
        {"status": "refused", "name": "n" * 90, "gain_us": None, "reason": f"cause {i}: " + sums.format("a" * 300)}
        for i in range(9)
    ]
    lines = patch_words._groups(sites)
    assert sum(-(-len(line) // 100) for line in lines) <= 20 and lines[-1].startswith("3 more")
    assert all("ours 4.2 us" in line for line in lines[:-1])


@pytest.mark.long
@pytest.mark.parametrize("network", ["yolov8s", "smp_unet"])
def test_the_first_screen_is_forty_lines(network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / f"{network}.onnx"
    onnx.save(models.build(network, "float32", batch=1), str(source))
    lines = said(capsys, source, "--dry-run", "--dtype", "fp16", code=None)
    assert sum(-(-max(len(line), 1) // 80) for line in lines) <= 40, "\n".join(lines)
    table = lines[next(i for i, line in enumerate(lines) if "fused sites" in line) + 1 :]
    rows = [line for line in table[1:11] if re.match(r" +[\d.]+ +", line)]
    assert len(rows) == 10 and all(len(row) <= 80 for row in rows)
    gains = [float(row.split()[0]) for row in rows]
    assert gains == sorted(gains, reverse=True)
    assert len(said(capsys, source, "--dry-run", "--dtype", "fp16", "--verbose", code=None)) > 60


def test_what_stays_outside_is_counted_by_reason_with_one_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.onnx"
    body = " ".join(
        f"c{i} = Concat<axis=1>(a, b) x{i} = Conv<group={g}>(c{i}, {w}) y{i} = Relu(x{i})"
        for i, (g, w) in enumerate([(3, "g"), (3, "g"), (1, "w"), (1, "w"), (1, "w")])
    )
    values = weights(dtype="float16", w=(4, 24, 3, 3), g=(12, 8, 3, 3))
    inputs = {"a": "1,8,9,7", "b": "1,16,9,7"}
    onnx.save(graph(body, values, inputs=inputs, outputs=[f"y{i}" for i in range(5)], dtype="float16"), str(source))
    lines = said(capsys, source, "--dry-run", "--sm", "80", code=3)
    groups = [line for line in lines if re.match(r"\d+ (refused|left out|excluded), ", line)]
    assert sorted(int(line.split()[0]) for line in groups) == [2, 3], groups
    assert all("; as Conv_" in line for line in groups)


def test_names_keep_their_ends_and_lose_what_all_begin_with() -> None:
    short = patch_words._shortened("/backbone/layer1/layer1.0/conv1/Conv", 20)
    assert len(short) == 20 and short.startswith("/backb") and short.endswith("v1/Conv") and "..." in short
    assert patch_words._shortened("/a/Conv", 20) == "/a/Conv"
    assert patch_words._common(["/m/a.1/Conv", "/m/a.2/Conv", "/m/b/Conv"]) == "/m/"
    assert patch_words._common(["/m/a/Conv"]) == "" and patch_words._common(["Conv_1", "Conv_2"]) == ""


# ---------------------------------------------------------------------------------------------------------- verify
def sparse(path: Path, operator: str = "sparse.Conv3d") -> Path:
    """Two sites behind an operator that no runtime here knows, as BEVFusion's neck behind its sparse convolutions."""
    domain = operator.split(".")[0]
    body = (
        f"s = {operator}(p) b = {operator}(p) c = Concat<axis=1>(s, b) x = Conv<pads=[1,1,1,1]>(c, w) r = Relu(x) "
        "d = Concat<axis=1>(r, s) z = Conv(d, u) y = Relu(z)"
    )
    head = f'<ir_version: 9, opset_import: ["": 17, "{domain}": 1]> g (float[n,5] p) => (float[1,16,24,20] y)'
    model = parser.parse_model(f"{head} {{ {body} }}")
    values = weights(w=(32, 64, 3, 3), u=(16, 64, 1, 1))
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in values.items())
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    sized = [onnx.helper.make_tensor_value_info(t, onnx.TensorProto.FLOAT, [1, 32, 24, 20]) for t in ("s", "b")]
    model.graph.value_info.extend(sized)
    onnx.save(model, str(path))
    return path


LOWERED = [
    [],
    ["--dtype", "fp16"],
    ["--dtype", "fp16", "--scope", "sites"],
    ["--dtype", "bf16"],
    ["--no-functions"],
    ["--layout", "nhwc"],
]


@pytest.mark.parametrize("options", LOWERED, ids=" ".join)
def test_where_an_operator_is_not_known_each_site_is_proven_by_itself(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = sparse(tmp_path / "m.onnx")
    lines = said(capsys, source, "--all", "--verify", "--gpu", "H200", *options)
    assert any("site by site" in line and "2 of 2" in line for line in lines)
    assert any("no output was compared" in line and "Conv3d" in line for line in lines)
    proof = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    assert proof["passed"] and proof["outputs"] == [] and len(proof["sites"]) == 2 and proof["site_by_site"]


@pytest.mark.parametrize("options", LOWERED, ids=" ".join)
def test_a_wrong_site_fails_by_itself_too(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = conv_facts.pack, 16
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(np.asarray(w[:, ::-1]) if len(w) == wrong else w, *of))
    source = sparse(tmp_path / "m.onnx")
    assert main([str(source), "--all", "--verify", "--gpu", "H200", *options]) == 1
    assert "first at site 'Conv_6'" in capsys.readouterr().err
    assert not (tmp_path / "m.cutefuse.onnx").exists()


def test_a_model_that_fails_for_another_reason_is_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.onnx"
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) y1 = Relu(x) s = Shape(a) t = Reshape(y1, v) y = Relu(t)"
    values = weights(w=(12, 24, 3, 3), k=(12,)) | {"v": np.array([7, -1, 11, 13])}
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)", inputs={"a": "1,8,9,7", "b": "1,16,9,7"})
    bad = onnx.helper.make_node("Reshape", ["y", "v"], ["z"], name="bad")
    model.graph.node.append(bad)
    model.graph.initializer.append(numpy_helper.from_array(values["v"], "v"))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [None] * 4))
    onnx.save(model, str(source))
    assert body and main([str(source), "--all", "--verify", "--gpu", "H200"]) == 1
    assert "nothing is proven" in capsys.readouterr().err


def test_a_proof_tells_the_outputs_error_from_end_to_end_then_the_sites_and_what_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that amplifies rounding errors: its sites are judged apart, and the outputs' own error is told."""
    from test_verify import STEPS, stepping_model

    source = tmp_path / "m.onnx"
    onnx.save(stepping_model(STEPS), str(source))
    lines = said(capsys, source, "--all", "--verify", "--gpu", "H200")
    proof = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    own = next(o for o in proof["end_to_end"] if o["name"] == "y")["max_rel_error"]
    start = next(i for i, line in enumerate(lines) if line.startswith("verified with"))
    assert f"from end to end {own:.2g}" in lines[start] and "1 random input" in lines[start]
    assert "1 of 1 fused site" in lines[start + 1]
    assert any("function bodies" in line and "not the kernels" in line for line in lines[start:])
