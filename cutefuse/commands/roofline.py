"""`cutefuse roofline`: peaks of GPUs, measured peaks, and language models under the roof."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, run_command
from cutefuse.output import add_json, json_alone, write_json
from cutefuse.report.pages import write_llm_page
from cutefuse.roofline.llm import MODELS, llm_view, transformer_from
from cutefuse.roofline.measure import peaks_for
from cutefuse.roofline.peaks import Peaks, boards


def main(argv: list[str] | None = None) -> int:
    """`cutefuse roofline`: the table of peaks, measured peaks, or the view of a language model."""
    parser = argparse.ArgumentParser(prog="cutefuse roofline", allow_abbrev=False, description=__doc__)
    parser.add_argument("--peaks", default=None, help="board name, JSON file or 'measured'; without it the whole table")
    parser.add_argument("--llm", metavar="MODEL", help="config.json or a name: " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=1, help="batch of the prefill rows (1)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step (1024)")
    parser.add_argument("--weights", default="FP16", help="type of the weights (FP16)")
    parser.add_argument("--kv", default="FP16", help="type of the key-value cache (FP16)")
    parser.add_argument("-o", "--output", type=Path, help="also write the figures (.json) or a page (.html)")
    add_json(parser)
    args = parser.parse_args(argv)

    def command() -> int:
        with json_alone(args.json) as show:
            show(figures())
        return 0

    def figures() -> Any:
        if args.batch < 1 or args.context < 0:
            raise CutefuseError(
                f"batch {args.batch} and context {args.context}: batch must be 1 or more, context 0 or more"
            )
        if not args.llm:
            rows = [peaks_for(args.peaks)] if args.peaks else list(boards())
            _print_peaks([r for r in rows if r])
            data = [vars(r) for r in rows if r]
            if args.output:
                write_json(args.output, data)
            return data
        peaks = peaks_for(args.peaks or "H200")
        assert peaks is not None
        view = llm_view(
            transformer_from(args.llm, args.weights.upper(), args.kv.upper()), peaks, args.batch, args.context
        )
        _print_llm(view)
        if args.output and args.output.suffix == ".html":
            write_llm_page(view, peaks, args.output)
        elif args.output:
            write_json(args.output, view)
        return view

    return run_command(command)


def _print_peaks(rows: list[Peaks]) -> None:
    names = [n for n in ("FP32", "TF32", "FP16", "BF16", "FP8", "INT8", "FP4") if any(n in r.tflops for r in rows)]
    print(f"{'device':<24}{'GB/s':>8}" + "".join(f"{n:>9}" for n in names) + "   FP16 ridge (FLOP/B)")
    for r in rows:
        cells = "".join(f"{r.tflops[n]:>9.4g}" if n in r.tflops else f"{'-':>9}" for n in names)
        print(f"{r.device:<24}{r.bandwidth_gbs:>8.4g}{cells}   {r.ridge('FP16') or 0:>8.0f}   {r.source}")
    print("TFLOP/s, dense; GeForce: FP16 with FP16 accumulation")


def _print_llm(view: dict[str, Any]) -> None:
    print(
        f"{view['model']} ({view['weight_type']} weights, {view['kv_type']} cache) on {view['device']}: "
        f"ridge {view['ridge']:.0f} FLOP/byte ({view['precision']})"
    )
    for phase, key, other in (
        ("prefill", "length", f"batch {view['batch']}"),
        ("decode", "batch", f"context {view['context']}"),
    ):
        print(f"\n{phase} ({other})\n{key:>8}{'FLOP/byte':>12}{'bound':>10}{'TFLOP/s max':>13}{'least ms':>11}")
        for r in view[phase]:
            print(
                f"{r[key]:>8}{r['intensity']:>12.2f}{r['bound']:>10}{r['attainable_tflops']:>13.1f}"
                + f"{r['floor_ms']:>11.3f}"
            )
    length, batch = view["prefill_crossing_length"], view["decode_crossing_batch"]
    print(f"\nprefill turns compute-bound at {length} tokens" if length else "\nprefill stays memory-bound")
    limit = f"(an endless batch reaches {view['decode_intensity_limit']:.1f} FLOP/byte: the cache is read per sequence)"
    print(f"decode turns compute-bound at batch {batch} {limit}" if batch else f"decode stays memory-bound {limit}")


if __name__ == "__main__":
    sys.exit(main())
