"""The fused convolution as one PyTorch operator, `cutefuse::packed_conv`: it takes what the plugin's node has, a packed
filter and every attribute, so that torch.onnx can write that node. `PackedConv` is the module that keeps the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.operators import conv_math
from cutefuse.operators.conv_form import AFTER, BEFORE, Form, form_of
from cutefuse.operators.function import node_attributes
from cutefuse.operators.layouts import HWC8, LAYOUT
from cutefuse.torch import compiled
from cutefuse.torch.launch import NAMES, Plan, dense, enqueue, planned, runs_in_library
from cutefuse.torch.pixels import as_given, as_pixels, empty_pixels, fusible, padded, pixel_in_place

LISTS = ("channels", "kernel_shape", "strides", "pads", "dilations", "channel_starts", "upsample", "output_channels")
NUMBERS = ("alpha", "lo", "hi")
# Absent before PyTorch 2.7, whose torch.onnx cannot write nodes of other domains.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
SCHEMA = (
    "(Tensor[] inputs, str op_type, int[] channels, int[] kernel_shape, int[] strides, int[] pads, int[] dilations, "
    "int[] channel_starts, int[] upsample, int[] output_channels, float alpha, float lo, float hi, int tile)"
    " -> Tensor[]"
)
# name -> function of (z, alpha, lo, hi)
_FUNCTIONS: dict[str, Callable[[Tensor, float, float, float], Tensor]] = {
    "": lambda z, *_: z, "Relu": lambda z, *_: F.relu(z),
    "LeakyRelu": lambda z, alpha, *_: F.leaky_relu(z, alpha), "Clip": lambda z, _, lo, hi: z.clamp(lo, hi),
    "Silu": lambda z, *_: F.silu(z), "HardSwish": lambda z, *_: F.hardswish(z),
    "Sigmoid": lambda z, *_: torch.sigmoid(z), "Tanh": lambda z, *_: torch.tanh(z), "Gelu": lambda z, *_: F.gelu(z),
}  # fmt: skip
ACTIVATIONS = tuple(_FUNCTIONS)


class Attributes:
    """The attributes of a node by name, and what follows from them."""

    def __init__(self, op_type: str, values: Sequence[Any]) -> None:
        self.op_type, self.form = op_type, form_of(op_type)
        given = dict(zip((*LISTS, *NUMBERS, "tile"), values, strict=True))
        self.tile = int(given.pop("tile"))
        self.lists: dict[str, list[int]] = {name: list(given[name]) for name in LISTS}
        self.numbers = {name: float(given[name]) for name in NUMBERS}
        geometry = tuple(tuple(self.lists[k]) for k in ("kernel_shape", "strides", "pads", "dilations"))
        if tuple(map(len, geometry)) != (2, 2, 4, 2) or min(geometry[1]) < 1 or not self.lists["upsample"]:
            raise CutefuseError(
                "packed_conv: its geometry is not that of a 2-D convolution; pass the attributes of the node"
            )
        self.geometry = conv_math.Geometry(*geometry)

    def packed_sizes(self, packed: Tensor) -> list[int]:
        """Filter columns per source: those of the matrix for one, whatever its packing."""
        lists, one = self.lists, self.form.sources == 1
        return [packed.shape[1]] if one else conv_math.packed_sizes(lists["channels"], lists["kernel_shape"])

    def call_attrs(self, packed: Tensor) -> dict[str, Any]:
        """As kernels.Call takes them."""
        numbers = {k: [v] for k, v in self.numbers.items()}
        return {**self.lists, "packed_sizes": self.packed_sizes(packed), **numbers}

    def outputs(self, inputs: Sequence[Tensor]) -> list[tuple[Any, int, Any, Any]]:
        """N, K, P, Q of every output."""
        if len(inputs) != self.form.inputs:
            raise CutefuseError(
                f"packed_conv: {self.op_type} takes {self.form.inputs} tensors, {self.form.sources} sources, a packed "
                f"filter and a bias among them; {len(inputs)} were given"
            )
        if inputs[0].dim() != 4:
            raise CutefuseError(f"packed_conv: the source has {inputs[0].dim()} axes; give images of 4, N C H W")
        N, _, *size = inputs[0].shape
        P, Q = (self.geometry.positions(axis, d * self.lists["upsample"][0]) for axis, d in enumerate(size))
        s = self.form.spread
        alone = inputs[self.form.sources + 1].shape[0] // s**2
        split = self.lists["output_channels"] if self.form.outputs > 1 else [alone]
        return [(N, K, P * s, Q * s) for K in split]


def activate(z: Tensor, activation: str, alpha: float, lo: float, hi: float) -> Tensor:
    """One of ACTIVATIONS of z."""
    return _FUNCTIONS[activation](z, alpha, lo, hi)


def reference(inputs: Sequence[Tensor], given: Attributes) -> list[Tensor]:
    """The node in PyTorch's own operators, in float32 or wider."""
    form, lists = given.form, given.lists
    dtype = inputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    seen = []
    starts = lists["channel_starts"] if form.view else [0] * form.sources
    factors = lists["upsample"] if form.view else [1] * form.sources
    for x, c, start, factor in zip(inputs, lists["channels"], starts, factors, strict=False):
        x = x.narrow(1, start, c).to(wide)
        seen.append(x.repeat_interleave(factor, 2).repeat_interleave(factor, 3) if factor > 1 else x)
    packed, bias, *residual = inputs[form.sources :]
    joined = torch.cat(seen, 1)
    if form.pre_activated:
        scale, shift, *residual = (v.to(wide).view(1, -1, 1, 1) for v in residual)
        joined = torch.relu(joined * scale + shift)
    top, left, bottom, right = lists["pads"]
    x = F.pad(joined, (left, right, top, bottom))
    groups = sum(lists["channels"]) if form.depthwise else 1
    if form.depthwise:
        w = packed.to(wide).t().reshape(groups, 1, *lists["kernel_shape"])
    else:
        w = _unpacked(packed.to(wide), given)
    z = F.conv2d(x, w, bias.to(wide), lists["strides"], 0, lists["dilations"], groups)
    z = z + residual[0] if form.residual == BEFORE else z
    z = activate(z, form.suffix, given.numbers["alpha"], given.numbers["lo"], given.numbers["hi"])
    z = z + residual[0] if form.residual == AFTER else z
    if (s := form.spread) > 1:
        z = z.unflatten(1, (s, s, -1)).permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)
    parts = torch.split(z, lists["output_channels"] if form.outputs > 1 else z.shape[1], 1)
    return [empty_pixels(tuple(y.shape), dtype, z.device).copy_(y) for y in parts]


