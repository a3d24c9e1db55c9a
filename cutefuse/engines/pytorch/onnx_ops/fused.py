"""Nodes of our own domain: kernel calls through the C interface, images in channels-last memory without copies."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from onnx import FunctionProto, NodeProto
from torch import Tensor

from cutefuse import kernels
from cutefuse.engines.pytorch.onnx_ops.node import UnsupportedError
from cutefuse.graph.body import TILE
from cutefuse.operators import operators
from cutefuse.operators.conv_form import GROUP
from cutefuse.operators.function import body_for, call_of
from cutefuse.torch.launch import sm_of
from cutefuse.torch.pixels import ALIGNMENT, as_given, as_pixels, empty_pixels, fusible, laid_out, padded, widened

DOMAIN = "cutefuse"
NAMES = {getattr(torch, name): name for name in kernels.TYPES}
# No attributes of the operator: how TensorRT finds the plugin, and what a depthwise node has for its body.
_OTHERS = ("plugin_version", "plugin_namespace", GROUP)
_count = itertools.count()
_nodes: weakref.WeakValueDictionary[int, FusedNode] = weakref.WeakValueDictionary()


def body_of(proto: NodeProto, opset: int, given: Sequence[Tensor | None]) -> FunctionProto:
    """The function body of one node, for a model that was patched without bodies."""
    name = kernels.operator_of(proto.op_type)["name"]
    half = next((op for op in operators() if op.stem == name), None)
    if half is None:
        raise UnsupportedError(f"{proto.op_type} belongs to {name}, which no ONNX graph holds; repair the model")
    tensors = [kernels.Tensor(tuple(t.shape), NAMES.get(t.dtype, "float32")) for t in given if t is not None]
    return body_for([call_of(proto, tensors)], max(opset, half.oldest_opset(proto.op_type, tensors[0].dtype)))


GUESS, GIVEN, TIMED = "first guess", "given", "timed"


class FusedNode:
    """One fused node as a function of its tensors. `config`: the tile, 0 for the kernels' first guess. `tile_from`: who
    chose it, GUESS, GIVEN or TIMED. `tiles_us`: id of a tile -> microseconds, of those that were timed. `named`: the
    model has the node; else the engine runs a standard one by our kernels."""

    def __init__(
        self, name: str, op_type: str, attrs: dict[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor],
        named: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.op_type, self.named = name, op_type, named
        self.attrs = {k: v for k, v in attrs.items() if k not in _OTHERS}
        self.inputs, self.outputs = list(inputs), list(outputs)
        facts = kernels.facts(op_type)
        self.images = facts["kind"] in ("convolution", "window")  # read as NHWC pixels
        self.first_image = int(facts["image"])  # which of the inputs is the first of them
        self.config = 0
        self.tile_from = GUESS
        self.tiles_us: Mapping[int, float] = {}
        self.workspace: Tensor | None = None
        self.kept: Any = None  # what takes note of the tensors that it makes
        self._bound: dict[tuple[int, ...], kernels.Bound] = {}  # by the pixel strides of the operands
        self.handle = next(_count)
        _nodes[self.handle] = self

    # ---------------------------------------------------------------------------------------------------- at load
    def _is_image(self, t: Tensor, i: int) -> bool:
        """Whether operand i, inputs first, is read or written as NHWC pixels."""
        return self.images and t.dim() == 4 and i >= self.first_image

    def _describe(self, t: Tensor, i: int, pixel: int = 0) -> kernels.Tensor:
        if t.dtype not in NAMES:
            raise UnsupportedError(f"{self.op_type} '{self.name}' has an operand of {t.dtype}; the kernels have none")
        layout = kernels.CHANNELS_LAST if self._is_image(t, i) or pixel else kernels.LINEAR
        return kernels.Tensor(tuple(t.shape), NAMES[t.dtype], layout, 0, pixel)

    def call(
        self, pixels: Sequence[int] = (), workspace_bytes: int = -1, sm: int = 0, sm_count: int = 0
    ) -> kernels.Call:
        """The node as a kernel call. `pixels`: elements from pixel to pixel of each operand, none for dense ones."""
        operands = [*self.inputs, *self.outputs]
        steps = pixels or [0] * len(operands)
        tensors = [self._describe(t, i, p) for i, (t, p) in enumerate(zip(operands, steps, strict=True))]
        count = len(self.inputs)
        return kernels.Call(
            self.op_type, tensors[:count], tensors[count:], self.attrs, workspace_bytes=workspace_bytes,
            config=self.config, sm=sm, sm_count=sm_count,
        )  # fmt: skip

    def reject(self) -> str | None:
        """Why the kernels cannot run the node; None when they can."""
        sm = _sm()
        return (kernels.reject_device(sm) if sm else None) or kernels.reject(self.call(sm=sm, sm_count=_sm_count()))

    def tiles(self) -> list[int]:
        """The ids of the tiles that can run the node here, best guess first: on pixels of whole vectors, as `_operand`
        and `_empty` lay them out."""
        pixels = [self._pixel(t, i) for i, t in enumerate((*self.inputs, *self.outputs))]
        return kernels.configs(self.call(pixels, sm=_sm(), sm_count=_sm_count()))

    @property
    def asked(self) -> int:
        """The tile that the node's own attribute asks for, or the heir of a retired one; 0 where it asks for none."""
        own = int(self.attrs.get(TILE, 0))
        heirs = {r["id"]: r["heir"] for r in kernels.operator_of(self.op_type)["retired"]}
        return int(heirs.get(own, own))

    @property
    def tile(self) -> int:
        """The id of the tile that the node runs: as it was planned, or will be."""
        bound = next(iter(self._bound.values()), None)
        return bound.plan.config if bound else self.config or next(iter(self.tiles()), 0)

    @property
    def tile_name(self) -> str:
        return self.name_of(self.tile)

    def name_of(self, tile: int) -> str:
        """What the library calls a tile."""
        known = kernels.operator_of(self.op_type)["configs"]
        return next((str(c["name"]) for c in known if c["id"] == tile), str(tile))

    def results(self) -> list[Tensor]:
        """The outputs as the node makes them, on `meta`."""
        return [self._empty(t, "meta") for t in self.outputs]

    def workspace_bytes(self) -> int:
        return kernels.workspace_bytes(self.call(sm=_sm(), sm_count=_sm_count()))

    # --------------------------------------------------------------------------------------------------- at run time
    def __call__(self, *xs: Tensor) -> Any:
        read = [fusible(x) if self._is_image(x, i) else x for i, x in enumerate(xs)]
        made = torch.ops.cutefuse.fused_node(read, self.handle)
        return made[0] if len(made) == 1 else tuple(made)

    def _empty(self, t: Tensor, device: Any) -> Tensor:
        if not (self.images and t.dim() == 4):
            return torch.empty(t.shape, dtype=t.dtype, device=device)
        return empty_pixels(t.shape, t.dtype, device)

    def _operand(self, x: Tensor, i: int) -> tuple[Tensor, int]:
        """The tensor as the kernels can read it, and its elements from pixel to pixel (0: dense, linear)."""
        if i < self.first_image:
            return as_given(x)
        if not self._is_image(x, i):
            x = x.contiguous()
            return (x if x.data_ptr() % ALIGNMENT == 0 else x.clone()), 0
        return as_pixels(x)

    def operand(self, x: Tensor, i: int) -> Tensor:
        """Input i as `launch` reads it without a copy."""
        return self._operand(x, i)[0]

    def launch(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the kernels on the current stream."""
        read = [self._operand(x, i) for i, x in enumerate(xs)]
        made = [self._empty(t, xs[0].device) for t in self.outputs]
        if self.kept is not None:
            self.kept.add(made)
        pixels = (*(p for _, p in read), *(self._pixel(t, len(xs)) for t in made))
        size, address = (0, 0) if self.workspace is None else (self.workspace.numel(), self.workspace.data_ptr())
        if pixels not in self._bound:
            self._bound[pixels] = kernels.Bound(kernels.Plan(self.call(pixels, size, _sm(), _sm_count())))
        operands = [t.data_ptr() for t in (*(t for t, _ in read), *made)]
        self._bound[pixels].bind(operands, address, size)(torch.cuda.current_stream(xs[0].device).cuda_stream)
        return made

    def _pixel(self, t: Tensor, i: int) -> int:
        """Elements from pixel to pixel of operand i, a new image; 0 for what is none."""
        return padded(t.shape[1], t.element_size()) if self._is_image(t, i) else 0


def _sm() -> int:
    return sm_of() if torch.cuda.is_available() else 0


def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count if _sm() else 0


@torch.library.custom_op("cutefuse::fused_node", mutates_args=(), schema="(Tensor[] xs, int handle) -> Tensor[]")
def _fused_node(xs: Sequence[Tensor], handle: int) -> list[Tensor]:
    return _nodes[handle].launch(xs)


@_fused_node.register_fake
def _(xs: Sequence[Tensor], handle: int) -> list[Tensor]:
    return [_nodes[handle]._empty(t, xs[0].device) for t in _nodes[handle].outputs]


def whole_pixels(x: Tensor) -> Tensor:
    """A copy of an image whose pixels are whole vectors; torch.compile makes it a part of what makes the image."""
    return laid_out(x) if torch.compiler.is_compiling() else torch.ops.cutefuse.widened(x)


@torch.library.custom_op("cutefuse::widened", mutates_args=())
def _widened(x: Tensor) -> Tensor:
    return widened(x)


@_widened.register_fake
def _(x: Tensor) -> Tensor:
    return empty_pixels(x.shape, x.dtype, x.device)
