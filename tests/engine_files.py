"""Synthetic engine files for the report tests, labelled as such: TensorRT 10 with concat copies, the same engine
patched with plugins, the schema of TensorRT 11 as NVIDIA documents it, and graphs of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FP16_HWC8 = "Channel major FP16 format where channel % 8 == 0"
FP32_LINEAR = "Row major linear FP32"


def tensor(name: str, dims: list[int], form: str = FP16_HWC8) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": dims, "Format/Datatype": form}


def conv(name: str, source: dict[str, Any], out: dict[str, Any], kernel: int = 3, **more: Any) -> dict[str, Any]:
    c, k = source["Dimensions"][1], out["Dimensions"][1]
    return {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [source],
        "Outputs": [out],
        "ParameterType": "Convolution",
        "Kernel": [kernel, kernel],
        "PrePadding": [kernel // 2] * 2,
        "PostPadding": [kernel // 2] * 2,
        "Stride": [1, 1],
        "Dilation": [1, 1],
        "OutMaps": k,
        "Groups": 1,
        "Weights": {"Type": "Half", "Count": k * c * kernel * kernel},
        "Bias": {"Type": "Half", "Count": k},
        "TacticName": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tensor16x8x16",
        "StreamId": 0,
        "Metadata": "\x1e".join(f"[ONNX Layer: {n}]" for n in name.split(" + ")),
        **more,
    }


def copy(name: str, source: dict[str, Any], out: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": "Reformat",
        "Inputs": [source],
        "Outputs": [out],
        "ParameterType": "Reformat",
        "Origin": "REFORMAT",
        "TacticValue": "0x3e8",
        "StreamId": 0,
        **more,
    }


PLAIN = [
    copy(
        "Reformatting CopyNode for Input Tensor 0 to /stem/Conv + /stem/Relu",
        tensor("x", [1, 8, 64, 64], FP32_LINEAR),
        tensor("x_hwc8", [1, 8, 64, 64]),
    ),
    conv("/stem/Conv + /stem/Relu", tensor("x_hwc8", [1, 8, 64, 64]), tensor("a", [1, 64, 64, 64])),
    conv("/side/Conv + /side/Relu", tensor("a", [1, 64, 64, 64]), tensor("b", [1, 64, 64, 64])),
    copy("a copy", tensor("a", [1, 64, 64, 64]), tensor("cat", [1, 128, 64, 64]), Origin="CONCAT"),
    copy("b copy", tensor("b", [1, 64, 64, 64]), tensor("cat", [1, 128, 64, 64]), Origin="CONCAT"),
    conv("/up/Conv + /up/Relu", tensor("cat", [1, 128, 64, 64]), tensor("c", [1, 64, 64, 64])),
    conv("/head/Conv", tensor("c", [1, 64, 64, 64]), tensor("y", [1, 2, 64, 64], FP32_LINEAR), kernel=1),
]
PLAIN_US = [6.0, 11.0, 21.0, 9.5, 10.5, 40.0, 7.0]
PLUGIN = {
    "Name": "/up/Conv",
    "LayerType": "PluginV3",
    "ParameterType": "Plugin",
    "PluginType": "CuteConcatConv2Relu",
    "Inputs": [
        tensor("a", [1, 64, 64, 64]),
        tensor("b", [1, 64, 64, 64]),
        tensor("w", [64, 1152]),
        tensor("bias", [64], FP32_LINEAR),
    ],
    "Outputs": [tensor("c", [1, 64, 64, 64])],
    "TacticValue": "0x3",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: /up/Conv]",
}
PATCHED = [PLAIN[0], PLAIN[1], PLAIN[2], PLUGIN, PLAIN[6]]
PATCHED_US = [6.0, 11.0, 21.0, 32.0, 7.0]
PATCH_REPORT = {
    "schema": 1,
    "tool": {"name": "cutefuse", "version": "0.2.0"},
    "input": {"path": "net.onnx"},
    "output": {"path": "net.cutefuse.onnx"},
    "sites": [
        {
            "name": "/up/Conv",
            "operator": "concat_conv",
            "op_type": "CuteConcatConv2Relu",
            "status": "fused",
            "reason": "",
            "nodes": ["/up/Concat", "/up/Conv", "/up/Relu"],
            "flops": 1207959552,
            "bytes_saved": 2097152,
        },
        {
            "name": "/other/Conv",
            "operator": "concat_conv",
            "op_type": "",
            "status": "refused",
            "reason": "group is 2; 1 is allowed",
            "nodes": ["/other/Conv"],
        },
    ],
}
DEVICE = {"Selected Device": "NVIDIA H200", "Compute Capability": 9.0, "SMs": 132.0}


def write_engine(
    folder: Path,
    stem: str,
    layers: list[Any],
    times_us: list[float] | None = None,
    latency_ms: float | None = None,
    root: Any = None,
) -> Path:
    """Write graph, and where given profile, timing and metadata files; returns the graph file."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = folder / f"{stem}.engine.graph.json"
    graph.write_text(json.dumps(root if root is not None else {"Layers": layers, "Bindings": ["x", "y"]}))
    names = [la if isinstance(la, str) else la.get("Name", "") for la in layers]
    if times_us is not None:
        total = sum(times_us)
        records: list[dict[str, Any]] = [{"count": 100}]
        for name, us in zip(names, times_us, strict=True):
            ms = us / 1000
            records.append(
                {"name": name, "timeMs": ms * 100, "averageMs": ms, "medianMs": ms, "percentage": 100 * us / total}
            )
        (folder / f"{stem}.engine.profile.json").write_text(json.dumps(records))
    if latency_ms is not None:
        values = [latency_ms * (1 + 0.001 * (i % 7)) for i in range(50)]
        timing = [{"latencyMs": v, "computeMs": v} for v in values]
        (folder / f"{stem}.engine.timing.json").write_text(json.dumps(timing))
        metadata = {
            "performance_summary": {"Throughput": 1000 / latency_ms},
            "device_information": DEVICE,
            "inference_options": {"Batch": "1"},
            "tensorrt_version": "10.16.0",
        }
        (folder / f"{stem}.engine.profile.metadata.json").write_text(json.dumps(metadata))
    return graph


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A plain engine and its patched one with the patch report; returns the two folders."""
    write_engine(folder / "plain", "net.onnx", PLAIN, PLAIN_US, 0.11)
    write_engine(folder / "patched", "net.cutefuse.onnx", PATCHED, PATCHED_US, 0.08)
    (folder / "patched" / "net.cutefuse.patch.json").write_text(json.dumps(PATCH_REPORT))
    return folder / "plain", folder / "patched"


def tensorrt_11(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The same layers in the schema of TensorRT 11: split format and type, `I/O Tensors` in place of `Bindings`."""

    def split(t: dict[str, Any]) -> dict[str, Any]:
        half = "FP16" in t["Format/Datatype"]
        rest = {k: v for k, v in t.items() if k != "Format/Datatype"}
        return {**rest, "Format": "kHWC8" if half else "kLINEAR", "Datatype": "Half" if half else "Float"}

    modern = [
        {**la, "Inputs": [split(t) for t in la["Inputs"]], "Outputs": [split(t) for t in la["Outputs"]]}
        for la in layers
    ]
    io = [
        {
            "Name": n,
            "IOMode": mode,
            "DataType": "Float",
            "Dimensions": [1, 8, 64, 64],
            "Location": "Device",
            "IsShapeInferenceIO": False,
            "ProfileInfo": [],
        }
        for n, mode in (("x", "INPUT"), ("y", "OUTPUT"))
    ]
    return {"Layers": modern, "I/O Tensors": io}


def chain(count: int) -> list[dict[str, Any]]:
    """A long network with skip connections every ten layers."""
    layers = []
    for i in range(count):
        dims = [1, 64, 56, 56]
        layer = conv(
            f"/block{i // 10}/conv{i}/Conv + /block{i // 10}/conv{i}/Relu",
            tensor(f"t{i}", dims),
            tensor(f"t{i + 1}", dims),
        )
        if i % 10 == 9:
            layer["Inputs"].append(tensor(f"t{i - 8}", dims))
        layers.append(layer)
    return layers
