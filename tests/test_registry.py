"""TensorRT's own plugin registry takes the library and creates a plugin of every op_type from the parser's fields.

`make test-all` runs `scripts/lean_tensorrt.py`, which brings the lean runtimes: registry and deserialiser, no builder.
Each version has a process of its own. No GPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutefuse import kernels, plugin_path
from cutefuse.operators import operators
from cutefuse.operators.conv_call import NHWC
from cutefuse.operators.function import node_attributes

pytestmark = pytest.mark.long

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import lean_tensorrt  # noqa: E402

# argv: the folder of the runtime, our library, a JSON file of [op_type, {field: [is int, values]}].
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import tensorrt_lean_bindings as trt

logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
registry = trt.get_plugin_registry()
before = len(registry.all_creators)
loaded = registry.load_library(sys.argv[2]) is not None
made, refused = [], []
for op_type, fields in json.load(open(sys.argv[3])):
    creator = registry.get_creator(op_type, "1", "cutefuse")
    arrays = [np.array(values, np.int32 if ints else np.float32) for ints, values in fields.values()]
    kinds = [trt.PluginFieldType.INT32 if ints else trt.PluginFieldType.FLOAT32 for ints, _ in fields.values()]
    collection = trt.PluginFieldCollection([trt.PluginField(*f) for f in zip(fields, arrays, kinds)])
    try:
        plugin = creator.create_plugin("node", collection, trt.TensorRTPhase.BUILD)
    except RuntimeError:
        plugin = None
    (refused if plugin is None else made).append(op_type)
print(json.dumps({"version": trt.__version__, "loaded": loaded, "new": len(registry.all_creators) - before,
                  "made": made, "refused": refused}))
"""


def fields_of_all() -> list[tuple[str, dict[str, Any]]]:
    """The fields of one node of every op_type; every second convolution is over NHWC tensors."""
    found: dict[str, dict[str, Any]] = {}
    for op in operators():
        for case in op.cases():
            if case.op_type in found:
                continue
            call = op.call(case, case.dtypes[0])
            attrs = {**node_attributes(call), **({"layout": NHWC} if "layout" in call.attrs and len(found) % 2 else {})}
            found[case.op_type] = {
                spec["name"]: [spec["kind"] == "ints", v if isinstance(v, list) else [v]]
                for spec in kernels.operator_of(case.op_type)["attributes"]
                for v in [attrs[spec["name"]]]
            }
    return list(found.items())


def ask(version: str, nodes: list[tuple[str, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    runtime = lean_tensorrt.FOLDER / version
    if not runtime.is_dir():
        pytest.skip(f"TensorRT's lean runtime {version} is not here; run `python scripts/lean_tensorrt.py`")
    (folder / "nodes.json").write_text(json.dumps(nodes))
    command = [sys.executable, "-c", CHILD, str(runtime), str(plugin_path()), str(folder / "nodes.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("version", lean_tensorrt.VERSIONS)
def test_the_registry_creates_a_plugin_of_every_op_type(version: str, tmp_path: Path) -> None:
    nodes = fields_of_all()
    answer = ask(version, nodes, tmp_path)
    assert answer["version"] == version and answer["loaded"]
    assert answer["made"] == [op_type for op_type, _ in nodes] and answer["refused"] == []
    assert answer["new"] == len(nodes) == 1365


@pytest.mark.parametrize("version", lean_tensorrt.VERSIONS[::3])
def test_the_registry_gets_no_plugin_for_fields_that_are_wrong(version: str, tmp_path: Path) -> None:
    name, good = next((n, f) for n, f in fields_of_all() if n == "CuteConcatConv2Relu")
    too_many, other_type = {**good, "channels": [True, [8] * 9]}, {**good, "alpha": [True, [1]]}
    missing = {key: value for key, value in good.items() if key != "channels"}
    answer = ask(version, [(name, fields) for fields in (too_many, other_type, missing, good)], tmp_path)
    assert answer["refused"] == [name] * 3 and answer["made"] == [name]


def test_what_pip_cannot_fetch_is_said_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    reason = lean_tensorrt.fetch("0.0.1", tmp_path / "lean")
    assert "0.0.1" in reason and "\n" not in reason
    assert list((tmp_path / "lean").iterdir()) == []
