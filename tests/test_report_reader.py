"""Readers of engine JSON: every real file, every schema, and 500 mutated files without a traceback."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import engine_files as ef
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutefuse.engines.artifacts import loads
from cutefuse.engines.kinds import kind_of, node_names, on_tensor_cores
from cutefuse.engines.tensors import dtype_of, layout_of, tensor_of
from cutefuse.errors import CutefuseError
from cutefuse.report.analyse.tables import analyse
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.report.write import write
from cutefuse.roofline.peaks import by_name

DATA = Path(__file__).parent / "data" / "engines"
FOLDERS = sorted(p for p in DATA.iterdir() if p.is_dir())


def read(path: Path) -> Any:
    return read_engine(find_engines(path)[0])


@pytest.mark.parametrize(
    ("folder", "layers", "convs", "total_us", "latency_ms"),
    [("resnet18-a100-fp16", 36, 21, 1016.832, 0.862), ("resnet50-rtx3090-fp32", 103, 54, 12399.744, 12.17)],
)
def test_real_engines_are_read_completely(
    folder: str, layers: int, convs: int, total_us: float, latency_ms: float
) -> None:
    engine = read(DATA / folder)
    assert len(engine.layers) == layers
    assert sum(la.kind == "conv" for la in engine.layers) == convs
    assert engine.total_us == pytest.approx(total_us, rel=1e-6)
    assert engine.latency_ms == pytest.approx(latency_ms, rel=2e-3)
    assert len(engine.inputs) == 1 and len(engine.outputs) == 1
    assert set(engine.files) == {"graph", "profile", "timing", "build_metadata", "profile_metadata"}
    assert all(t.dtype and t.layout not in ("", "other") for la in engine.layers for t in (*la.inputs, *la.outputs))


def test_every_time_can_be_traced_to_its_field() -> None:
    folder = DATA / "resnet18-a100-fp16"
    engine = read(folder)
    records = json.loads((folder / "resnet.onnx.engine.profile.json").read_text())
    for layer in engine.layers:
        if layer.time_us is not None:
            file, _, field = layer.sources["time"].partition(" › ")
            index = int(field[1 : field.index("]")])
            assert file == "resnet.onnx.engine.profile.json"
            assert records[index]["averageMs"] * 1000 == layer.time_us and records[index]["name"] == layer.name


def test_tensorrt_11_gives_the_same_engine_as_10(tmp_path: Path) -> None:
    old = read(ef.write_engine(tmp_path / "10", "n.onnx", ef.PLAIN))
    new = read(ef.write_engine(tmp_path / "11", "n.onnx", ef.PLAIN, root=ef.tensorrt_11(ef.PLAIN)))
    assert [(la.name, la.kind, la.precision) for la in new.layers] == [
        (la.name, la.kind, la.precision) for la in old.layers
    ]
    assert [t.layout for la in new.layers for t in la.outputs] == [t.layout for la in old.layers for t in la.outputs]
    assert (new.inputs, new.outputs) == (old.inputs, old.outputs) == (["x"], ["y"])


def test_a_list_root_and_names_only_layers_are_read(tmp_path: Path) -> None:
    as_list = read(ef.write_engine(tmp_path / "a", "n", ef.PLAIN, ef.PLAIN_US, root=ef.PLAIN))
    assert len(as_list.layers) == 7 and as_list.total_us == pytest.approx(sum(ef.PLAIN_US))
    names = [la["Name"] for la in ef.PLAIN]
    bare = read(ef.write_engine(tmp_path / "b", "n", names, ef.PLAIN_US, root={"Layers": names, "Bindings": []}))
    assert [la.kind for la in bare.layers] == ["copy", "conv", "conv", "copy", "copy", "conv", "conv"]
    assert "names only" in bare.notes[0]


def test_careless_json_is_repaired(tmp_path: Path) -> None:
    control = json.dumps({"Layers": ef.PLAIN}).replace("\\u001e", "\x1e")
    assert "\x1e" in control and len(loads(control, tmp_path)["Layers"]) == 7
    raw = '[\n  { "count" : 5 }\n, { "name" : "a "quoted" \\x name", "timeMs" : nan, "averageMs" : -inf }\n]'
    records = loads(raw, tmp_path)
    assert records[1]["name"] == 'a "quoted" \\x name' and records[1]["averageMs"] is None
    assert loads('\ufeff{"Layers": [], "x": NaN}', tmp_path)["Layers"] == []


def test_layers_without_outputs_sub_graphs_and_unknown_fields_are_kept(tmp_path: Path) -> None:
    odd = [
        {"Name": "train", "LayerType": "TrainStation"},
        {
            "Name": "if",
            "LayerType": "Conditional",
            "Inputs": None,
            "Outputs": "none",
            "TrueBranch": [ef.PLAIN[1]],
            "FalseBranch": ["x"],
        },
        {
            "Name": "myelin",
            "LayerType": "Myelin",
            "Inputs": [ef.tensor("a", [-1, 4])],
            "Outputs": [{"Name": "b", "Dimensions": ["?", 2.0]}],
        },
        17,
        None,
        {"no": "layer"},
    ]
    engine = read(ef.write_engine(tmp_path, "n", odd[:3], root={"Layers": odd}))
    assert [la.name for la in engine.layers] == ["train", "if", "if//stem/Conv + /stem/Relu", "if/x", "myelin"]
    assert engine.layers[-1].outputs[0].dims == (-1, 2) and engine.layers[-1].outputs[0].size_bytes is None


def test_layers_of_one_name_get_their_own_times(tmp_path: Path) -> None:
    twice = [
        ef.conv("same", ef.tensor("x", [1, 8, 4, 4]), ef.tensor("a", [1, 8, 4, 4])),
        ef.conv("same", ef.tensor("a", [1, 8, 4, 4]), ef.tensor("y", [1, 8, 4, 4])),
    ]
    engine = read(ef.write_engine(tmp_path, "n", twice, [3.0, 5.0]))
    assert [la.time_us for la in engine.layers] == [3.0, 5.0]


def test_a_profile_of_another_engine_is_noted_and_not_lost(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "n", ef.PLAIN, ef.PLAIN_US)
    profile = tmp_path / "n.engine.profile.json"
    profile.write_text(profile.read_text().replace("/head/Conv", "/renamed/Conv"))
    engine = read(tmp_path)
    assert len(engine.layers) == 8 and engine.total_us == pytest.approx(sum(ef.PLAIN_US))
    assert "1 profiled layers are not in the layer information" in engine.notes[0]


def test_logs_are_read_where_no_metadata_was_extracted(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "n", ef.PLAIN, ef.PLAIN_US)
    (tmp_path / "n.engine.build.log").write_text(
        "&&&& RUNNING TensorRT.trtexec [TensorRT v100300]\n[11/21/2026-01:02:03] [V] Generating copy for a to cat "
        "because input is not movable.\n"
    )
    engine = read(tmp_path)
    assert engine.version == "10.3.0"
    assert engine.concats == [{"action": "copy", "node": "a to cat", "reason": "input is not movable."}]


def test_a_folder_of_several_engines_keeps_their_files_apart(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "a.onnx", ef.PLAIN, ef.PLAIN_US)
    ef.write_engine(tmp_path, "b.onnx", ef.PATCHED)
    a, b = (read_engine(f) for f in find_engines(tmp_path))
    assert a.profiled and not b.profiled


def test_files_of_any_name_are_recognised_by_content(tmp_path: Path) -> None:
    graph = ef.write_engine(tmp_path, "n", ef.PLAIN)
    graph.rename(tmp_path / "whatever.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    assert len(read(tmp_path).layers) == 7


def test_a_patch_report_belongs_to_the_patched_model_alone(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "net.onnx", ef.PLAIN)
    ef.write_engine(tmp_path, "net.cutefuse.onnx", ef.PATCHED)
    (tmp_path / "net.patch.json").write_text(json.dumps(ef.PATCH_REPORT))
    engines = {e.name: e for e in map(read_engine, find_engines(tmp_path))}
    assert engines["net.onnx"].patch is None
    assert engines["net.cutefuse.onnx"].patch is not None
    assert "/up/Concat" in engines["net.cutefuse.onnx"].layers[3].onnx


@pytest.mark.parametrize(
    "content",
    [
        "",
        "   ",
        "{",
        "[]",
        "{}",
        '{"Layers": []}',
        '{"Layers": 3}',
        "[1]",
        '"text"',
        "null",
        "\x00\x01",
        '{"Layers": [{}]}',
    ],
)
def test_a_wrong_graph_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "n.engine.graph.json").write_text(content)
    with pytest.raises(CutefuseError) as error:
        read(tmp_path)
    assert "graph.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{}", '"x"', "{", "3"])
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, content: str) -> None:
    ef.write_engine(tmp_path, "n", ef.PLAIN)
    (tmp_path / "n.engine.profile.json").write_text(content)
    with pytest.raises(CutefuseError, match=r"profile\.json"):
        read(tmp_path)


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="does not exist"):
        find_engines(tmp_path / "nothing")
    with pytest.raises(CutefuseError, match="no layer information"):
        find_engines(tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("Conv_0 + Relu_1", {}, ["Conv_0", "Relu_1"]),
        ("PWN(PWN(Sigmoid_3), Mul_4)", {}, ["Sigmoid_3", "Mul_4"]),
        ("{ForeignNode[/a/Add.../b/Mul]}", {}, ["/a/Add", "/b/Mul"]),
        ("/a/Conv || /b/Conv", {}, ["/a/Conv", "/b/Conv"]),
        ("Reformatting CopyNode for Input Tensor 0 to X", {}, []),
        ("fused", {"Metadata": "[ONNX Layer: /a/Conv]\x1e[ONNX Layer: /a/Relu]"}, ["/a/Conv", "/a/Relu"]),
        # As TensorRT's parser marks layers of a local function.
        ("node_of_t_7", {"Metadata": "[ONNX Layer: node_of_t | /b (CuteF)][ONNX Layer: y | /c (CuteF)]"}, ["/b", "/c"]),
        ("n", {"Metadata": "[ONNX Layer: in | /mid (Inner) | /out (Outer)]"}, ["/out"]),
        ("n", {"Metadata": "[ONNX Layer: a | b]"}, ["a | b"]),
    ],
)
def test_onnx_names_come_out_of_layer_names(name: str, raw: dict[str, Any], expected: list[str]) -> None:
    assert node_names(name, raw) == expected


@pytest.mark.parametrize(
    ("text", "dtype", "layout"),
    [
        ("Row major linear FP16 format", "FP16", "linear"),
        ("Channel major FP16 format where channel % 8 == 0", "FP16", "HWC8"),
        ("Channel major FP32 format", "FP32", "HWC"),
        ("Thirty-two wide channel vectorized row major Int8 format", "INT8", "CHW32"),
        ("kHWC8 BFloat16", "BF16", "HWC8"),
        ("kLINEAR FP8E4M3", "FP8", "linear"),
        ("Row major linear Bool", "BOOL", "linear"),
        ("", "", ""),
        ("Unknown format", "", "other"),
    ],
)
def test_formats_are_understood(text: str, dtype: str, layout: str) -> None:
    assert (dtype_of(text), layout_of(text)) == (dtype, layout)


def test_padding_of_vector_layouts_counts_in_memory_only() -> None:
    found = tensor_of(ef.tensor("t", [1, 3, 10, 10]))
    assert found is not None and found.size_bytes == 600 and found.padded_bytes == 1600


@pytest.mark.parametrize(
    ("layer_type", "parameter", "name", "kind"),
    [
        ("CaskConvolution", "Convolution", "x", "conv"),
        ("CudaDepthwiseConvolution", "Convolution", "x", "conv"),
        ("CaskDeconvolutionV2", "Deconvolution", "x", "conv"),
        ("CaskGemmMatrixMultiply", "", "x", "gemm"),
        ("TiledPooling", "Pooling", "x", "pool"),
        ("NoOp", "", "x", "noop"),
        ("PluginV3", "", "x", "plugin"),
        ("Myelin", "", "x", "foreign"),
        ("PointWiseV2", "PointWise", "x", "pointwise"),
        ("kgen", "", "x", "foreign"),
        ("Reformat", "Reformat", "a copy", "copy"),
        ("Shuffle", "Shuffle", "x", "copy"),
        ("", "", "/a/Conv", "conv"),
        ("", "", "{ForeignNode[a...b]}", "foreign"),
        ("Normalization", "", "x", "norm"),
        ("Something", "", "x", "other"),
        ("CudaSoftMax", "SoftMax", "/model.22/dfl/Softmax", "softmax"),
        ("SoftMax", "", "/attn/Softmax", "softmax"),
        ("fused_mha_softmax", "", "x", "attention"),
        ("MultiHeadAttention", "", "x", "attention"),
        ("TrainStation", "", "[trainstation1]", "noop"),
        ("", "", "[trainstation1]", "noop"),
        ("MyelinGraph", "", "x", "foreign"),
        ("Concat", "Concatenation", "x", "copy"),
        ("Resize", "", "x", "pool"),
    ],
)
def test_kinds(layer_type: str, parameter: str, name: str, kind: str) -> None:
    assert kind_of(layer_type, {"ParameterType": parameter} if parameter else {}, name) == kind


@pytest.mark.parametrize(
    ("tactic", "expected"),
    [
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize256x64x32_tensor16x8x16_t1r3s3", True),
        ("ampere_h16816cudnn_128x128_ldg8_relu_exp_stages_64x3_large_nhwc_tn_v1", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_g1_ffma_t1r3s3", False),
        ("ampere_scudnn_128x64_relu_medium_nn_v1", False),
        ("volta_int8x4_icudnn_int8x4_128x32_relu", False),
        ("", None),
    ],
)
def test_tensor_cores_are_read_from_tactics(tactic: str, expected: bool | None) -> None:
    assert on_tensor_cores("conv", "CaskConvolution", tactic) is expected


# ---------------------------------------------------------------------------------------------------- mutated files
SEEDS = {
    "graph": (DATA / "resnet18-a100-fp16" / "resnet.onnx.engine.graph.json").read_text(),
    "profile": (DATA / "resnet18-a100-fp16" / "resnet.onnx.engine.profile.json").read_text(),
    "modern": json.dumps(ef.tensorrt_11(ef.PLAIN)),
}


def mutate(text: str, edits: list[tuple[int, int, str]]) -> str:
    for at, length, new in edits:
        at %= len(text) + 1
        text = text[:at] + new + text[at + length :]
    return text


snippets = st.one_of(
    st.sampled_from(
        [
            "{",
            "}",
            "[",
            "]",
            '"',
            ",",
            ":",
            "null",
            "nan",
            "-1",
            "1e999",
            "\\",
            "\x1e",
            "\ud83d\ude00",
            '"Layers"',
            "[]",
            "{}",
        ]
    ),
    st.text(max_size=6),
)
edits = st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 60), snippets), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.sampled_from(sorted(SEEDS)), changes=edits)
def test_mutated_files_give_an_engine_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, seed: str, changes: list[tuple[int, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    broken = mutate(SEEDS[seed], changes).encode("utf-8", "replace")
    graph, profile = folder / "m.engine.graph.json", folder / "m.engine.profile.json"
    graph.write_bytes(SEEDS["graph"].encode() if seed == "profile" else broken)
    profile.write_bytes(broken if seed == "profile" else SEEDS["profile"].encode())
    try:
        engine = read(folder)
        assert engine.layers and math.isfinite(engine.total_us)
        analyse(engine, by_name("A100"))
    except CutefuseError as error:
        assert len(str(error)) < 2000
    finally:
        shutil.rmtree(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "Name",
                    "LayerType",
                    "Inputs",
                    "Outputs",
                    "Dimensions",
                    "Format/Datatype",
                    "Format",
                    "Datatype",
                    "Layers",
                    "Bindings",
                    "I/O Tensors",
                    "IOMode",
                    "Metadata",
                    "Weights",
                    "Count",
                    "Type",
                    "Kernel",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(layers=st.lists(json_values, max_size=5), bindings=json_values)
def test_json_of_any_structure_goes_through_the_whole_report(
    tmp_path_factory: pytest.TempPathFactory, layers: list[Any], bindings: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "m.engine.graph.json").write_text(json.dumps({"Layers": layers, "Bindings": bindings}))
    try:
        page = write(folder, folder, peaks="H200", quiet=True)
        assert page.read_text().startswith("<!doctype html>")
    except CutefuseError as error:
        assert "graph.json" in str(error)
    finally:
        shutil.rmtree(folder)
