"""Whole networks on one GPU in float16: plain against patched, each by cuDNN and by torch.compile, in CUDA graphs.

    python benchmarks/networks.py --json networks.json --markdown
    python benchmarks/networks.py --networks 'yolo*' --batch 1 --layers --json layers.json
    python benchmarks/networks.py --networks model.onnx,'yolo*'      # a file as well, in float16, with its own sizes
    python benchmarks/networks.py --bare --limit-s 900 --json networks.json   # with the sum of the bare convolutions
    python benchmarks/networks.py --from networks.json --markdown   # docs/measured.md; --short: the README

Each network has a process of its own. These compile side by side; whoever tries kernels on the GPU holds a lock, and
while one is timed all others are stopped. Within a network all engines are timed in the same interleaved rounds.
`ratio` is the best patched time over the best plain one; `predicted` is what the sites' predicted gains leave of the
predicted plain time under torch.compile, times what torch.compile took over the best plain one.
Outputs are compared on the GPU with those of the plain network in float32: `error` is the largest difference of a
tensor over its largest value, of the worst mode. A patched network may have twice the error of the plain one. One that
fails is named in one sentence, and the JSON is written after each network.

`bare` is the sum of all 2-D convolutions of the plain network, each without bias and activation, by the fastest of all
plans of cuDNN's graph API (pip install nvidia-cudnn-frontend) from the L2 cache; `over bare`, the patched network's
time under torch.compile over it. A column that could not be measured says n/a.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import tempfile
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import models  # noqa: E402
from benchmarks.lib import network_bare, network_table, network_work, pool  # noqa: E402
from benchmarks.lib import rows as table_rows  # noqa: E402
from benchmarks.lib.network_model import images_of  # noqa: E402
from benchmarks.lib.network_work import Task  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402

# Those that compile longest begin first, so that none of them is alone at the end.
LONGEST = ("densenet121", "hrnet_ocr", "yolov8m", "yolo11s", "inception_v3", "yolov8s", "yolov8n", "smp_unet_pp")
ALSO = ("hrnet_head",)  # a part that stands for the head of a large network
# Each process compiles by itself, and several of them fill the machine.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    known = ", ".join(network_work.VARIANTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", metavar="GLOB",
                        help="comma list of patterns and of ONNX files; default: all networks, no parts")  # fmt: skip
    parser.add_argument("--batch", default="1,8", help="comma list of images in a run; default 1,8")
    parser.add_argument("--variants", default="default", help=f"comma list of {known}; default: default")
    parser.add_argument("--layers", action="store_true", help="also record layer times, and those of each fused site")
    parser.add_argument("--bare", nargs="?", type=float, const=150.0, metavar="SECONDS",
                        help="also time bare convolutions, for so many seconds of --limit-s; 150")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only print the distinct convolutions; needs no GPU")
    parser.add_argument("--compile-jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1), metavar="N",
                        help="networks that are prepared at a time; default: all processors but two")  # fmt: skip
    parser.add_argument("--limit-s", type=float, default=540, help="end after so many seconds; default 540")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; default 15")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="length of one sample; default 4")
    parser.add_argument("--work", type=Path, help="folder for models, caches and logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the rows here, after each network")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--short", action="store_true", help="print the README's table: the better time of each pair")
    parser.add_argument("--from", dest="source", type=Path, help="tabulate the rows of a JSON file")
    parser.add_argument("--device", default="cuda", help="cuda; cpu shows that all works, its times say nothing")
    parser.add_argument("--small", action="store_true", help="networks of small size, for a trial")
    return parser.parse_args(argv)


def tasks_of(args: argparse.Namespace, folder: Path) -> list[Task]:
    """What is to be measured, files first, then the longest. Raises CutefuseError for what names nothing."""
    variants = tuple(dict.fromkeys(args.variants.split(",")))
    if unknown := [v for v in variants if v not in network_work.VARIANTS]:
        known = ", ".join(network_work.VARIANTS)
        raise CutefuseError(f"--variants names '{unknown[0]}', which there is not; choose from {known}")
    names = [] if args.networks else [*models.NETWORKS, *ALSO]
    files = list[Path]()
    for pattern in args.networks.split(",") if args.networks else ():
        if pattern.endswith(".onnx"):
            files += _files(pattern)
            continue
        found = [n for n in models.names() if fnmatchcase(n, pattern)]
        if not found:
            raise CutefuseError(f"--networks '{pattern}' matches none of {', '.join(models.names())}")
        names += found
    try:
        batches = [int(b) for b in args.batch.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise CutefuseError(f"--batch '{args.batch}' is no comma list of numbers of images; give 1,8")
    names = sorted(dict.fromkeys(names), key=lambda n: LONGEST.index(n) if n in LONGEST else len(LONGEST))
    if twice := [p.name for i, p in enumerate(files) if p.name in {q.name for q in files[:i]}]:
        raise CutefuseError(f"two files are called {twice[0]}, and rows are told apart by it; rename one")
    given = Task("", 1, variants, folder, args.device, args.layers, args.small, args.rounds, args.sample_ms)
    return [replace(given, network=path.name, batch=images_of(path), file=path) for path in files] + [
        replace(given, network=n, batch=b) for b in batches for n in names
    ]


def _files(pattern: str) -> list[Path]:
    """The ONNX files of a path or pattern. Raises CutefuseError where there is none."""
    found = sorted(Path(p) for p in glob.glob(pattern))
    if not found:
        raise CutefuseError(f"--networks '{pattern}' is no file; give the path of an ONNX model")
    return found


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Networks in the order of `models`, then parts, then files; batches together."""
    place = {name: i for i, name in enumerate([*models.NETWORKS, *models.PARTS])}
    return sorted(rows, key=lambda r: (r["batch"], place.get(r["network"], len(place)), r["network"]))


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of all networks; those that failed have a `failure`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    tasks, rows, begin = tasks_of(args, folder), list[dict[str, Any]](), time.monotonic()
    limit_s = args.limit_s - (args.bare or 0)

    def say(task: Task, text: str) -> None:
        print(f"# {time.monotonic() - begin:.0f} s: {task.network} b{task.batch} {text}", file=sys.stderr, flush=True)

    for task, row, failure in pool.run(
        network_work.measure, tasks, max(args.compile_jobs, 1), folder / "pool", limit_s, say
    ):
        rows.append(row or {"network": task.network, "batch": task.batch, "failure": failure})
        table_rows.write(args.json, ordered(rows))
        say(task, rows[-1].get("failure", "done"))
    rows = ordered(rows)
    if args.bare is not None:
        network_bare.add(rows, tasks, args.compile_jobs, args.bare, folder / "bare", args.layers)
        table_rows.write(args.json, rows)
    return rows


def run(argv: list[str] | None) -> int:
    args = parse(argv)
    if args.source:
        rows = table_rows.read(args.source)
    elif args.list:
        print("\n".join(network_bare.listed(tasks_of(args, Path()))))
        return 0
    else:
        if args.bare is not None and not 0 < args.bare < args.limit_s:
            raise CutefuseError(
                f"--bare {args.bare:g} of --limit-s {args.limit_s:g} seconds leaves none for the networks, or none for "
                "the convolutions; give --limit-s more"
            )
        if args.bare is not None and args.device == "cpu":
            raise CutefuseError("--bare asks cuDNN, which runs on a GPU; leave --device cpu out")
        if args.device != "cpu":
            from cutefuse.engines.cuda_memory import local_sm

            if not local_sm():
                raise CutefuseError("no CUDA device was found; measure on a GPU, or tabulate old rows with --from")
        with tempfile.TemporaryDirectory() as temporary:
            rows = measure(args, args.work or Path(temporary))
    print(network_table.short(rows) if args.short else network_table.text(rows, args.markdown))
    failed = network_table.wrong(rows) or any("failure" in row for row in rows)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
