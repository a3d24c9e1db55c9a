"""Builds and profiles engines: trtexec, TensorRT's Python API and ONNX Runtime, the same JSON files out of each.

May import the base, the C interface, graph/, ops/, torch/ and roofline/.
"""
