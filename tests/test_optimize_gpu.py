"""`cutefuse optimize` over the PyTorch engine on a GPU. About four minutes, most of it torch.compile:

python -m pytest -q -m gpu tests/test_optimize_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import models
from cutefuse.commands.optimize import main
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.timing.noise import compare, interleave

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def optimize(model: onnx.ModelProto, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    onnx.save(model, str(folder / "m.onnx"))
    code = main([str(folder / "m.onnx"), "-o", str(folder / "out"), "--backend", "torch", *words])
    return code, json.loads((folder / "out" / "optimize.json").read_text())


def test_a_unet_gets_faster_and_its_best_engine_opens_again(tmp_path: Path) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    code, data = optimize(models.build("unet", "float16"), tmp_path, "--verify")
    assert code == 0 and data["builds"] <= 4 and data["verdict"]["high"] < 1
    best = tmp_path / "out" / "best"
    assert read_engine(find_engines(best)[0]).patch
    made = json.loads((best / "m.cutefuse.onnx.engine").read_text())
    mode = {w.partition("=")[0]: w.partition("=")[2] for w in made["options"]}["--mode"]
    patched = TorchEngine.build(Path(made["model"]), mode)
    plain = TorchEngine.build(tmp_path / "m.onnx", data["rival"].rpartition(", ")[2])
    times = interleave([lambda: plain.sample_us(10), lambda: patched.sample_us(10)], 15)
    assert compare(times[1], times[0]).faster


def test_every_site_of_a_network_is_measured(tmp_path: Path) -> None:
    code, data = optimize(models.build("yolo_neck", "float16"), tmp_path)
    tried = [s for s in data["sites"] if s["status"] in ("kept", "taken back")]
    assert code in (0, 3) and tried and all(s["measured_us"] is not None for s in tried)
    assert data["kept"].startswith("plain") == (code == 3)


def test_a_network_without_sites_comes_back_unchanged(tmp_path: Path) -> None:
    code, data = optimize(models.build("unet", "float16", small=True), tmp_path, "--exclude", "*")
    assert code == 3 and data["ended"] == "no site can be fused" and data["kept"].startswith("plain")