def pack(weight: Tensor, channels: Sequence[int]) -> Tensor:
    """[K, C, R, S] as the kernels read it: [K][source][ceil(C/64)][R][S][64], pads zero."""
    parts = []
    for w in weight.split(list(channels), 1):
        blocks = F.pad(w, (0, 0, 0, 0, 0, -w.shape[1] % conv_math.CHANNEL_BLOCK))
        parts.append(blocks.unflatten(1, (-1, conv_math.CHANNEL_BLOCK)).permute(0, 1, 3, 4, 2).flatten(1))
    return torch.cat(parts, 1)


def _unpacked(matrix: Tensor, given: Attributes) -> Tensor:
    """The inverse of `pack`, and of an image's compact packing."""
    channels, (R, S) = given.lists["channels"], given.lists["kernel_shape"]
    block = min(conv_math.CHANNEL_BLOCK, matrix.shape[1] // (R * S))
    parts = torch.split(matrix, given.packed_sizes(matrix), 1)
    shaped = [p.reshape(len(p), -1, R, S, block).permute(0, 1, 4, 2, 3).reshape(len(p), -1, R, S) for p in parts]
    return torch.cat([p[:, :c] for p, c in zip(shaped, channels, strict=True)], 1)


def _described(shape: Sequence[int], dtype: torch.dtype, pixel: int) -> kernels.Tensor:
    if dtype not in NAMES:
        raise CutefuseError(f"packed_conv was given a {dtype} tensor; use float32, float16 or bfloat16")
    layout = kernels.CHANNELS_LAST if pixel else kernels.LINEAR
    return kernels.Tensor(tuple(shape), NAMES[dtype], layout, 0, pixel)


def _call(given: Attributes, inputs: Sequence[tuple[Tensor, int]], outputs: Sequence[Sequence[int]]) -> kernels.Call:
    """The node as a kernel call, over tensors with their elements from pixel to pixel (0: no pixels)."""
    dtype = inputs[0][0].dtype
    read = [_described(t.shape, t.dtype, pixel) for t, pixel in inputs]
    made = [_described(dims, dtype, padded(dims[1], dtype.itemsize)) for dims in outputs]
    return kernels.Call(given.op_type, read, made, given.call_attrs(inputs[given.form.sources][0]), config=given.tile)


def run(inputs: Sequence[Tensor], op_type: str, *values: Any) -> list[Tensor]:
    """The operator, by a kernel on a GPU and in PyTorch's own operators elsewhere."""
    given = Attributes(op_type, values)
    shapes = given.outputs(inputs)
    if not runs_in_library(inputs[0]):
        return reference(inputs, given)
    compiled.ensure()
    read = [as_pixels(t) if t.dim() == 4 else (dense(t), 0) for t in inputs[given.form.image :]]
    read = [*map(as_given, inputs[: given.form.image]), *read]
    made = [empty_pixels(dims, inputs[0].dtype, inputs[0].device) for dims in shapes]
    lists = (v for name in LISTS for v in (name, *given.lists[name]))
    key = (op_type, given.tile, *given.numbers.values(), *lists, *((t.shape, t.dtype, pixel) for t, pixel in read))
    enqueue(key, lambda: _call(given, read, shapes), [t for t, _ in read], made)
    return made


_packed_conv = torch.library.custom_op("cutefuse::packed_conv", run, mutates_args=(), schema=SCHEMA)


@_packed_conv.register_fake
def _(inputs: Sequence[Tensor], op_type: str, *values: Any) -> list[Tensor]:
    given = Attributes(op_type, values)
    return [empty_pixels(dims, inputs[0].dtype, inputs[0].device) for dims in given.outputs(inputs)]


def plan(inputs: Sequence[Tensor], op_type: str, *values: Any) -> Plan:
    """The plan of a call, for the extension."""
    given = Attributes(op_type, values)
    shapes, size = given.outputs(inputs), inputs[0].element_size()
    read, copies = list[tuple[Tensor, int]](), list[int]()
    for i, t in enumerate(inputs):
        if i < given.form.image:
            x, pixel = as_given(t)
            copy = 0 if x is t else -1
        else:
            pixel = pixel_in_place(t) if t.dim() == 4 else 0
            copy = -1 if t.dim() != 4 else 0 if pixel else padded(t.shape[1], t.element_size())
        read.append((t, pixel or max(copy, 0)))
        copies.append(copy)
    made = planned(_call(given, read, shapes), inputs[0].device)
    return made.data, made.workspace_bytes, copies, [[*dims, padded(dims[1], size)] for dims in shapes]


def _onnx_node(inputs: Sequence[Tensor], given: Attributes) -> Sequence[Tensor]:
    """The plugin's node, as the rewriter writes it, in place of the call."""
    shapes = given.outputs(inputs)
    whole = given.call_attrs(inputs[given.form.sources]) | {"residual_start": [0], LAYOUT: [HWC8]}
    attrs = node_attributes(kernels.Call(given.op_type, [], [], whole), given.tile)
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{given.op_type}", inputs, attrs, dtypes=[inputs[0].dtype] * len(shapes), shapes=shapes, version=1
    )


