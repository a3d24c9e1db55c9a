"""Profiles a PyTorch module: every submodule becomes a record_function region, forward and, if asked, backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, first_line
from cutefuse.profilers.torch.events import REGION, Event, events_of
from cutefuse.progress import track


def measure(
    torch: Any, module: Any, inputs: tuple[Any, ...], iterations: int, trace: Path | None, backward: bool = False
) -> list[Event]:
    """Profile a module after a warm-up; `backward`: with the gradients of all floating-point outputs' means.

    Writes a chrome trace when asked. Raises CutefuseError where the module cannot compute with these inputs.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    handles = _add_regions(torch, module)
    try:
        with torch.set_grad_enabled(backward):
            for _ in track(range(3), "warming up", 3):
                _first_step(torch, module, inputs, backward)
            settings = {"activities": activities, "record_shapes": True, "profile_memory": True}
            if "acc_events" in inspect.signature(torch.profiler.profile.__init__).parameters:
                settings["acc_events"] = True  # newer releases warn without
            with torch.profiler.profile(**settings) as profiler:
                for _ in track(range(iterations), "profiling", iterations):
                    _step(torch, module, inputs, backward)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    if trace:
        profiler.export_chrome_trace(str(trace))
    return events_of(profiler.events())


def _step(torch: Any, module: Any, inputs: tuple[Any, ...], backward: bool) -> None:
    outputs = module(*inputs)
    if backward:
        losses = [x.float().mean() for x in _tensors(torch, outputs) if x.requires_grad]
        if not losses:
            raise CutefuseError(f"{type(module).__name__} returns nothing with a gradient; leave --backward out")
        sum(losses[1:], losses[0]).backward()
        module.zero_grad(set_to_none=True)


def _first_step(torch: Any, module: Any, inputs: tuple[Any, ...], backward: bool) -> None:
    """A step, in which anything that a foreign module raises becomes one sentence."""
    try:
        _step(torch, module, inputs, backward)
    except CutefuseError:
        raise
    except Exception as error:
        shapes = " ".join(_described(x) for x in inputs)
        name, why = type(module).__name__, first_line(error)
        raise CutefuseError(f"{name} cannot compute with {shapes} ({why}); give its inputs with --input") from None


def _described(x: Any) -> str:
    if not hasattr(x, "shape"):
        return type(x).__name__
    return "x".join(map(str, x.shape)) + ":" + str(x.dtype).removeprefix("torch.")


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    """The floating-point tensors of an output, which may be nested."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(torch, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(torch, part)


def _add_regions(torch: Any, module: Any) -> list[Any]:
    """Hooks that open a record_function region around every submodule; returns their handles."""
    handles = []
    for name, part in module.named_modules():
        title = f"{REGION}{name or '(whole)'} ({type(part).__name__})"
        open_regions: list[Any] = []

        def enter(_m: Any, _a: Any, title: str = title, stack: list[Any] = open_regions) -> None:
            stack.append(torch.profiler.record_function(title))
            stack[-1].__enter__()

        def leave(_m: Any, _a: Any, _r: Any, stack: list[Any] = open_regions) -> None:
            stack.pop().__exit__(None, None, None)

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)]
    return handles
