"""Tiny ONNX graphs for tests of the rewriter: ONNX's text form for the nodes, seeded weights, two runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper, parser

from cutefuse.rewrite.patch import Options, Result, patch

TEXT_TYPES = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16", "float64": "double"}
IR_OF_OPSET = ((21, 10), (15, 8), (12, 7), (11, 6), (0, 4))
INPUTS = {"a": "n,8,9,7", "b": "n,16,9,7"}
FILTER = (12, 24, 3, 3)
# Two sites on the same tensors, of different geometry and activation; outputs y1 and y2.
TWO = (
    "c = Concat<axis=1>(a, b) x1 = Conv(c, w, k) y1 = Relu(x1) "
    "d = Concat<axis=1>(b, a) x2 = Conv<strides=[2,2]>(d, w) y2 = Tanh(x2)"
)


def weights(seed: int = 0, dtype: str = "float32", **shapes: Sequence[int]) -> dict[str, np.ndarray]:
    """Normal values of the given shapes; names with 'var' are positive, as variances are."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = {k: rng.standard_normal(s) / np.sqrt(max(1, np.prod(s[1:]))) for k, s in shapes.items()}
    return {k: (np.abs(v) + 0.5 if "var" in k else v).astype(kind) for k, v in values.items()}


def bn_weights(filters: int = 12, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Parameters of a BatchNormalization, in its order of inputs."""
    return weights(1, dtype, gamma=(filters,), beta=(filters,), mean=(filters,), var=(filters,))


def graph(
    body: str, values: Mapping[str, np.ndarray] | None = None, *, opset: int = 17, dtype: str = "float32",
    inputs: Mapping[str, str] = INPUTS, outputs: Sequence[str] = ("y",), rank: int = 4, ir: int | None = None,
) -> onnx.ModelProto:  # fmt: skip
    """A checked model. `body` holds nodes in ONNX's text form; without `values` there is a filter w and a bias k."""
    stored = weights(dtype=dtype, w=FILTER, k=(12,)) if values is None else values
    kind = TEXT_TYPES[dtype]
    version = ir or next(v for o, v in IR_OF_OPSET if opset >= o)
    formals = ", ".join(f"{kind}[{s}] {name}" for name, s in inputs.items())
    results = ", ".join(f"{kind}[{','.join(f'{o}_{axis}' for axis in range(rank))}] {o}" for o in outputs)
    text = f'<ir_version: {version}, opset_import: ["": {opset}]> test ({formals}) => ({results}) {{ {body} }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in stored.items())
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    onnx.checker.check_model(model, full_check=True)
    return model


def run_patch(model: onnx.ModelProto, folder: Path, **options: object) -> tuple[Result, onnx.ModelProto | None]:
    """Save and patch a model: the result and the patched model. With --all, and --verify where it is no dry run, unless
    told otherwise."""
    source = folder / "model.onnx"
    onnx.save(model, str(source))
    output = folder / "model.cutefuse.onnx"
    usual = {"verify": not options.get("dry_run"), "all_sites": True}
    measured = {name: options.pop(name) for name in ("price", "tiles") if name in options}
    result = patch(source, output, Options(**{**usual, **options}), **measured)  # type: ignore[arg-type]
    assert (result.output is not None) == output.exists()
    written = result.report_path is not None and result.report_path.exists()
    assert written == (result.exit_code in (0, 1) and not options.get("dry_run"))
    return result, onnx.load(str(output)) if output.exists() else None


def fused_types(model: onnx.ModelProto | None) -> list[str]:
    """The op_types of our nodes, in graph order."""
    return [n.op_type for n in model.graph.node if n.domain == "cutefuse"] if model else []
