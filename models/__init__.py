"""Generators of real topologies: ONNX from numpy and onnx alone, seeded random weights, no downloads.

PARTS are small graphs around one kind of site, NETWORKS whole networks at deployment size. Each comes from a
module's `build(config, **arguments) -> onnx.ModelProto`.
"""

from __future__ import annotations

import importlib
from typing import Any

from models.net import Config

PARTS = (
    "bevfusion_fuser", "centerpoint_neck", "deeplabv3p_head", "hrnet_head", "pidnet", "vit_block", "yolo_elan",
    "yolo_neck",
)  # fmt: skip
# name -> module of models.networks, arguments of its build
NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "yolov8n": ("yolov8", {"scale": "n"}),
    "yolov8s": ("yolov8", {"scale": "s"}),
    "yolov8m": ("yolov8", {"scale": "m"}),
    "yolo11s": ("yolo11", {"scale": "s"}),
    "unet": ("unet", {}),
    "unet_pp": ("unet_pp", {}),
    "smp_unet": ("smp_unet", {}),
    "smp_unet_pp": ("smp_unet_pp", {}),
    "deeplabv3p": ("deeplabv3p", {}),
    "hrnet_ocr": ("hrnet_ocr", {}),
    "googlenet": ("googlenet", {}),
    "inception_v3": ("inception_v3", {}),
    "squeezenet1_1": ("squeezenet1_1", {}),
    "densenet121": ("densenet121", {}),
    "vovnet39": ("vovnet39", {}),
    "dla34": ("dla34", {}),
    "bevfusion_neck": ("bevfusion_neck", {}),
    "bevfusion_decoder": ("bevfusion_decoder", {}),
    "centerpoint": ("centerpoint", {}),
    "raft_update": ("raft_update", {}),
}
DEMO = ("bevfusion_fuser", "hrnet_head", "unet", "yolo_neck")  # what `make demo` shows


def names() -> list[str]:
    """All parts and networks, in alphabetical order."""
    return sorted([*PARTS, *NETWORKS])


def build(
    name: str, dtype: str = "float32", small: bool = False, batch: int | None = None, size: int | None = None
) -> Any:
    """The onnx.ModelProto of a part or network in float32 or float16.

    small keeps the topology and shrinks its sizes. batch: images in a run, dynamic where None. size: rows of a
    network's input in pixels, its deployment size where None. Raises ValueError for sizes that the model cannot have.
    """
    config = Config(dtype, small, batch, size)
    if name in NETWORKS:
        module, arguments = NETWORKS[name]
        return importlib.import_module(f"models.networks.{module}").build(config, **arguments)
    if size is not None:
        raise ValueError(f"{name} is a part of a network and has one size; leave --size out")
    return importlib.import_module(f"models.parts.{name}").build(config)


def one_image(model: Any) -> dict[str, list[int]]:
    """Sizes for a run of one image: of the inputs of an onnx.ModelProto whose first axis at most is dynamic."""
    stored = {t.name for t in model.graph.initializer}
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {
        name: [dims[0] or 1, *dims[1:]] for name, dims in sizes.items() if name not in stored and dims and all(dims[1:])
    }
