"""RMSNorm and LayerNorm: read.py knows their forms in ONNX, build.py makes calls of them."""
