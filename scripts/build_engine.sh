#!/usr/bin/env bash
# Build a TensorRT engine: scripts/build_engine.sh model.onnx [outdir] [trtexec options]
# Finds a Python that has cutefuse's dependencies and calls `cutefuse build`, which knows the flags of each TensorRT.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for python in "${PYTHON:-}" "$root/.venv/bin/python" python3 python; do
    if [ -n "$python" ] && command -v "$python" >/dev/null 2>&1 && "$python" -c 'import onnx' >/dev/null 2>&1; then
        PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m cutefuse.cli build "$@"
    fi
done
echo "error: no Python with the package onnx was found; run 'make setup' or set PYTHON" >&2
exit 2
