#!/usr/bin/env python3
"""Compare engines layer by layer: compare_engines.py baseline/ candidate/ [-o compare.html]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutefuse.commands.compare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
