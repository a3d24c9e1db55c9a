"""ONNX Runtime as the embedded engine: profiles a model without TensorRT, into the same files and schema.

ONNX Runtime runs its optimised graph; `onnxruntime_nodes` traces its nodes back to those of the model.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from cutefuse.engines import plugins
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.inputs import input_specs, resolve, seeded
from cutefuse.engines.onnxruntime import nodes as onnxruntime_nodes
from cutefuse.engines.options import BUILDER, Effort, one_of, options_of, say_idle, shapes_of
from cutefuse.engines.records import PARAMETER_TYPES, write_build, write_profile
from cutefuse.errors import CutefuseError
from cutefuse.graph.staging import hidden
from cutefuse.graph.store import load_model
from cutefuse.output import make_folder, write_json
from cutefuse.progress import spinner
from cutefuse.roofline.measure import measure_cpu

_LEVELS = {"all": 99, "extended": 2, "basic": 1, "disable": 0}
_OPTIONS = ("--shapes", "--optShapes", "--iterations", "--duration", "--warmUp", "--threads", "--optimization")
_IGNORED = (*BUILDER, "--noTF32")
_REFUSAL = "{name} means nothing to ONNX Runtime; allowed are {known}; leave it out"
_LABELS = {"float": "FP32", "float16": "FP16", "bfloat16": "BF16", "double": "FP64", "int8": "Int8", "uint8": "UInt8",
           "int32": "Int32", "int64": "Int64", "bool": "Bool", "Float8E4M3FN": "FP8"}  # fmt: skip
_FILLED = ("float32", "float16", "float64", "int8", "uint8", "int32", "int64", "bool")


def seeded_inputs(model: onnx.ModelProto, wanted: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """One array per input; dynamic axes from `wanted`, else filled (see `inputs`)."""
    specs = input_specs(model)
    for spec in specs:
        if spec.dtype not in _FILLED:
            raise CutefuseError(f"input {spec.name} has type {spec.dtype}, which cannot be filled here; use TensorRT")
    return seeded(specs, resolve(specs, wanted))


def profile(model: Path, outdir: Path, words: list[str]) -> Artifacts:
    """Run a model with ONNX Runtime on the CPU and write graph, profile, timing and metadata JSON into `outdir`."""
    options = options_of(words, _OPTIONS, _REFUSAL, _IGNORED)
    level = one_of(options, "--optimization", "extended", _LEVELS)
    say_idle(words, "ONNX Runtime", _IGNORED)
    files = Artifacts.of(model, outdir)
    source = load_model(model)
    make_folder(outdir)
    with hidden(outdir, ".ort-") as scratch:
        try:
            with spinner(f"profiling {model.name} with ONNX Runtime {onnxruntime.__version__}"):
                feed = seeded_inputs(source, shapes_of(options))
                latencies, wall_s = _time(model, options, feed)
                events = _events(model, options, feed, scratch, statistics_ms=latencies)
        except CutefuseError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions are built at run time and share no public base
            text = " ".join(str(error).split())[:400]
            lacks = "NOT_IMPLEMENTED" in text
            remedy = "it lacks that on the CPU, use another engine" if lacks else "check the model, or give --shapes="
            raise CutefuseError(f"ONNX Runtime cannot run {model} ({text}); {remedy}") from None
        layers, times = _layers(source, scratch / "optimised.onnx", events)
    bindings = [*feed, *(o.name for o in source.graph.output)]
    write_json(files.graph, {"Layers": layers, "Bindings": bindings})
    used = ",".join(f"{name}={'x'.join(map(str, a.shape))}" for name, a in feed.items())
    threads = options.get("--threads", "default")
    device = {"Selected Device": f"CPU (ONNX Runtime {onnxruntime.__version__})", "Threads": threads}
    write_profile(
        files, times, latencies, wall_s, {"Input inference shapes": used, "Engine": "ONNX Runtime"},
        device_information=device, backend="onnxruntime", peaks=vars(measure_cpu()),
    )  # fmt: skip
    write_build(files, model, {"Graph optimization": level}, device_information=device, backend="onnxruntime")
    plugins.keep_report(model, outdir)
    return files


def _session(model: Path, options: dict[str, str], scratch: Path | None) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel(
        _LEVELS[options.get("--optimization", "extended")]
    )
    if "--threads" in options:
        settings.intra_op_num_threads = int(options["--threads"])
    if scratch:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(scratch / "events")
        settings.optimized_model_filepath = str(scratch / "optimised.onnx")
        # Weights stay outside of the saved graph: only its structure is read.
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    return onnxruntime.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])


def _time(model: Path, options: dict[str, str], feed: dict[str, np.ndarray]) -> tuple[list[float], float]:
    session = _session(model, options, None)

    def sample() -> list[float]:
        start = time.perf_counter()
        session.run(None, feed)
        return [(time.perf_counter() - start) * 1000]

    return Effort.of(options).times(sample)


def _events(
    model: Path, options: dict[str, str], feed: dict[str, np.ndarray], scratch: Path, statistics_ms: list[float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Node events of a separate run with the profiler on; the first (cold) inference is left out."""
    session = _session(model, options, scratch)
    session.run(None, feed)
    cold_end = None
    for _ in range(min(max(len(statistics_ms), 10), 50)):
        session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    for event in events:
        if event.get("name") == "model_run":
            cold_end = event["ts"] + event["dur"]
            break
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    return [e for e in kernels if cold_end is None or e["ts"] >= cold_end]


