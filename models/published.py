"""The graphs of published networks that the onnx wheel carries as tests, with random weights.

There every weight is one constant, which hides a wrong order of channels: they are filled anew from a seed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def names() -> list[str]:
    """The networks, in alphabetical order; empty where the wheel leaves its tests out."""
    return sorted(p.stem.removeprefix("light_") for p in FOLDER.glob("light_*.onnx"))


def load(name: str, seed: int = 0) -> onnx.ModelProto:
    """A network whose ConstantOfShape weights are replaced by seeded initializers of sensible size."""
    model = onnx.load(str(FOLDER / f"light_{name}.onnx"))
    rng = np.random.default_rng(seed)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = [int(size) for size in shapes[node.input[0]]]
        # A vector may be a scale, a bias or a variance: small and positive suits them all.
        value = rng.uniform(0.5, 1.5, shape) if len(shape) < 2 else rng.standard_normal(shape)
        value *= np.sqrt(2 / max(1, np.prod(shape[1:]))) if len(shape) > 1 else 1
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), node.output[0]))
        model.graph.input.append(helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model
