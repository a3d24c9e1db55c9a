"""The problems of ConcatConv for tests and benchmarks over all operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutefuse.graph.numbers import FLOATS, HALVES
from cutefuse.operators.conv_form import AFTER, BEFORE, Form, forms
from cutefuse.operators.op import Case

CHANNELS = (16, 8, 72, 4, 64, 12, 20, 24)
PRE_ACTIVATED = (16, 8, 72, 64, 24, 40, 8, 32)  # in whole vectors of every type
UPSAMPLE = (2, 1, 4, 1, 1, 2, 1, 1)
STARTS = (0, 8, 16, 0, 8, 0, 0, 24)


def cases() -> list[Case]:
    """Every op_type on a small problem, then the sizes that break kernels: odd, tiny, empty, strided, dilated, long."""
    return [
        *(_case(f"{f.sources}_sources_{f.suffix or 'linear'}", CHANNELS[: f.sources], f.suffix, K=24, H=9, W=7)
          for f in forms() if f == Form(f.sources, f.suffix)),
        _case("one_pixel", [8, 8], "Relu", K=8, H=1, W=1, R=1, S=1),
        _case("one_filter", [64, 64], "", K=1, H=5, W=5),
        _case("empty_batch", [16, 16], "Relu", N=0, K=16, H=4, W=4),
        _case("odd_everything", [13, 77], "Silu", N=3, K=19, H=13, W=11, dtypes=HALVES),
        _case("one_channel_each", [1, 1, 1], "Tanh", K=7, H=6, W=5, dtypes=HALVES),
        _case("strided", [48, 96], "Relu", N=2, K=40, H=15, W=18, strides=(2, 3)),
        _case("dilated", [64, 32], "Relu", K=72, H=17, W=16, pads=(2, 3, 2, 3), dilations=(2, 3)),
        _case("asymmetric_pads", [32, 64], "LeakyRelu", K=64, H=10, W=12, pads=(0, 2, 3, 1)),
        _case("row_filter", [128, 128, 128], "Sigmoid", K=96, H=9, W=20, R=1, S=5),
        _case("column_filter", [24, 40], "Tanh", K=33, H=20, W=9, R=7, S=1),
        _case("pads_wider_than_image", [16, 16], "Relu", K=16, H=1, W=2, R=5, S=5, pads=(4, 4, 4, 4)),
        _case("unet_up", [64, 64], "Relu", K=64, H=32, W=32),
        _case("bevfusion", [80, 256], "Relu", K=256, H=20, W=20),
        _case("hrnet_head", [48, 96, 192, 384], "Relu", K=720, H=12, W=16, R=1, S=1),
        _case("long_reduction", [512, 512], "Relu", K=64, H=8, W=8),
        *_extended(),
        _case("yolo_top_down", [64, 32], "Silu", view=True, K=32, H=20, W=20, R=1, S=1, upsample=(2, 1)),
        _case("c2f", [32, 16, 16], "Silu", view=True, K=32, H=20, W=20, R=1, S=1,
              channel_starts=(0, 0, 16), widths=(32, 32, 48)),
        _case("enlarged_thrice", [24, 40], "Relu", view=True, N=2, K=40, H=9, W=15, upsample=(3, 1), strides=(2, 1)),
        _case("enlarged_apart", [16, 16, 8], "", view=True, K=19, H=8, W=12, pads=(2, 0, 1, 3), upsample=(4, 1, 2),
              dilations=(1, 2), channel_starts=(8, 0, 16)),
        _case("inception", [48, 16], "Relu", outputs=(24, 16, 40), K=80, H=7, W=9, R=1, S=1),
        _case("odd_last_output", [40, 24], "Tanh", outputs=(8, 72, 13), K=93, H=6, W=5, N=2),
        _case("bottleneck", [32, 32], "Relu", residual=BEFORE, N=2, K=72, H=11, W=6, strides=(2, 1)),
        _case("densenet", [256, 32, 32, 32], "Relu", pre_activated=True, N=2, K=128, H=7, W=7, R=1, S=1),
        _case("strided_pre_activation", [40, 72], "", pre_activated=True, N=3, K=19, H=9, W=12, strides=(2, 1),
              pads=(0, 2, 3, 1), dilations=(1, 2)),
        _case("c2f_residual", [32, 16], "Silu", view=True, residual=AFTER, N=2, K=32, H=9, W=7, channel_starts=(0, 16),
              widths=(32, 48), residual_start=[32]),
        _case("middle_of_a_residual", [16, 8], "Relu", view=True, residual=BEFORE, K=24, H=8, W=12, strides=(2, 1),
              upsample=(2, 1), residual_start=[8], after=16),
        _case("image", [3], "Silu", N=2, K=19, H=9, W=11, strides=(2, 1), image=True),
        _case("float32_image", [4], "Relu", K=24, H=8, W=10, R=5, S=3, pads=(2, 1, 1, 0), dilations=(1, 2), image=True,
              given="float32"),
        _case("image_of_one_tap", [5], "Relu", N=2, K=13, H=7, W=10, R=1, S=1, image=True),
        _case("mobilenet", [40], "HardSwish", N=2, K=40, H=15, W=13, R=5, S=5, strides=(2, 2), depthwise=True),
        _case("dilated_depthwise", [24], "Silu", N=3, K=24, H=8, W=11, pads=(2, 0, 1, 3), strides=(1, 2),
              dilations=(1, 2), depthwise=True),
        _case("depthwise_of_several", [16, 40, 24], "Relu", N=2, K=80, H=7, W=9, pads=(2, 1, 2, 1), dilations=(2, 1),
              depthwise=True),
        _case("deconvolution", [72], "Relu", N=2, K=24, H=7, W=9, R=1, S=1, spread=2),
        _case("pixel_shuffle", [16, 40], "LeakyRelu", N=2, K=8, H=10, W=5, strides=(2, 1), pads=(0, 2, 3, 1), spread=3),
        _case("odd_residual", [32, 16], "Silu", residual=AFTER, N=2, K=13, H=5, W=7, dtypes=HALVES),
    ]  # fmt: skip


def _extended() -> Iterator[Case]:
    """One case for each op_type with more than sources and an activation."""
    for form, op_type in forms().items():
        n = form.sources
        if form.quantised or form == Form(n, form.suffix):
            continue
        views: dict[str, Any] = {"upsample": UPSAMPLE[:n], "channel_starts": STARTS[:n]} if form.view else {}
        parts = (8, 16, 8, 4)[: form.outputs]
        channels = (PRE_ACTIVATED if form.pre_activated or form.depthwise else (3,) if form.image else CHANNELS)[:n]
        yield _case(op_type, channels, form.suffix, view=form.view, residual=form.residual, outputs=parts,
                    K=sum(parts), H=4, W=8, pre_activated=form.pre_activated, image=form.image,
                    depthwise=form.depthwise, spread=form.spread, **views)  # fmt: skip


def _case(
    name: str, channels: list[int] | tuple[int, ...], suffix: str, *, K: int, H: int, W: int, N: int = 1, R: int = 3,
    S: int = 3, pads: tuple[int, ...] = (), dtypes: tuple[str, ...] = (),
    view: bool = False, residual: str = "", outputs: tuple[int, ...] = (), widths: tuple[int, ...] = (),
    pre_activated: bool = False, after: int = 0, image: bool = False, given: str = "", depthwise: bool = False,
    spread: int = 1, **attrs: Any,
) -> Case:  # fmt: skip
    """H and W are those of the convolution, whose pads keep them where none are given; `widths` are the channels of the
    tensors that hold the sources, `after` is how many channels the residual's tensor has behind those that are added.
    `given`: the type of an image, "" for the filter's."""
    form = Form(len(channels), suffix, view, max(1, len(outputs)), residual, pre_activated=pre_activated, image=image,
                depthwise=depthwise, spread=spread)  # fmt: skip
    sizes: dict[str, int | str | list[int]] = {"N": N, "C": list(channels), "H": H, "W": W, "K": K, "R": R, "S": S}
    sizes |= {"widths": list(widths)} if widths else {}
    sizes |= {"after": after} if after else {}
    sizes |= {"image": given} if given else {}
    params = {"LeakyRelu": {"alpha": [0.125]}, "Clip": {"lo": [-0.5], "hi": [0.75]}}.get(suffix, {})
    parts = {"output_channels": outputs} if len(outputs) > 1 else {}
    legal = dtypes or (HALVES if image or depthwise or spread > 1 else FLOATS)
    geometry = {"pads": pads or (R // 2, S // 2, R // 2, S // 2), **attrs}
    return Case(name, form.op_type, sizes, {**geometry, **parts, **params}, legal)
