"""PyTorch on a GPU as an engine: a program from an ONNX graph, in a CUDA graph, with its layers and tiles timed."""
