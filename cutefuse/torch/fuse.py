"""Puts the fused convolutions, and our norms, into a PyTorch model for inference.

The model is exported by torch.export; the sites are those that `cutefuse patch` would fuse in the same ONNX graph,
found by the same rules and priced against torch.compile. What is not taken stays PyTorch's own operators.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from cutefuse.errors import CutefuseError, first_line
from cutefuse.graph.shapes import batch_of_one, open_inputs
from cutefuse.match.answer import Constant, Joined
from cutefuse.match.site import FUSED, MERGED, REFUSED, Site
from cutefuse.operators.layouts import TORCH
from cutefuse.rewrite.in_memory import patched
from cutefuse.rewrite.options import Options
from cutefuse.table import counted
from cutefuse.torch.conv import PackedConv
from cutefuse.torch.launch import sm_of
from cutefuse.torch.norms import layer_norm, rms_norm
from cutefuse.torch.replace import NormReport, replace_norms
from cutefuse.torch.skeleton import Skeleton

TYPES = ("float16", "bfloat16")
GUARDS = "_guards_fn"  # the module of torch.export that checks the sizes of what the model is given


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did, by the paths of the modules in the model."""

    taken: Mapping[str, str]  # convolution -> what it computes now
    left: Mapping[str, str]  # convolution -> why it stays as it was
    norms: NormReport = field(default_factory=lambda: NormReport((), {}))

    def __str__(self) -> str:
        lines = [f"{counted(len(self.taken), 'convolution')} fused"]
        lines += [f"fused: {name}, {what}" for name, what in self.taken.items()]
        lines += [f"left as it was: {name}, {reason}" for name, reason in self.left.items()]
        return "\n".join([*lines, str(self.norms)])


