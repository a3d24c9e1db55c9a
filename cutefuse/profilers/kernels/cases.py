"""Our own operators as programs to profile: one tile on one of an operator's cases."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cutefuse import kernels
from cutefuse.engines.pytorch import gpu_torch
from cutefuse.errors import CutefuseError
from cutefuse.operators import operators

DRIVER = "cutefuse.profilers.kernels.drive"


@dataclass(frozen=True)
class Problem:
    """A case of an operator of ours in one type. `size`: sizes that replace the case's own, "H=160,C=64+64"."""

    op: str
    case: str
    dtype: str
    size: str = ""


def drive_command(problem: Problem, config: int, repeats: int) -> list[str]:
    """A program that launches one tile of one operator on one of its cases."""
    words = [problem.op, problem.case, problem.dtype, problem.size, str(config), str(repeats)]
    return [sys.executable, "-m", DRIVER, "case", *words]


def case_call(problem: Problem) -> Any:
    """The call of a named case. Raises CutefuseError with the known names, and for a size that the case has not."""
    (op,) = _operators(problem.op)
    cases = {case.name: case for case in op.cases()}
    if problem.case not in cases:
        raise CutefuseError(f"case {problem.case} is unknown; --op {problem.op} --list shows those of this operator")
    case = cases[problem.case]
    return op.call(replace(case, sizes={**case.sizes, **_sizes(problem.size, case.sizes)}), problem.dtype)


def _operators(stem: str | None) -> Sequence[Any]:
    """The operator of this name; all of them for None. Raises CutefuseError with the known names."""
    found = {op.stem: op for op in operators()}
    if stem is not None and stem not in found:
        raise CutefuseError(f"operator {stem} is unknown; choose one of {', '.join(found)}")
    return list(found.values()) if stem is None else [found[stem]]


def _sizes(text: str, known: Mapping[str, Any]) -> dict[str, int | list[int]]:
    """Sizes from "H=160,C=64+64,leading=4x1024"."""
    found: dict[str, int | list[int]] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        numbers = re.split(r"[x+]", value)
        if name not in known or not all(n.isdigit() for n in numbers):
            raise CutefuseError(f"--size has {part}; the sizes of this case are {', '.join(known)}, such as H=160")
        several = isinstance(known[name], Sequence)
        if not several and len(numbers) > 1:
            raise CutefuseError(f"--size has {part}; {name} is one number")
        if name == "C" and len(numbers) != len(known[name]):
            raise CutefuseError(f"--size has {part}; this case has {len(known[name])} sources, joined by +")
        found[name] = [int(n) for n in numbers] if several else int(value)
    return found


def torch_with_gpu() -> Any:
    """PyTorch, for device memory. Raises CutefuseError where it is missing or sees no GPU."""
    return gpu_torch("profiling our kernels", "use --command")


def launcher(problem: Problem, config: int) -> Callable[[], None]:
    """A launch of one tile on PyTorch's current stream, over operands of its own that stay alive with it."""
    call, torch = case_call(problem), torch_with_gpu()
    keep: list[Any] = []

    def placed(tensor: kernels.Tensor) -> kernels.Tensor:
        elements = math.prod(tensor.dims)
        if tensor.layout == kernels.CHANNELS_LAST and tensor.ld:
            elements = elements // tensor.dims[1] * tensor.ld
        keep.append(torch.randn(max(elements, 1), device="cuda").to(getattr(torch, tensor.dtype)))
        return replace(tensor, data=keep[-1].data_ptr())

    call = replace(call, inputs=[placed(t) for t in call.inputs], outputs=[placed(t) for t in call.outputs],
                   config=config)  # fmt: skip
    size = kernels.Plan(call).workspace_bytes
    if size > 0:
        keep.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
        call = replace(call, workspace=keep[-1].data_ptr(), workspace_bytes=size)
    bound = kernels.Launcher(replace(call, stream=torch.cuda.current_stream().cuda_stream))

    def launch(_: list[Any] = keep) -> None:
        bound()

    return launch


def known_cases(stem: str | None = None) -> list[dict[str, Any]]:
    """Operators, or the one of this name, with tiles ("configs") and cases, each with the line that describes it."""
    chosen = _operators(stem)
    try:
        tiles = {op["name"]: op["configs"] for op in kernels.describe()["ops"]}
    except (CutefuseError, OSError):
        tiles = {}
    return [
        {
            "op": op.stem,
            "configs": [{"id": c["id"], "text": f"{c['name']} ({kernels.gpus_of(c)})"} for c in tiles.get(op.stem, [])],
            "cases": [{"name": c.name, "text": op.title(op.call(c, c.dtypes[0]))} for c in op.cases()],
        }
        for op in chosen
    ]


def list_cases(known: Sequence[Mapping[str, Any]]) -> str:
    """What `known_cases` found, as lines of text."""
    lines = []
    for op in known:
        lines.append(op["op"])
        lines += [f"  config {c['id']:>4}  {c['text']}" for c in op["configs"]]
        lines += [f"  case {c['name']}  {c['text']}" for c in op["cases"]]
    return "\n".join(lines)
