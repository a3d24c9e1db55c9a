"""The inputs of an embedded engine: shapes for dynamic axes, and values from a seed, the same for every back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from cutefuse.errors import CutefuseError

SEED = 1
_SPATIAL_DEFAULT = 64  # for an unnamed height or width
_OTHER_DEFAULT = 8  # for an unnamed length, channel or feature axis


@dataclass(frozen=True)
class InputSpec:
    """One input of a model: an axis is a size above 0, or a name or None where it is dynamic."""

    name: str
    dims: tuple[int | str | None, ...]
    dtype: str  # NumPy's name


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    """The inputs of a model that are no weights. Raises CutefuseError for one that is no tensor of a known type."""
    weights = {i.name for i in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.name in weights:
            continue
        if not tensor.elem_type:
            raise CutefuseError(
                f"input {value.name} is no tensor of a known type, and cannot be filled; repair the model"
            )
        dims = tuple(d.dim_value if d.dim_value > 0 else d.dim_param or None for d in tensor.shape.dim)
        specs.append(InputSpec(value.name, dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name))
    return specs


def shapes_text(shapes: Mapping[str, Sequence[int]]) -> str:
    """What `parse_shapes` reads: `x:1x3x64x64,y:scalar`."""
    return ",".join(f"{name}:{'x'.join(map(str, dims)) or 'scalar'}" for name, dims in shapes.items())


def parse_shapes(spec: str) -> dict[str, tuple[int, ...]]:
    """`x:1x3x64x64,y:scalar` of trtexec as a dictionary; names may hold colons.

    Raises CutefuseError for another form.
    """
    result: dict[str, tuple[int, ...]] = {}
    for part in filter(None, spec.split(",")):
        name, colon, dims = part.rpartition(":")
        try:
            if not colon:
                raise ValueError
            result[name.strip("'\"")] = () if dims in ("", "scalar") else tuple(int(d) for d in dims.split("x"))
        except ValueError:
            raise CutefuseError(f"shape {part} is not of the form name:1x3x64x64; correct the option") from None
    return result


def resolve(specs: Sequence[InputSpec], wanted: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """A shape for every input: dynamic axes from `wanted`, else 1 for a batch, 64 for an image, 8 for the rest.

    Axes of one name get one size. Raises CutefuseError for a shape of no input, or one that contradicts the model.
    """
    unknown = set(wanted) - {s.name for s in specs}
    if unknown:
        names = ", ".join(s.name for s in specs)
        raise CutefuseError(
            f"--shapes names {', '.join(sorted(unknown))}, the model's inputs are {names}; correct the option"
        )
    named: dict[str, int] = {}
    for spec in specs:
        for dim, size in zip(spec.dims, wanted.get(spec.name, ()), strict=False):
            if isinstance(dim, str):
                named.setdefault(dim, size)
    result: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        usual = [_default(axis, len(spec.dims)) for axis in range(len(spec.dims))]
        given = wanted.get(spec.name)
        if given is None:
            pairs = zip(spec.dims, usual, strict=True)
            given = [named.setdefault(dim, size) if isinstance(dim, str) else dim or size for dim, size in pairs]
        fixed = [(d, g) for d, g in zip(spec.dims, given, strict=False) if isinstance(d, int)]
        if len(given) != len(spec.dims) or any(d != g for d, g in fixed):
            shape = "x".join(str(d) if d else "?" for d in spec.dims) or "scalar"
            text = "x".join(map(str, given)) or "scalar"
            raise CutefuseError(f"--shapes gives {spec.name} {text}, the model has {shape}; correct the option")
        result[spec.name] = tuple(given)
    return result


def _default(axis: int, rank: int) -> int:
    if axis == 0:
        return 1
    return _SPATIAL_DEFAULT if rank >= 4 and axis >= 2 else _OTHER_DEFAULT


def seeded(specs: Sequence[InputSpec], dims: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """One array per input: normal floats, zeros and ones for integers. bfloat16 comes as float32."""
    random = np.random.default_rng(SEED)
    feed: dict[str, np.ndarray] = {}
    for spec in specs:
        dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
        shape = tuple(dims[spec.name])
        if dtype.kind == "f":
            feed[spec.name] = random.standard_normal(shape).astype(dtype)
        else:
            feed[spec.name] = random.integers(0, 2, shape).astype(dtype)
    return feed