def fuse(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None,
    norms: bool = True, all_sites: bool = False, include: Sequence[str] = (), exclude: Sequence[str] = (),
    without: Sequence[str] = (),
) -> fx.GraphModule:  # fmt: skip
    """The model for inference, with Concat + Conv + BatchNorm + activation + shortcut as single kernels; its `report`
    is a FuseReport. The given model stays as it is, but for its norms where `norms` is set: they become ours, in place,
    as replace_norms does.

    model: in eval mode, in float16 or bfloat16; call `model.to(memory_format=torch.channels_last)` first, so that what
    stays PyTorch's own meets channels-last images without copies. args, kwargs, dynamic_shapes: as torch.export.export
    takes them; sizes that are not dynamic stay those of the example. all_sites: every legal site, whatever it is
    predicted to save against torch.compile. include, exclude: patterns of names, as of `cutefuse patch`; without: what
    no site may take in, of cutefuse.rewrite.options.TAKES.

    Raises CutefuseError for a model in training mode, one that torch.export cannot take, and an unknown choice.
    """
    if model.training:
        raise CutefuseError("fuse was given a model in training mode, and folds what training changes; call eval()")
    replaced = replace_norms(model) if norms else NormReport((), {})
    module = _exported(model, args, kwargs, dynamic_shapes)
    skeleton = Skeleton(module)
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    unpriced = bool(open_inputs(skeleton.model)) and not batch_of_one(skeleton.model, {})  # nothing else can choose
    sm = sm_of(device) if device.type == "cuda" else 0
    options = Options(
        engine=TORCH, sm=sm, functions=False, dry_run=True, all_sites=all_sites or unpriced, include=include,
        exclude=exclude, without=without, include_op=("concat_conv",),
    )  # fmt: skip
    sites = patched(skeleton.model, options, "torch")[0].sites
    for site in sites:
        if site.status == FUSED and (kind := site.chosen.call.dtype) not in TYPES:
            why = f"it computes in {kind}; fuse takes {' and '.join(TYPES)}, call half() or bfloat16()"
            site.refuse(REFUSED, why)
    taken, left = dict[str, str](), dict[str, str]()
    joined: dict[Joined, fx.Node] = {}
    with torch.no_grad():
        for site in sites:
            if site.status == FUSED:
                call = site.sized_call or site.chosen.call
                taken[site.name] = f"{call.op_type} {site.op.title(call)}"
                _apply(module, skeleton, site, device, joined)
            elif site.status != MERGED:
                left[site.name] = site.reason
    left |= skeleton.others({*taken, *left} | {s.name for s in sites})
    _call_norms(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    module.report = FuseReport(taken, left, replaced)
    return module


def _exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic: Any) -> fx.GraphModule:
    """The model as one graph of functional ATen operators."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic)
            module = program.run_decompositions({}).module()
    except Exception as error:  # of the user's own code, or of what export does not take
        why = first_line(error)
        raise CutefuseError(f"torch.export cannot take the model ({why}); fuse the parts that it takes") from error
    assert isinstance(module, fx.GraphModule)
    return module


def _apply(
    module: fx.GraphModule, skeleton: Skeleton, site: Site, device: torch.device, joined: dict[Joined, fx.Node]
) -> None:
    """Put one site's kernel in front of everything that reads its results; `joined` are operands that sites share."""
    match, graph = site.chosen, module.graph
    constants = {i.suffix: i for i in match.inputs if isinstance(i, Constant)}
    packed, bias = (_tensor(constants[k], device) for k in ("packed_weight", "bias"))
    path = f"fused_{sum(isinstance(m, PackedConv) for m in module.children())}"
    vectors = [_tensor(constants[k], device) for k in ("pre_scale", "pre_shift") if k in constants]
    attrs = dict(match.call.attrs)
    module.add_submodule(path, PackedConv(match.call.op_type, attrs, packed, bias, site.tile, vectors))
    for operand in match.inputs:
        if isinstance(operand, Joined) and operand not in joined:
            parts = [skeleton.tensors[name] for name in operand.tensors]
            with graph.inserting_after(_last(graph, parts)):
                joined[operand] = graph.call_function(torch.ops.aten.cat.default, (parts, 1))
    tensors = [i for i in match.inputs if isinstance(i, str | Joined)]
    read = [joined[i] if isinstance(i, Joined) else skeleton.tensors[i] for i in tensors]
    made = [skeleton.tensors[name] for name in match.outputs]
    with graph.inserting_after(_last(graph, read)):
        new = graph.call_module(path, tuple(read))
    parts = [new]
    if len(made) > 1:
        with graph.inserting_after(new):
            parts = [graph.call_function(operator.getitem, (new, i)) for i in range(len(made))]
    for name, old, part in zip(match.outputs, made, parts, strict=True):
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)
        skeleton.tensors[name] = part


def _last(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The last of some nodes, or what a graph begins with where that comes later."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = [node for node in graph.nodes if node.op == "placeholder" or node.target == GUARDS]
    return max((*nodes, *first), key=order.__getitem__)


def _tensor(constant: Constant, device: torch.device) -> Tensor:
    wide = torch.from_numpy(np.ascontiguousarray(constant.make(), np.float32))
    return wide.to(device, getattr(torch, constant.dtype))


def _call_norms(module: fx.GraphModule) -> None:
    """Calls of the norms' functions instead of their operators: eagerly they cost less."""
    ops = torch.ops.cutefuse
    plain = {ops.rms_norm.default: rms_norm, ops.layer_norm.default: layer_norm}
    for node in list(module.graph.nodes):
        function: Any = plain.get(node.target) if node.op == "call_function" else None
        users = list(node.users)
        if function is None or len(node.args) < 3 or node.args[1] is not None or any(u.args[1] != 0 for u in users):
            continue
        with module.graph.inserting_after(node):
            new = module.graph.call_function(function, (node.args[0], *node.args[2:]))
        for user in users:
            new.meta = dict(user.meta)
            user.replace_all_uses_with(new)
