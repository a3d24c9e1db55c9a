"""`profile-torch`: the command, the inputs of its command line, and real modules on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cutefuse.commands.profile_torch import main
from cutefuse.errors import CutefuseError
from cutefuse.profilers.torch.inputs import Given, load, parse_inputs

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(16, 8, 3, padding=1)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        y = self.a(x)
        return self.norm(torch.relu(self.b(torch.cat([y, y], 1))))

class RMSNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

class Decoder(torch.nn.Module):
    def __init__(self, layers=4, size=32, ids=7):
        super().__init__()
        self.embedding = torch.nn.Embedding(ids, size)
        layer = lambda: torch.nn.Sequential(RMSNorm(size), torch.nn.Linear(size, size))
        self.layers = torch.nn.ModuleList(layer() for _ in range(layers))
        self.norm = RMSNorm(size)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.norm(x), "ids": ids}

class Fixed(torch.nn.Module):
    def forward(self, x):
        return x + 1

def with_inputs():
    return Net(), torch.randn(1, 3, 16, 16)

def broken():
    raise ValueError("not a TypeError")
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, that holds the module tiny_net."""
    (tmp_path / "tiny_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_net", raising=False)
    return tmp_path


@pytest.mark.parametrize("target", ["nocolon", "no_such_module:f", "os:no_such_function", "os.path:join", ":f", "os:"])
def test_a_factory_that_cannot_be_called_is_one_sentence(target: str) -> None:
    with pytest.raises(CutefuseError, match="give for example|cannot be"):
        load(target)


def test_inputs_are_read() -> None:
    assert parse_inputs(["1x3x8x8", "5", "4x256:int64", "2x2:bool"]) == [
        Given((1, 3, 8, 8)), Given((5,)), Given((4, 256), "int64"), Given((2, 2), "bool"),
    ]  # fmt: skip
    assert [str(g) for g in parse_inputs(["4x256:int64", "1x3"])] == ["4x256:int64", "1x3"]


@pytest.mark.parametrize(
    "word", ["1,3", "", "x", "4x", "0x3", "-1x3", "4x256:", "4x256:int7", "4x256:int64:9", ":int64", "1e3", "9" * 13]
)
def test_a_bad_shape_is_one_sentence_and_exit_code_2(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["os:getcwd", f"--input={word}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --input {word} is not of the form 1x3x224x224 or 4x256:int64")


@pytest.mark.parametrize("option", ["--iterations", "--rows"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["os:getcwd", option, "0"]) == 2
    assert capsys.readouterr().err == f"error: {option} is 0; give 1 or more\n"


def test_without_torch_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["os:getcwd"]) == 2
    err = capsys.readouterr().err
    assert "pip install torch" in err and err.count("\n") == 1


@pytest.mark.torch
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["os:getcwd"], "os:getcwd returned str; it must return a torch.nn.Module"),
        (["tiny_net:Net"], "tiny_net:Net returned no inputs; return (module, inputs), or give --input"),
        (["tiny_net:Net", "--input", "2x4x16x16"], "Net cannot compute with 2x4x16x16:float32 ("),
        (["tiny_net:Net", "--input", "2x3x16x16:int64"], "Net cannot compute with 2x3x16x16:int64 ("),
        (["tiny_net:Net", "--input", "4x5", "--input", "4x5"], "Net cannot compute with 4x5:float32 4x5:float32 ("),
        (["tiny_net:Decoder", "--input", "4x5"], "Decoder cannot compute with 4x5:float32 ("),
        (
            ["tiny_net:Fixed", "--input", "4", "--backward"],
            "Fixed returns nothing with a gradient; leave --backward out",
        ),
        (["tiny_net:Net", "--input", "2x3x16x16", "--device", "no_such"], "--device no_such cannot be used ("),
    ],
)
def test_what_cannot_be_profiled_is_one_sentence(
    argv: list[str], words: str, net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}")
    assert not list(net.glob("torch_profile/*.json")), "nothing half-written is left"


@pytest.mark.torch
@pytest.mark.parametrize("argv", [["tiny_net:Net", "--shape", "2x3x16x16"], ["tiny_net:with_inputs"]])
def test_a_real_module_is_profiled(argv: list[str], net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([*argv, "--iterations", "2", "-o", "out"]) == 0
    out = capsys.readouterr().out
    assert "ConcatConv at b (Conv2d)" in out and "LayerNorm at norm (LayerNorm)" in out
    assert (net / "out" / "trace.json").is_file() and "bwd" not in out and "CUDA" not in out
    data = json.loads((net / "out" / "profile.json").read_text())
    conv = next(r for r in data["classes"] if r["name"] == "Conv2d")
    assert (conv["calls"], conv["modules"]) == (2, 2) and 0 < conv["share"] < 100 and "replaced" not in data
    batch = 2 if "--shape" in argv else 1
    # Each convolution makes 8 float32 channels of 16 x 16, and what oneDNN keeps beside them.
    assert conv["cpu_bytes"] >= 2 * batch * 8 * 16 * 16 * 4


@pytest.mark.torch
def test_token_ids_backward_and_replaced_norms(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    argv = ["tiny_net:Decoder", "--input", "4x16:int64", "--backward", "--replace-norms", "--iterations", "2"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "5 norms replaced" in out and "bwd CPU us" in out and "class, CPU time before and after" in out
    data = json.loads((net / "torch_profile" / "profile.json").read_text())
    classes = {r["name"]: r for r in data["classes"]}
    norms = classes["RMSNorm"]
    assert (norms["calls"], norms["modules"]) == (5, 5)
    assert norms["cpu_us_avg"] == pytest.approx(norms["cpu_us"] / 5)
    assert all(classes[c]["backward_cpu_us"] > 0 for c in ("RMSNorm", "Linear", "Embedding", "Decoder"))
    inner = sum(classes[c]["backward_cpu_us"] for c in ("RMSNorm", "Linear", "Embedding"))
    assert inner <= classes["Decoder"]["backward_cpu_us"] <= data["total"]["cpu_us"]
    assert classes["Decoder"]["share"] <= 100
    compared = {r["name"]: r for r in data["replaced"]["compared"]}
    assert compared["RMSNorm"]["calls"] == 5 and compared["RMSNorm"]["after_us"] > 0
    assert list(compared)[-1] == "(whole)"
    assert {p.name for p in (net / "torch_profile").glob("trace*.json")} == {"trace.json", "trace_replaced.json"}
    assert any(e.get("name") == "module:norm (RMSNorm)" for e in json.loads(
        (net / "torch_profile" / "trace.json").read_text())["traceEvents"])  # fmt: skip
