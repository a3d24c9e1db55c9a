"""Tensors of an engine graph: names, shapes, data types and memory layouts in the words of TensorRT's inspector."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from cutefuse.roofline.peaks import DTYPE_BITS

_DTYPE = re.compile(
    r"\b(?:(FP8|FP4|FP16|FP32|FP64|BF16|BFloat16|Half|Float|Double|Bool|UInt8|E8M0|Int4|Int8|Int16|Int32|Int64)"
    r"(?:E\dM\d)?)\b",
    re.IGNORECASE,
)
_ALIASES = {"HALF": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16"}
_WORKSPACE = re.compile(r"_wksp(?:\.\d+)?_myl\d+$")  # a plugin's, which Myelin lists among its outputs
_WORDS = {"two": 2, "four": 4, "eight": 8, "sixteen": 16, "thirty-two": 32}


@dataclass(frozen=True)
class Tensor:
    """One input or output of a layer. `dims` are logical (N, C, H, W); `layout` is how they lie in memory."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    layout: str
    text: str  # format and type as the file has them

    @property
    def elements(self) -> int | None:
        """Number of elements; None when a dimension is unknown."""
        return None if any(d < 0 for d in self.dims) else math.prod(self.dims)

    @property
    def size_bytes(self) -> float | None:
        """Bytes of the elements themselves, without the padding of a vectorised layout."""
        bits = DTYPE_BITS.get(self.dtype)
        elements = self.elements
        return None if bits is None or elements is None else elements * bits / 8

    @property
    def padded_bytes(self) -> float | None:
        """Bytes in memory: channels rounded up to the vector width of the layout."""
        size = self.size_bytes
        width = vector_width(self.layout)
        if size is None or width == 1 or len(self.dims) < 3 or not self.dims[-3]:
            return size
        channels = self.dims[1] if len(self.dims) > 3 else self.dims[0]
        return size / channels * (-(-channels // width) * width) if channels else size

    @property
    def shape_text(self) -> str:
        return "×".join(str(d) for d in self.dims) or "scalar"


def vector_width(layout: str) -> int:
    """Elements of the channel axis that lie together: 8 for HWC8, 32 for CHW32, 1 for linear."""
    digits = re.search(r"(?:HWC|CHW)(\d+)$", layout)
    return int(digits[1]) if digits else 1


def dtype_of(text: str) -> str:
    """FP32, FP16, INT8, ... out of any spelling; empty when none is named."""
    found = _DTYPE.search(text)
    if not found:
        return ""
    name = found[1].upper()
    return _ALIASES.get(name, name)


def layout_of(text: str) -> str:
    """Short layout name out of the inspector's sentence or a format name of TensorRT 11 (kHWC8, HWC8)."""
    short = re.search(r"\bk?(D?(?:HWC|CHW)\d*|LINEAR|DLA_\w+)\b", text)
    if short:
        return "linear" if short[1] == "LINEAR" else short[1]
    lower = text.lower()
    if "channel major" in lower:
        modulus = re.search(r"channel % (\d+)", lower)
        return f"HWC{modulus[1]}" if modulus else "HWC"
    vector = re.search(r"(two|four|eight|sixteen|thirty-two) wide channel vectorized", lower)
    if vector:
        return f"CHW{_WORDS[vector[1]]}"
    if "row major" in lower or "linear" in lower:
        return "linear"
    return "" if not text.strip() else "other"


def _by_order(order: list[int]) -> str:
    """Layout name of a stride order, the axis with 0 lying closest: [3, 0, 2, 1] is HWC, [3, 2, 1, 0] linear."""
    rank = len(order)
    if order == list(range(rank))[::-1]:
        return "linear"
    if rank > 2 and order == [rank - 1, 0, *range(rank - 2, 0, -1)]:
        return "HWC"
    if order == [4, 1, 0, 3, 2]:  # channels in blocks, each block of a pixel together
        return "blocked HWC"
    return f"order {','.join(map(str, order))}"


def _dim(value: Any) -> int:
    try:
        size = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return size if size < 1 << 40 else -1  # no engine has such an axis


def tensor_of(value: Any) -> Tensor | None:
    """A tensor from its JSON, or None when there is nothing to name."""
    if isinstance(value, str):
        return Tensor(value, (), "", "", "") if value else None
    if not isinstance(value, dict):
        return None
    name = str(value.get("Name", value.get("name", "")))
    if _WORKSPACE.search(name):
        return None
    dims = value.get("Dimensions", value.get("Dims", value.get("Shape", [])))
    both = str(value.get("Format/Datatype", ""))
    kind = str(value.get("Datatype", value.get("DataType", ""))) or both
    form = str(value.get("Format", "")) or both
    shape = tuple(_dim(d) for d in dims) if isinstance(dims, list) else ()
    text = both or " ".join(filter(None, (form, kind)))
    place = layout_of(form)
    if place == "other":  # Myelin: a word for the layout or none, and the order of the strides
        found = re.search(r"stride order = \[([\d,]+)\]", form)
        order = list(map(int, found[1].split(","))) if found else value.get("StrideOrder")
        place = _by_order(order) if isinstance(order, list) and order else place
    return Tensor(name, shape, dtype_of(kind), place, text) if name or shape else None
