"""TensorRT and TensorRT for RTX: their command line, their Python API, and the log that shows the compiled layers."""
