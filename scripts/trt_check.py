#!/usr/bin/env python3
"""Check the plugins on a machine with TensorRT and write a report: trt_check.py [-o outdir] [--models unet]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutefuse.commands.trt_check import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
