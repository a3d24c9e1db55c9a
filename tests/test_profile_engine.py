"""`profile-kernels --engine`: kernels sorted to layers, ONNX nodes and the roofline, with stand-ins of trtexec, Nsight
Systems and Nsight Compute. Their CSVs have the columns of the real tools: Nsight Compute's were recorded
(tests/recorded), Nsight Systems' are those that its manual names, since no machine at hand could write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import engine_files
import pytest
from trtexec_stub import STUB

from cutefuse.commands.profile_kernels import main
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels import engines, layers, ncu, nsys
from cutefuse.profilers.kernels.metrics import TIME, Kernel

CONV, SIDE, UP, HEAD = (
    "/stem/Conv + /stem/Relu", "/side/Conv + /side/Relu", "/up/Conv + /up/Relu", "/head/Conv",
)  # fmt: skip
NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def ncu_csv(launches: list[tuple[str, str, int, int]], domain: str = "TensorRT", outer: str = "enqueue") -> str:
    """Nsight Compute's raw CSV of (range, kernel, ns, bytes read)."""
    head = ["ID", NVTX, "Kernel Name", TIME.names[0], "dram__bytes_read.sum", "dram__bytes_write.sum"]
    rows = [head, ["", "", "", "ns", "byte", "byte"]]
    for i, (text, kernel, time_ns, size) in enumerate(launches):
        inner = [outer, text] if text else [outer]
        ranges = "  ".join(f'"{domain}:{r}:none:none:none:none:none:none"' for r in inner)
        rows.append([str(i), f"911  {ranges} ", kernel, f"{time_ns:,}", f"{size:,}", "0"])
    quoted = (",".join('"{}"'.format(c.replace('"', '""')) for c in row) for row in rows)
    return "==PROF== Connected to process 911\n" + "\n".join(quoted) + "\n"


HEADER = (
    "NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),"
    "Kernel Name"
)


def nsys_csv(rows: list[tuple[str, str, int, int, int]]) -> str:
    """The report nvtx_kern_sum of (range, kernel, ranges, launches, total ns), behind what nsys prints before it."""
    lines = [f'"{r}",PushPop,7,7,{n},{k},{ns},1,1,1,1,0,"{kernel}"' for r, kernel, n, k, ns in rows]
    return "\n".join(
        ["Generating SQLite file x.sqlite from x.nsys-rep", "Processing [x] with [y]...", "", HEADER, *lines]
    )


NCU = ncu_csv(
    [
        (CONV, "void conv_a<half>(Params)", 12_000, 3_000_000),
        (CONV, "void relu(float*)", 2_000, 1_000_000),
        (UP, "conv_b", 45_000, 9_000_000),
        ("no layer of it", "fill", 500, 0),
        (CONV, "void conv_a<half>(Params)", 14_000, 3_000_000),
        (CONV, "void relu(float*)", 2_000, 1_000_000),
        (UP, "conv_b", 47_000, 9_000_000),
    ]
)
NSYS = nsys_csv(
    [
        ("TensorRT:enqueue", "conv_b", 20, 20, 900_000),
        (f"TensorRT:{UP}", "conv_b", 20, 20, 800_000),
        (f"TensorRT:{CONV}", "void conv_a<half>(Params)", 20, 40, 400_000),
    ]
)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!{sys.executable}\nimport pathlib, sys\n{text}\n")
    path.chmod(0o755)
    return path


Tools = Callable[..., Path]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Makes an engine with its files, a trtexec, and the profilers that are wanted; returns the engine's path."""

    def make(ncu_text: str | None = NCU, nsys_text: str | None = NSYS, writes_report: bool = True) -> Path:
        found = {"trtexec": str(executable(tmp_path / "bin" / "trtexec", STUB.format(python=sys.executable)))}
        if ncu_text is not None:
            (tmp_path / "ncu.txt").write_text(ncu_text)
            code = 9 if "==ERROR==" in ncu_text else 0
            script = f"print(pathlib.Path({str(tmp_path / 'ncu.txt')!r}).read_text())\nsys.exit({code})"
            found["ncu"] = str(executable(tmp_path / "bin" / "ncu", script))
        if nsys_text is not None:
            (tmp_path / "nsys.txt").write_text(nsys_text)
            script = (
                "if sys.argv[1] == 'profile':\n"
                "    out = next(a for a in sys.argv if a.startswith('--output='))\n"
                f"    if {writes_report}:\n        pathlib.Path(out[9:]).write_text('report')\n"
                f"else:\n    print(pathlib.Path({str(tmp_path / 'nsys.txt')!r}).read_text())"
            )
            found["nsys"] = str(executable(tmp_path / "bin" / "nsys", script))
        monkeypatch.setenv("TRTEXEC", found["trtexec"])
        monkeypatch.setattr(ncu, "find", lambda: found.get("ncu"))
        monkeypatch.setattr(nsys, "find", lambda: found.get("nsys"))
        graph = engine_files.write_engine(
            tmp_path / "engine", "plain.onnx", engine_files.PLAIN, engine_files.PLAIN_US, 0.11
        )
        engine = graph.with_name("plain.onnx.engine")
        engine.write_bytes(b"\0engine")
        return engine

    return make


