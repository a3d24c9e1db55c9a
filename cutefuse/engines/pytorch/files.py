"""`engines.pytorch.run` from path to path: the files that trtexec and NVIDIA's engine explorer write.

PyTorch has no engine file: `build` writes a small JSON file in its place, with the model's path and the options, and
`profile` takes it as well as the model itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutefuse.engines import plugins, records
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.options import BUILDER, Effort, one_of, say_idle, shapes_of
from cutefuse.engines.options import options_of as given_options
from cutefuse.engines.pytorch.layers import Layer
from cutefuse.engines.pytorch.lock import alone
from cutefuse.engines.pytorch.onnx_ops.convolution import Convolution, ConvolutionRelu
from cutefuse.engines.pytorch.onnx_ops.fused import TIMED, FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step
from cutefuse.engines.pytorch.run import MODES, TorchEngine, time_interleaved_us
from cutefuse.engines.pytorch.tiles import CHOICES, FIRST
from cutefuse.errors import CutefuseError
from cutefuse.output import make_folder, write_json
from cutefuse.progress import spinner
from cutefuse.roofline.measure import measure_cpu

_OPTIONS = ("--shapes", "--optShapes", "--iterations", "--duration", "--warmUp", "--mode", "--tiles", "--device",
            "--noTF32")  # fmt: skip
_REFUSAL = "{name} means nothing to the PyTorch back end; allowed are {known}; leave it out"
_FORMAT = "cutefuse torch engine"


@dataclass(frozen=True)
class _Wanted:
    shapes: dict[str, tuple[int, ...]]
    mode: str
    tiles: str
    device: str | None
    tf32: bool
    effort: Effort


def options_of(words: Sequence[str]) -> _Wanted:
    """trtexec options and our own `--mode`, `--tiles`, `--device`; TensorRT's builder's are ignored, others refused."""
    options = given_options(words, _OPTIONS, _REFUSAL, BUILDER)
    return _Wanted(
        shapes_of(options), one_of(options, "--mode", "cudnn", MODES), one_of(options, "--tiles", TIMED, CHOICES),
        options.get("--device") or None, "--noTF32" not in options, Effort.of(options),
    )  # fmt: skip


def build(model: Path, files: Artifacts, words: Sequence[str], use_plugins: bool = True) -> None:
    """Load a model, run it once, and write layers, metadata and the small file that stands for the engine."""
    wanted = options_of(words)
    say_idle(words, "PyTorch")
    engine = _engine(model, wanted, use_plugins)
    _write_engine(model, files, words)
    _write_graph(engine, model, files, [Layer(step.name, [step]) for step in engine.program.steps])
    _report_fused(engine, model)


def profile(source: Path, files: Artifacts, words: Sequence[str], use_plugins: bool = True) -> None:
    """Time a model, or what `build` wrote, as a whole and layer by layer."""
    model, words = _model_of(source, words)
    wanted = options_of(words)
    say_idle(words, "PyTorch")
    _profiled(model, files, wanted, use_plugins)


def build_and_profile(model: Path, outdir: Path, words: Sequence[str]) -> tuple[TorchEngine, Artifacts]:
    """The files of `build` and of `profile` from one engine, which stays loaded."""
    wanted, files = options_of(words), Artifacts.of(model, outdir)
    make_folder(outdir)
    engine = _profiled(model, files, wanted, True)
    _write_engine(model, files, words)
    return engine, files


def _profiled(model: Path, files: Artifacts, wanted: _Wanted, use_plugins: bool) -> TorchEngine:
    engine = _engine(model, wanted, use_plugins)
    _write_profile(engine, model, files, wanted.effort)
    _report_fused(engine, model)
    plugins.keep_report(model, files.engine.parent)
    return engine


def load(source: Path) -> TorchEngine:
    """The engine of a model, or of what `build` wrote, with the options that it was built with."""
    model, words = _model_of(source, [])
    return _engine(model, options_of(words), True)


def _write_engine(model: Path, files: Artifacts, words: Sequence[str]) -> None:
    write_json(files.engine, {"format": _FORMAT, "model": str(model.resolve()), "options": list(words)})


def _write_profile(engine: TorchEngine, model: Path, files: Artifacts, effort: Effort) -> None:
    with spinner(f"profiling {model.name} with PyTorch {torch.__version__}"), alone():
        latencies, wall_s = effort.times(lambda: [t / 1000 for t in time_interleaved_us([engine], 5, 1.0)[0]])
        layers = engine.layers(min(max(effort.least, 5), 50))
    _write_graph(engine, model, files, layers)
    graph = "Enabled" if engine.device.type == "cuda" else "Disabled"
    peaks = {"peaks": vars(measure_cpu())} if engine.device.type == "cpu" else {}
    records.write_profile(
        files, {x.name: [t / 1000 for t in x.times_us] for x in layers if x.times_us}, latencies, wall_s,
        {"Input inference shapes": records.used_shapes(engine.inputs), "Engine": "PyTorch", "CUDA Graph": graph},
        1000 / statistics.median(latencies), device_information=_device(engine), backend="torch", **peaks,
    )  # fmt: skip


def _model_of(source: Path, words: Sequence[str]) -> tuple[Path, list[str]]:
    """The model behind what `build` wrote, with its options in front of the given ones."""
    if source.suffix == ".onnx":
        return source, list(words)
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError
        return Path(data["model"]), [*map(str, data["options"]), *words]
    except FileNotFoundError:
        raise CutefuseError(f"engine {source} does not exist; build it first with `cutefuse build`") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise CutefuseError(
            f"{source} is no engine of the PyTorch back end; build one with `cutefuse build --backend torch`, or give "
            "an ONNX model"
        ) from None


def _engine(model: Path, wanted: _Wanted, use_plugins: bool) -> TorchEngine:
    with spinner(f"loading {model.name} into PyTorch {torch.__version__}"):
        return TorchEngine.build(
            model, wanted.mode, wanted.device, shapes=wanted.shapes, plugins=use_plugins, tf32=wanted.tf32,
            tiles=_tiles(model, wanted.tiles) if use_plugins else FIRST,
        )  # fmt: skip


def _tiles(model: Path, choice: str) -> dict[str, int] | str:
    """The tiles of the patch report where the nodes do not ask for them themselves, and the choice for all others."""
    facts = plugins.read_model(model)
    tuned = {name: tile for name, tile in plugins.tuned_tiles(model).items() if facts.tiles.get(name) != tile}
    if choice == FIRST and tuned:
        return {**dict.fromkeys(facts.fused_nodes.keys() - facts.tiles.keys(), 0), **tuned}
    return tuned or choice


def _report_fused(engine: TorchEngine, model: Path) -> None:
    """How many of the fused nodes run by our kernels."""
    fused = plugins.read_model(model).fused_nodes
    if not fused:
        return
    for note in engine.program.notes:
        print(note)
    if engine.device.type == "cpu":
        print(f"on the CPU the {len(fused)} fused nodes run their function bodies; a GPU would run the kernels")
    else:
        print(f"{len(engine.program.fused)} of {len(fused)} fused nodes run as kernels{_said_of(engine.program)}")


def _said_of(program: Program) -> str:
    """How the tiles of the fused nodes were chosen."""
    timed = [node for node in program.fused if node.tile_from == TIMED]
    others = sum(node.config != next(iter(node.tiles_us)) for node in timed)
    return f"; tiles of {len(timed)} timed, {others} run another one than the first guess" if timed else ""


def _device(engine: TorchEngine) -> dict[str, Any]:
    if engine.device.type == "cpu":
        return {"Selected Device": f"CPU (PyTorch {torch.__version__})", "Threads": str(torch.get_num_threads())}
    found = torch.cuda.get_device_properties(engine.device)
    return {
        "Selected Device": found.name, "Compute Capability": f"{found.major}.{found.minor}",
        "SMs": found.multi_processor_count, "PyTorch": str(torch.__version__), "CUDA": str(torch.version.cuda),
    }  # fmt: skip


def _write_graph(engine: TorchEngine, model: Path, files: Artifacts, layers: Sequence[Layer]) -> None:
    program = engine.program
    bindings = [*program.inputs, *program.outputs]
    write_json(files.graph, {"Layers": [describe(program, layer) for layer in layers], "Bindings": bindings})
    precision = "as the model" + ("+TF32" * engine.settings.tf32)
    options = {"Mode": engine.settings.mode, "Precision": precision}
    records.write_build(files, model, options, device_information=_device(engine), backend="torch")


# -------------------------------------------------------------------------------------------------- layers as JSON
def describe(program: Program, layer: Layer) -> dict[str, Any]:
    """A layer in the words of TensorRT's inspector."""
    single = layer.steps[0] if len(layer.steps) == 1 else None
    made = [s for step in layer.steps for s in step.outputs]
    read = dict.fromkeys(s for step in layer.steps for s in step.inputs if s and s not in made)
    fused = single is not None and isinstance(single.run, FusedNode)
    kept = [s for s in read if s in program.shapes or fused]  # weights are tensors of a plugin's layer alone
    own = set(map(id, layer.steps))
    outside = {s for step in program.steps if id(step) not in own for s in step.inputs} | set(program.outputs.values())
    inputs, outputs = ([_tensor(program, s) for s in slots] for slots in (kept, [s for s in made if s in outside]))
    parameters = {**(_parameters(program, single) if single else {}), **_tactic(layer, single)}
    nodes = dict.fromkeys(n for step in layer.steps for n in step.nodes)
    return records.layer(layer.name, _type(layer, single), inputs, outputs, parameters, nodes)