class PackedConv(nn.Module):
    """A fused convolution that keeps its packed filter.

    attrs: the attributes of the ONNX node. packed: [K, columns] in the type of the images; bias: [K] in float32;
    vectors: scale and shift [C] of a pre-activation, in the type of the images, none without one. The module is called
    with the sources [N, C_i, H, W] and the residual, where its form has one; channels-last images go in and come out
    without a copy. tile: id of a kernel's tile, 0 for the best guess.
    """

    packed: Tensor
    bias: Tensor

    def __init__(
        self, op_type: str, attrs: dict[str, Any], packed: Tensor, bias: Tensor, tile: int = 0,
        vectors: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.op_type, self.tile = op_type, tile
        self.form: Form = form_of(op_type)
        self.lists = {name: [int(v) for v in attrs[name]] for name in LISTS}
        self.numbers = {name: float(attrs[name][0]) for name in NUMBERS}
        self.register_buffer("packed", packed)
        self.register_buffer("bias", bias)
        self.vectors = [f"pre_{name}" for name, _ in zip(("scale", "shift"), vectors, strict=False)]
        for name, vector in zip(self.vectors, vectors, strict=True):
            self.register_buffer(name, vector)

    def forward(self, *xs: Tensor) -> Any:
        """The output, or a list of them where the form has more than one."""
        sources = self.form.sources
        vectors = (self.get_buffer(name) for name in self.vectors)
        for_onnx = _is_exporting() and torch.onnx.is_in_onnx_export()
        images = [x if for_onnx or i < self.form.image else fusible(x) for i, x in enumerate(xs)]
        inputs = [*images[:sources], self.packed, self.bias, *vectors, *images[sources:]]
        values = (*self.lists.values(), *self.numbers.values(), self.tile)
        if for_onnx:
            made = _onnx_node(inputs, Attributes(self.op_type, values))
        else:
            made = torch.ops.cutefuse.packed_conv(inputs, self.op_type, *values)
        return made if self.form.outputs > 1 else made[0]

    def extra_repr(self) -> str:
        return f"{self.op_type}, {'+'.join(map(str, self.lists['channels']))}->{self.bias.shape[0]}"
