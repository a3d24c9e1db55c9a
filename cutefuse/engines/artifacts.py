"""The files around one engine: their names, their safe writing, their JSON, and what trtexec's logs say.

Names and schemas are those of trtexec and of NVIDIA's engine explorer, so files move freely between the tools.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError


class _Beside:
    """A file beside the engine, by what its name has behind the engine's."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def __get__(self, files: Artifacts, _: type) -> Path:
        return files.engine.with_name(files.engine.name + self.suffix)


SUFFIXES = (".engine", ".plan", ".trt")  # of engine files


@dataclass(frozen=True)
class Artifacts:
    """Paths of everything that belongs to one engine; `engine` is `<outdir>/<model file name>.engine`."""

    engine: Path

    graph = _Beside(".graph.json")
    build_log = _Beside(".build.log")
    build_metadata = _Beside(".build.metadata.json")
    profile = _Beside(".profile.json")
    profile_log = _Beside(".profile.log")
    profile_metadata = _Beside(".profile.metadata.json")
    timing = _Beside(".timing.json")

    @classmethod
    def of(cls, model: Path, outdir: Path) -> Artifacts:
        """Artifacts of a model (or of an engine file, whose own name is kept) in `outdir`."""
        name = model.name if model.suffix in SUFFIXES else f"{model.name}.engine"
        return cls(outdir / name)

    @property
    def timing_cache(self) -> Path:
        return self.engine.parent / "timing.cache"


@contextmanager
def whole_or_nothing(*outputs: Path) -> Iterator[None]:
    """Files or folders that the block makes. When it fails, what it left is removed and what was there is restored.

    trtexec writes under the names that it is given; setting the earlier files aside keeps the command that is run
    equal to the command that is printed.
    """
    aside = {path: path.with_name(f".{path.name}.previous") for path in outputs}
    for path, old in aside.items():
        if path.exists():
            os.replace(path, old)
    try:
        yield
    except BaseException:
        for path in outputs:
            _remove(path)
        raise
    finally:
        for path, old in aside.items():
            if path.exists():
                _remove(old)
            elif old.exists():
                os.replace(old, path)


def _remove(path: Path) -> None:
    """Remove a file or a folder that may be there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- JSON, tolerantly
_MAX_FILE_BYTES = 512 * 2**20
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BARE_NAN = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:nan|inf)(?:\(ind\))?(?=\s*[,}\]])", re.IGNORECASE)
# Half of a surrogate pair is no character: it could be neither written nor printed later.
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_RAW_NAME = re.compile(r'("name" : ")(.*)(", "timeMs" :)')


def loads(text: str, where: Path) -> Any:
    """JSON as TensorRT's tools write it. Raises CutefuseError when the text is something else."""
    text = _LONE_SURROGATE.sub(r"\\ufffd", text.lstrip("\ufeff").strip())
    if not text:
        raise CutefuseError(f"{where} is empty; build or profile the engine again")
    repaired = _BARE_NAN.sub(r"\1null", text)
    attempts = (text, repaired, _RAW_NAME.sub(lambda m: m[1] + json.dumps(m[2])[1:-1] + m[3], repaired))
    problem: Exception | None = None
    for attempt in (*attempts, _BAD_ESCAPE.sub(r"\\\\", repaired)):
        try:
            return json.loads(attempt, strict=False)
        except (ValueError, RecursionError) as error:
            problem = problem or error
    raise CutefuseError(f"{where} is no JSON ({problem}); build or profile the engine again")


def read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CutefuseError(f"{path} has more than {_MAX_FILE_BYTES >> 20} MiB; this is no engine JSON")
        return loads(path.read_text(encoding="utf-8", errors="replace"), path)
    except OSError as error:
        raise CutefuseError(f"{path} cannot be read ({error.strerror}); check the path") from None


# ---------------------------------------------------------------------------------------------------- trtexec logs
_STAMP = re.compile(r"^\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[(?P<level>[A-Z])\] ?(?P<text>.*)$")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_STATISTICS = ("Latency", "Enqueue Time", "H2D Latency", "GPU Compute Time", "D2H Latency")
_TOTALS = ("Throughput", "Total Host Walltime", "Total GPU Compute Time")
_DEVICE_NUMBERS = ("Compute Clock Rate", "Memory Bus Width", "Memory Clock Rate", "Compute Capability", "SMs")


