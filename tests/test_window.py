"""What the operator `window` refuses, in words; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from windows import LINEAR, MAX, MEAN, Window

from cutefuse import kernels
from cutefuse.kernels import CHANNELS_LAST, Tensor
from cutefuse.kernels import LINEAR as ROWS

POOL = Window(MAX, (16, 8), (2, 9, 11), (3, 3), (2, 2), (1, 1, 1, 1))
RESIZE = Window(LINEAR, (8,), (1, 4, 5), out=(8, 10), scales=(0.5, 0.5), offsets=(-0.25, -0.25))


def test_windows_of_whole_vectors_are_taken() -> None:
    draw = random.Random(0)
    for _ in range(200):
        channels = tuple(8 * draw.randint(1, 9) for _ in range(draw.randint(1, 8)))
        sides, size = [draw.randint(1, 5) for _ in "hw"], [draw.randint(5, 40) for _ in "hw"]
        pads = [draw.randint(0, k - 1) for k in sides * 2]
        window = Window(
            draw.choice((MAX, MEAN)), channels, (draw.randint(1, 9), size[0], size[1]), (sides[0], sides[1]),
            (draw.randint(1, 5), draw.randint(1, 5)), (pads[0], pads[1], pads[2], pads[3]),
        )  # fmt: skip
        dtype = draw.choice(("float16", "bfloat16", "float32"))
        assert kernels.reject(window.call(dtype)) is None, window
        assert kernels.workspace_bytes(window.call(dtype)) == 0 and kernels.predicted_us(window.call(dtype)) is None
    assert kernels.reject(RESIZE.call("float32")) is None


@pytest.mark.parametrize(
    ("window", "changes", "words"),
    [
        (POOL, {"mode": [3]}, "mode is 3"),
        (POOL, {"mode": [-1]}, "mode is -1"),
        (POOL, {"kernel_shape": [0, 3]}, "must be 1 to 32768"),
        (POOL, {"strides": [2, 0]}, "must be 1 to 32768"),
        (POOL, {"dilations": [1, 40000]}, "must be 1 to 32768"),
        (POOL, {"pads": [-1, 1, 1, 1]}, "pads 0 to 32768"),
        (POOL, {"pads": [3, 1, 1, 1]}, "do not all meet the image"),  # the first row of windows is in the pads
        (replace(POOL, out=(6, 6)), {}, "do not all meet the image"),  # the last row is behind the image
        (replace(POOL, out=(5, 7)), {}, "do not all meet the image"),
        (RESIZE, {"scales": [0.0, 0.5]}, "scale 0"),
        (RESIZE, {"scales": [0.5, -1.0]}, "scale -1"),
        (RESIZE, {"scales": [0.5, float("nan")]}, "scale nan"),
        (RESIZE, {"offsets": [float("inf"), 0.0]}, "offset inf"),
        (replace(RESIZE, size=(1, 0, 5)), {}, "do not all meet the image"),
        (replace(RESIZE, channels=(12,)), {}, "12 channels"),
        (replace(RESIZE, out=(40000, 10)), {}, "at most 32768"),
        (replace(RESIZE, size=(2, 4, 5), out=(32768, 32768)), {}, "2147483648 vectors of 16 bytes, 2147483519"),
    ],
)
def test_attributes_and_sizes_that_are_none_are_refused(window: Window, changes: dict[str, Any], words: str) -> None:
    call = window.call("float16")
    assert words in str(kernels.reject(replace(call, attrs={**call.attrs, **changes}, _keep=[])))


@pytest.mark.parametrize(
    ("place", "tensor", "words"),
    [
        (0, Tensor((2, 16, 9, 11), "float16", ROWS), "pass float32, float16 or bfloat16 images"),
        (0, Tensor((2, 16, 9, 11), "int8", CHANNELS_LAST), "source is int8"),
        (1, Tensor((2, 8, 9, 11), "float32", CHANNELS_LAST), "source is float32"),
        (1, Tensor((2, 8, 9), "float16", CHANNELS_LAST), "of rank 3"),
        (1, Tensor((3, 8, 9, 11), "float16", CHANNELS_LAST), "dimension 0 of source 1 is 3"),
        (1, Tensor((2, 8, 9, 12), "float16", CHANNELS_LAST), "dimension 3 of source 1 is 12"),
        (1, Tensor((2, 8, 9, 11), "float16", CHANNELS_LAST, 0, 12), "pixels of 12 elements"),
        (0, Tensor((2, 16, 9, 11), "float16", CHANNELS_LAST, 0, 8), "pixels of 8 elements"),
        (2, Tensor((2, 32, 5, 6), "float16", CHANNELS_LAST), "batch and channels must be equal"),
        (2, Tensor((1, 24, 5, 6), "float16", CHANNELS_LAST), "batch and channels must be equal"),
        (2, Tensor((2, 24, 5, 6), "bfloat16", CHANNELS_LAST), "output is bfloat16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(place: int, tensor: Tensor, words: str) -> None:
    call = POOL.call("float16")
    operands = [*call.inputs, *call.outputs]
    operands[place] = tensor
    changed = replace(call, inputs=operands[:2], outputs=operands[2:], _keep=[])
    assert words in str(kernels.reject(changed))


def test_every_size_must_be_known() -> None:
    call = POOL.call("float16")
    inputs = [replace(t, dims=(-1, *t.dims[1:])) for t in call.inputs]
    assert kernels.reject(replace(call, inputs=inputs, _keep=[])) is not None
