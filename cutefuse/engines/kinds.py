"""What a layer does: one of a dozen kinds, its compute precision, and whether tensor cores do it."""

from __future__ import annotations

import re
from typing import Any

from cutefuse.engines.tensors import Tensor

# kind -> what the report calls it. The order is that of legends.
KINDS = {
    "plugin": "plugins",
    "conv": "convolutions",
    "gemm": "matrix products",
    "attention": "attention",
    "softmax": "softmax",
    "norm": "normalisation and reductions",
    "pointwise": "pointwise",
    "pool": "pooling and resizing",
    "foreign": "compiled regions (Myelin)",
    "copy": "copies, reformats, concats",
    "noop": "no-ops and bookkeeping",
    "other": "other",
}
# First match wins; tried on "LayerType ParameterType" in lower case.
_RULES: tuple[tuple[str, str], ...] = (
    ("noop", r"\bnoop\b|\bconstant\b|\bsignal\b|\bwait\b|assertion|\bidentity\b|trainstation"),
    ("plugin", r"plugin|custom_layer|\bcute[a-z]"),
    ("attention", r"mha|attention|\bsdpa\b"),
    ("softmax", r"softmax"),
    ("conv", r"conv|correlation"),
    ("gemm", r"gemm|matmul|matrixmultiply|fullyconnected|\bfc\b|einsum"),
    ("copy", r"reformat|concat|shuffle|slice|copy|memcpy|transpose|\bcast\b|gather|scatter|reorder|padding|\bpad\b"
             r"|split|quantizelinear|unsqueeze|squeeze|reshape|flatten|expand|\btile\b|ragged"),
    ("norm", r"norm|reduce|topk|cumsum|argmax|argmin"),
    ("pool", r"pool|resize|upsample|gridsample|roialign|interpol"),
    ("foreign", r"myelin|foreign|kgen|\bfusion|graph"),
    ("pointwise", r"pointwise|elementwise|unary|activation|scale|\bpwn\b|relu|sigmoid|tanh|gelu|silu|swish|clip|erf"
                  r"|where|\b(?:add|sub|mul|div|pow|exp|log|sqrt|neg|abs|max|min|sum|not|and|or|less|greater|equal|select)\b"
                  r"|leaky|elu|batchnorm|comparison"),
)  # fmt: skip
_COMPILED = [(kind, re.compile(pattern)) for kind, pattern in _RULES]
_TENSOR_CORE = re.compile(
    r"tensor\d+x\d+x\d+|h16816|s16816|h1688|s1688|s884|h884|i8816|i16832|i8832|imma|hmma|gmma|utcmma|"
    r"tensorop|interleaved_i8|f8f8|sm(?:90|100)_xmma|ampere_fp16_s|turing_fp16_s|volta_fp16_s"
)
_OTHER_NORM = re.compile(
    r"(?:batch|instance|group|lp|local_?response|spectral|weight)_?norm|\bmeanvariance|\blrn\b|\bbn\d*\b"
)
_SCALAR = re.compile(r"ffma|scudnn|simt|icudnn_int8x4|int8x4|depthwise|winograd|hfma|dp4a|fp32_icudnn|_h?cudnn_\d")

# Myelin names a kernel that it generates by what it does, four letters each: `__myl_ConcMulAddRelu_myl0_12`.
_KERNEL = re.compile(r"^__myl_((?:[A-Z][a-z0-9]*)+)_myl\d+_\d+$")
_MOVING_WORDS = {"Move", "Conc", "Resh", "Tran", "Slic"}
_CASTING_WORDS = {"Cast", "Resi"}  # movement where nothing in the kernel computes
_KERNEL_KINDS = (
    ("conv", {"Corr", "Deco"}), ("gemm", {"Fc"}), ("softmax", {"Exp"}), ("norm", {"Mean", "Maxr", "Sum"}),
    ("pool", {"Resi"}),
)  # fmt: skip


def kernel_words(name: str) -> list[str]:
    """What a kernel of Myelin does, step by step: "__myl_TranMove_myl0_21" -> ["Tran", "Move"]; else empty."""
    found = _KERNEL.match(name)
    return re.findall(r"[A-Z][a-z0-9]*", found[1]) if found else []


def computing_words(name: str) -> list[str]:
    """What a kernel of Myelin computes beside what it moves, each step once: "__myl_ConcMulAdd_myl0_3" -> Mul, Add."""
    return [w for w in dict.fromkeys(kernel_words(name)) if w not in _MOVING_WORDS | _CASTING_WORDS]


def _kernel_kind(layer_type: str, words: list[str]) -> str:
    """Kind of a kernel that Myelin names by its steps. A fusion moves on its way to a product, which is no copy."""
    given = set(words)
    moves = given & _MOVING_WORDS or ("Cast" in given and given <= _CASTING_WORDS)
    if moves and layer_type != "runtime_fusion":
        return "copy"
    return next((kind for kind, steps in _KERNEL_KINDS if given & steps), "pointwise")