def _number(text: str) -> float | str:
    found = _NUMBER.search(text)
    return float(found.group()) if found else text


def log_sections(log: str) -> dict[str, dict[str, str]]:
    """`=== Title ===` sections of a trtexec log as dictionaries; values keep their colons."""
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for line in log.splitlines():
        stamped = _STAMP.match(line)
        text = (stamped["text"] if stamped else line).strip()
        title = re.fullmatch(r"=== (.+?) ===", text)
        if title:
            current = sections.setdefault(title[1], {})
        elif not text:
            current = None
        elif current is not None and stamped and stamped["level"] == "I":
            key, colon, value = text.partition(":")
            if colon and not key.startswith("\t"):
                current.setdefault(key.strip(), value.strip())
    return sections


def tensorrt_version(log: str) -> tuple[int, int, int] | None:
    """Version in a banner `[TensorRT v101600]` (`v8601` as TensorRT 8 wrote it) or a `TensorRT version:` line."""
    banner = re.search(r"\[TensorRT v(\d+)\]", log)
    if banner:
        number = int(banner[1])
        scale = 10000 if number >= 100000 else 1000
        return number // scale, number % scale // 100, number % 100
    line = re.search(r"TensorRT version: (\d+)\.(\d+)\.(\d+)", log)
    return (int(line[1]), int(line[2]), int(line[3])) if line else None


def _where(log: str, device: dict[str, str]) -> dict[str, Any]:
    """Device and TensorRT version. `device`: the section of the log."""
    known = {key.replace("Application ", "", 1): value for key, value in device.items()}
    version = tensorrt_version(log)
    return {
        "device_information": {key: _number(v) if key in _DEVICE_NUMBERS else v for key, v in known.items()},
        "tensorrt_version": ".".join(map(str, version)) if version else None,
    }


def build_metadata(log: str) -> dict[str, Any]:
    """Metadata of a build log: model and build options, device, TensorRT version, copies that the builder kept."""
    sections = log_sections(log)
    return {
        "model_options": sections.get("Model Options", {}),
        "build_options": sections.get("Build Options", {}),
        **_where(log, sections.get("Device Information", {})),
        "concats": concat_notes(log),
    }


def profile_metadata(log: str) -> dict[str, Any]:
    """Metadata of a profile log: performance summary (ms, s, queries/s), inference options, device, warnings."""
    sections = log_sections(log)
    summary: dict[str, Any] = {}
    for key, text in sections.get("Performance summary", {}).items():
        if key in _STATISTICS:
            summary[key] = [_number(part.partition("=")[2]) for part in text.split(",") if "=" in part]
        else:
            summary[key] = _number(text) if key in _TOTALS else text
    latency = sections.get("Performance summary", {}).get("Latency", "")
    return {
        "performance_summary": summary,
        "percentiles": [float(p) for p in re.findall(r"percentile\(([\d.]+)%\)", latency)],
        "inference_options": sections.get("Inference Options", {}),
        **_where(log, sections.get("Device Information", {})),
        "warnings": re.findall(r"\[W\] \* (.+)", log),
    }


def concat_notes(log: str) -> list[dict[str, str]]:
    """What the builder did with each concatenation: eliminated it, or generated a copy and why (--verbose logs)."""
    notes: list[dict[str, str]] = []
    for line in log.splitlines():
        if "Eliminating concatenation" in line:
            notes.append({"action": "eliminate", "node": line.partition("Eliminating concatenation")[2].strip(" :")})
        elif "Generating copy for" in line:
            node, _, reason = line.partition("Generating copy for")[2].partition(" because ")
            notes.append({"action": "copy", "node": node.strip(), "reason": reason.strip()})
        elif "Retargeting" in line:
            notes.append({"action": "retarget", "node": line.partition("Retargeting")[2].strip()})
    return notes


def log_errors(log: str, limit: int = 3) -> str:
    """The first error lines of a log without their time stamps, or its last line."""
    errors = [m["text"] for m in map(_STAMP.match, log.splitlines()) if m and m["level"] in "EF"]
    lines = errors[:limit] or [line.strip() for line in log.splitlines() if line.strip()][-1:]
    return "; ".join(lines) or "it wrote nothing"