def _tactic(layer: Layer, single: Step | None) -> dict[str, Any]:
    """The kernels of a layer; of a fused node its tile, which is what TensorRT would time as a tactic."""
    names = " + ".join(layer.kernels)
    if single is None or not isinstance(single.run, FusedNode) or not single.run.named:
        return {"TacticName": names, "TacticValue": f"0x{0:016x}"}
    node = single.run
    times = {node.name_of(tile): time_us for tile, time_us in node.tiles_us.items()}
    return {
        "TacticName": node.tile_name, "TacticValue": f"0x{node.tile:016x}", "TileChoice": node.tile_from,
        **({"TileTimesUs": times} if times else {}), **({"Kernels": names} if names else {}),
    }  # fmt: skip


def _is_plugin(step: Step) -> bool:
    """Whether a step is a node of our domain in the model."""
    return isinstance(step.run, FusedNode) and step.run.named


def _type(layer: Layer, single: Step | None) -> str:
    if single is not None:
        return "PluginV3" if _is_plugin(single) else single.op_type
    found = [s.op_type for s in layer.steps if s.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
    name = layer.name.lower()
    if found:
        return found[0]
    return "Reduce" if name.startswith(("triton_red", "triton_per")) else "PointWise" if layer.steps else "Kernel"


def _parameters(program: Program, step: Step) -> dict[str, Any]:
    weights = [program.constants[s] for s in step.inputs[1:] if s in program.constants]
    if _is_plugin(step):
        return {"PluginType": step.op_type, "PluginVersion": "1", "PluginNamespace": "cutefuse"}
    if isinstance(step.run, (Convolution, ConvolutionRelu)) and weights:
        conv = step.run if isinstance(step.run, Convolution) else step.run.inner
        kernel, filters = list(weights[0].shape[2:]), weights[0].shape[0]
        return {
            **records.convolution(
                kernel, conv.pads, conv.stride, conv.dilation, filters, conv.groups, _count(weights[0])
            ),
            "HasBias": int(len(weights) > 1),
            "Activation": "RELU" if isinstance(step.run, ConvolutionRelu) else "NONE",
        }
    if step.op_type in ("Gemm", "MatMul", "ConvTranspose") and weights:
        return {"Weights": _count(weights[0])}
    if "kernel_shape" in step.attrs:
        return {"WindowSize": list(step.attrs["kernel_shape"])}
    return {"Origin": "CAST"} if step.op_type == "Cast" else {}


def _count(weight: Tensor) -> dict[str, Any]:
    return {"Type": _label(weight, "Float"), "Count": weight.numel()}


def _label(t: Tensor, usual: str = "unknown") -> str:
    return records.LABELS.get(str(t.dtype).removeprefix("torch."), usual)


def _tensor(program: Program, slot: str) -> dict[str, Any]:
    t = program.shapes[slot] if slot in program.shapes else program.constants[slot]
    label, images = _label(t), t.dim() == 4 and t.stride(1) == 1
    whole = " where channel % 8 == 0" if images and t.shape[1] % 8 == 0 else ""
    text = f"Channel major {label} format{whole}" if images else f"Row major linear {label}"
    name = program.tensors.get(slot, slot)
    return {"Name": name, "Location": "Device", "Dimensions": list(t.shape), "Format/Datatype": text}
