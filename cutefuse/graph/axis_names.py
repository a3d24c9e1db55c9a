"""Names of axes through Resize, which ONNX's shape inference gives up: it makes up a new name for every axis without a
number, so that a batch of `N` images is no longer known to be the batch of the tensor that it is added to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper

UNKNOWN = -1


class Names:
    """Sizes as integers: one that is known, UNKNOWN, or a negative code for a name that the model itself gives.

    Names that inference makes up are UNKNOWN: the next inference gives them to other axes.
    """

    def __init__(self, graph: GraphProto) -> None:
        infos = (*graph.input, *graph.output, *graph.value_info)
        own = {d.dim_param for v in infos for d in v.type.tensor_type.shape.dim if d.dim_param}
        self._codes = {name: UNKNOWN - 1 - i for i, name in enumerate(sorted(own))}
        self._names = {code: name for name, code in self._codes.items()}

    def dims(self, info: onnx.ValueInfoProto) -> list[int] | None:
        """The sizes of a tensor; None where its rank is not known."""
        kind = info.type.tensor_type
        if not kind.HasField("shape"):
            return None
        return [d.dim_value if d.HasField("dim_value") else self._codes.get(d.dim_param, UNKNOWN)
                for d in kind.shape.dim]  # fmt: skip

    def text(self, size: int) -> int | str | None:
        """A size as ONNX's helper takes it."""
        return size if size >= 0 else self._names.get(size)


def keep(
    skeleton: GraphProto, found: GraphProto, opset: int, names: Names, value: Callable[[str], np.ndarray | None]
) -> bool:
    """Write into `skeleton` the sizes that its Resize nodes keep or are given, where inference (`found`) has none.

    `value` is the value of a small tensor, sizes coded by `names`; None where it is not known. Returns whether there
    were any, so that another inference finds more.
    """
    infos = {v.name: v for v in (*found.input, *found.value_info, *found.output)}
    outputs, written = {v.name for v in skeleton.output}, {v.name: v for v in skeleton.value_info}
    changed = False
    for node in skeleton.node:
        if node.op_type not in ("Resize", "Upsample") or not node.input or node.output[0] not in infos:
            continue
        before = names.dims(infos[node.input[0]]) if node.input[0] in infos else None
        info = infos[node.output[0]]
        after = names.dims(info)
        sizes = before and _sizes(node, opset, before, value)
        if not sizes or after is None or len(after) != len(sizes) or node.output[0] in outputs:
            continue
        better = [new if old == UNKNOWN else old for old, new in zip(after, sizes, strict=True)]
        if better != after:
            dims = [names.text(size) for size in better]
            new = helper.make_tensor_value_info(info.name, info.type.tensor_type.elem_type, dims)
            if info.name in written:
                written[info.name].CopyFrom(new)
            else:
                skeleton.value_info.append(new)
            changed = True
    return changed


def _sizes(
    node: NodeProto, opset: int, before: Sequence[int], value: Callable[[str], np.ndarray | None]
) -> list[int] | None:
    """What a Resize makes of the sizes before it, UNKNOWN where that is not plain to see; None where nothing is."""
    text: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if text.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        return None
    at = 2 if node.op_type == "Resize" and opset >= 11 else 1
    scales = np.array(text["scales"]) if "scales" in text else _input(node, at, value)
    stretches = text.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    wanted = _input(node, 3, value) if at == 2 and stretches else None
    for numbers in (scales, wanted):
        if numbers is None or numbers.ndim != 1 or not numbers.size:
            continue
        axes = [int(a) for a in text.get("axes", range(numbers.size))]
        if len(axes) != numbers.size or any(not -len(before) <= a < len(before) for a in axes):
            return None
        sizes = list(before)
        for axis, number in zip(axes, numbers, strict=True):
            kept = before[axis] if number == 1 else UNKNOWN
            sizes[axis] = kept if numbers is scales else int(number)
        return sizes
    return None


def _input(node: NodeProto, index: int, value: Callable[[str], np.ndarray | None]) -> np.ndarray | None:
    return value(node.input[index]) if len(node.input) > index and node.input[index] else None
