"""Reads and writes ONNX graphs: types, shapes, constants, weights, function bodies, differences, equal outputs.

May import the base; it knows no operator of ours.
"""