def kind_of(layer_type: str, raw: dict[str, Any], name: str) -> str:
    """Kind of a layer from its type and parameters; names decide only where TensorRT gives no type."""
    text = f"{layer_type} {raw.get('ParameterType', '')}".lower()
    if "noop" in text:
        return "noop"
    if words := kernel_words(name):
        return _kernel_kind(layer_type, words)
    if name.startswith("_gemm_mha"):
        return "attention"
    if name.endswith(" copy") or name.startswith("Reformatting CopyNode"):
        return "copy"
    named = text.strip() in ("", "unknown")
    if named:
        lower = name.lower()
        if "trainstation" in lower:
            return "noop"
        if "foreignnode" in lower or "myelin" in lower:
            return "foreign"
        text = lower.replace("_", " ").replace("/", " ")
    found = (kind for kind, pattern in _COMPILED if pattern.search(text))
    return next((kind for kind in found if not named or kind != "noop"), "other")


def precision_of(kind: str, inputs: list[Tensor], outputs: list[Tensor], tactic: str) -> str:
    """Precision of the arithmetic: that of the first input where the layer multiplies, else of the output."""
    order = [*inputs, *outputs] if kind in ("conv", "gemm", "plugin", "attention", "softmax") else [*outputs, *inputs]
    dtype = next((t.dtype for t in order if t.dtype and not t.dtype.startswith(("INT32", "INT64", "BOOL"))), "")
    dtype = dtype or next((t.dtype for t in order if t.dtype), "")
    return "TF32" if dtype == "FP32" and "tf32" in tactic else dtype


def on_tensor_cores(kind: str, layer_type: str, tactic: str) -> bool | None:
    """Whether a convolution or matrix product uses tensor cores; None when its tactic does not tell."""
    text = f"{layer_type} {tactic}".lower()
    if kind not in ("conv", "gemm") or not tactic:
        return False if "depthwise" in text else None
    if _SCALAR.search(text):
        return False
    return True if _TENSOR_CORE.search(text) else None


def is_row_norm(layer_type: str, name: str) -> bool:
    """Whether a normalisation may be an RMSNorm or LayerNorm: none over a batch, an instance or groups."""
    text = f"{layer_type} {name}".lower()
    return "norm" in text and not _OTHER_NORM.search(text)


def copy_origin(name: str, raw: dict[str, Any], layer_type: str) -> str:
    """Why a data movement exists, in words: format change, quantisation, concatenation, cast, slice, transpose."""
    origin = str(raw.get("Origin", "")).upper()
    text = f"{layer_type} {raw.get('ParameterType', '')}".lower()
    words = set(kernel_words(name))
    for step, reason in (("Conc", "concat"), ("Slic", "slice"), ("Move", "reformat"), ("Cast", "cast")):
        if step in words:
            return reason
    if "concat" in text or "CONCAT" in origin or name.endswith(" copy"):
        return "concat"
    if origin == "QDQ" or "quantize" in text:
        return "quantise"
    if origin == "CAST" or re.search(r"\bcast\b", text):
        return "cast"
    if origin == "SLICE" or "slice" in text or "split" in text or "pad" in text:
        return "slice"
    if "reformat" in text or "reorder" in text or origin == "REFORMAT" or name.startswith("Reformatting CopyNode"):
        return "reformat"
    if "gather" in text or "scatter" in text:
        return "gather"
    return "shuffle"


_MYELIN_SUFFIX = re.compile(r"(?:_U\d+)?(?:\.\d+)?(?:_\d+)?_myl\d+$")


def model_tensor(name: str) -> str:
    """The tensor of the model that Myelin names: "/a/Relu_output_0.1_2_myl0" is /a/Relu_output_0."""
    return _MYELIN_SUFFIX.sub("", name)


_METADATA = re.compile(r"\[ONNX Layer: ([^\]\x1e\x1f]*)\]")
_CALLED = re.compile(r".* \| (.+) \(\w+\)$")  # `node of a body | node that calls it (its op_type)`, outermost last
_COPY = re.compile(r"^Reformatting CopyNode for (?:Input|Output) Tensor \d+ to (.+)$")


def node_names(layer_name: str, raw: dict[str, Any]) -> list[str]:
    """ONNX node names of a layer: from its metadata (TensorRT 8.6+), else from the parts of its fused name."""
    marked = _METADATA.findall(str(raw.get("Metadata", "")))
    if marked:
        return list(dict.fromkeys(_CALLED.sub(r"\1", m.strip()) for m in marked if m.strip()))
    layer_name, myelin, _ = layer_name.partition("_myl0_")
    if _COPY.match(layer_name) or (myelin and layer_name.startswith("_")):
        return []
    text = re.sub(r"\{ForeignNode\[(.*?)\.\.\.(.*?)\]\}", r"\1 + \2", layer_name)
    text = re.sub(r"\b(?:PWN|fusion)\(", "", text).replace(")", "")
    parts = re.split(r" \+ | \|\| |, ", text)
    return list(dict.fromkeys(p.strip() for p in parts if p.strip()))
