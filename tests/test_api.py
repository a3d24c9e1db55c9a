"""The Python interface: a ModelProto in, a ModelProto out; names that help, checkers and completion can see."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest
from graphs import TWO, fused_types, graph, weights

import cutefuse
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.match.conv import read as conv_facts
from cutefuse.rewrite.in_memory import Choices
from cutefuse.rewrite.options import Options

ROOT = Path(__file__).resolve().parent.parent
FIXED = {"a": "1,8,9,7", "b": "1,16,9,7"}


def model() -> onnx.ModelProto:
    return graph(TWO, outputs=("y1", "y2"), inputs=FIXED)


def test_a_model_is_patched_and_the_given_one_stays() -> None:
    given = model()
    before = given.SerializeToString(deterministic=True)
    patched, result = cutefuse.patch(given, all_sites=True, verify=True)
    assert len(fused_types(patched)) == 2 and result.exit_code == 0 and result.report["summary"]["fused"] == 2
    assert result.report["verify"]["passed"] and result.output is None
    assert given.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(patched)


def test_where_nothing_pays_the_given_model_comes_back() -> None:
    given = model()
    patched, result = cutefuse.patch(given, exclude=["*"])
    assert patched is given and result.exit_code == 3


def test_a_wrong_fusion_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w[:, ::-1], *of))
    with pytest.raises(VerificationError, match="computes something else"):
        cutefuse.patch(model(), all_sites=True, verify=True)


def test_what_is_no_model_no_choice_or_no_weight_is_a_sentence() -> None:
    with pytest.raises(CutefuseError, match=r"str.*ModelProto"):
        cutefuse.patch("model.onnx")  # type: ignore[arg-type]
    with pytest.raises(CutefuseError, match=r"all_site'.*all_sites"):
        cutefuse.patch(model(), all_site=True)  # type: ignore[call-arg]
    away = graph("x = Conv(a, w) y = Relu(x)", weights(w=(12, 8, 3, 3)), inputs={"a": FIXED["a"]})
    onnx.external_data_helper.set_external_data(away.graph.initializer[0], "w.bin")
    with pytest.raises(CutefuseError, match="'w' lies in a file"):
        cutefuse.patch(away)


def test_every_public_name_is_listed_and_there() -> None:
    assert {"patch", "patch_graph", "VerificationError"} <= set(cutefuse.__all__) <= set(dir(cutefuse))
    assert all(getattr(cutefuse, name) for name in cutefuse.__all__)
    with pytest.raises(AttributeError, match="nope"):
        cutefuse.nope  # noqa: B018


@pytest.mark.parametrize("function", ["patch", "patch_graph"])
def test_the_signature_names_every_choice_with_its_default(function: str) -> None:
    parameters = inspect.signature(getattr(cutefuse, function)).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert parameters["dtype"].default == "" and parameters["all_sites"].default is False
    assert set(Choices.__annotations__) <= set(parameters) and set(Choices.__annotations__) <= set(vars(Options()))


WRONG = """
    import cutefuse, onnx
    model, result = cutefuse.patch(onnx.load("m.onnx"), all_sites=True)
    cutefuse.patch(onnx.load("m.onnx"), all_site=True)  # wrong
    cutefuse.patch("m.onnx")  # wrong
    cutefuse.patch_graph(None, all_site=True)  # wrong
    cutefuse.nope  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_sees_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (ROOT / "cutefuse" / "py.typed").is_file()
    user = tmp_path / "user.py"
    user.write_text(textwrap.dedent(WRONG))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(user)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = {int(line.split(":")[1]) for line in said.splitlines() if "user.py" in line and "error" in line}
    assert found == {i for i, line in enumerate(user.read_text().splitlines(), 1) if "# wrong" in line}, said
