#!/usr/bin/env python3
"""Write the demo models: make_models.py --out DIR [names] [--dtype float32 float16] [--small]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