def _layers(
    source: onnx.ModelProto, optimised: Path, events: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    graph = onnx.load(str(optimised), load_external_data=False).graph
    origins = onnxruntime_nodes.origins(source, graph)
    names = onnxruntime_nodes.names(source, graph, origins)
    constants = {i.name: i for i in graph.initializer}
    # A float16 filter that is computed in float32 comes through a Cast.
    cast = {n.output[0]: constants[n.input[0]] for n in graph.node if n.op_type == "Cast" and n.input[0] in constants}
    runs_of = _by_node(graph, events)
    layers: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {}
    for index, node in enumerate(graph.node):
        name = names[index]
        runs = runs_of.get(index, [])
        layers.append(_layer(node, name, runs[-1]["args"] if runs else {}, constants, cast, origins[index]))
        if runs:
            times[name] = [e["dur"] / 1000 for e in runs]
    return layers, times


def _by_node(graph: Any, events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Events of each node of the optimised graph: by name, and nameless ones by type in the order of execution."""
    named: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nameless: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    known = {node.name for node in graph.node if node.name}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if name in known:
            named[name].append(event)
        else:
            args = event.get("args", {})
            nameless[args.get("op_name", "")].setdefault(str(args.get("node_index")), []).append(event)
    queues = {kind: iter(groups.values()) for kind, groups in nameless.items()}
    result: dict[int, list[dict[str, Any]]] = {}
    for index, node in enumerate(graph.node):
        result[index] = named[node.name] if node.name else next(queues.get(node.op_type, iter(())), [])
    return result


def _layer(
    node: Any, name: str, args: dict[str, Any], constants: dict[str, Any], cast: dict[str, Any], origin: list[str]
) -> dict[str, Any]:
    """`constants`: initializers by name; `cast`: those behind a Cast, by the name of its output."""
    layer: dict[str, Any] = {"Name": name, "LayerType": node.op_type}
    kinds = args.get("input_type_shape") or []
    # ONNX Runtime lists the inputs that are present; weights are no tensors of the engine graph.
    present = [i for i in node.input if i]
    layer["Inputs"] = [
        _tensor(i, kinds[n] if n < len(kinds) else {}) for n, i in enumerate(present) if i not in constants
    ]
    results = args.get("output_type_shape") or []
    outputs = [o for o in node.output if o]
    layer["Outputs"] = [_tensor(o, results[n] if n < len(results) else {}) for n, o in enumerate(outputs)]
    layer["ParameterType"] = PARAMETER_TYPES.get(node.op_type, node.op_type)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type != a.GRAPH}
    filters = (constants.get(present[1]) or cast.get(present[1])) if len(present) > 1 else None
    if layer["ParameterType"] in ("Convolution", "Deconvolution") and filters is not None:
        layer.update(_convolution(attributes, filters, layer["ParameterType"]))
        if present[1] in cast:
            del layer["Weights"]  # they are an input tensor of the layer
        layer["HasBias"] = int(len(present) > 2)
    elif layer["ParameterType"] == "MatrixMultiply":
        weights = [constants[i] for i in present[:2] if i in constants]
        if weights:
            layer["Weights"] = {"Type": "Float", "Count": int(np.prod(weights[0].dims))}
    activation = attributes.get("activation")
    if activation:
        layer["Activation"] = activation.decode().upper() if isinstance(activation, bytes) else str(activation).upper()
    if layer["ParameterType"] == "Reformat":
        layer["Origin"] = "CAST" if node.op_type == "Cast" else "REFORMAT"
    layer["TacticName"] = str(args.get("provider", "CPUExecutionProvider"))
    layer["TacticValue"] = "0x0000000000000000"
    layer["StreamId"] = 0
    layer["Metadata"] = "\x1e".join(f"[ONNX Layer: {o}]" for o in origin)
    return layer


def _convolution(attributes: dict[str, Any], weight: Any, kind: str) -> dict[str, Any]:
    kernel = list(weight.dims[2:])
    rank = len(kernel)
    pads = list(attributes.get("pads") or [0] * 2 * rank)
    groups = int(attributes.get("group", 1))
    return {
        "Kernel": kernel,
        "PrePadding": pads[:rank],
        "PostPadding": pads[rank:],
        "Stride": list(attributes.get("strides") or [1] * rank),
        "Dilation": list(attributes.get("dilations") or [1] * rank),
        "OutMaps": int(weight.dims[0] if kind == "Convolution" else weight.dims[1] * groups),
        "Groups": groups,
        "Weights": {"Type": "Float", "Count": int(np.prod(weight.dims))},
    }


def _tensor(name: str, kind: dict[str, list[int]]) -> dict[str, Any]:
    dtype, dims = next(iter(kind.items()), ("", []))
    label = _LABELS.get(dtype, dtype or "unknown")
    return {"Name": name, "Location": "Host", "Dimensions": dims, "Format/Datatype": f"Row major linear {label}"}
