"""cuBLASLt as a peer: what it is asked for, without the library; and on a GPU, what it computes."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import problems
import pytest

from benchmarks.lib import cublaslt, peers
from cutefuse.errors import CutefuseError


class Library:
    """Stands for libcublasLt.so: notes calls, answers `status`, and offers `states` as heuristics."""

    def __init__(self, status: int = 0, states: tuple[int, ...] = (0,)) -> None:
        self.status, self.states, self.calls = status, states, []

    def __getattr__(self, name: str) -> Any:
        def call(*operands: Any) -> int:
            self.calls.append((name, operands))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                for i, state in enumerate(self.states):
                    operands[8][i].state, operands[8][i].waves = state, float(i)
                operands[9]._obj.value = len(self.states)
            return self.status

        return call

    def operands(self, name: str) -> list[tuple[Any, ...]]:
        return [operands for called, operands in self.calls if called == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    workspace = types.SimpleNamespace(data_ptr=lambda: 4096)
    torch = types.SimpleNamespace(uint8=None, empty=lambda *size, **more: workspace)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cublaslt, "_library", lambda: (fake, ctypes.c_void_p(1)))
    return fake


def product() -> cublaslt.Product:
    return cublaslt.Product("float16", (400, 768, 512), (16, 32, 48, 64))


def test_the_product_is_of_filters_and_pixels(library: Library) -> None:
    product()
    layouts = [tuple(v.value for v in o[2:]) for o in library.operands("cublasLtMatrixLayoutCreate")]
    assert layouts == [(768, 512, 768), (768, 400, 768), (512, 400, 512)]
    attributes = {o[1]: o[2]._obj.value for o in library.operands("cublasLtMatmulDescSetAttribute")}
    assert attributes == {3: 1, 7: 4, 8: 48}  # transposed filters; bias in the epilogue; its address


def test_a_heuristic_that_cannot_run_is_no_candidate(library: Library) -> None:
    library.states = (0, 15, 0)
    found = product()
    assert found.count == 2
    found.run(1, 7)
    (operands,) = library.operands("cublasLtMatmul")
    assert (operands[3].value, operands[5].value, operands[8].value) == (32, 16, 64)
    assert operands[-1].value == 7


def test_a_refusal_is_one_sentence(library: Library) -> None:
    library.status = 15
    with pytest.raises(CutefuseError, match="cuBLASLt answered status 15"):
        product()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(cuda="99.7")))
    cublaslt._library.cache_clear()
    with pytest.raises(CutefuseError, match=r"libcublasLt\.so\.99 was not found"):
        cublaslt._library()


@pytest.mark.parametrize("odd", [{"R": 3, "S": 3}, {"strides": (2, 2)}, {"pads": (1, 1, 1, 1)}])
def test_only_matrices_are_multiplied(odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    work = types.SimpleNamespace(problem=problems.Problem(1, 20, 20, (64,), 64, **odd))
    with pytest.raises(CutefuseError, match="only 1x1 filters"):
        peers.cublas(work)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_peer_is_right(dtype: str) -> None:
    import torch

    work = peers.Workload.of(problems.Problem(1, 20, 20, (256, 512), 72), dtype, 2)
    prepared = peers.make("cublaslt", work)
    y: Any = prepared.launch(0)
    truth = problems.convolve(work.instances[0], torch.float64)
    assert float((y.permute(0, 3, 1, 2) - truth).norm() / truth.norm()) < 5e-3
