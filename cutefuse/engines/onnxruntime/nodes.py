"""The nodes of a graph that ONNX Runtime optimised, by the nodes of the model they compute.

They are traced back through tensor names. Nodes inlined from a function body (a fused node of ours) belong to the call.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

# ONNX Runtime names tensors of an inlined body `_inlfunc_<op_type>[_token_<n>]_<name>`: one token for each call.
_INLINED = re.compile(r"_inlfunc_(?P<token>(?P<op_type>\w+?)(?:_token_\d+)?)_(?=_)")
# What it puts in front of a tensor's name where it computes float16 in float32.
_INSERTED = re.compile(r"^(?:InsertedPrecisionFreeCast_)+")
_ANCHORS = ("Conv", "LayerNormalization", "RMSNormalization")


def original(tensor: str) -> str:
    """The name that a tensor of the optimised graph had before ONNX Runtime put casts around it."""
    return _INSERTED.sub("", tensor)


def origins(model: Any, optimised: Any) -> list[list[str]]:
    """For each node of the optimised graph the names of the model's nodes that it computes.

    Backwards from its outputs through the model's graph until tensors that the optimised graph still has.
    """
    bodies = {f.name for f in model.functions}
    kept = {original(t) for node in optimised.node for t in (*node.input, *node.output)}
    maker = {out: (i, node) for i, node in enumerate(model.graph.node) for out in node.output if out}
    members: dict[str, list[int]] = defaultdict(list)  # token -> nodes inlined from that call
    owners: dict[str, int] = {}  # token -> the call, where a node of its body makes an output of it
    found: list[set[int]] = []
    for position, node in enumerate(optimised.node):
        tokens = _tokens(node)
        for token in tokens:
            members[token].append(position)
        made = [original(o) for o in node.output]
        own: set[int] = set()
        todo = [o for o in made if o in maker]
        merged = all(maker[o][1].op_type != node.op_type for o in todo)  # the last node of a body may be in it too
        while todo:
            tensor = todo.pop()
            index, source = maker[tensor]
            calls = [t for t, op_type in tokens.items() if op_type == source.op_type]
            if source.op_type in bodies and calls:
                owners.setdefault(calls[0], index)
            if source.op_type in bodies and tensor not in made and not (calls and merged):
                continue
            if index not in own:
                own.add(index)
                todo += [i for i in source.input if i in maker and i not in kept]
        found.append(own)
    for token, positions in members.items():
        inside = [optimised.node[p] for p in positions]
        call = owners[token] if token in owners else _by_inputs(token, inside, model, set(owners.values()))
        for position in positions:
            found[position] = found[position] or ({call} if call is not None else set())
    nodes = model.graph.node
    return [[nodes[i].name or nodes[i].output[0] for i in sorted(own)] for own in found]


def names(model: Any, optimised: Any, own: Sequence[Sequence[str]]) -> list[str]:
    """A name for each optimised node, none twice among those that have none: a node of a function body is named after
    the call, whose own name its convolution or norm inherits."""
    bodies = {f.name for f in model.functions}
    calls = {n.name or n.output[0] for n in model.graph.node if n.op_type in bodies}
    taken = Counter(n.name for n in optimised.node if n.name)
    result = []
    for index, (node, origin) in enumerate(zip(optimised.node, own, strict=True)):
        call = next((o for o in origin if o in calls), None)
        if call is not None:
            kind = node.op_type.removeprefix("Fused")
            name = call if kind in _ANCHORS else f"{call}/{node.op_type}"
        elif node.name:
            result.append(node.name)
            continue
        else:
            name = f"{node.op_type}_{index}"
        taken[name] += 1
        result.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return result


def _tokens(node: Any) -> dict[str, str]:
    """The calls whose bodies a node's tensors are of: token -> op_type, that of its outputs first."""
    found = (_INLINED.match(original(t)) for t in (*node.output, *node.input))
    return {m["token"]: m["op_type"] for m in found if m}


def _by_inputs(token: str, nodes: Sequence[Any], model: Any, taken: set[int]) -> int | None:
    """The call of a body whose output the optimised graph lost: that which takes what the body takes from outside."""
    op_type = _INLINED.match(f"_inlfunc_{token}__")
    known = {o for n in model.graph.node for o in n.output} | {i.name for i in model.graph.input}
    outside = {original(t) for n in nodes for t in n.input} & known
    return next(
        (i for i, n in enumerate(model.graph.node)
         if op_type and n.op_type == op_type["op_type"] and i not in taken and outside and outside <= set(n.input)),
        None,
    )  # fmt: skip
