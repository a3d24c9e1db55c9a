#!/usr/bin/env python3
"""Make a network faster on this machine: optimize_onnx.py model.onnx -o dir/ [options]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutefuse.commands.optimize import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
