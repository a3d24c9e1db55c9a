"""Blocks of real networks as PyTorch modules, exported by both of PyTorch's exporters. Imports torch when called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = ("unet_up", "yolo_up", "c2f", "elan", "bottleneck", "gru", "relu6", "leaky_relu", "gelu", "hardswish",
         "tanh_silu", "dropout", "grouped", "pre_activation", "llama_block")  # fmt: skip
TRACING_OPSETS = (11, 13, 14, 17, 20)
OLDEST_TRACING = {"llama_block": 14}  # scaled_dot_product_attention
DYNAMO_OPSETS = (18, 21, 23)


def modules() -> dict[str, tuple[Any, list[tuple[int, ...]], list[str]]]:
    """name -> (module in eval mode with random weights, input shapes, op_types that must appear once patched)."""
    import torch
    from torch import nn

    from models.llama_block import Block, Config

    class Joined(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.cat(xs, dim=1))

    class TanhSiLU(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (0.5 * torch.tanh(0.5 * x) + 0.5)

    class UNetUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = Joined(nn.Conv2d(24, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))

        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            return self.conv(skip, self.up(x))

    class C2f(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cv1, self.m = nn.Conv2d(16, 16, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.cv2 = Joined(nn.Conv2d(24, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.cv1(x).chunk(2, 1)
            return self.cv2(a, b, self.m(b))

    class YoloUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Upsample(scale_factor=2, mode="nearest")
            self.conv = Joined(nn.Conv2d(24, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())

        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            return self.conv(self.up(x), skip)

    class Elan(nn.Module):
        """A gated join: its two branches read the same pair, and a range of the first is joined again."""

        def __init__(self) -> None:
            super().__init__()
            self.cv1, self.cv2 = (Joined(nn.Conv2d(24, 16, 1), nn.SiLU()) for _ in range(2))
            self.cv3 = Joined(nn.Conv2d(24, 16, 1), nn.SiLU())

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            x, y = self.cv1(a, b), self.cv2(a, b)
            return self.cv3(x[:, 8:], y)

    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Joined(nn.Conv2d(24, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(a, b) + b)

    class Gru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = Joined(nn.Conv2d(24, 8, (1, 5), padding=(0, 2)), nn.Sigmoid())
            self.q = Joined(nn.Conv2d(24, 8, (5, 1), padding=(2, 0)), nn.Tanh())

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            z = self.z(h, x)
            return (1 - z) * h + z * self.q(z * h, x)

    class PreActivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 1))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.cat([a, b], 1))

    def conv(**kwargs: Any) -> nn.Conv2d:
        return nn.Conv2d(24, 8, 3, **kwargs)

    pair = [(1, 8, 12, 10), (1, 16, 12, 10)]
    found = {
        "unet_up": (UNetUp(), [(1, 16, 6, 5), (1, 8, 12, 10)], ["CuteConcatConv2Relu"]),
        "yolo_up": (YoloUp(), [(1, 16, 6, 5), (1, 8, 12, 10)], ["CuteViewConcatConv2Silu"]),
        "c2f": (C2f(), [(1, 16, 12, 10)], ["CuteViewConcatConv1", "CuteConcatConv2Silu"]),
        "elan": (Elan(), pair, ["CuteConcatConv2x2Silu", "CuteViewConcatConv2Silu"]),
        "bottleneck": (Bottleneck(), pair, ["CuteConcatConv2AddRelu"]),
        "gru": (Gru(), pair, ["CuteConcatConv2Sigmoid", "CuteConcatConv2Tanh"]),
        "relu6": (Joined(conv(stride=2), nn.ReLU6()), pair, ["CuteConcatConv2Clip"]),
        "leaky_relu": (Joined(conv(dilation=2), nn.LeakyReLU(0.2)), pair, ["CuteConcatConv2LeakyRelu"]),
        "gelu": (Joined(conv(padding=1), nn.GELU()), pair, ["CuteConcatConv2Gelu"]),
        "hardswish": (Joined(conv(padding=1), nn.Hardswish()), pair, ["CuteConcatConv2HardSwish"]),
        "tanh_silu": (nn.Sequential(conv(padding=1), TanhSiLU()), [(1, 24, 12, 10)], ["CuteConcatConv1Silu"]),
        "dropout": (Joined(nn.Dropout2d(), conv(padding="same")), pair, ["CuteConcatConv2"]),
        "grouped": (Joined(conv(groups=8), nn.ReLU()), pair, []),
        "pre_activation": (PreActivation(), pair, ["CutePreConcatConv2"]),
        "llama_block": (Block(Config(1, 64, 4, 2, 96)), [(2, 7, 64)], ["CuteRMSNorm", "CuteAddRMSNorm"]),
    }
    for module, _, _ in found.values():
        for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2.0)
    return {name: (module.eval(), shapes, types) for name, (module, shapes, types) in found.items()}


def export(name: str, path: Path, opset: int, dynamo: bool) -> list[str]:
    """Write the ONNX file of a module; returns the op_types that must appear once it is patched.

    The tracing exporter gets a dynamic batch; the one on torch.export (`dynamo`) needs onnxscript.
    """
    import torch

    torch.manual_seed(0)
    module, shapes, types = modules()[name]
    inputs = tuple(torch.randn(s) for s in shapes)
    names = [f"x{i}" for i in range(len(inputs))]
    if dynamo:
        torch.onnx.export(
            module, inputs, str(path), opset_version=opset, dynamo=True, external_data=False, verbose=False
        )
    else:
        torch.onnx.export(
            module, inputs, str(path), opset_version=opset, dynamo=False, input_names=names,
            dynamic_axes={n: {0: "batch"} for n in names},
        )  # fmt: skip
    return types
