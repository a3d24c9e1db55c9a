"""The cost of layers against hand counts, the intensity of sizes, and language models under the roof."""

from __future__ import annotations

import json
from pathlib import Path

import engine_files as ef
import pytest

from cutefuse.commands.roofline import main
from cutefuse.errors import CutefuseError
from cutefuse.report.read.cost import Cost, layer_cost, place
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.roofline.layers import Layer, common_layers, conv, conv_from, layer_view, matmul, matmul_from
from cutefuse.roofline.llm import MODELS, Transformer, crossing, llm_view, transformer_from
from cutefuse.roofline.measure import measure_cpu, peaks_for
from cutefuse.roofline.peaks import Peaks, board, boards, by_name


def intensity(layer: Layer) -> float:
    return Cost(layer.flops, layer.size_bytes).intensity or 0.0


def test_a_matrix_product_has_the_intensity_of_its_sizes() -> None:
    layer = matmul_from("512x1024x4096", "FP16")
    assert (layer.flops, layer.size_bytes) == (2 * 512 * 1024 * 4096, 2 * (512 * 1024 + 1024 * 4096 + 512 * 4096))
    assert round(intensity(layer)) == 315
    assert intensity(matmul_from("512,1024,4096", "FP32")) == pytest.approx(intensity(layer) / 2)
    assert matmul_from("8x64x32x16", "FP16") == matmul(64, 32, 16, batch=8)
    assert intensity(matmul(64, 32, 16, batch=8)) == intensity(matmul(64, 32, 16))  # nothing is shared


def test_a_convolution_has_the_intensity_of_its_sizes() -> None:
    layer = conv_from("1,128,64,64,64,3", "FP16")
    assert layer.flops == 2 * 64 * 64 * 64 * 128 * 9
    assert layer.size_bytes == 2 * (128 * 64 * 64 + 64 * 128 * 9 + 64 * 64 * 64)
    strided = conv_from("2,8,15,14,16,1,3,2", "INT8")
    assert strided.flops == 2 * (2 * 16 * 8 * 7) * 8 * 3 and strided == conv(2, 8, 15, 14, 16, 1, 3, 2, dtype="INT8")
    assert strided.size_bytes == 2 * 8 * 15 * 14 + 16 * 8 * 3 + 2 * 16 * 8 * 7


def test_common_layers_are_bound_as_nvidias_guide_says() -> None:
    peaks = board("V100 PCIe")
    rows = {v["layer"]: v for v in (layer_view(layer, peaks) for layer in common_layers())}
    found = {name.split(",")[0] if "MaxPool" in name else name: round(v["intensity"], 2) for name, v in rows.items()}
    assert found == {
        "Linear 1024 -> 4096, batch 512": 315.08, "Linear 1024 -> 4096, batch 1": 1.0, "MaxPool 3x3": 2.25,
        "ReLU": 0.25, "LayerNorm": 2.0, "Concat": 0.0,
    }  # fmt: skip
    assert [v["bound"] for v in rows.values()] == ["compute"] + ["memory"] * 5
    assert rows["ReLU"]["floor_us"] == pytest.approx(4e6 / 900 / 1e3)


def test_the_roof_is_the_lesser_of_peak_and_bandwidth() -> None:
    peaks = Peaks("p", 1000.0, {"FP16": 100.0}, "test")
    low, high = peaks.known_roof("FP16", 1e8, 1e7), peaks.known_roof("FP16", 1e9, 1e6)
    assert (low.ridge, low.bound, high.bound) == (100, "memory", "compute")
    assert low.attainable_tflops == 10 and high.attainable_tflops == 100
    assert low.floor_us == pytest.approx(10) and high.floor_us == pytest.approx(10)
    assert peaks.roof("FP64", 1.0, 1.0) is None
    placed = place(peaks, "FP16", Cost(1e9, 1e6), 20.0)
    assert placed is not None and placed.bound == "compute" and placed.percent_of_roof == pytest.approx(50)
    assert place(peaks, "FP16", Cost(None, 1e6), 20.0) is None and place(peaks, "FP16", Cost(1.0, 0.0), 20.0) is None


