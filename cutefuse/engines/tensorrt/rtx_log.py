"""The compiled layers in a build log of TensorRT for RTX, as the JSON that trtexec's --exportLayerInfo writes.

A machine without a GPU has no engine inspector; the builder's own log, at its most detailed, lists the same facts.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TENSOR = re.compile(
    r"\{ Name: (?P<Name>.*?), Dimensions: (?P<Dimensions>\[[^\]]*\])"
    r"(?:, Strides: (?P<Strides>\[[^\]]*\]))?(?:, StrideOrder: (?P<StrideOrder>\[[^\]]*\]))?"
    r", Datatype: (?P<Datatype>[^,]*), Format: (?P<Format>.*?) \}"
)
_LISTS = ("Inputs", "Constants", "Outputs")
_LAYER = re.compile(
    r"^Name: (?P<Name>.*?), LayerType: (?P<LayerType>[^,]*), Inputs: \[(?P<Inputs>|.*? \})\]"
    r"(?:, Constants: \[(?P<Constants>|.*? \})\])?, Outputs: \[(?P<Outputs>|.*? \})\](?P<rest>, [A-Z]\w*: .*|)$"
)
_BINDING = re.compile(
    r"^ Name: (?P<Name>.*?), IOMode: (?P<IOMode>\w+), DataType: (?P<DataType>\w+),"
    r" Dimensions: (?P<Dimensions>\[[^\]]*\])"
)


def _tensors(text: str) -> list[dict[str, Any]]:
    found = []
    for match in _TENSOR.finditer(text):
        facts = {key: value for key, value in match.groupdict().items() if value is not None}
        found.append({key: json.loads(value) if value.startswith("[") and key != "Name" else value
                      for key, value in facts.items()})  # fmt: skip
    return found


def layer_of(line: str) -> dict[str, Any] | None:
    """One layer from its line of the log; None for a line that describes none.

    Keys: Name, LayerType, Inputs, Constants, Outputs (lists of tensors with Name, Dimensions, Strides, StrideOrder,
    Datatype, Format), and what follows them (TacticName, StreamId, Metadata).
    """
    match = _LAYER.match(line)
    if not match:
        return None
    layer: dict[str, Any] = {"Name": match["Name"], "LayerType": match["LayerType"]}
    layer.update({key: _tensors(match[key] or "") for key in _LISTS})
    for part in re.split(r", (?=[A-Z]\w+: )", match["rest"])[1:]:
        key, _, value = part.partition(": ")
        if key == "Metadata":  # the last one; a node's name may hold what looks like a further key
            layer[key] = match["rest"].partition("Metadata: ")[2].strip()
            break
        layer[key] = int(value) if value.isdecimal() else value.strip()
    return layer


def layer_information(log: str) -> dict[str, Any]:
    """`{"Layers": [...], "I/O Tensors": [...]}` of the last engine that a build log describes.

    Both lists are empty where the log describes none (a verbosity below DETAILED, a build that failed).
    """
    _, found, text = log.rpartition("Layers:\n")
    if not found:
        return {"Layers": [], "I/O Tensors": []}
    text, _, bindings = text.partition("\nI/O Tensors:\n")
    layers = [layer for layer in map(layer_of, text.split("\n")) if layer]
    tensors = [
        {key: json.loads(value) if key == "Dimensions" else value for key, value in match.groupdict().items()}
        for match in map(_BINDING.match, bindings.partition("\nEngine Metadata:")[0].splitlines()) if match
    ]  # fmt: skip
    return {"Layers": layers, "I/O Tensors": tensors}