def layers_of(tmp_path: Path, name: str = "plain.onnx.engine") -> dict[str, dict[str, object]]:
    data = json.loads((tmp_path / "out" / f"{name}.kernels.json").read_text())
    return {layer["layer"]: layer for layer in data["layers"]}


def test_kernels_are_sorted_to_layers_nodes_and_the_roofline(
    tools: Tools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(tools()), "--peaks", "H200", "-o", str(tmp_path / "out")]) == 0
    found = layers_of(tmp_path)
    assert list(found) == [CONV, UP]
    stem, up = found[CONV], found[UP]
    assert stem["onnx"] == ["/stem/Conv", "/stem/Relu"]
    # Two inferences: the mean of 14 and 16 us; Nsight Systems saw each range 20 times.
    assert stem["ncu_us"] == pytest.approx(15.0) and stem["nsys_us"] == pytest.approx(20.0)
    assert stem["dram_bytes"] == 4_000_000 and stem["kernels"] == ["void conv_a<half>(Params)", "void relu(float*)"]
    flops = 2 * 64 * 64 * 64 * 128 * 9
    assert up["flops"] == flops and up["counted_intensity"] == pytest.approx(flops / 9e6)
    assert up["nsys_us"] == pytest.approx(40.0) and up["achieved_tflops"] == pytest.approx(flops / 40e6)
    assert up["bound"] in ("memory", "compute") and 0 < float(str(up["percent_of_roof"])) < 100
    out = capsys.readouterr().out
    assert "conv_a, relu" in out and "1 of 4 kernels that Nsight Compute saw belong to no layer" in out


