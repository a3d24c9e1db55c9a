"""Why a place is not fused, in words: what stands between a convolution and a neighbour that it could be fused with,
and refusals by cause for the summary that ends a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute, label

MAX_DEPTH = 8  # nodes between a Concat and a Conv; a BatchNormalization in three steps and a SiLU are five
_ELEMENTWISE = ("Mul", "Add", "Sub", "Div")
_BETWEEN = (
    "BatchNormalization", "InstanceNormalization", "Relu", "LeakyRelu", "PRelu", "Elu", "Clip", "Sigmoid", "Tanh",
    "HardSwish", "Swish", "Gelu", "Resize", "Upsample", "Reshape", "Transpose", "Split", "Slice", "Gather", "Pad",
    "Cast", "Identity", "Dropout", "LRN", *_ELEMENTWISE,
)  # fmt: skip
_SHUFFLE = ("Reshape", "Transpose", "Reshape")


def behind_concat(graph: Graph, tensor: str, taken: Sequence[NodeProto] = ()) -> str:
    """Why a Concat before what a convolution reads is not fused with it; "" where none is, or a match takes it in."""
    nodes: list[NodeProto] = []
    while len(nodes) <= MAX_DEPTH:
        node = graph.producer(tensor)
        if graph.is_op(node, "Concat") and attribute(node, "axis", 1) in (1, -3):
            inside = {id(n) for n in taken}
            return "" if all(id(n) in inside for n in nodes) else _stands(node, nodes)
        tensor = _through(graph, node)
        if node is None or not tensor:
            return ""
        nodes.insert(0, node)
    return ""


def _through(graph: Graph, node: NodeProto | None) -> str:
    """The one tensor from which a node makes its output; "" where there are more, or it is no node to see through."""
    if not graph.is_op(node, *_BETWEEN):
        return ""
    if node.op_type not in _ELEMENTWISE:
        return node.input[0]
    moving = {t for t in node.input if t and not graph.is_constant(t)}
    if len(moving) == 2 and node.op_type == "Mul":  # x * sigmoid(x)
        for gate in moving:
            maker = graph.producer(gate)
            if graph.is_op(maker, "Sigmoid", "HardSigmoid") and maker.input[0] in moving - {gate}:
                moving = moving - {gate}
                break
    return moving.pop() if len(moving) == 1 else ""


def _stands(concat: NodeProto, nodes: Sequence[NodeProto]) -> str:
    types = list(dict.fromkeys(n.op_type for n in nodes if n.op_type != "Identity"))
    if tuple(n.op_type for n in nodes[:3]) == _SHUFFLE:
        words, many = "a channel shuffle (Reshape, Transpose, Reshape)", False
    else:
        words, many = " and ".join(filter(None, (", ".join(types[:-1]), types[-1]))), len(types) > 1
    where = f"{words} {'stand' if many else 'stands'} between this Conv and Concat '{label(concat)}'"
    return f"{where}; only a Conv that reads the Concat itself is fused with it"


def other_sum(graph: Graph, tensor: str) -> str:
    """Why the sum after a convolution is no residual of it; "" where there is none but a bias."""
    node = graph.only_user(tensor)
    if not graph.is_op(node, "Add", "Sum") or list(node.input).count(tensor) != 1:
        return ""
    others = [name for name in node.input if name != tensor]
    if any(graph.is_constant(name) for name in others):
        return ""
    if len(others) != 1:
        return f"{node.op_type} '{label(node)}' stays: it adds {len(others) + 1} tensors; only a sum of two is fused"
    sizes, own = graph.partial_symbols(others[0]), graph.partial_symbols(tensor)
    found = f"'{others[0]}' is {_words(sizes)}, the Conv's output {_words(own)}"
    found += "; only a tensor that is known to have the same sizes can be fused"
    return f"{node.op_type} '{label(node)}' stays: {found}"


def _words(sizes: Sequence[int | str] | None) -> str:
    return "of unknown rank" if sizes is None else "x".join(str(s) or "?" for s in sizes) or "one number"


OTHER = "other reasons"
# Cause -> words. A refusal's cause is the first one with words that it holds. Sentences of the kernel library begin
# with an operator's name.
CAUSES: dict[str, tuple[str, ...]] = {
    "in control flow or a local function": ("inside the ",),
    "average pool that no filter computes": ("AveragePool '",),
    "ConvTranspose": ("ConvTranspose",),
    "groups": (" groups; only group=1",),
    "DepthToSpace": ("DepthToSpace", "be spread over"),
    "not 2-D": ("only 2-D convolutions",),
    "channel shuffle behind the Concat": ("channel shuffle",),
    "operators between Concat and Conv": ("this Conv and Concat",),
    "Resize that is not nearest": ("only nearest by a whole factor",),
    "Resize by other factors or coordinates": ("Resize '", "Upsample '"),
    "sum with another or unknown size": ("known to have the same sizes", "only a sum of two"),
    "activation of another kind": ("SiLU and GELU by erf can be fused", "only alpha=1"),
    "norm over pixels": ("only a BatchNormalization can be fused", "goes over the pixels"),
    "norm over another axis": ("the last axis is normalised over",),
    "quantisation that TensorRT fuses itself or that is not symmetric": ("quantised site",),
    "filter computed at run time": ("computed at run time",),
    "filter that is not folded": ("is made of constants",),
    "filter that is stored sparsely": ("sparse initializer",),
    "filter that callers may replace": ("callers may replace it",),
    "Concat along another axis": ("Concat joins axis",),
    "Concat of too many tensors": ("can be fused; split the Concat",),
    "taken by another site": ("is fused into the site", "it overlaps with"),
    "function bodies of an old opset": ("one body cannot", "is older than", "--no-functions"),
    "unknown sizes": (" is unknown", "needs a static input size"),
    "BatchNormalization that cannot be folded": ("loses precision",),
    "types": ("convert the model", "both must be one of", "stash_type"),
    "parameters of another size or type": ("all parameters of one type",),
    "channels in no whole vectors": ("takes multiples of",),
    "statistics of a norm that are read": ("gives its statistics",),
    "broken models": ("repair ",),
    "no kernels for this GPU": ("does not multiply float8", "older than 8.9 and without float8"),
    "beyond the kernels": ("skip this fusion", "concat_conv: ", "row_norm: "),
}


def cause_of(reason: str) -> str:
    """The cause of a refusal in a few words."""
    return next((cause for cause, words in CAUSES.items() if any(w in reason for w in words)), OTHER)


def by_cause(reasons: Iterable[str]) -> dict[str, int]:
    """cause -> how many refusals have it, most first, other reasons last."""
    found = Counter(map(cause_of, reasons))
    return dict(sorted(found.items(), key=lambda item: (item[0] == OTHER, -item[1], item[0])))


def sentence(causes: Mapping[str, int]) -> str:
    """ "12 refused: 7 groups, 3 ConvTranspose, 2 unknown sizes"; "" for none."""
    parts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    return f"{sum(causes.values())} refused: {parts}" if causes else ""
