"""The process that compiles with TensorRT for RTX: a request file in, an answer file out, the log on stdout.

What the library prints itself, or says when it ends the process, lands in the same log.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import log_errors
from cutefuse.engines.tensorrt import api
from cutefuse.engines.tensorrt.rtx import BINDINGS, NAME, TARGET
from cutefuse.errors import CutefuseError


def _peak_mib() -> float:
    """The most memory that this process held; not getrusage, which begins with what the parent held."""
    found = re.search(r"^VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a model; the facts of the answer. Raises CutefuseError where parser or builder refuse it."""
    trt = importlib.import_module(BINDINGS)
    log = api.Log(trt, sys.stdout)
    model, options = Path(request["model"]), request["options"]
    start = time.perf_counter()
    builder, network, _parser = api.parse(trt, log, model, [Path(p) for p in request["libraries"]], True)
    config = api.configure(trt, builder, network, options)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{options[TARGET]}"), 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CutefuseError(f"{NAME} could not build {model}: {log_errors(log.text)}")
    seconds = time.perf_counter() - start
    if request["engine"]:
        Path(request["engine"]).write_bytes(plan)
    return {
        "version": trt.__version__, "seconds": seconds, "engine_bytes": int(plan.nbytes), "peak_mib": _peak_mib(),
    }  # fmt: skip


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        answer = work(request)
    except (CutefuseError, ImportError, OSError) as error:
        answer = {"error": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
