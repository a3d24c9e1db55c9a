#!/usr/bin/env python3
"""Build, profile, draw and report an engine: process_engine.py input outdir [trtexec options]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutefuse.commands.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
