"""One problem in float32, and everything that can solve it: the steps, the library's kernels, PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ladder.steps import STEPS, is_backward, loaded
from cutefuse.errors import CutefuseError
from cutefuse.kernels import Call, Launcher, Tensor

EPSILON = 1e-5
ABSENT = Tensor((0,), "float32")

Launch = Callable[[int], Any]  # enqueues set i on the current stream, returns its result


class Ladder:
    """`launches`: name -> launch. LayerNorm has no affine parameters; every set of tensors is beyond the L2 cache."""

    def __init__(self, torch: Any, library: Path, rows: int, columns: int, compiled: bool) -> None:
        self.torch, self.rows, self.columns, self.sets = torch, rows, columns, 4
        self.x, self.dy = ([torch.randn(rows, columns, device="cuda") for _ in range(self.sets)] for _ in range(2))
        self.y = [torch.empty_like(x) for x in self.x]
        self.gamma = torch.randn(columns, device="cuda")
        self.means = [x.mean(1) for x in self.x]
        self.rstds = [(x.var(1, correction=0) + EPSILON).rsqrt() for x in self.x]
        self.run = loaded(library)
        self.launches: dict[str, Launch] = {name: self._step(name, step) for name, step in STEPS.items()}
        self.launches["RMSNorm: cutefuse"] = self._forward(False)
        self.launches["LayerNorm: cutefuse"] = self._forward(True)
        self.launches["LayerNorm backward: cutefuse"] = self._backward()
        for name, function in (("RMSNorm", self._rms), ("LayerNorm", self._layer)):
            self._peer(name, "torch eager", function)
            if compiled:
                self._peer(name, "torch.compile", torch.compile(function, dynamic=False))

    def _rms(self, x: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (self.columns,), self.gamma, EPSILON)

    def _layer(self, x: Any) -> Any:
        return self.torch.nn.functional.layer_norm(x, (self.columns,), None, None, EPSILON)

    def _peer(self, norm: str, who: str, function: Callable[[Any], Any]) -> None:
        def forward(i: int) -> Any:
            with self.torch.no_grad():
                return function(self.x[i])

        self.launches[f"{norm}: {who}"] = forward
        if norm == "LayerNorm":
            leaves = [x.detach().requires_grad_() for x in self.x]
            results = [function(x) for x in leaves]

            def backward(i: int) -> Any:
                return self.torch.autograd.grad(results[i], leaves[i], self.dy[i], retain_graph=True)[0]

            self.launches[f"{norm} backward: {who}"] = backward

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def _step(self, name: str, number: int) -> Launch:
        def launch(i: int) -> Any:
            other = self.dy[i] if is_backward(name) else self.gamma
            operands = self.x[i].data_ptr(), other.data_ptr(), self.y[i].data_ptr()
            if not self.run(number, *operands, self.rows, self.columns, EPSILON, self.stream()):
                raise CutefuseError(f"this step cannot take rows of {self.columns}")
            return self.y[i]

        return launch

    def _forward(self, layer: bool) -> Launch:
        attrs = {"epsilon": EPSILON, "layer": int(layer)}
        gamma = ABSENT if layer else _described(self.gamma)
        calls = [
            Call("CuteRowNormForward", [_described(x), ABSENT, gamma, ABSENT], [_described(y), *[ABSENT] * 3], attrs)
            for x, y in zip(self.x, self.y, strict=True)
        ]
        return self._ours(calls)

    def _backward(self) -> Launch:
        attrs, calls = {"epsilon": EPSILON, "layer": 1}, []
        for tensors in zip(self.dy, self.x, self.means, self.rstds, self.y, strict=True):
            dy, x, mean, rstd, dx = map(_described, tensors)
            calls.append(Call("CuteRowNormBackward", [dy, ABSENT, x, ABSENT, mean, rstd], [dx, ABSENT, ABSENT], attrs))
        return self._ours(calls)

    def _ours(self, calls: list[Call]) -> Launch:
        launchers = [Launcher(call) for call in calls]

        def launch(i: int) -> Any:
            launchers[i](self.stream())
            return self.y[i]

        return launch

    def error(self, name: str) -> float | None:
        """Largest absolute error against float64; None where the step cannot take the shape. Raises CutefuseError
        where it is more than rounding."""
        self.y[0].fill_(float("nan"))
        try:
            y = self.launches[name](0)
        except CutefuseError:
            return None
        self.torch.cuda.synchronize()
        error = float((y.double() - truth(name, self.x[0].double(), self.dy[0].double(), self.gamma)).abs().max())
        if not error < 1e-4:
            raise CutefuseError(f"{name} is wrong: its error against float64 is {error:.3g}")
        return error


def _described(t: Any) -> Tensor:
    return Tensor(tuple(t.shape), "float32", data=t.data_ptr())


def truth(name: str, x: Any, dy: Any, gamma: Any) -> Any:
    """What a step computes of x [rows, columns], in the type of x; arrays of PyTorch or of numpy."""
    layer = name.startswith("LayerNorm")
    centred = x - x.mean(1)[:, None] if layer else x
    rstd = ((centred * centred).mean(1)[:, None] + EPSILON) ** -0.5
    normal = centred * rstd
    if is_backward(name):
        return rstd * (dy - dy.mean(1)[:, None] - normal * (dy * normal).mean(1)[:, None])
    return normal if layer else normal * gamma
