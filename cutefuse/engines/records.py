"""The JSON files of an engine that runs in this process, as trtexec and NVIDIA's engine explorer write theirs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import Artifacts
from cutefuse.output import write_json

# The names that TensorRT's inspector gives to the parameters of these operators; for any other the operator's own.
PARAMETER_TYPES = {"Conv": "Convolution", "FusedConv": "Convolution", "ConvTranspose": "Deconvolution",
                   "Concat": "Concatenation", "MaxPool": "Pooling", "AveragePool": "Pooling",
                   "GlobalAveragePool": "Pooling", "Softmax": "SoftMax", "Transpose": "Shuffle", "Reshape": "Shuffle",
                   "ReorderInput": "Reformat", "ReorderOutput": "Reformat", "Cast": "Reformat",
                   "Gemm": "MatrixMultiply", "FusedGemm": "MatrixMultiply", "MatMul": "MatrixMultiply",
                   "FusedMatMul": "MatrixMultiply"}  # fmt: skip
# NumPy's name of a type -> a word of TensorRT's inspector
LABELS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "float64": "FP64", "int8": "Int8", "uint8": "UInt8",
          "int16": "Int16", "int32": "Int32", "int64": "Int64", "bool": "Bool", "float8_e4m3fn": "FP8",
          "float8_e5m2": "FP8"}  # fmt: skip


def layer(
    name: str, op_type: str, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]],
    parameters: Mapping[str, Any], nodes: Iterable[str],
) -> dict[str, Any]:  # fmt: skip
    """A layer in the words of TensorRT's inspector. `nodes`: those of the model that it computes."""
    return {
        "Name": name, "LayerType": op_type, "Inputs": list(inputs), "Outputs": list(outputs),
        "ParameterType": PARAMETER_TYPES.get(op_type, op_type), **parameters, "StreamId": 0,
        "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes),
    }  # fmt: skip


def convolution(
    kernel: list[int], pads: list[int], stride: list[int], dilation: list[int], filters: int, groups: int,
    weights: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Those of a convolution's layer. `pads`: all beginnings, then all ends."""
    rank = len(kernel)
    return {
        "Kernel": kernel, "PrePadding": pads[:rank], "PostPadding": pads[rank:], "Stride": stride,
        "Dilation": dilation, "OutMaps": filters, "Groups": groups, "Weights": weights,
    }  # fmt: skip


def used_shapes(inputs: Mapping[str, Any]) -> str:
    """The shapes of the arrays or tensors that were run, as trtexec writes them: `x=1x3x64x64,y=1`."""
    return ",".join(f"{name}={'x'.join(map(str, value.shape))}" for name, value in inputs.items())


def write_build(files: Artifacts, model: Path, options: dict[str, Any], **facts: Any) -> None:
    """build.metadata.json. `options`: how it was built, by name; `facts`: what else is known of the build."""
    head = {"model_options": {"Format": "ONNX", "Model": str(model)}, "build_options": options}
    write_json(files.build_metadata, {**head, "device_information": {}, **facts})


def write_profile(
    files: Artifacts, layers: dict[str, list[float]], latencies_ms: list[float], wall_s: float,
    inference_options: dict[str, str], throughput: float | None = None, **facts: Any,
) -> None:  # fmt: skip
    """profile.json, timing.json and profile.metadata.json.

    Args:
        layers: layer -> its times in ms, in the order of execution. latencies_ms: of whole inferences.
        wall_s: what the latencies took to measure. throughput: inferences in a second, where a latency is the mean of
        several. facts: what else the metadata hold.
    """
    write_json(files.profile, profile_records(layers))
    write_json(files.timing, [{"computeMs": t, "latencyMs": t} for t in latencies_ms])
    metadata = summary(latencies_ms, wall_s, inference_options)
    if throughput is not None:
        metadata["performance_summary"]["Throughput"] = throughput
    write_json(files.profile_metadata, {**metadata, **facts})


def profile_records(layers: dict[str, list[float]]) -> list[dict[str, Any]]:
    """profile.json of trtexec from the times (ms) of each layer, in the order of execution."""
    total = sum(map(sum, layers.values())) or 1.0
    rows = [
        {
            "name": name, "timeMs": sum(times), "averageMs": statistics.fmean(times),
            "medianMs": statistics.median(times), "percentage": 100 * sum(times) / total,
        }
        for name, times in layers.items()
    ]  # fmt: skip
    return [{"count": max(map(len, layers.values()), default=0)}, *rows]


def summary(latencies_ms: Sequence[float], wall_s: float, inference_options: dict[str, str]) -> dict[str, Any]:
    """profile.metadata.json from whole-inference latencies: min, max, mean, median, p90, p95, p99 as in trtexec."""
    ordered = sorted(latencies_ms)
    percentiles = [ordered[max(len(ordered) - int(len(ordered) * (100 - p) / 100) - 1, 0)] for p in (90, 95, 99)]
    values = [ordered[0], ordered[-1], statistics.fmean(ordered), statistics.median(ordered), *percentiles]
    return {
        "performance_summary": {
            "Throughput": len(ordered) / wall_s if wall_s else 0.0,
            "Latency": values,
            "GPU Compute Time": values,
            "Total Host Walltime": wall_s,
            "Total GPU Compute Time": sum(ordered) / 1000,
        },
        "percentiles": [90, 95, 99],
        "inference_options": inference_options,
        "device_information": {},
        "warnings": [],
    }
