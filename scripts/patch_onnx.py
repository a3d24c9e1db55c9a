#!/usr/bin/env python3
"""Rewrite an ONNX model to use the fused operators: patch_onnx.py model.onnx [-o out.onnx] [options]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutefuse.commands.patch import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