def test_convolution_costs_are_those_of_a_hand_count(tmp_path: Path) -> None:
    engine = read_engine(find_engines(ef.write_pair(tmp_path)[0])[0])
    conv = next(la for la in engine.layers if la.name.startswith("/up/Conv"))
    cost = layer_cost(engine, conv)
    assert cost.flops == 2 * 64 * 64 * 64 * 128 * 9
    assert cost.size_bytes == 2 * (128 * 64 * 64 + 64 * 64 * 64 + 64 * 128 * 9 + 64)
    copy = next(la for la in engine.layers if la.name == "a copy")
    assert layer_cost(engine, copy).flops == 0


def test_plugin_costs_come_from_the_packed_weights_or_the_patch_report(tmp_path: Path) -> None:
    folder = ef.write_pair(tmp_path)[1]
    engine = read_engine(find_engines(folder)[0])
    plugin = next(la for la in engine.layers if la.kind == "plugin")
    assert layer_cost(engine, plugin).flops == 2 * 64 * 64 * 64 * 128 * 9
    del plugin.inputs[2:]
    assert layer_cost(engine, plugin).flops == 1207959552
    assert engine.patch is not None
    engine.patch["sites"][0]["shapes"] = {"outputs": [[-1, 64, 64, 64]]}
    assert layer_cost(engine, plugin).flops is None


def test_int8_plugins_cost_what_their_packed_weights_say(tmp_path: Path) -> None:
    engine = read_engine(find_engines(ef.write_pair(tmp_path)[1])[0])
    plugin = next(la for la in engine.layers if la.kind == "plugin")
    engine.patch = None
    plugin.raw["PluginType"] = "CuteQConcatConv2ReluQ"
    plugin.inputs.insert(3, plugin.inputs[3])  # the filter's scales beside the bias
    assert layer_cost(engine, plugin).flops == 2 * 64 * 64 * 64 * 128 * 9


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "flops"),
    [
        ("CuteConcatConv2x2Relu", [[1, 64, 8, 8], [1, 32, 8, 8], [48, 1152], [48]], [[1, 16, 8, 8], [1, 32, 8, 8]],
         2 * 64 * 48 * 96 * 9),
        ("CuteConcatConv2AddRelu", [[48, 64, 8, 8], [48, 64, 8, 8], [48, 128], [48], [48, 48, 8, 8]],
         [[48, 48, 8, 8]], 2 * 48 * 64 * 48 * 128),
        ("CuteViewConcatConv2", [[1, 256, 4, 4], [1, 32, 8, 8], [48, 128], [48]], [[1, 48, 8, 8]],
         2 * 64 * 48 * 128),  # 40 of 256 channels, and 32: both padded to 64
        ("CuteConcatConv2x2Relu", [[1, 64, 8, 8], [1, 32, 8, 8], [48, 1152], [48]], [[1, 16, 8, 8]], None),
        ("CuteDepthwiseConcatConv1Silu", [[2, 24, 8, 8], [25, 24], [24]], [[2, 24, 8, 8]], 2 * 2 * 64 * 24 * 25),
        ("CuteDepthwiseConcatConv1Silu", [[2, 24, 8, 8], [25, 16], [24]], [[2, 24, 8, 8]], None),
    ],
)  # fmt: skip
def test_the_plugins_other_forms_are_counted_from_the_packed_weights_too(
    tmp_path: Path, op_type: str, inputs: list[list[int]], outputs: list[list[int]], flops: int | None
) -> None:
    tensors = {
        "Inputs": [ef.tensor(f"x{i}", d) for i, d in enumerate(inputs)],
        "Outputs": [ef.tensor(f"y{i}", d) for i, d in enumerate(outputs)],
    }
    layer = {**ef.PLUGIN, "PluginType": op_type, **tensors}
    engine = read_engine(find_engines(ef.write_engine(tmp_path, "n", [layer]))[0])
    assert layer_cost(engine, engine.layers[0]).flops == flops


