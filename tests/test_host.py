"""The plugin host itself: it must pass a good plugin and name every way in which a bad one breaks the contract."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cutefuse.errors import CutefuseError
from cutefuse_host import Host, HostError, Input, field_of, memory, reference_ops

pytestmark = pytest.mark.slow  # compiles plugin libraries

ROOT = Path(__file__).resolve().parents[1]
INPUT = Input((-1, 8, 2, 2), "float32", (1, 8, 2, 2), (4, 8, 2, 2), (16, 8, 2, 2))


def compile_plugin(out: Path, *options: str) -> Path:
    source = ROOT / "tests/cpp/plugin_broken.cpp"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-array-bounds"]
    subprocess.run([*command, *options, f"-I{ROOT}/plugins", source, "-o", out], check=True)
    return out


@pytest.fixture(scope="session")
def broken_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_plugin(tmp_path_factory.mktemp("broken") / "libbroken.so")


@pytest.fixture
def load(broken_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Host]:
    def load(fault: str = "") -> Host:
        # A copy, because the dynamic linker hands out a loaded file again with its old state.
        copy = tmp_path / f"lib{fault or 'good'}.so"
        copy.write_bytes(broken_library.read_bytes())
        monkeypatch.setenv("BROKEN_LIBRARY", fault)
        return Host(copy)

    return load


def found(host: Host, fault: str, inputs: list[Input] | None = None) -> list[str]:
    plugin = host.build(("Broken", {"fault": fault, "state": 0}), inputs or [INPUT])
    return [f"{f.kind} {f.step}: {f.text}" for f in plugin.findings]


def test_a_good_plugin_has_no_findings(load: Callable[..., Host]) -> None:
    host = load()
    assert host.findings == []
    plugin = host.build(("Broken", {"fault": ""}), [INPUT]).check()
    assert plugin.findings == []
    assert plugin.report["output_shapes"] == [["in0[0]", "8", "2", "2"]]
    assert plugin.report["output_max"] == [[16, 8, 2, 2]]
    [combination] = plugin.report["combinations"]
    assert combination["tactics"] == [1, 2] and combination["workspace_bytes"] == 1024
    assert plugin.report["compiled"] == combination


def test_a_soak_ends_at_a_plugin_that_cannot_run(load: Callable[..., Host]) -> None:
    host = load()
    assert host.soak(("Broken", {"fault": "", "state": 0}), 3) == 3
    assert host.soak(("Broken", {"fault": "no_runtime", "state": 0}), 3) == 0


def test_a_weakly_typed_network_tries_the_16_bit_types_too(load: Callable[..., Host]) -> None:
    plugin = load().build(("Broken", {"fault": ""}), [INPUT], strongly_typed=False).check()
    assert [c["types"] for c in plugin.report["combinations"]] == [[t, t] for t in ("float32", "float16", "bfloat16")]
    assert not plugin.report["compiled"]["usable"]  # Myelin takes strongly typed networks alone


@pytest.mark.parametrize(
    ("fault", "expected"),
    {
        "create_null": "failure createPlugin: it returns null",
        "wrong_core": "violation createPlugin: the capability asked for as PLUGIN_V3ONE_CORE says that it is",
        "no_runtime": "violation createPlugin: getCapabilityInterface returns null for PLUGIN_V3ONE_RUNTIME",
        "keeps_field_pointers": "violation createPlugin: the plugin keeps pointers into the field collection",
        "clone_null": "violation clone: clone returns null",
        "clone_self": "violation clone: clone returns the object itself",
        "clone_shares_memory": "violation clone: the clone's fields change when its original is deleted",
        "other_name": "violation IPluginV3OneCore: getPluginName is 'Other', the creator's is 'Broken'",
        "null_namespace": "violation IPluginV3OneCore: getPluginNamespace is '(null)'",
        "no_output": "violation getNbOutputs: it returns 0",
        "two_outputs": "failure getNbOutputs: it returns 2, the ONNX node has 1 outputs",
        "types_fail": "failure getOutputDataTypes: it returns 1",
        "bool_output": "violation getOutputDataTypes: an output has the data type bool",
        "unknown_output": "violation getOutputDataTypes: an output has the data type unknown (77)",
        "shapes_fail": "failure getOutputShapes: it returns 1",
        "nine_dims": "violation getOutputShapes: output 0 has 9 dimensions",
        "no_dims": "violation getOutputShapes: output 0 has -1 dimensions",
        "null_size": "violation getOutputShapes: output 0 has a size that the expression builder did not make",
        "foreign_size": "violation getOutputShapes: output 0 has a size that the expression builder did not make",
        "divides_by_zero": "failure getOutputShapes: output 0, dimension 0: floor(in0[0] / 0) is a division by zero",
        "negative_size": "failure getOutputShapes: output 0, dimension 0: (in0[0] - 1000) is -999",
        "unknown_operation": "violation getOutputShapes: operation() was asked for the unknown operation 99",
        "no_format": "failure supportsFormatCombination: no combination of types and formats is accepted",
        "looks_ahead": "violation supportsFormatCombination: the answer for tensor 0 changes with what stands",
        "many_formats": "warning supportsFormatCombination: the limit of 3 combinations is reached",
        "limit_zero": "violation getFormatCombinationLimit: it returns 0",
        "configure_fails": "failure configurePlugin: it returns 7",
        "negative_tactics": "violation getNbTactics: it returns -1",
        "tactics_fail": "failure getValidTactics: it returns 1",
        "zero_tactic": "violation getValidTactics: tactic 0 is not distinct and positive",
        "negative_tactic": "violation getValidTactics: tactic -3 is not distinct and positive",
        "double_tactic": "violation getValidTactics: tactic 1 is not distinct and positive",
        "too_many_tactics": "violation getValidTactics: it writes past the end of the array",
        "workspace_shrinks": "violation getWorkspaceSize: it asks for 4096 bytes at the optimum and 1024",
        "no_timing_id": "warning getTimingCacheID: it returns null",
        "timing_id_changes": "violation getTimingCacheID: it changes when the plugin is configured",
        "serialises_shapes": "warning getFieldsToSerialize: the fields change with configurePlugin",
        "refuses_tactic": "violation setTactic: it returns 1 for tactic 2, which the plugin offers itself",
        "shape_change_fails": "failure onShapeChange: it returns 3 for the optimum shape",
        "fields_null": "violation getFieldsToSerialize: getFieldsToSerialize returns no valid field collection",
        "double_field": "violation getFieldsToSerialize: serialised field 1 has the name 'fault'",
        "field_without_data": "violation getFieldsToSerialize: serialised field 'empty' has length 4 and no data",
        "shared_state": "violation clone: the clone's fields change when its original is deleted",
        "runtime_null": "violation createPlugin (runtime): it returns null for the fields that the plugin serialised",
        "runtime_forgets": "violation createPlugin (runtime): a deserialised plugin serialises other fields",
        "types_change": "violation getOutputDataTypes: asked again, it gives other types",
        "shapes_change": "violation getOutputShapes: asked again, it gives other shapes",
        "fields_change": "violation getFieldsToSerialize: asked again, it gives other fields",
        "refuses_minus_one": "failure configurePlugin: it returns 4 for sizes of -1, which Myelin gives",
        "format_of_no_myelin": "warning supportsFormatCombination: tensor 0 has no format that Myelin asks for",
        "attach_null": "violation attachToContext: it returns null",
        "attach_self": "violation attachToContext: it does not return a new object for each context",
        "attach_forgets": "violation attachToContext: the attached object serialises other fields",
    }.items(),
)
def test_names_what_a_plugin_breaks(load: Callable[..., Host], fault: str, expected: str) -> None:
    findings = found(load(), fault)
    assert any(f.startswith(expected) for f in findings), findings


@pytest.mark.parametrize(
    ("fault", "expected"),
    {
        "null_creator": "violation getCreators: creator 0 is null",
        "old_creator": "violation getCreators: creator 0 has the interface 'PLUGIN CREATOR_V1'",
        "no_name": "violation getCreators: creator 0 has no usable name",
        "no_version": "violation getCreators: creator 0 has no usable version",
        "double_creator": "violation getCreators: Broken 1 is there twice",
        "unstable_creators": "violation getCreators: two calls return different creators",
        "negative_count": "violation getCreators: it returns -1 creators and no list",
        "no_list": "violation getCreators: it returns 1 creators and no list",
        "no_field_names": "violation getFieldNames: Broken returns no valid field collection",
        "double_field_name": "violation getFieldNames: Broken lists the field name 'fault' which is empty or double",
        "uses_logger": "violation setLoggerFinder: the library calls the logger finder",
    }.items(),
)
def test_names_what_a_library_breaks(load: Callable[..., Host], fault: str, expected: str) -> None:
    findings = [f"{f.kind} {f.step}: {f.text}" for f in load(fault).findings]
    assert any(f.startswith(expected) for f in findings), findings


def test_warns_about_a_library_without_logger_finder(tmp_path: Path) -> None:
    host = Host(compile_plugin(tmp_path / "libquiet.so", "-DNO_LOGGER_FINDER=1"))
    assert [f.kind for f in host.findings] == ["warning"]


def test_check_raises_with_every_violation_in_one_sentence(load: Callable[..., Host]) -> None:
    with pytest.raises(HostError, match="Broken: violation in getValidTactics: tactic 0"):
        load().build(("Broken", {"fault": "zero_tactic"}), [INPUT]).check()


def test_a_failing_enqueue_is_an_error_and_not_an_abort(load: Callable[..., Host]) -> None:
    plugin = load().build(("Broken", {"fault": ""}), [INPUT])
    with pytest.raises(HostError, match="Broken: enqueue returned 5"):
        plugin.enqueue([(4, 8, 2, 2)], [0], [0])


def test_refuses_a_file_that_is_no_plugin_library(tmp_path: Path) -> None:
    text = tmp_path / "lib.so"
    text.write_text("no library")
    with pytest.raises(HostError, match="plugin host: .*lib.so"):
        Host(text)
    with pytest.raises(HostError, match="cannot open shared object"):
        Host(tmp_path / "missing.so")


def test_refuses_a_library_without_getcreators(tmp_path: Path) -> None:
    empty = tmp_path / "empty.cpp"
    empty.write_text("int nothing() { return 0; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", empty, "-o", tmp_path / "libempty.so"], check=True)
    with pytest.raises(HostError, match="does not export getCreators"):
        Host(tmp_path / "libempty.so")


@pytest.mark.parametrize("key", [("Missing", "1", None), ("Broken", "2", None), ("Broken", "1", "")])
def test_a_plugin_is_found_by_name_version_and_namespace(load: Callable[..., Host], key: tuple) -> None:
    host = load()
    assert host.find("Broken", "1", "tests") == 0
    with pytest.raises(HostError, match="has no plugin"):
        host.find(*key)


def test_fields_follow_the_parsers_type_mapping() -> None:
    assert field_of("i", 3) == field_of("i", [3])
    assert field_of("i", (1 << 32) + 7).data == field_of("i", 7).data  # the parser truncates to 32 bits
    assert (field_of("f", [1.0, 2.5]).type, field_of("f", 1.0).length) == (1, 1)
    assert (field_of("s", "ab").type, field_of("s", b"ab").length) == (6, 3)
    with pytest.raises(HostError, match="attribute 'd' is dict"):
        field_of("d", {})


@pytest.mark.parametrize("layout", ["kLINEAR", "kHWC", "kHWC8", "kHWC16", "kCHW2", "kCHW4", "kCHW32"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 8, 2, 1), (3, 17, 4), (0, 5, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_format_and_back_is_the_same_tensor(layout: str, shape: tuple[int, ...], dtype: str) -> None:
    array = np.random.default_rng(0).integers(-9, 9, shape).astype(memory.numpy_type(dtype))
    packed = memory.pack(array, layout)
    assert packed.shape == memory.packed_shape(shape, layout) and packed.flags["C_CONTIGUOUS"]
    assert (memory.unpack(packed, shape, layout) == array).all()


def test_pad_lanes_of_an_input_hold_nan() -> None:
    packed = memory.pack(np.zeros((1, 3, 2, 2), np.float16), "kHWC8")
    assert packed.shape == (1, 2, 2, 8)
    assert np.isnan(packed[..., 3:]).all() and not np.isnan(packed[..., :3]).any()
    assert memory.pad_lanes(packed, (1, 3, 2, 2), "kHWC8").shape == (1, 2, 2, 5)


def test_a_format_without_conversion_is_refused() -> None:
    with pytest.raises(CutefuseError, match="kDLA_HWC4 cannot be converted"):
        memory.pack(np.zeros((1, 3, 2, 2), np.float16), "kDLA_HWC4")


def test_running_a_plugin_without_a_gpu_is_one_clear_error(
    load: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    monkeypatch.setattr(memory, "device_count", lambda: 0)
    host = load()
    node = onnx.helper.make_node("Broken", ["x"], ["y"], domain="tests", fault="")
    value = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4, 8, 2, 2]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, 1) for d in ("", "tests")])
    session = ReferenceEvaluator(model, new_ops=reference_ops(host))
    with pytest.raises(CutefuseError, match="needs a CUDA device"):
        session.run(None, {"x": np.zeros((4, 8, 2, 2), np.float32)})
