"""Pages, findings, comparison and drawing of engines."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import engine_files as ef
import pytest

from cutefuse.commands.compare import main as compare_main
from cutefuse.commands.report import main
from cutefuse.engines.tensors import tensor_of
from cutefuse.report.analyse.compare import compare
from cutefuse.report.analyse.findings import Finding
from cutefuse.report.analyse.tables import analyse
from cutefuse.report.draw.layout import NODE_HEIGHT, NODE_WIDTH, layout
from cutefuse.report.read.graph import Edge, edges, memory_profile
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.report.write import write, write_compare
from cutefuse.roofline.peaks import by_device

DATA = Path(__file__).parent / "data" / "engines"


def read(path: Path) -> Any:
    return read_engine(find_engines(path)[0])


def found(path: Path) -> dict[str, Finding]:
    engine = read(path)
    return {f.title: f for f in analyse(engine, by_device(engine.device)).findings}


class Page(HTMLParser):
    """Checks that elements close, and collects what the page would load from outside."""

    VOID = {"meta", "input", "br", "link", "img", "hr", "path", "rect", "circle", "use"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert not self.stack, self.stack[-3:]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.stack.append(tag)
        if tag in ("script", "img", "iframe", "link", "source") and (values.get("src") or values.get("href")):
            self.outside.append(str(values))
        if values.get("id"):
            self.ids.append(str(values["id"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.handle_starttag(tag, attrs)
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag


def data_of(page: str) -> dict[str, Any]:
    return dict(json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]))  # type: ignore[index]


@pytest.mark.parametrize("folder", sorted(p.name for p in DATA.iterdir() if p.is_dir()))
def test_a_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path, folder: str) -> None:
    text = write(DATA / folder, tmp_path, quiet=True).read_text()
    page = Page(text)
    assert page.outside == [] and "@import" not in text and "url(" not in text
    assert len(page.ids) == len(set(page.ids)) and len(text) < 8e6
    for section in (
        "overview",
        "findings",
        "time",
        "roofline",
        "copies",
        "memory",
        "latency",
        "engine",
        "layers",
        "files",
    ):
        assert section in page.ids and f'href="#{section}"' in text


def test_no_dot_of_the_roofline_lies_on_the_name_of_a_line(tmp_path: Path) -> None:
    text = write(DATA / "resnet18-a100-fp16", tmp_path, quiet=True).read_text()
    (drawing,) = re.findall(r'<section [^>]*id="roofline">.*?</svg>', text, re.S)
    names = [m.start() for m in re.finditer('<text class="tick over"', drawing)]  # what is drawn last lies above
    assert len(names) >= 2 and min(names) > drawing.rindex('<circle class="dot"') > drawing.rindex('class="roof"')


def test_figures_of_the_page_are_those_of_the_files(tmp_path: Path) -> None:
    folder = DATA / "resnet18-a100-fp16"
    data = data_of(write(folder, tmp_path, quiet=True).read_text())
    records = json.loads((folder / "resnet.onnx.engine.profile.json").read_text())
    by_name = {r["name"]: r["averageMs"] * 1000 for r in records if "name" in r}
    columns = data["columns"]
    rows = [dict(zip(columns, r, strict=True)) for r in data["layers"]]
    assert len(rows) == 36
    for row in rows:
        if row["time_us"] is not None:
            assert row["time_us"] == pytest.approx(by_name[data["strings"][row["name"]]], rel=1e-4)
            assert row["from"].startswith("resnet.onnx.engine.profile.json › ")
    with (tmp_path / "resnet.onnx.engine.layers.csv").open() as file:
        table = list(csv.DictReader(file))
    assert sum(float(r["time_us"] or 0) for r in table) == pytest.approx(1016.832)
    assert all(r["layer_source"].startswith("resnet.onnx.engine.graph.json › Layers[") for r in table)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'&\x1b\ud800"
    layers = [ef.conv(evil, ef.tensor(evil, [1, 8, 4, 4]), ef.tensor("y", [1, 8, 4, 4]), TacticName=evil)]
    text = write(ef.write_engine(tmp_path, "n", layers, [5.0]), tmp_path, quiet=True).read_text()
    page = Page(text)
    assert page.outside == [] and "<img" not in text and "\x1b" not in text
    data = data_of(text)
    assert any(text.startswith("</script><img") for text in data["strings"])
    ElementTree.parse(tmp_path / "n.engine.graph.json.svg")


def test_commands_in_findings_are_code_and_nothing_else_is_let_through(tmp_path: Path) -> None:
    evil = "<img src=x>`"
    layers = [*ef.PLAIN[:5], ef.conv(f"/up/Conv{evil}", ef.tensor("cat", [1, 128, 8, 8]), ef.tensor("c", [1, 9, 8, 8]))]
    text = write(ef.write_engine(tmp_path, "n", layers, ef.PLAIN_US[:6]), tmp_path, quiet=True).read_text()
    assert "<code>cutefuse patch</code>" in text and "<img" not in text and Page(text).outside == []


def test_names_only_engines_get_a_page_without_a_graph(tmp_path: Path) -> None:
    names = [f"conv{i}" for i in range(5)]
    text = write(ef.write_engine(tmp_path, "n", names, [1.0] * 5), tmp_path, quiet=True).read_text()
    assert "names only" in text and 'id="view"' not in text


def test_an_engine_without_profile_is_drawn_without_times(tmp_path: Path) -> None:
    text = write(ef.write_engine(tmp_path, "n", ef.PLAIN), tmp_path, quiet=True).read_text()
    assert 'id="time"' not in text and 'id="engine"' in text


BIG = """
import re, sys, time
from pathlib import Path
import engine_files as ef
from cutefuse.report.write import write
folder = Path(sys.argv[1])
ef.write_engine(folder, "big", ef.chain(10_000), [1 + i % 37 for i in range(10_000)], 5.0)
start = time.process_time()  # a loaded machine takes longer, but not of the processor
page = write(folder, folder / "out", quiet=True, peaks="H200")
# Not getrusage: a process begins with its parent's peak there.
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(time.process_time() - start, peak_kib / 2**20, page.stat().st_size)
"""


@pytest.mark.slow
def test_ten_thousand_layers_are_reported_quickly_and_small(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    command = [sys.executable, "-c", BIG, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seconds, memory_gib, size_bytes = map(float, done.stdout.split())
    assert seconds < 20 and memory_gib < 1 and size_bytes < 8e6


# ---------------------------------------------------------------------------------------------------------- findings
def test_concat_copies_are_found_with_their_cost_and_nodes(tmp_path: Path) -> None:
    plain, patched = ef.write_pair(tmp_path)
    finding = found(plain)["Concatenations are copied in front of convolutions"]
    assert finding.severity == "high" and finding.cost_us == pytest.approx(20.0) and sorted(finding.layers) == [3, 4]
    assert "Concatenations are copied in front of convolutions" not in found(patched)


def test_the_plugin_count_is_a_finding(tmp_path: Path) -> None:
    _, patched = ef.write_pair(tmp_path)
    assert found(patched)["1 of 1 fused nodes run as plugins"].severity == "info"
    ef.write_engine(patched, "net.cutefuse.onnx", ef.PLAIN, ef.PLAIN_US)
    assert found(patched)["0 of 1 fused nodes run as plugins"].severity == "high"


def test_an_fp32_island_is_found_and_an_fp32_engine_has_none(tmp_path: Path) -> None:
    island = ef.conv(
        "island", ef.tensor("a", [1, 64, 8, 8], ef.FP32_LINEAR), ef.tensor("b", [1, 64, 8, 8], ef.FP32_LINEAR)
    )
    ef.write_engine(tmp_path / "a", "n", [*ef.PLAIN, island], [*ef.PLAIN_US, 12.0])
    assert any("FP32 island" in t for t in found(tmp_path / "a"))
    assert not any("island" in t for t in found(DATA / "resnet50-rtx3090-fp32"))


def test_bookkeeping_is_no_opaque_region(tmp_path: Path) -> None:
    """TrainStation layers hold data-dependent sizes (NVIDIA/TensorRT#3585)."""
    station = {"Name": "[trainstation1]", "LayerType": "TrainStation", "Inputs": [], "Outputs": []}
    write(ef.write_engine(tmp_path, "n", [*ef.PLAIN, station], [*ef.PLAIN_US, 200.0]), tmp_path / "out", quiet=True)
    assert not [t for t in found(tmp_path) if "opaque" in t]
    shares = json.loads((tmp_path / "out" / "n.engine.report.json").read_text())["time_us_by_kind"]
    assert shares["noop"] == pytest.approx(200.0) and "foreign" not in shares
    compiled = {**station, "Name": "m", "LayerType": "Myelin"}
    ef.write_engine(tmp_path / "m", "n", [*ef.PLAIN, compiled], [*ef.PLAIN_US, 200.0])
    assert [t for t in found(tmp_path / "m") if "opaque" in t]


@pytest.mark.parametrize(("c", "k", "bad"), [(12, 64, True), (64, 20, True), (64, 64, False), (3, 64, False)])
def test_misaligned_channels_are_found(tmp_path: Path, c: int, k: int, bad: bool) -> None:
    layer = ef.conv("c", ef.tensor("x", [1, c, 8, 8]), ef.tensor("y", [1, k, 8, 8]))
    ef.write_engine(tmp_path, "n", [layer], [10.0])
    assert any("misaligned" in t for t in found(tmp_path)) is bad


def test_convolutions_without_tensor_cores_are_found() -> None:
    titles = found(DATA / "resnet50-rtx3090-fp32")
    scalar = titles["13 convolutions without tensor cores"]
    assert scalar.severity == "high" and scalar.cost_us == pytest.approx(3590.2, abs=0.1)
    assert not any("without tensor cores" in t for t in found(DATA / "resnet18-a100-fp16"))


def test_reformats_at_an_input_advise_its_format(tmp_path: Path) -> None:
    same = [
        ef.copy(
            "Reformatting CopyNode for Input Tensor 0 to c",
            ef.tensor("x", [1, 8, 64, 64], "Row major linear FP16"),
            ef.tensor("h", [1, 8, 64, 64]),
        ),
        ef.conv("c", ef.tensor("h", [1, 8, 64, 64]), ef.tensor("y", [1, 8, 64, 64])),
    ]
    ef.write_engine(tmp_path, "n", same, [5.0, 10.0])
    finding = found(tmp_path)["1 reformat FP16 linear → FP16 HWC8"]
    assert "--inputIOFormats" in finding.advice


def test_tiny_layers_and_hidden_parallelism_are_told(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "n", ef.chain(20), [2.0] * 20, latency_ms=0.02)
    titles = found(tmp_path)
    assert "20 tiny layers" in titles and "Layer times do not add up to the latency" in titles


# -------------------------------------------------------------------------------------------------------- comparison
def test_a_comparison_aligns_the_plugin_with_what_it_replaced(tmp_path: Path) -> None:
    plain, patched = ef.write_pair(tmp_path)
    result = compare([read(plain), read(patched)])
    row = result.rows[0]
    assert [[la.index for la in own] for own in row.layers] == [[3, 4, 5], [3]]
    assert row.times_us == [pytest.approx(60.0), pytest.approx(32.0)] and row.speedup == pytest.approx(1.875)
    assert row.change == "2 copies + convolution fused into a plugin"
    assert all(abs(r.saved_us) < 1e-9 for r in result.rows[1:])
    assert result.latency_speedup == pytest.approx(0.11 / 0.08)
    assert sum(r.times_us[0] or 0 for r in result.rows) == pytest.approx(sum(ef.PLAIN_US))
    assert result.by_kind["copy"] == [pytest.approx(26.0), pytest.approx(6.0)]


def test_comparing_an_engine_with_itself_changes_nothing() -> None:
    folder = DATA / "resnet50-rtx3090-fp32"
    result = compare([read(folder), read(folder)])
    assert all(r.saved_us == 0 and not r.change for r in result.rows)
    assert sum(r.times_us[0] or 0 for r in result.rows) == pytest.approx(12399.744)


def test_the_compare_command_writes_page_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, patched = ef.write_pair(tmp_path)
    assert compare_main([str(plain), str(patched), "-o", str(tmp_path / "out" / "c.html")]) == 0
    text = (tmp_path / "out" / "c.html").read_text()
    assert Page(text).outside == [] and "fused into a plugin" in text and "1.38" in text
    rows = list(csv.DictReader((tmp_path / "out" / "c.csv").open()))
    assert rows[0]["change"] == "2 copies + convolution fused into a plugin"
    assert "1.38×" in capsys.readouterr().out


def test_three_engines_can_be_compared(tmp_path: Path) -> None:
    plain, patched = ef.write_pair(tmp_path)
    write_compare([plain, patched, plain], tmp_path / "c.html")
    assert (tmp_path / "c.html").read_text().count('<div class="stack">') == 3


@pytest.mark.parametrize("case", ["one", "no profile", "two in a folder", "missing"])
def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = ef.write_pair(tmp_path)
    ef.write_engine(tmp_path / "bare", "n", ef.PLAIN)
    ef.write_engine(tmp_path / "two", "a", ef.PLAIN)
    ef.write_engine(tmp_path / "two", "b", ef.PLAIN)
    other = {"one": [], "no profile": ["bare"], "two in a folder": ["two"], "missing": ["nowhere"]}[case]
    assert compare_main([str(plain), *(str(tmp_path / o) for o in other), "-o", str(tmp_path / "c.html")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "c.html").exists()


# ----------------------------------------------------------------------------------------------------------- drawing
@pytest.mark.parametrize("folder", sorted(p.name for p in DATA.iterdir() if p.is_dir()))
def test_no_two_layers_overlap_and_edges_go_down(folder: str) -> None:
    engine = read(DATA / folder)
    links = edges(engine)
    drawing = layout(len(engine.layers), links)
    rows: dict[float, list[float]] = {}
    for x, y in zip(drawing.x, drawing.y, strict=True):
        rows.setdefault(y, []).append(x)
        assert 0 <= x and x + NODE_WIDTH <= drawing.width and y + NODE_HEIGHT <= drawing.height
    for xs in rows.values():
        assert all(b - a >= NODE_WIDTH for a, b in zip(sorted(xs), sorted(xs)[1:], strict=False))
    for edge, points in zip(links, drawing.paths, strict=True):
        if edge.source >= 0 and edge.target >= 0:
            assert points[0][1] == drawing.y[edge.source] + NODE_HEIGHT and points[-1][1] == drawing.y[edge.target]
            assert all(b[1] >= a[1] for a, b in zip(points, points[1:], strict=False))


def test_a_layer_that_nothing_feeds_stands_just_above_its_first_reader() -> None:
    """0 -> 1 -> 2 -> 4 -> 5; 3 feeds 4 and 5; 6 is alone and stays at the top."""
    tensor = tensor_of(ef.tensor("t", [1, 8, 4, 4]))
    assert tensor is not None
    links = [Edge(a, b, tensor) for a, b in ((0, 1), (1, 2), (2, 4), (3, 5), (3, 4), (4, 5))]
    tops = layout(7, links).y
    step = tops[1] - tops[0]
    assert step > NODE_HEIGHT and [round((y - tops[0]) / step) for y in tops] == [0, 1, 2, 2, 3, 4, 0]


def test_cycles_and_in_place_tensors_are_drawn(tmp_path: Path) -> None:
    t = [1, 8, 4, 4]
    loop = [
        ef.conv("a", ef.tensor("late", t), ef.tensor("x", t)),
        ef.conv("b", ef.tensor("x", t), ef.tensor("x", t)),
        ef.conv("c", ef.tensor("x", t), ef.tensor("late", t)),
    ]
    write(ef.write_engine(tmp_path, "n", loop, [1.0, 2.0, 3.0]), tmp_path, quiet=True)
    tree = ElementTree.parse(tmp_path / "n.engine.graph.json.svg")
    assert len(tree.findall(".//*[@data-i]")) == 3


def test_the_svg_file_names_formats_on_its_edges(tmp_path: Path) -> None:
    write(ef.write_pair(tmp_path)[1], tmp_path, quiet=True)
    text = (tmp_path / "net.cutefuse.onnx.engine.graph.json.svg").read_text()
    assert (
        "FP16 HWC8 1×64×64×64" in text and "32.0 µs" in text and "CuteConcatConv2Relu" not in text.split("</style>")[0]
    )


def test_the_svg_file_defines_each_colour_that_it_uses(tmp_path: Path) -> None:
    write(ef.write_pair(tmp_path)[1], tmp_path, quiet=True)
    text = (tmp_path / "net.cutefuse.onnx.engine.graph.json.svg").read_text()
    style = text[: text.index("</style>")]
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", text)), set(re.findall(r"(--[\w-]+):(#[0-9a-f]+);", style))
    assert len(used) >= 12 and used <= {name for name, _ in defined}
    assert len(defined) == len({name for name, _ in defined}) and "light-dark" not in text  # which few viewers know


def placed(path: Path) -> list[tuple[str, float, float, float]]:
    """Texts of the labels between layers: text, left, right, base line; widths of a wide font."""
    found = []
    for element in ElementTree.parse(path).findall(".//{*}text"):
        if element.get("class") in ("g-l", "g-io"):
            x, width = float(element.attrib["x"]), 6.0 * len(element.text or "")
            left = x - width if element.get("text-anchor") == "end" else x
            found.append((str(element.text), left, left + width, float(element.attrib["y"])))
    return found


def test_no_label_of_the_graph_lies_on_another(tmp_path: Path) -> None:
    """A layer that four edges and three inputs of the engine reach, and one that hands four tensors on."""
    t = [1, 8, 4, 4]
    wide = [ef.conv(n, ef.tensor("images", t), ef.tensor(n, [1, 8, 160, 160])) for n in "abcd"]
    joined = ef.conv("join", ef.tensor("a", [1, 8, 160, 160]), ef.tensor("y", t))
    joined["Inputs"] += [ef.tensor(n, [1, 8, 160, 160]) for n in "bcd"]
    joined["Inputs"] += [ef.tensor(f"constant_{i}", [1, 1, 1, i]) for i in (1, 2, 3)]
    split = ef.copy("split", ef.tensor("y", t), ef.tensor("s0", [1, 1, 4, 4]))
    split["Outputs"] += [ef.tensor(f"s{i}", [1, i + 1, 4, 4], ef.FP32_LINEAR) for i in range(1, 4)]
    heads = [ef.conv(f"h{i}", split["Outputs"][i], ef.tensor(f"z{i}", t)) for i in range(4)]
    layers = [*wide, joined, split, *heads]
    write(ef.write_engine(tmp_path, "n", layers, [1.0] * len(layers)), tmp_path, quiet=True)
    labels = placed(tmp_path / "n.engine.graph.json.svg")
    for i, (one, left, right, y) in enumerate(labels):
        for other, a, b, at in labels[i + 1 :]:
            assert abs(y - at) >= 10 or right <= a or b <= left, (one, other)
    words = " ".join(text for text, *_ in labels)
    assert words.count("FP16 HWC8 1×8×160×160") == 4 and words.count("images") == 4  # each once, however many read it
    assert "constant_1" in words and "and 2 more" in words and "1×1×4×4" in words
    assert len(labels) >= 4 + 4 + 1 + 1 + 3 + 4


def test_memory_counts_what_is_alive(tmp_path: Path) -> None:
    t = [1, 8, 16, 16]  # 4096 bytes in FP16
    three = [
        ef.conv("a", ef.tensor("x", t), ef.tensor("p", t)),
        ef.conv("b", ef.tensor("p", t), ef.tensor("q", t)),
        ef.conv("c", ef.tensor("q", t), ef.tensor("y", t)),
    ]
    three[2]["Inputs"].append(ef.tensor("p", t))
    engine = read(ef.write_engine(tmp_path, "n", three))
    assert memory_profile(engine) == [2 * 4096, 2 * 4096, 3 * 4096]


def test_wrong_sources_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["nowhere"], "nowhere does not exist"),
        ([str(tmp_path)], f"{tmp_path} holds no layer information"),
        ([str(DATA / "resnet18-a100-fp16"), "--peaks", "abacus", "-o", str(tmp_path)], "--peaks is abacus"),
    ):
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {words}")