@pytest.mark.parametrize(
    ("a", "b", "out", "flops"),
    [
        ([4, 32], [32, 8], [4, 8], 2 * 4 * 8 * 32),
        ([7, 4, 32], [7, 32, 8], [7, 4, 8], 2 * 7 * 4 * 8 * 32),
        ([2, 4, 32], [32, 8], [2, 4, 8], 2 * 2 * 4 * 8 * 32),
    ],
)
def test_matrix_products_count_over_any_batch(
    tmp_path: Path, a: list[int], b: list[int], out: list[int], flops: int
) -> None:
    layer = {
        "Name": "mm",
        "LayerType": "CaskGemmMatrixMultiply",
        "Inputs": [ef.tensor("a", a), ef.tensor("b", b)],
        "Outputs": [ef.tensor("y", out)],
    }
    engine = read_engine(find_engines(ef.write_engine(tmp_path, "n", [layer]))[0])
    assert layer_cost(engine, engine.layers[0]).flops == pytest.approx(flops)


def test_layers_of_unknown_shape_have_no_cost(tmp_path: Path) -> None:
    layer = ef.conv("c", ef.tensor("a", [-1, 8, 4, 4]), ef.tensor("b", [-1, 8, 4, 4]))
    engine = read_engine(find_engines(ef.write_engine(tmp_path, "n", [layer]))[0])
    assert layer_cost(engine, engine.layers[0]) == Cost(None, None)


def test_weights_of_llama_are_counted_right() -> None:
    total = MODELS["llama-3-8b"].block_weights + 2 * MODELS["llama-3-8b"].head_weights  # embedding and head
    assert total == pytest.approx(8.03e9, rel=0.002)
    assert MODELS["llama-2-7b"].block_weights + 2 * MODELS["llama-2-7b"].head_weights == pytest.approx(
        6.74e9, rel=0.002
    )
    assert MODELS["gpt2"].block_weights + MODELS["gpt2"].head_weights == pytest.approx(124e6, rel=0.02)


def test_decoding_reads_every_weight_once_for_two_flops() -> None:
    model = MODELS["llama-2-7b"]
    flops, size = model.decode(1, 0)
    # Two operations and two bytes a weight: one FLOP per byte, not two (bytes are elements times element size).
    assert flops / size == pytest.approx(1.0, rel=0.01)
    eight = Transformer(**{**vars(model), "weight_type": "INT8"})
    assert eight.decode(1, 0)[0] / eight.decode(1, 0)[1] == pytest.approx(2.0, rel=0.01)


def test_the_key_value_cache_bounds_the_intensity_of_decoding() -> None:
    model, peaks = MODELS["llama-2-7b"], by_name("A100 SXM4 80GB")
    assert peaks is not None
    view = llm_view(model, peaks, 1, 2048)
    rows = [r["intensity"] for r in view["decode"]]
    assert rows == sorted(rows) and rows[-1] < view["decode_intensity_limit"] < view["ridge"]
    assert view["decode_crossing_batch"] is None
    assert 100 < view["prefill_crossing_length"] < 300
    assert view["prefill"][0]["bound"] == "memory" and view["prefill"][-1]["bound"] == "compute"


def test_crossing_is_the_first_size_at_the_ridge() -> None:
    assert crossing(lambda n: n, 37.5) == 38 and crossing(lambda n: n, 1) == 1
    assert crossing(lambda n: 5.0, 6.0) is None


def test_the_cpu_can_be_measured() -> None:
    peaks = measure_cpu(size_mib=8, edge=256)
    assert peaks.bandwidth_gbs > 0.1 and peaks.tflops["FP32"] > 1e-4


