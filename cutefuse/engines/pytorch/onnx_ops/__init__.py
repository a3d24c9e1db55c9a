"""An ONNX graph as a PyTorch program: one table of operators, one file per family, everything known computed at load.

Why not a converter from PyPI: onnx2torch 1.5.15 (August 2024) ends at opset 16 for most operators and knows neither
GroupNormalization, GridSample nor QuantizeLinear; onnx2fx 0.0.1 (February 2026, its first release) knows the operators,
but reads axes and shapes out of tensors while it runs. On a GPU that stops the host at every Reshape, so nothing can be
captured in a CUDA graph. Neither keeps track of which kernels belong to which ONNX node.
"""
