"""`python -m models.packages`: fetch published packages, export their networks, patch and prove each, and write the
second table of docs/models.md."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from cutefuse.errors import CutefuseError, run_command
from cutefuse.output import write_text
from cutefuse.rewrite.patch import Options, patch
from models.packages import DYNAMO_OPSET, OPSET, REQUIREMENTS, wanted
from models.packages.page import whole
from models.table import worst

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def requirements(torch: str) -> list[str]:
    """What pip installs beside a version of torch: torchvision 0.28 goes with torch 2.13, 0.29 with 2.14."""
    major, minor = map(int, torch.split(".")[:2])
    pinned = f"torchvision==0.{minor + 15}.*" if major == 2 else "torchvision"
    return [pinned if name == "torchvision" else name for name in REQUIREMENTS]


def fetch(folder: Path) -> None:
    """Install the packages into a folder, without torch, which is here already."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        str(folder),
    ]
    if subprocess.run([*command, *requirements(version("torch"))]).returncode != 0:
        raise CutefuseError("pip could not fetch the packages; install them into a folder and name it with --packages")


def export(package: str, name: str, dynamo: bool, path: Path) -> list[list[int]]:
    """Write the ONNX file of a network for one image; returns the sizes of its inputs."""
    import torch

    from models.packages.makers import make

    module, inputs = make(package, name)
    opset = DYNAMO_OPSET if dynamo else OPSET
    extra: dict[str, Any] = {"external_data": False, "verbose": False} if dynamo else {}
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, str(path), opset_version=opset, dynamo=dynamo, **extra)
    return [list(x.shape) for x in inputs]


def prove(path: Path) -> dict[str, Any]:
    """What the rewriter does with a model: what it takes by itself, and every legal site, verified."""
    usual = patch(path, path.with_name("usual.onnx"), Options(dry_run=True)).report["summary"]
    result = patch(path, path.with_name("all.onnx"), Options(all_sites=True, verify=True))
    summary, proof = result.report["summary"], result.report["verify"]
    kept = ("candidates", "merged", "refused", "refused_by", "excluded", "nodes_before", "nodes_after")
    return {key: summary[key] for key in kept} | {
        "taken": usual["fused"],
        "left_out": usual["left_out"],
        "fused": summary["fused"],
        "ops": Counter(n.op_type for n in onnx.load(str(path), load_external_data=False).graph.node),
        "error": worst(proof) if proof else "-",
        "proven": sum("max_rel_error" in s for s in proof["sites"]) if proof else 0,
    }


def measure(package: str, name: str, dynamo: bool) -> dict[str, Any]:
    """One line of the table as data; a failure is one too, with its kind and its words."""
    line: dict[str, Any] = {"package": package, "version": version(package), "name": name, "dynamo": dynamo}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            line["inputs"] = export(package, name, dynamo, path)
        except Exception as error:  # whatever a package's or torch's exporter raises
            return line | {"not_exported": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        exported = time.perf_counter()
        try:
            line |= prove(path)
        except CutefuseError as error:
            line["refused_whole"] = str(error)
        except Exception as error:  # a traceback is what this table looks for
            line["traceback"] = f"{type(error).__name__}: {error}"[:300]
    return line | {"export_s": round(exported - started, 1), "patch_s": round(time.perf_counter() - exported, 1)}


def key(line: dict[str, Any]) -> tuple[str, str, bool]:
    """What `wanted` calls a line."""
    return line["package"], line["name"], line["dynamo"]


def fits(one: tuple[str, str, bool], patterns: Sequence[str]) -> bool:
    """Whether one of the patterns, or none at all, names a network."""
    return any(fnmatchcase(f"{one[0]}/{one[1]}", p) for p in patterns or ["*"])


@contextlib.contextmanager
def installed(packages: Path | None) -> Iterator[None]:
    """The packages can be imported: from their folder, or from one that lasts as long as this does."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("onnxscript") is None:
        raise CutefuseError("PyTorch or onnxscript is missing; install torch and onnxscript")
    with tempfile.TemporaryDirectory() as temporary:
        if packages is None:
            packages = Path(temporary)
            fetch(packages)
        sys.path.append(str(packages))
        yield


def write(patterns: Sequence[str], packages: Path | None, folder: Path) -> None:
    """Write the ONNX files of networks into a folder, and say which could not be exported."""
    chosen = [w for w in wanted() if not w[2] and fits(w, patterns)]
    if not chosen:
        raise CutefuseError(f"no network is called {', '.join(patterns)}; models/packages/__init__.py names them")
    folder.mkdir(parents=True, exist_ok=True)
    with installed(packages):
        for package, name, _ in chosen:
            part = folder / f"{package}-{name}.part"
            try:
                export(package, name, False, part)
                part.replace(part.with_suffix(".onnx"))
            except Exception as error:  # whatever a package's or torch's exporter raises
                print(f"{package}/{name}: {type(error).__name__}: {error}".splitlines()[0][:200], flush=True)
            finally:
                part.unlink(missing_ok=True)
            gc.collect()


def run(patterns: Sequence[str], packages: Path | None, lines: Path, page_path: Path, only_page: bool) -> None:
    """Measure what `lines` lacks, a line of JSON for each, and write the page."""
    done = [json.loads(text) for text in lines.read_text().splitlines()] if lines.exists() else []
    have = set(map(key, done))
    chosen = [w for w in wanted() if w not in have and fits(w, patterns)]
    if chosen and not only_page:
        with installed(packages):
            for one in chosen:
                done.append(measure(*one))
                with lines.open("a") as out:
                    out.write(json.dumps(done[-1]) + "\n")
                print(json.dumps({k: v for k, v in done[-1].items() if k != "ops"}), flush=True)
                gc.collect()
    order = {w: i for i, w in enumerate(wanted())}
    done = sorted((line for line in done if key(line) in order), key=lambda line: order[key(line)])
    write_text(page_path, whole(page_path.read_text(encoding="utf-8"), done))


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m models.packages`."""
    parser = argparse.ArgumentParser(
        prog="python -m models.packages", description="Patch and prove the networks of published packages.",
        epilog="example: python -m models.packages 'timm/*' --lines build/packages.jsonl",
    )  # fmt: skip
    parser.add_argument("patterns", nargs="*", metavar="PACKAGE/NETWORK", help="which; default: all")
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="DIR",
        help="where they are installed, torchvision of the same build as torch; default: pip fetches them",
    )
    parser.add_argument("--lines", type=Path, default=Path("packages.jsonl"), help="results; those there are kept")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--onnx", type=Path, metavar="DIR", help="write the ONNX files here, and measure nothing")
    parser.add_argument("--only-page", action="store_true", help="measure nothing, write the page from --lines")
    args = parser.parse_args(argv)
    if args.onnx:
        return run_command(lambda: write(args.patterns, args.packages, args.onnx))
    return run_command(lambda: run(args.patterns, args.packages, args.lines, args.page, args.only_page))


if __name__ == "__main__":
    sys.exit(main())
