"""Weights outside the file: streamed into a data file of the patched model's own, or refused in one sentence."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, weights
from onnx import TensorProto, numpy_helper

from cutefuse.commands.patch import main
from cutefuse.graph import store
from cutefuse.graph.runner import Runner
from cutefuse.rewrite.unpatch import unpatch

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) z = Relu(x) v = Conv(z, u) y = Add(v, s)"


def outside(folder: Path, name: str = "m.onnx") -> Path:
    """A model whose larger weights lie in <name>.bin."""
    values = weights(w=(40, 24, 3, 3), k=(40,), u=(12, 40, 1, 1), s=(1, 12, 1, 1))
    onnx.save(graph(BODY, values), str(folder / name), save_as_external_data=True, location=f"{name}.bin",
              size_threshold=512)  # fmt: skip
    return folder / name


def locations(path: Path) -> dict[str, str]:
    graph_ = onnx.load(str(path), load_external_data=False).graph
    return {t.name: store.external_fields(t).get("location", "inside") for t in graph_.initializer}


def test_the_patched_model_owns_all_its_weights_in_one_file(tmp_path: Path) -> None:
    source = outside(tmp_path)
    assert locations(source) == {"w": "m.onnx.bin", "k": "inside", "u": "m.onnx.bin", "s": "inside"}
    assert main([str(source), "--all", "--verify"]) == 0
    patched = tmp_path / "m.cutefuse.onnx"
    assert locations(patched) == {
        "u": "m.cutefuse.onnx.data", "s": "inside", "Conv_1.packed_weight": "m.cutefuse.onnx.data",
        "Conv_1.bias": "inside",
    }  # fmt: skip
    (tmp_path / "m.onnx.bin").unlink()
    onnx.checker.check_model(str(patched), full_check=True)
    assert fused_types(onnx.load(str(patched))) == ["CuteConcatConv2Relu"]


def test_data_files_are_readable_as_the_umask_says_and_aligned_for_mapping(tmp_path: Path) -> None:
    source = outside(tmp_path)
    (tmp_path / "m.onnx.bin").chmod(0o644)  # onnx writes it for its owner alone
    assert main([str(source), "--all"]) == 0
    umask = os.umask(0)
    os.umask(umask)
    for name in ("m.cutefuse.onnx", "m.cutefuse.onnx.data", "m.patch.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask, name
    loaded = onnx.load(str(tmp_path / "m.cutefuse.onnx"), load_external_data=False)
    offsets = [int(f["offset"]) for t in loaded.graph.initializer if (f := store.external_fields(t))]
    assert len(offsets) == 2 and all(o % store.ALIGNMENT == 0 for o in offsets)


def test_weights_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHUNK", 100)
    source = outside(tmp_path)
    assert main([str(source), "--exclude", "*"]) == 3
    assert main([str(source), "--all", "--verify"]) == 0
    before, after = (onnx.load(str(tmp_path / n)).graph.initializer for n in ("m.onnx", "m.cutefuse.onnx"))
    value = {t.name: numpy_helper.to_array(t) for t in before}["u"]
    assert np.array_equal({t.name: numpy_helper.to_array(t) for t in after}["u"], value)


def test_an_output_in_another_folder_carries_its_weights(tmp_path: Path) -> None:
    source = outside(tmp_path)
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "out.onnx"
    assert main([str(source), "--all", "-o", str(target), "--verify"]) == 0
    assert sorted(p.name for p in target.parent.iterdir()) == ["out.onnx", "out.onnx.data", "out.patch.json"]
    model = onnx.load(str(target))
    feeds = {n: np.ones((1, c, 9, 7), np.float32) for n, c in (("a", 8), ("b", 16))}
    original = Runner(onnx.load(str(source)), tmp_path)(feeds)[0]
    assert np.allclose(Runner(model, target.parent)(feeds)[0], original, atol=1e-5)


def test_unpatching_streams_too(tmp_path: Path) -> None:
    source = outside(tmp_path)
    assert main([str(source), "--all"]) == 0
    assert unpatch(tmp_path / "m.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    assert locations(tmp_path / "plain.onnx") == {
        "u": "plain.onnx.data", "s": "inside", "Conv_1.weight": "plain.onnx.data", "Conv_1.bias": "inside",
    }  # fmt: skip


def test_a_model_that_outgrows_protobuf_moves_its_weights_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "EXTERNAL_LIMIT", 10_000)
    values = weights(w=(40, 24, 3, 3), k=(40,), u=(12, 40, 1, 1), s=(1, 12, 1, 1))
    onnx.save(graph(BODY, values), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--verify"]) == 0
    assert locations(tmp_path / "m.cutefuse.onnx")["Conv_1.packed_weight"] == "m.cutefuse.onnx.data"


def damage(kind: str, folder: Path) -> None:
    data = folder / "m.onnx.bin"
    model = onnx.load(str(folder / "m.onnx"), load_external_data=False)
    entries = {e.key: e for e in next(t for t in model.graph.initializer if t.name == "u").external_data}
    if kind == "gone":
        data.unlink()
    elif kind == "short":
        data.write_bytes(data.read_bytes()[:2000])
    elif kind == "outside the folder":
        entries["location"].value = "../m.onnx.bin"
    elif kind == "absolute":
        entries["location"].value = "/etc/passwd"
    elif kind == "no number":
        entries["offset"].value = "many"
    elif kind == "negative":
        entries["offset"].value = "-5"
    onnx.save(model, str(folder / "m.onnx"))


@pytest.mark.parametrize("kind", ["gone", "short", "outside the folder", "absolute", "no number", "negative"])
def test_damaged_outside_data_is_one_sentence_and_leaves_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    outside(inner)
    damage(kind, inner)
    before = sorted(p.name for p in inner.iterdir())
    assert main([str(inner / "m.onnx"), "--all"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "tensor '" in err, err
    assert sorted(p.name for p in inner.iterdir()) == before


def test_an_external_tensor_without_a_location_is_one_sentence(tmp_path: Path, capsys) -> None:
    model = graph(BODY, weights(w=(40, 24, 3, 3), k=(40,), u=(12, 40, 1, 1), s=(1, 12, 1, 1)))
    model.graph.initializer[2].ClearField("raw_data")
    model.graph.initializer[2].data_location = TensorProto.EXTERNAL
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert main([str(tmp_path / "m.onnx"), "--all"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the data of tensor 'u' cannot be read (") and line.endswith("); repair the model")


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """As on a full disk, a file can be made and written until it is this large."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = outside(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with files_of_at_most(16_000):  # less than the packed filter
        assert main([str(source), "--all"]) == 2
    assert "m.cutefuse.onnx.data cannot be written (File too large)" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_folder_where_the_data_should_lie_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.cutefuse.onnx.data").mkdir()
    assert main([str(outside(tmp_path)), "--all"]) == 2
    assert "m.cutefuse.onnx.data cannot be written (Is a directory)" in capsys.readouterr().err
    assert not (tmp_path / "m.cutefuse.onnx").exists()
