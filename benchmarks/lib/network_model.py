"""The float16 model of a task: one of models/, or an ONNX file of anyone's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto

import models
from cutefuse.errors import CutefuseError
from cutefuse.graph.store import load_model
from cutefuse.rewrite.retype import to_float16

if TYPE_CHECKING:
    from benchmarks.lib.network_work import Task


def in_float16(task: Task) -> onnx.ModelProto:
    """A generated network at the task's batch; a file with its own sizes, converted where it is in float32."""
    if task.file is None:
        return models.build(task.network, "float16", small=task.small, batch=task.batch)
    model = load_model(task.file)
    wide = any(t.data_type == TensorProto.FLOAT and len(t.dims) > 1 for t in model.graph.initializer)
    return to_float16(model, task.file.parent, ())[0] if wide else model


def images_of(path: Path) -> int:
    """The images of a run, by the first input of a file. Raises CutefuseError where a size of an input is not fixed."""
    graph = load_model(path).graph
    stored = {t.name for t in graph.initializer}
    inputs = [v for v in graph.input if v.name not in stored]
    for value in inputs:
        if not all(d.dim_value > 0 for d in value.type.tensor_type.shape.dim):
            raise CutefuseError(
                f"{path}: input {value.name} has a size that is not fixed; write it into the file, for example by "
                f"polygraphy surgeon sanitize --override-input-shapes {value.name}:[1,3,640,640]"
            )
    dims = inputs[0].type.tensor_type.shape.dim if inputs else ()
    return int(dims[0].dim_value) if dims else 1
