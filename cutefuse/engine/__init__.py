"""Builds and profiles engines: trtexec, TensorRT's Python API, PyTorch and ONNX Runtime, the same files out of each.

May import the base, the C interface, graph/, ops/, torch/ and roofline/.
"""