def test_either_profiler_alone_is_enough(tools: Tools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", str(tools(nsys_text=None)), "-o", str(tmp_path / "out")]) == 0
    assert "nsys was not found" in capsys.readouterr().out
    assert layers_of(tmp_path)[UP]["nsys_us"] is None
    assert main(["--engine", str(tools(ncu_text=None)), "-o", str(tmp_path / "out")]) == 0
    assert "the bytes that the kernels move are not counted" in capsys.readouterr().out
    assert layers_of(tmp_path)[UP]["dram_bytes"] is None


def test_a_profiler_that_fails_leaves_the_other(
    tools: Tools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(tools(writes_report=False)), "-o", str(tmp_path / "out")]) == 0
    assert "without Nsight Systems: nsys ended well but wrote no plain.onnx.engine.nsys-rep" in capsys.readouterr().out
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    assert main(["--engine", str(tools(ncu_text=refused)), "-o", str(tmp_path / "out")]) == 0
    assert "without Nsight Compute: ncu failed for plain.onnx.engine: this user may not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ncu_text", "nsys_text", "words"),
    [
        (None, None, "neither nsys nor ncu was found"),
        ("==WARNING== No kernels were profiled.", None, "no kernel was launched that matches"),
        (None, "ERROR: no such report", "holds no table nvtx_kern_sum"),
        (None, HEADER, "holds no kernel inside of a range"),
    ],
)
def test_nothing_recorded_is_one_sentence(
    ncu_text: str | None, nsys_text: str | None, words: str, tools: Tools, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["--engine", str(tools(ncu_text, nsys_text)), "-o", str(tmp_path / "out")]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(err) == 1 and words in err[0]
    assert not list((tmp_path / "out").glob("*.kernels.json"))


def test_a_missing_engine_and_a_missing_trtexec_are_one_sentence(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tools()
    assert main(["--engine", str(tmp_path / "no.engine")]) == 2
    assert "no.engine cannot be read" in capsys.readouterr().err
    monkeypatch.delenv("TRTEXEC")
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    assert main(["--engine", str(engine)]) == 2
    assert "trtexec was not found" in capsys.readouterr().err
    assert main(["--engine", str(engine), "--dry-run", "--trt-version", "new"]) == 2
    assert "--trt-version is new" in capsys.readouterr().err


def test_layer_names_and_filters_reach_both_tools_on_both_majors(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = str(tools())
    assert main(["--engine", engine, "--dry-run", "--trt-version", "10.3", "--inferences", "4"]) == 0
    record, stats, counters = capsys.readouterr().out.splitlines()
    assert "--trace=cuda,nvtx" in record and "--profilingVerbosity=detailed" in record and "--iterations=4" in record
    assert "nvtx_kern_sum" in stats and "--nvtx-include regex:TensorRT@.+/ " in counters
    assert "CudaGraph" not in record
    # Hundreds of kernels: few metrics, so that each runs a few times only.
    assert "dram__bytes_read.sum" in counters and "launch__occupancy" not in counters
    assert main(["--engine", engine, "--dry-run", "--trt-version", "11.1"]) == 0
    assert all("--noCudaGraph" in line for line in capsys.readouterr().out.splitlines() if "trtexec" in line)


# ------------------------------------------------------------------------------------------------------------- parts
def target_of(tools: Tools, tmp_path: Path, per_layer: bool = True) -> engines.Target:
    found = engines.target(tools(), tmp_path, 1, None)
    return engines.Target(found.path, found.command, found.nvtx, found.layers, per_layer)


@pytest.mark.parametrize(
    ("text", "layer"),
    [(UP, UP), (f"TensorRT:{UP}", UP), (f"{UP} [profile 1]", UP), (f"cutefuse layer {HEAD}", HEAD), (f":{HEAD}", HEAD),
     ("enqueue", None), (f"{UP}!", None), ("", None)],
)  # fmt: skip
def test_a_range_names_its_layer(text: str, layer: str | None, tools: Tools, tmp_path: Path) -> None:
    target = target_of(tools, tmp_path)
    index = target.layer_of(text)
    assert target.layers is not None and layer == (None if index is None else target.layers.layers[index].name)


def test_kernels_without_ranges_are_laid_beside_those_of_the_profile(tools: Tools, tmp_path: Path) -> None:
    target = target_of(tools, tmp_path, per_layer=False)
    assert target.layers is not None
    for layer in target.layers.layers:
        layer.raw["TacticName"] = ""
    target.layers.layers[1].raw["TacticName"] = "triton_a + void at::(anonymous namespace)::cat<float>(int)"
    target.layers.layers[5].raw["Kernels"] = "conv_b"
    names = ["triton_a", "void at::<unnamed>::cat<float>(int, T2)", "conv_b"]
    launches = [ncu.Launch(name, {TIME.names[0]: 1000.0 * (i + 1)}, ("run",)) for i, name in enumerate(names)]
    rows, notes = layers.sort(target, launches, [])
    assert [(r.layer.name, r.ncu_us) for r in rows] == [(CONV, 3.0), (UP, 3.0)] and not notes
    rows, notes = layers.sort(target, launches[:2], [])
    assert not rows and notes == ["2 of 2 kernels that Nsight Compute saw belong to no layer of the engine"]


def test_a_kernel_that_a_layer_launches_twice_counts_twice(tools: Tools, tmp_path: Path) -> None:
    launches = [ncu.Launch("k", {TIME.names[0]: 1000.0}, ("enqueue", layer)) for layer in (CONV, CONV, UP)]
    rows, _ = layers.sort(target_of(tools, tmp_path), launches * 3, [])
    assert [(r.layer.name, r.ncu_us) for r in rows] == [(CONV, 2.0), (UP, 1.0)]
    assert rows[0].ncu == [Kernel("k", 2, {TIME.names[0]: 1000.0})]


@pytest.mark.parametrize("line", ["1,2,3", f"{UP},PushPop,7,7,many,1,1,1,1,1,1,1,k"])
def test_rows_of_nsys_that_are_no_rows_end_the_table(line: str) -> None:
    found = nsys.read_csv(f"{NSYS}\n{line}\n", "x")
    assert len(found) == 3 and found[1].range == f"TensorRT:{UP}" and found[1].total_us == 800
    with pytest.raises(CutefuseError, match="holds no kernel inside of a range"):
        nsys.read_csv(f"{HEADER}\n{line}", "x")


def test_files_of_pytorch_are_told_from_engines(tmp_path: Path) -> None:
    (tmp_path / "a.engine").write_text('{"format": "cutefuse torch engine", "options": ["--mode=compile"]}')
    (tmp_path / "b.engine").write_bytes(b"ftrt cutefuse")
    assert engines.of_torch(tmp_path / "a.engine") and engines.of_torch(tmp_path / "m.onnx")
    assert not engines.of_torch(tmp_path / "b.engine")
    found = engines.target(tmp_path / "a.engine", tmp_path, 2, None)
    assert (
        not found.per_layer
        and found.nvtx == "cutefuse inference/"
        and found.command[-2:] == [str(tmp_path / "a.engine"), "2"]
    )
