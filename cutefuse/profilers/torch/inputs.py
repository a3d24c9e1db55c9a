"""The module of `module:factory` and the tensors that it is given, from the words of the command line."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, first_line

TYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")
_LARGEST = 1 << 40  # elements of one input; beyond it something was mistyped


@dataclass(frozen=True)
class Given:
    """The shape of an input, and its type; "" for that of the module."""

    dims: tuple[int, ...]
    dtype: str = ""

    def __str__(self) -> str:
        return "x".join(map(str, self.dims)) + (f":{self.dtype}" if self.dtype else "")


def parse_inputs(words: Sequence[str]) -> list[Given]:
    """`1x3x224x224` or `4x256:int64` of the command line. Raises CutefuseError for anything else."""
    found = []
    for word in words:
        shape, colon, dtype = word.partition(":")
        sizes = shape.split("x")
        whole = all(re.fullmatch("[0-9]+", s) and int(s) for s in sizes) and math.prod(map(int, sizes)) <= _LARGEST
        if not whole or (colon and dtype not in TYPES):
            raise CutefuseError(
                f"--input {word} is not of the form 1x3x224x224 or 4x256:int64; sizes are above 0, types are "
                + ", ".join(TYPES)
            )
        found.append(Given(tuple(map(int, sizes)), dtype))
    return found


def load(target: str) -> Any:
    """What `module:factory` returns when called. Raises CutefuseError when it cannot be imported or called."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise CutefuseError(f"{target} is not of the form module:factory; give for example my_models:make_unet")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        return factory()  # type: ignore[operator]
    except (ImportError, AttributeError) as error:
        raise CutefuseError(f"{target} cannot be found ({error}); check the module and PYTHONPATH") from None
    except TypeError as error:
        raise CutefuseError(f"{target} cannot be called without arguments ({error}); wrap it in a factory") from None
    finally:
        sys.path.pop(0)


def prepare(
    torch: Any, made: Any, target: str, given: Sequence[Given], device: str, dtype: str, training: bool
) -> tuple[Any, tuple[Any, ...]]:
    """(module, inputs) on a device and in a type ("" as it is), from what the factory returned: a module, or a module
    and its inputs, which `given` replaces. Raises CutefuseError where that cannot be."""
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise CutefuseError(f"{target} returned {type(module).__name__}; it must return a torch.nn.Module")
    if inputs is None and not given:
        raise CutefuseError(
            f"{target} returned no inputs; return (module, inputs), or give --input 1x3x224x224 (4x256:int64 for ids)"
        )
    wanted = getattr(torch, dtype) if dtype else None
    module = module.train(training)
    if given:
        torch.manual_seed(1)
        inputs = tuple(_tensor(torch, module, one) for one in given)
    inputs = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    try:
        module = module.to(device)
        module = module.to(wanted) if wanted else module
        return module, tuple(
            x.to(device, wanted if wanted and x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x
            for x in inputs
        )
    except (RuntimeError, AssertionError) as error:
        raise CutefuseError(f"--device {device} cannot be used ({first_line(error)}); give cuda or cpu") from None


def _tensor(torch: Any, module: Any, given: Given) -> Any:
    """Random values; whole numbers are ids that every embedding of the module knows, and 0 or 1 without one."""
    dtype = getattr(torch, given.dtype or "float32")
    known = [m.num_embeddings for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    try:
        if dtype.is_floating_point:
            return torch.randn(given.dims).to(dtype)
        return torch.randint(0, 2 if dtype == torch.bool else min(known, default=2), given.dims).to(dtype)
    except RuntimeError as error:  # no memory
        raise CutefuseError(f"--input {given} cannot be made ({first_line(error)}); give a smaller one") from None
