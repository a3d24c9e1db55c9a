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

from cutefuse.engines import plugins, records
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.inputs import input_specs, resolve, seeded
from cutefuse.engines.onnxruntime import nodes as onnxruntime_nodes
from cutefuse.engines.options import BUILDER, Effort, one_of, options_of, say_idle, shapes_of
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
_NAMES = {"float": "float32", "double": "float64", "Float8E4M3FN": "float8_e4m3fn"}  # NumPy's, where they differ
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
    threads = options.get("--threads", "default")
    device = {"Selected Device": f"CPU (ONNX Runtime {onnxruntime.__version__})", "Threads": threads}
    records.write_profile(
        files, times, latencies, wall_s,
        {"Input inference shapes": records.used_shapes(feed), "Engine": "ONNX Runtime"}, device_information=device,
        backend="onnxruntime", peaks=vars(measure_cpu()),
    )  # fmt: skip
    records.write_build(files, model, {"Graph optimization": level}, device_information=device, backend="onnxruntime")
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
    for _ in range(min(max(len(statistics_ms), 10), 50)):
        session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    cold_end = next((e["ts"] + e["dur"] for e in events if e.get("name") == "model_run"), 0)
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    return [e for e in kernels if e["ts"] >= cold_end]


def _layers(
    source: onnx.ModelProto, optimised: Path, events: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    graph = onnx.load(str(optimised), load_external_data=False).graph
    origins = onnxruntime_nodes.origins(source, graph)
    names = onnxruntime_nodes.names(source, graph, origins)
    constants = {i.name: i for i in graph.initializer}
    # A float16 filter that is computed in float32 comes through a Cast.
    cast = {n.output[0]: constants[n.input[0]] for n in graph.node if n.op_type == "Cast" and n.input[0] in constants}
    layers: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {}
    for node, name, origin, runs in zip(graph.node, names, origins, _by_node(graph, events), strict=True):
        layers.append(_layer(node, name, runs[-1]["args"] if runs else {}, constants, cast, origin))
        if runs:
            times[name] = [e["dur"] / 1000 for e in runs]
    return layers, times


def _by_node(graph: Any, events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
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
    return [named[n.name] if n.name else next(queues.get(n.op_type, iter(())), []) for n in graph.node]


def _layer(
    node: Any, name: str, args: dict[str, Any], constants: dict[str, Any], cast: dict[str, Any], origin: list[str]
) -> dict[str, Any]:
    """`constants`: initializers by name; `cast`: those behind a Cast, by the name of its output."""
    present, made = ([slot for slot in slots if slot] for slots in (node.input, node.output))
    # ONNX Runtime lists the inputs that are present; weights are no tensors of the engine graph.
    read = [t for t in _tensors(present, args.get("input_type_shape")) if t["Name"] not in constants]
    kind = records.PARAMETER_TYPES.get(node.op_type, node.op_type)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type != a.GRAPH}
    found: dict[str, Any] = {}
    filters = (constants.get(present[1]) or cast.get(present[1])) if len(present) > 1 else None
    if kind in ("Convolution", "Deconvolution") and filters is not None:
        found = _convolution(attributes, filters, kind)
        if present[1] in cast:
            del found["Weights"]  # they are an input tensor of the layer
        found["HasBias"] = int(len(present) > 2)
    elif kind == "MatrixMultiply" and (weights := [constants[i] for i in present[:2] if i in constants]):
        found["Weights"] = _count(weights[0])
    if activation := attributes.get("activation"):
        found["Activation"] = activation.decode().upper()
    if kind == "Reformat":
        found["Origin"] = "CAST" if node.op_type == "Cast" else "REFORMAT"
    found |= {"TacticName": args.get("provider", "CPUExecutionProvider"), "TacticValue": "0x0000000000000000"}
    return records.layer(name, node.op_type, read, _tensors(made, args.get("output_type_shape")), found, origin)


def _convolution(attributes: dict[str, Any], weight: Any, kind: str) -> dict[str, Any]:
    kernel, groups = list(weight.dims[2:]), int(attributes.get("group", 1))
    pads, stride, dilation = (
        list(attributes.get(attribute) or [usual] * count * len(kernel))
        for attribute, usual, count in (("pads", 0, 2), ("strides", 1, 1), ("dilations", 1, 1))
    )
    filters = int(weight.dims[0] if kind == "Convolution" else weight.dims[1] * groups)
    return records.convolution(kernel, pads, stride, dilation, filters, groups, _count(weight))


def _count(weight: Any) -> dict[str, Any]:
    return {"Type": "Float", "Count": int(np.prod(weight.dims))}


def _tensors(names: list[str], kinds: list[dict[str, list[int]]] | None) -> list[dict[str, Any]]:
    """`kinds`: of each name its type and shape, as far as the profiler told them."""
    known, found = dict(zip(names, kinds or [], strict=False)), []
    for name in names:
        dtype, dims = next(iter(known.get(name, {}).items()), ("", []))
        text = f"Row major linear {records.LABELS.get(_NAMES.get(dtype, dtype), dtype or 'unknown')}"
        found.append({"Name": name, "Location": "Host", "Dimensions": dims, "Format/Datatype": text})
    return found