def test_a_hugging_face_config_is_read(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert transformer_from(str(tmp_path / "config.json")).block_weights == MODELS["llama-3-8b"].block_weights


def test_the_command_writes_a_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--llm", "mistral-7b", "--peaks", "H100 SXM", "-o", str(tmp_path / "llm.html")]) == 0
    page = (tmp_path / "llm.html").read_text()
    assert "mistral-7b on H100 SXM" in page and page.count("<svg") == 1 and "http-equiv" not in page
    assert "prefill turns compute-bound at" in capsys.readouterr().out
    assert main(["-o", str(tmp_path / "peaks.json")]) == 0
    assert len(json.loads((tmp_path / "peaks.json").read_text())) == len(boards())


SIZES = ("512x1024", "1x2x3x4x5", "512x0x4096", "512x-1x4096", "9e9x1x1", "9" * 20 + "x1x1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--peaks", "no such board"], "no such board"),
        (["--peaks", "A100"], "A100 SXM4 80GB"),  # several share the name
        *((["--matmul", given], "MxKxN") for given in SIZES),
        *((["--conv", given], "N,C,H,W,K,R") for given in ("", "1,64,56,56,64", "1,64,56,56,64,3,3,0")),
        (["--layers", "--dtype", "fp17"], "fp17"),
        (["--layers", "--llm", "gpt2"], "--llm"),
        (["--matmul", "8x8x8", "--dtype", "INT16"], "INT16; choose"),
        (["--matmul", "8x8x8", "--dtype", "FP32", "--peaks", "half.json"], "FP32"),
        (["--llm", "gpt2", "--weights", "FP32", "--peaks", "half.json"], "FP32"),
        (["--peaks", "auto"], "auto"),
        (["--layers", "-o", "x.html"], "--llm"),
        (["--llm", "no-such-model"], "no-such-model"),
        (["--llm", "gpt2", "--weights", "FP17"], "FP17"),
        (["--llm", "missing.json"], "JSON"),
        (["--llm", "gpt2", "--batch", "0"], "batch 0"),
        (["--peaks", "bad.json"], "bad.json"),
        (["--peaks", "endless.json"], "endless.json"),
        (["--llm", "config.json"], "config.json"),
        (["--llm", "hollow.json"], "num_hidden_layers"),
    ],
)
def test_wrong_choices_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    peaks = {"device": "x", "bandwidth_gbs": 100, "tflops": {"FP16": 1}}
    endless = peaks | {"bandwidth_gbs": float("inf")}
    hollow = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    files = {"bad": peaks | {"bandwidth_gbs": 0}, "half": peaks, "endless": endless,
             "hollow": hollow | {"num_hidden_layers": -1}, "config": {"hidden_size": "many"}}  # fmt: skip
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_the_command_prints_layers_of_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layers.json"
    argv = ["--matmul", "512x1024x4096", "--conv", "1,128,64,64,64,3", "--layers", "--peaks", "V100 PCIe"]
    assert main([*argv, "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "V100 PCIe: ridge 124.7 FLOP/byte (FP16)" in text
    (line,) = [row for row in text.splitlines() if row.startswith("matmul 512x1024x4096")]
    assert " 315.1  compute" in line
    rows = json.loads(out.read_text())
    assert [r["layer"] for r in rows][:2] == ["matmul 512x1024x4096", "conv 128->64 3x3 @64x64"] and len(rows) == 8
    assert main(["--matmul", "512x1024x4096"]) == 0 and capsys.readouterr().out.startswith("H200: ridge 206.1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peaks", "H200", "--batch", "1"], ["--batch does nothing without --llm"]),
        (["--matmul", "8x8x8", "--context", "9", "--kv", "FP8"],
         ["--context does nothing without --llm", "--kv does nothing without --llm"]),
        (["--llm", "llama-3-8b", "--dtype", "FP8"], ["--dtype does nothing without --matmul, --conv or --layers"]),
        (["--llm", "llama-3-8b", "--batch", "2", "--context", "9", "--weights", "FP8", "--kv", "FP8"], []),
        (["--matmul", "8x8x8", "--dtype", "FP8"], []),
    ],
)  # fmt: skip
def test_options_of_another_view_are_named(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "does nothing" in line] == said


def test_the_table_of_boards_shows_memory_and_cores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peaks", "A100 40GB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["cores"], row["memory_gb"], row["bandwidth_gbs"]) == (6912, "40", 1555)
    assert main(["--peaks", "V100 SXM2"]) == 0
    head, line, _ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["device", "GB", "cores", "GB/s"] and line.split()[2:5] == ["16/32", "5120", "900"]


def test_peaks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"device": "mine", "bandwidth_gbs": 100, "tflops": {"fp16": 10}}')
    peaks = peaks_for(str(path))
    assert peaks is not None and peaks.tflops == {"FP16": 10.0}
    with pytest.raises(CutefuseError, match="give auto, measured"):
        peaks_for("nothing")
