"""What the report says of embedded engines on a CPU, of patched models, and of times with outliers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import engine_files as ef
import pytest
from test_report_rank import net

from cutefuse.engines.kinds import is_row_norm
from cutefuse.report.analyse.compare import compare
from cutefuse.report.analyse.findings import Finding, findings
from cutefuse.report.analyse.tables import analyse, compare_terminal
from cutefuse.report.read.reader import Engine, find_engines, read_engine
from cutefuse.report.write import write, write_compare
from cutefuse.roofline.peaks import by_name
from cutefuse.table import time_text

SITE = "/neck/Conv"


def conv(name: str, source: str, out: str, node: str) -> dict[str, Any]:
    layer = ef.conv(name, ef.tensor(source, [1, 16, 8, 8]), ef.tensor(out, [1, 16, 8, 8]))
    return layer | {"TacticName": "CPUExecutionProvider", "Metadata": f"[ONNX Layer: {node}]"}


def concat(name: str, out: str, node: str) -> dict[str, Any]:
    return {
        "Name": name, "LayerType": "Concat", "ParameterType": "Concatenation", "Metadata": f"[ONNX Layer: {node}]",
        "Inputs": [ef.tensor("s", [1, 8, 8, 8])] * 2, "Outputs": [ef.tensor(out, [1, 16, 8, 8])],
    }  # fmt: skip


def engine(
    folder: Path, layers: list[dict[str, Any]], *, backend: str = "onnxruntime", patched: bool = False,
    latencies_ms: list[float] | None = None, medians: list[float] | None = None, **inference: str,
) -> Engine:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "m.onnx.engine"
    profile: list[dict[str, Any]] = [{"count": 10}]
    for i, layer in enumerate(layers):
        record = {"name": layer["Name"], "timeMs": 1.0, "averageMs": 0.1, "percentage": 1}
        profile.append(record | ({"medianMs": medians[i]} if medians else {}))
    files = {
        "graph": {"Layers": layers}, "profile": profile,
        "timing": [{"latencyMs": t} for t in latencies_ms or [0.1] * 30],
        "profile.metadata": {"backend": backend, "inference_options": inference},
    }  # fmt: skip
    for name, data in files.items():
        Path(f"{stem}.{name}.json").write_text(json.dumps(data))
    if patched:
        site = {"name": SITE, "status": "fused", "op_type": "CuteConcatConv2Relu", "nodes": ["/cat", SITE]}
        (folder / "m.patch.json").write_text(json.dumps({"model": "m.onnx", "output": "m.onnx", "sites": [site]}))
    return read_engine(find_engines(folder)[0])


def found(given: Engine) -> dict[str, Finding]:
    return {f.title: f for f in findings(given, [None] * len(given.layers))}


BODY = [concat("Concat_1", "t", SITE), conv("FusedConv_2", "t", "y", SITE)]
BY_NAME = [
    concat("Concat_1", "_inlfunc_CuteConcatConv2Relu_t", ""),
    conv("c", "_inlfunc_CuteConcatConv2Relu_t", "y", ""),
]
COPIED = "Concatenations are copied in front of convolutions"
BODIES = "Fused nodes run as function bodies"


@pytest.mark.parametrize("case", ["patch report", "tensor names"])
def test_the_concat_of_a_function_body_is_no_reason_to_patch(case: str, tmp_path: Path) -> None:
    given = engine(tmp_path, BODY if case == "patch report" else BY_NAME, patched=case == "patch report")
    assert given.runs_bodies and COPIED not in found(given)
    assert found(given)[BODIES].layers == [0, 1]


def inside(name: str, source: str, out: str, **more: Any) -> dict[str, Any]:
    return ef.conv(name, ef.tensor(source, [1, 8, 8, 8]), ef.tensor(out, [1, 8, 8, 8]), **more)


def patched_twice(folder: Path, layers: list[dict[str, Any]]) -> Engine:
    """An engine of TensorRT without the library: the bodies of /one and /two, of one op_type, became layers."""
    ef.write_engine(folder, "net.cutefuse.onnx", layers, [10.0] * len(layers))
    sites = [
        {"name": n, "status": "fused", "op_type": "CuteF", "nodes": [f"{n}/Concat", n], "outputs": [out]}
        for n, out in (("/one", "a"), ("/two", "b"))
    ]
    report = {"input": {"path": "net.onnx"}, "output": {"path": "net.cutefuse.onnx"}, "sites": sites}
    (folder / "net.cutefuse.patch.json").write_text(json.dumps(report))
    return read_engine(find_engines(folder)[0])


@pytest.mark.parametrize("told", ["metadata", "tensors"])
def test_layers_of_an_inlined_body_lead_back_to_the_fused_node(told: str, tmp_path: Path) -> None:
    def meta(inner: str, call: str) -> dict[str, Any]:
        return {"Metadata": f"[ONNX Layer: {inner}{f' | {call} (CuteF)' if told == 'metadata' else ''}]"}

    layers = [
        inside("node_of___cutefuse_t1", "x", "m1", **meta("node_of___cutefuse_t1", "/one")),
        inside("node_of___cutefuse_y0", "m1", "a", **meta("node_of___cutefuse_y0", "/one")),
        inside("node_of___cutefuse_t1_7", "a", "m2", **meta("node_of___cutefuse_t1", "/two")),
        {**inside("node_of___cutefuse_y0_8", "m2", "b", **meta("node_of___cutefuse_y0", "/two")),
         "LayerType": "PointWise", "ParameterType": "PointWise"},
        inside("/head/Conv", "b", "y"),
    ]  # fmt: skip
    given = patched_twice(tmp_path, layers)
    assert [la.onnx[0] for la in given.layers] == ["/one", "/one", "/two", "/two", "/head/Conv"]
    assert [la.title for la in given.layers] == ["/one", "/one", "/two", "/two/PointWise", "/head/Conv"]
    page = write(tmp_path, tmp_path / "out", quiet=True).read_text()
    assert 'title="/two/PointWise"' in page and "<title>/one</title>" in page
    assert "node_of___cutefuse_t1_7" in (tmp_path / "out/net.cutefuse.onnx.engine.layers.csv").read_text()


def test_a_body_that_makes_nothing_known_keeps_its_own_names(tmp_path: Path) -> None:
    layers = [inside("node_of___cutefuse_t1", "x", "m1"), inside("node_of___cutefuse_y0", "m1", "elsewhere")]
    given = patched_twice(tmp_path, layers)
    assert [la.title for la in given.layers] == [la.name for la in given.layers]
    assert not {"/one", "/two"} & {n for la in given.layers for n in la.onnx}


def test_a_concat_beside_the_fused_nodes_is_told_without_advice_to_patch_again(tmp_path: Path) -> None:
    given = engine(tmp_path, [*BODY, concat("cat2", "u", "/cat2"), conv("c2", "u", "z", "/c2")], patched=True)
    finding = found(given)[COPIED]
    assert finding.layers == [2] and "patched already" in finding.advice
    plain = found(engine(tmp_path / "plain", [concat("cat2", "u", "/cat2"), conv("c2", "u", "z", "/c2")]))
    assert "Run `cutefuse patch`" in plain[COPIED].advice and BODIES not in plain


def test_on_a_gpu_nothing_is_a_body(tmp_path: Path) -> None:
    given = engine(tmp_path, BODY, backend="tensorrt", patched=True)
    assert not given.runs_bodies and "0 of 1 fused nodes run as plugins" in found(given)


UNSTEADY = [0.1] * 25 + [9.0] * 5


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_advice_about_clocks_and_graphs_is_for_gpus(backend: str, tmp_path: Path) -> None:
    layers = [conv(f"c{i}", f"t{i}", f"t{i + 1}", f"/c{i}") for i in range(8)]
    given = engine(tmp_path, layers, backend=backend, latencies_ms=UNSTEADY, medians=[0.004] * 8)
    words = " ".join(f.text + f.advice for f in found(given).values())
    assert "Latency is unsteady" in found(given) and "Layer times do not add up to the latency" in found(given)
    for word in ("clocks", "CUDA graphs", "spin wait"):
        assert (word in words) == (backend == "tensorrt"), word


@pytest.mark.parametrize(("graphs", "advised"), [("Enabled", False), ("Disabled", True)])
def test_cuda_graphs_are_advised_where_they_are_off(graphs: str, advised: bool, tmp_path: Path) -> None:
    layers = [conv(f"c{i}", f"t{i}", f"t{i + 1}", f"/c{i}") for i in range(8)]
    given = engine(tmp_path, layers, backend="torch", medians=[0.004] * 8, **{"CUDA Graph": graphs})
    assert ("CUDA graphs" in found(given)["8 tiny layers"].advice) == advised


@pytest.mark.parametrize(
    ("layer_type", "name", "ours"),
    [
        ("LayerNormalization", "ln", True), ("SkipLayerNormalization", "s", True), ("RMSNormalization", "r", True),
        ("Normalization", "/encoder/norm1/LayerNorm", True), ("BatchNormalization", "BatchNormalization_3", False),
        ("Scale", "/features/norm0/BatchNormalization", False), ("InstanceNormalization", "i", False),
        ("GroupNorm", "g", False), ("LRN", "norm", False), ("Reduce", "/head/ReduceMean", False),
        ("LpNormalization", "l", False),
    ],
)  # fmt: skip
def test_a_batchnorm_is_no_norm_that_patch_replaces(layer_type: str, name: str, ours: bool, tmp_path: Path) -> None:
    assert is_row_norm(layer_type, name) == ours
    norm = conv(name, "a", "b", name) | {"LayerType": layer_type, "ParameterType": layer_type, "TacticName": "t"}
    titles = found(engine(tmp_path, [norm], backend="tensorrt"))
    assert any("normalisation layer" in t for t in titles) == ours


def test_one_outlier_does_not_rule_a_ranking(tmp_path: Path) -> None:
    layers = [conv("steady", "a", "b", "/a"), conv("once", "b", "c", "/b")]
    given = engine(tmp_path, layers, medians=[0.02, 0.005])  # means of 0.1 each
    assert [layer.time_us for layer in given.layers] == [20, 5] and given.total_us == 25
    assert [layer.mean_us for layer in given.layers] == [100, 100]
    assert given.layers[0].sources["time"].endswith("[1].medianMs")
    page = write(tmp_path, tmp_path / "out", quiet=True).read_text()
    assert "medianMs" in page and "averageMs" not in page
    only_means = engine(tmp_path / "old", layers)
    assert [layer.time_us for layer in only_means.layers] == [100, 100]
    assert only_means.layers[0].sources["time"].endswith("[1].averageMs")


def test_a_comparison_says_that_function_bodies_are_no_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = engine(tmp_path / "a", [concat("cat", "t", "/cat"), conv("c", "t", "y", SITE)])
    bodies = engine(tmp_path / "b", BODY, patched=True)
    assert "no measure of the kernels" in compare_terminal(compare([plain, bodies]))
    write_compare([tmp_path / "a", tmp_path / "b"], tmp_path / "compare.html")
    page = (tmp_path / "compare.html").read_text()
    assert "no measure of the kernels" in page and 'class="tile bad"' not in page
    assert "no measure of the kernels" in capsys.readouterr().out
    assert compare([plain, plain]).caution == ""
    on_gpu = engine(tmp_path / "c", BODY, backend="tensorrt", patched=True)
    assert "bodies" not in compare([plain, on_gpu]).caution


def section(page: str, name: str) -> str:
    found = re.search(rf'<section [^>]*id="{name}">.*?</section>', page, re.S)
    return found[0] if found else ""


def test_layers_above_the_roof_are_among_those_that_it_shows(tmp_path: Path) -> None:
    """Copies compute nothing: they are placed by their bytes, and are no dot."""
    layers = [conv(f"c{i}", f"t{i}", f"t{i + 1}", f"/c{i}") for i in range(3)]
    copies = [ef.copy(f"r{i}", ef.tensor(f"t{i}", [1, 16, 8, 8]), ef.tensor(f"u{i}", [1, 16, 8, 8])) for i in range(5)]
    engine(tmp_path, [*layers, *copies], backend="tensorrt", medians=[1e-6] * 2 + [1.0] + [1e-6] * 5)
    page = write(tmp_path, tmp_path / "out", quiet=True, peaks="H200").read_text()
    shown, over = map(int, re.findall(r"(\d+) (?:layers that compute|of them above)", section(page, "roofline")))
    assert (shown, over) == (3, 2) and page.count('<circle class="dot"') == 3


@pytest.mark.parametrize(("heavy_us", "judged"), [(1.0, True), (900.0, False)])
def test_a_roof_that_most_of_the_time_is_not_under_is_not_shown(heavy_us: float, judged: bool, tmp_path: Path) -> None:
    layers = [conv("c0", "a", "b", "/c0"), {"Name": "m", "LayerType": "Myelin", "Inputs": [], "Outputs": []}]
    engine(tmp_path, layers, backend="tensorrt", medians=[0.1, heavy_us / 1000])
    page = write(tmp_path, tmp_path / "out", quiet=True, peaks="H200").read_text()
    assert bool(section(page, "roofline")) is judged and ("of the roof, over all" in page) is judged


def test_a_roof_that_the_whole_engine_exceeds_gives_no_figure(tmp_path: Path) -> None:
    engine(tmp_path, [conv("c0", "a", "b", "/c0")], medians=[1e-6])
    page = write(tmp_path, tmp_path / "out", quiet=True, peaks="H200").read_text()
    assert "of the roof, over all" not in page and section(page, "roofline")


def test_a_cpu_gets_no_advice_about_its_roof(tmp_path: Path) -> None:
    for backend in ("onnxruntime", "tensorrt"):
        given = engine(tmp_path / backend, [conv("c0", "a", "b", "/c0")], backend=backend)
        titles = [f.title for f in analyse(given, by_name("H200")).findings]
        assert ("Heavy layers far below the roof" in titles) == (backend == "tensorrt")


JUDGED = [
    {"name": "/up/Conv", "status": "left out", "operator": "concat_conv", "op_type": "", "dtype": "float16",
     "reason": "costs 1.2 us (its kernels take 3.4 us)", "nodes": ["/up/Conv"], "gain_us": -1.2, "bytes_saved": 0},
    {"name": "/stem/Conv", "status": "fused", "operator": "concat_conv", "op_type": "CuteConcatConv1Relu", "reason": "",
     "dtype": "float16", "nodes": ["/stem/Conv"], "gain_us": 4.25, "bytes_saved": 2_500_000, "outputs": ["a"]},
    {"name": "/side/Conv", "status": "fused", "operator": "concat_conv", "op_type": "CuteConcatConv1Relu", "reason": "",
     "dtype": "float16", "nodes": ["/side/Conv"], "gain_us": None, "bytes_saved": None},
]  # fmt: skip


def test_no_page_gives_a_node_two_verdicts(tmp_path: Path) -> None:
    """The profile says that /up/Conv would save 20 us, and `patch` left it out for costing 1.2."""
    plain, _ = ef.write_pair(tmp_path)
    model = net(tmp_path / "net.onnx")
    page = write(plain, tmp_path / "out", model, quiet=True).read_text()
    assert "/up/Conv" in section(page, "next") and f"patch {model} --profile {plain}" in section(page, "next")
    report = {"input": {"path": "o.onnx"}, "output": {"path": "net.onnx"}, "sites": JUDGED[:1]}
    (plain / "net.patch.json").write_text(json.dumps(report))
    page = write(plain, tmp_path / "again", model, quiet=True).read_text()
    assert "/up/Conv" not in section(page, "next") and "/up/Conv" in section(page, "fused")
    assert "1 sites that" in section(page, "next") or "/stem/Conv" in section(page, "next")


def test_fused_and_refused_says_what_each_site_gains(tmp_path: Path) -> None:
    _, patched = ef.write_pair(tmp_path)
    report = {**ef.PATCH_REPORT, "sites": JUDGED, "summary": {"gain_us": 4.25},
              "prediction": {"engine": "TensorRT 11.3", "gpu": "H200"}}  # fmt: skip
    (patched / "net.cutefuse.patch.json").write_text(json.dumps(report))
    fused = section(write(patched, tmp_path / "out", quiet=True).read_text(), "fused")
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(?=<td)(.*?)</tr>", fused)]
    assert [r[0] for r in rows] == ["/stem/Conv", "/side/Conv", "/up/Conv"]  # the most first, those left out last
    assert [r[3:6] for r in rows] == [["float16", "4.2", "2.50"], ["float16", "not known", ""],
                                      ["float16", "-1.2", ""]]  # fmt: skip
    assert "4.2 µs together" in fused and "TensorRT 11.3 on H200" in fused


@pytest.mark.parametrize(
    ("given", "text"), [(412.54, "412.5 µs"), (661651.0, "661.7 ms"), (2.6e6, "2.6 s"), (-39802.5, "-39.8 ms")]
)
def test_times_have_the_unit_that_fits(given: float, text: str) -> None:
    assert time_text(given) == text


def test_a_wide_graph_opens_on_the_layer_that_takes_the_input(tmp_path: Path) -> None:
    """Forty layers side by side read constants; one, far from the middle, reads the engine's input."""
    layers = [conv(f"c{i}", f"k{i}", f"t{i}", f"/c{i}") for i in range(40)]
    made = [{"Name": f"k{i}", "LayerType": "Constant", "Inputs": [], "Outputs": [ef.tensor(f"k{i}", [1, 16, 8, 8])]}
            for i in range(1, 40)]  # fmt: skip
    engine(tmp_path, [*layers, *made])
    page = write(tmp_path, tmp_path / "out", quiet=True).read_text()
    picture = page[page.index('id="graph"') - 200 :]
    width = float(picture.split('viewBox="0 0 ')[1].split(" ")[0])
    x, y = map(float, picture.split('data-start="')[1].split('"')[0].split(" "))
    node = picture.split('data-i="0" transform="translate(')[1].split(")")[0]
    assert width > 5000 and [x - 102, y] == [float(v) for v in node.split(" ")]


def test_times_of_seconds_do_not_run_together_in_a_comparison(tmp_path: Path) -> None:
    layers = [concat("cat", "t", "/cat"), conv("c", "t", "y", "/conv")]
    slow = engine(tmp_path / "a", layers, medians=[79.8, 2615.884])
    slower = engine(tmp_path / "b", layers, medians=[99.7, 3189.1565])
    text = compare_terminal(compare([slow, slower]))
    assert re.search(r"^ *2615884\.0 {2,}3189156\.5 {2,}-573272\.5 {2,}\S", text, re.M), text
