"""What to fuse next: gains by the layers that would go, in the report and on the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import engine_files as ef
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cutefuse.commands.rank import main as rank_main
from cutefuse.errors import CutefuseError
from cutefuse.report.analyse.rank import gains
from cutefuse.report.write import write

DATA = Path(__file__).parent / "data" / "engines"


def net(path: Path, second_reader: bool = False, shared: bool = False) -> Path:
    """The ONNX model behind engine_files.PLAIN."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 64, 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("Conv", ["x", "w_stem"], ["s"], name="/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["s"], ["a"], name="/stem/Relu"),
        helper.make_node("Conv", ["a", "w_side"], ["t"], name="/side/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["t"], ["b"], name="/side/Relu"),
        helper.make_node("Concat", ["a", "b"], ["cat"], name="/up/Concat", axis=1),
        helper.make_node("Conv", ["cat", "w_up"], ["u"], name="/up/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["u"], ["c"], name="/up/Relu"),
        helper.make_node("Conv", ["c", "w_head"], ["y"], name="/head/Conv"),
    ]
    if second_reader:
        nodes.append(helper.make_node("GlobalAveragePool", ["cat"], ["z"], name="/pool"))
    if shared:
        nodes.append(helper.make_node("Conv", ["cat", "w_up"], ["z"], name="/twin/Conv"))
    dims = {"stem": (64, 8, 3, 3), "side": (64, 64, 3, 3), "up": (64, 128, 3, 3), "head": (2, 64, 1, 1)}
    weights = [numpy_helper.from_array(np.zeros(d, np.float32), f"w_{name}") for name, d in dims.items()]
    ends = [y, helper.make_tensor_value_info("z", TensorProto.FLOAT, None)] if shared else [y]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], ends, weights)), str(path))
    return path


def test_gains_are_the_copies_that_would_go(tmp_path: Path) -> None:
    plain, _ = ef.write_pair(tmp_path)
    alone = {"/stem/Conv": 0.0, "/side/Conv": 0.0}  # with their Relu: TensorRT fuses these by itself
    assert gains(plain, net(tmp_path / "net.onnx")) == {"/up/Conv": pytest.approx(20.0), **alone}


def test_a_shared_concat_is_shared_among_its_convolutions(tmp_path: Path) -> None:
    plain, _ = ef.write_pair(tmp_path)
    both = gains(plain, net(tmp_path / "net.onnx", shared=True))
    assert {k: v for k, v in both.items() if v} == {"/up/Conv": pytest.approx(10.0), "/twin/Conv": pytest.approx(10.0)}


def test_a_concat_that_stays_gains_nothing(tmp_path: Path) -> None:
    plain, _ = ef.write_pair(tmp_path)
    found = gains(plain, net(tmp_path / "net.onnx", second_reader=True))
    assert found["/up/Conv"] == 0.0 and not any(found.values())


def test_the_ranking_reaches_the_report_and_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = ef.write_pair(tmp_path)
    model = net(tmp_path / "net.onnx")
    assert rank_main([str(plain), str(model)]) == 0
    assert re.search(r"20\.0\s+20\.0\s+40\.0 .*concat_conv\s+/up/Conv", capsys.readouterr().out)
    assert rank_main([str(plain), str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["nodes"] == ["/up/Concat", "/up/Conv", "/up/Relu"]
    text = write(plain, tmp_path / "out", model, quiet=True).read_text()
    assert 'id="next"' in text and "/up/Concat → /up/Conv → /up/Relu" in text


def test_a_model_of_another_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rank_main([str(DATA / "resnet18-a100-fp16"), str(net(tmp_path / "net.onnx"))]) == 2
    assert "shares no node name" in capsys.readouterr().err
    text = write(DATA / "resnet18-a100-fp16", tmp_path, tmp_path / "net.onnx", quiet=True).read_text()
    assert "No ranking of what to fuse next" in text


def test_gains_need_a_profile(tmp_path: Path) -> None:
    ef.write_engine(tmp_path, "net.onnx", ef.PLAIN)
    with pytest.raises(CutefuseError, match="no layer times"):
        gains(tmp_path, net(tmp_path / "net.onnx"))
