"""Arithmetic intensity: the sizes of element types."""

# bits of one element
DTYPE_BITS = {
    "FP64": 64, "FP32": 32, "TF32": 32, "FP16": 16, "BF16": 16, "FP8": 8, "FP4": 4, "INT64": 64, "INT32": 32,
    "INT16": 16, "INT8": 8, "INT4": 4, "UINT8": 8, "BOOL": 8, "E8M0": 8,
}  # fmt: skip
