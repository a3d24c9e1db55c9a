"""Puts our norms into a PyTorch model. A module is replaced after a copy of it has computed the same in numbers.

The copy has random parameters and gets random rows; its results are compared with the formula in float64. So a class
whose name and parameters look like an RMSNorm's but which multiplies by `1 + weight`, adds epsilon elsewhere or divides
by n - 1 stays as it is.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cutefuse.table import counted
from cutefuse.torch.norms import DEFAULT_EPSILONS, LayerNorm, RMSNorm, forward_reference

EPSILONS = ("variance_epsilon", "eps", "epsilon")
NAMES = re.compile("(rms|layer)_?norm", re.IGNORECASE)
LEADING = ((5,), (2, 3), (2, 2, 2))  # axes before the normalised one: a norm of images shows itself at rank 4
ROUNDINGS = 8  # epsilons of the type that two roundings and a sum in another order may differ by
SUM_ERROR = 1e-5  # of float32 sums over long rows, for modules that compute in float32 whatever they are given
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _Left(Exception):
    """Why a module stays as it is: a clause about it."""


@dataclass(frozen=True)
class NormReport:
    """What replace_norms did, by the names of the modules in the model."""

    replaced: tuple[str, ...]
    left: Mapping[str, str]  # name -> its class, and why it stays as it was

    def __str__(self) -> str:
        left = [f"left as it was: {name}, {reason}" for name, reason in self.left.items()]
        return "\n".join([f"{counted(len(self.replaced), 'norm')} replaced", *left])


def replace_norms(model: nn.Module) -> NormReport:
    """Turn every norm over the last axis into ours, in place, parameters and hooks kept.

    Tried are nn.LayerNorm, nn.RMSNorm, their subclasses, and classes with RMSNorm or LayerNorm in their names that hold
    no modules. A module that computes something else, or that cannot be tried, is left and named in the report. The
    judgement holds for inputs of the parameters' type: given bfloat16 beside float32 parameters, ours return bfloat16.
    """
    replaced: list[str] = []
    left: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        if not _is_candidate(module):
            continue
        name = path or type(module).__name__
        try:
            _replace(module)
            replaced.append(name)
        except _Left as reason:
            left[name] = f"{type(module).__name__}: {reason}"
    return NormReport(tuple(replaced), left)


def _is_candidate(module: nn.Module) -> bool:
    if type(module) in (LayerNorm, RMSNorm):
        return False
    named = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or NAMES.search(type(module).__name__)
    return bool(named) and (not module._modules or parametrize.is_parametrized(module))


def _replace(module: Any) -> None:
    _check_parts(module)
    size = _size(module)
    epsilon = _epsilon(module)
    ours = next(c for c in _choices(module) if _computes(module, c, size, epsilon))
    try:
        module.__class__ = ours
    except TypeError as error:
        raise _Left(f"Python does not let its class change ({error})") from None
    module.normalized_shape, module.eps, module.elementwise_affine = (size,), epsilon, module.weight is not None
    if ours is LayerNorm and not hasattr(module, "bias"):
        module.bias = None


def _choices(module: nn.Module) -> Iterator[type[nn.Module]]:
    """The classes that could replace a module, the likelier one first; raises _Left after the last."""
    if isinstance(module, nn.LayerNorm) or module._parameters.get("bias") is not None:
        yield LayerNorm
        raise _Left("it computes no LayerNorm over the last axis")
    yield RMSNorm
    yield LayerNorm
    raise _Left("it computes neither RMSNorm nor LayerNorm over the last axis with its weight")


def _check_parts(module: nn.Module) -> None:
    """Raise _Left for a module that no copy can be tried of, or whose class does more than a norm."""
    if parametrize.is_parametrized(module):
        raise _Left("it is parametrised; call torch.nn.utils.parametrize.remove_parametrizations first")
    if "forward" in module.__dict__:
        raise _Left("its forward was replaced on this instance, and a new class would not change that")
    parameters = {k: p for k, p in module._parameters.items() if p is not None}
    if not set(parameters) <= {"weight", "bias"}:
        raise _Left(f"its parameters are {', '.join(parameters)}; a norm has a weight, and may have a bias")
    for name, p in parameters.items():
        if type(p) is not nn.Parameter:
            raise _Left(f"its {name} is of class {type(p).__name__}, no plain parameter")
        if p.is_meta:
            raise _Left("it is on the meta device; load the weights first")
    if len(kinds := sorted({str(p.dtype) for p in parameters.values()})) > 1:
        raise _Left(f"its parameters are {' and '.join(kinds)}; ours need one type")
    if any(p.dtype not in DEFAULT_EPSILONS for p in parameters.values()):
        raise _Left(f"its parameters are {kinds[0]}; ours take float32, float16, bfloat16 and float64")
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        return
    formals = list(inspect.signature(type(module).forward).parameters.values())[1:]
    more = [p.name for i, p in enumerate(formals) if i or p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if more:
        raise _Left(f"its forward takes more than a tensor: {', '.join(more)}")
    if module._buffers:
        raise _Left(f"it has a buffer {next(iter(module._buffers))} that its forward may read")
    for name, value in _attributes(module).items():
        if not _is_plain(value):
            raise _Left(f"its attribute {name} is a {type(value).__name__} that its forward may use")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps besides the things that every module has."""
    own = nn.Module().__dict__
    return {k: v for k, v in module.__dict__.items() if k not in own}


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _size(module: Any) -> int:
    """Elements of a row."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        if len(module.normalized_shape) != 1:
            raise _Left(f"it goes over {len(module.normalized_shape)} axes, ours go over the last one")
        return int(module.normalized_shape[0])
    weight = module._parameters.get("weight")
    if weight is None:
        raise _Left("it has no weight that tells the size of a row")
    if any(p is not None and (p.ndim != 1 or p.shape != weight.shape) for p in module._parameters.values()):
        raise _Left(f"its weight is {list(weight.shape)}; ours take one axis, and a bias of the same size")
    return weight.numel()


def _epsilon(module: Any) -> float | None:
    """The module's epsilon; None is the machine epsilon of the input's type, in nn.RMSNorm alone."""
    found = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), "")
    if isinstance(found, (int, float)) or (found is None and type(module).forward is nn.RMSNorm.forward):
        return found
    raise _Left(f"it has no epsilon as a number in {', '.join(EPSILONS[:-1])} or {EPSILONS[-1]}")


def _computes(module: nn.Module, ours: type[nn.Module], size: int, epsilon: float | None) -> bool:
    """Whether a module computes what `ours` would, in its type and in float32, training or not."""
    parameter = next((p for p in module._parameters.values() if p is not None), torch.empty(0, device="cpu"))
    # A narrow type hides a factor of n / (n - 1); float32 does not.
    kinds = dict.fromkeys((parameter.dtype, torch.promote_types(parameter.dtype, torch.float32)))
    for training, kind, leading in itertools.product((False, True), kinds, LEADING):
        trial = _copy(module, kind, training)
        if not _agrees(trial, ours, _rows((*leading, size), kind, parameter.device, epsilon), epsilon):
            if training:
                raise _Left("it computes something else in training mode than in evaluation mode")
            return False
        if changed := [k for k, v in _attributes(trial).items() if getattr(module, k, _Left) != v]:
            raise _Left(f"its forward changes its attribute {changed[0]}")
    return True


def _copy(module: nn.Module, kind: torch.dtype, training: bool) -> nn.Module:
    """The module with random parameters of its own. All else that it holds is plain, or not read by its forward."""
    trial = copy.copy(module)
    generator = torch.Generator().manual_seed(1)
    trial.__dict__["_parameters"] = {
        k: None if p is None else nn.Parameter(_random(p.shape, generator).to(p.device, kind), requires_grad=False)
        for k, p in module._parameters.items()
    }
    trial.__dict__["training"] = training
    return trial


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _rows(shape: tuple[int, ...], kind: torch.dtype, device: torch.device, epsilon: float | None) -> Tensor:
    """Random rows: of deviation 1, about 16, and so small that epsilon is half of the mean square."""
    floor = 2.0**-10 if kind == torch.float16 else 2.0**-26  # below, squares leave the type
    small = max(floor, (DEFAULT_EPSILONS[kind] if epsilon is None else epsilon) ** 0.5)
    x = _random(shape, torch.Generator().manual_seed(2)).view(-1, shape[-1])
    x[1::3] += 16
    x[2::3] *= small
    return x.view(shape).to(device, kind)


def _agrees(trial: nn.Module, ours: type[nn.Module], x: Tensor, epsilon: float | None) -> bool:
    mode = "training" if trial.training else "evaluation"
    try:
        with _undisturbed(x.device):
            y = type(trial).forward(trial, x.clone())
    except Exception as error:  # a foreign forward may raise anything
        raise _Left(f"it fails on {list(x.shape)} in {mode} mode ({' '.join(str(error).split())})") from None
    if not isinstance(y, Tensor):
        raise _Left(f"it returns a {type(y).__name__} instead of a tensor")
    if y.dtype != x.dtype:
        raise _Left(f"it turns {_name(x)} into {_name(y)}, ours keep the type")
    if y.shape != x.shape:
        return False
    weight, bias = (None if p is None else p.double() for p in map(trial._parameters.get, ("weight", "bias")))
    wide, eps = x.double(), DEFAULT_EPSILONS[x.dtype] if epsilon is None else epsilon
    truth, _, mean, rstd = forward_reference(wide, None, weight, bias, eps, ours is LayerNorm)
    rows = (*x.shape[:-1], 1)
    magnitude = (wide.abs() + mean.view(rows).abs()) * rstd.view(rows) * (1 if weight is None else weight.abs())
    magnitude = magnitude if bias is None else magnitude + bias.abs()
    bound = (ROUNDINGS * torch.finfo(x.dtype).eps + SUM_ERROR) * magnitude + torch.finfo(x.dtype).tiny
    return bool(((y.double() - truth).abs() <= bound).all())


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, and the random numbers of the process as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.random.fork_rng(devices):
        yield
