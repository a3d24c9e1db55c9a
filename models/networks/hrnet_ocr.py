"""HRNet-W48 with object-contextual representations: the segmentation network and both of its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.blocks.hrnet import backbone
from models.net import Config, Net

CLASSES, WIDTH, OCR, KEY = 19, 48, 512, 256  # channels of the finest branch, of the representations, of the attention


def build(config: Config) -> Any:
    """512x1024 pixels, the 19 classes of Cityscapes; small: 64x128. --size gives the rows."""
    rows = config.pixels(512, 64, 32)
    columns, pixels = 2 * rows, rows * rows // 8
    net = Net("hrnet_ocr", config, thin=True)
    ocr, key = net.filters(OCR), net.filters(KEY)

    def conv(x: str, filters: int, kernel: int, name: str) -> str:
        return net.act(net.conv(x, filters, kernel, f"{name}.0"), "Relu", f"{name}.1")

    def attended(x: str, name: str, layers: int) -> str:
        for i in range(layers):
            x = conv(x, KEY, 1, f"{name}/{name.rsplit('/', 1)[-1]}.{2 * i}")
        return x

    def transpose(x: str, name: str) -> str:
        return net.add("Transpose", [x], f"/{name}", perm=[0, 2, 1])

    scales = backbone(net, net.input("images", 3, rows, columns), WIDTH, rows, columns)
    finest = [scales[0], *(net.resize(x, rows // 4, columns // 4, f"up{i}") for i, x in enumerate(scales[1:], 1))]
    features = net.concat(finest, "Concat")
    aux = net.conv(conv(features, 15 * WIDTH, 1, "aux_head/aux_head"), CLASSES, 1, "aux_head/aux_head.3")
    x = conv(features, OCR, 3, "conv3x3_ocr/conv3x3_ocr")

    # one vector for each class: the mean of all pixels, weighted by how much they look like the class
    name = "ocr_gather_head"
    weights = net.add("Softmax", [net.reshape(aux, [CLASSES, pixels], f"{name}/Reshape", CLASSES)],
                      f"/{name}/Softmax", axis=2)  # fmt: skip
    flat = transpose(net.reshape(x, [ocr, pixels], f"{name}/Reshape_1", ocr), f"{name}/Transpose")
    classes = transpose(net.add("MatMul", [weights, flat], f"/{name}/MatMul"), f"{name}/Transpose_1")
    axis = net.weight(f"{name}.axis", np.array([3]), "int64")
    classes = net.add("Unsqueeze", [classes, axis], f"/{name}/Unsqueeze", ocr)

    # each pixel takes the vectors of the classes it resembles
    name = "ocr_distri_head/object_context_block"
    query = net.reshape(attended(x, f"{name}/f_pixel", 2), [key, pixels], f"{name}/Reshape", key)
    keys = net.reshape(attended(classes, f"{name}/f_object", 2), [key, CLASSES], f"{name}/Reshape_1", key)
    value = net.reshape(attended(classes, f"{name}/f_down", 1), [key, CLASSES], f"{name}/Reshape_2", key)
    scores = net.add("MatMul", [transpose(query, f"{name}/Transpose"), keys], f"/{name}/MatMul")
    scores = net.add("Mul", [scores, net.weight(f"{name}.scale", np.array(KEY**-0.5))], f"/{name}/Mul")
    scores = net.add("Softmax", [scores], f"/{name}/Softmax", axis=-1)
    context = net.add("MatMul", [scores, transpose(value, f"{name}/Transpose_1")], f"/{name}/MatMul_1")
    context = transpose(context, f"{name}/Transpose_2")
    context = net.reshape(context, [key, rows // 4, columns // 4], f"{name}/Reshape_3", key)
    context = conv(context, OCR, 1, f"{name}/f_up/f_up")
    joined = net.concat([context, x], "ocr_distri_head/Concat")
    x = conv(joined, OCR, 1, "ocr_distri_head/conv_bn_dropout/conv_bn_dropout")
    return net.model([net.conv(x, CLASSES, 1, "cls_head"), aux])
