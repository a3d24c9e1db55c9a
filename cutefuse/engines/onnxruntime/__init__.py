"""ONNX Runtime as an engine, for machines without TensorRT or a GPU."""
