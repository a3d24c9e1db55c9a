"""Reads and writes ONNX graphs: types, shapes, constants, weights, function bodies, differences, equal outputs."""
