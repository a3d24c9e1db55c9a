"""Builds and profiles engines: TensorRT by trtexec or its Python API, TensorRT for RTX, PyTorch and ONNX Runtime, the
same files out of each."""
