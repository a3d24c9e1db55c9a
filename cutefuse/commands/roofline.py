"""`cutefuse roofline`: peaks of GPUs, measured peaks, single layers and language models under the roof."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cutefuse import table
from cutefuse.errors import CutefuseError, command_line
from cutefuse.output import json_alone, parsed, write_json
from cutefuse.report.draw.page import write_llm_page
from cutefuse.roofline.layers import Layer, common_layers, conv_from, layer_view, matmul_from
from cutefuse.roofline.llm import MODELS, llm_view, transformer_from
from cutefuse.roofline.measure import peaks_for
from cutefuse.roofline.peaks import DTYPE_BITS, Peaks, boards

DEFAULTS = {"batch": 1, "context": 1024, "weights": "FP16", "kv": "FP16", "dtype": "FP16"}


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cutefuse roofline", allow_abbrev=False, description=__doc__)
    parser.add_argument("--peaks", default=None, help="board name, JSON file or 'measured'; without it the whole table")
    parser.add_argument(
        "--matmul", action="append", default=[], metavar="MxKxN", help="a matrix product [M, K] x [K, N]; repeatable"
    )
    parser.add_argument(
        "--conv", action="append", default=[], metavar="N,C,H,W,K,R", help="a convolution, padded to keep its size; "
        "S and the stride may follow (R and 1); repeatable",
    )  # fmt: skip
    parser.add_argument("--layers", action="store_true", help="common layers: Linear, pooling, ReLU, LayerNorm, Concat")
    parser.add_argument("--dtype", help="type of the tensors of --matmul, --conv and --layers (FP16)")
    parser.add_argument("--llm", metavar="MODEL", help="config.json or a name: " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int, help="batch of the prefill rows (1)")
    parser.add_argument("--context", type=int, help="tokens before a decode step (1024)")
    parser.add_argument("--weights", help="type of the weights (FP16)")
    parser.add_argument("--kv", help="type of the key-value cache (FP16)")
    parser.add_argument("-o", "--output", type=Path, help="also write the figures (.json) or a page (.html)")
    args = parsed(parser, argv)
    given = [option for option in DEFAULTS if getattr(args, option) is not None]
    for option in DEFAULTS.keys() - set(given):
        setattr(args, option, DEFAULTS[option])
    with json_alone(args.json) as show:
        show(_figures(args))
        for option in given:
            if option != "dtype" and not args.llm:
                print(f"--{option} does nothing without --llm")
            elif option == "dtype" and not (args.matmul or args.conv or args.layers):
                print("--dtype does nothing without --matmul, --conv or --layers")


def _figures(args: argparse.Namespace) -> Any:
    """The view that was asked for: printed, written where a file is named, and handed back as data."""
    if args.batch < 1 or args.context < 0:
        raise CutefuseError(f"batch {args.batch} and context {args.context}: batch is 1 or more, context 0 or more")
    single = _layers(args)
    if args.llm and single:
        raise CutefuseError("--llm and single layers are two views; ask for one of them")
    page = args.output if args.output and args.output.suffix == ".html" else None
    if page and not args.llm:
        raise CutefuseError(f"{page}: only --llm draws a page; give a .json file")
    data: Any
    if args.llm:
        peaks, model = _peaks(args), transformer_from(args.llm, args.weights.upper(), args.kv.upper())
        data = llm_view(model, peaks, args.batch, args.context)
        _print_llm(data)
        if page:
            write_llm_page(data, peaks, page)
    elif single:
        peaks = _peaks(args)
        data = [layer_view(layer, peaks) for layer in single]
        _print_layers(data)
    else:
        rows = [_peaks(args)] if args.peaks else boards()
        data = [{**vars(r), "cores": r.cores} for r in rows]
        _print_peaks(rows)
    if args.output and not page:
        write_json(args.output, data)
    return data


def _layers(args: argparse.Namespace) -> list[Layer]:
    """The single layers of the command line."""
    dtype = args.dtype.upper()
    if dtype not in DTYPE_BITS:
        raise CutefuseError(f"--dtype is {args.dtype}; choose one of {', '.join(sorted(DTYPE_BITS))}")
    found = [matmul_from(text, dtype) for text in args.matmul] + [conv_from(text, dtype) for text in args.conv]
    return found + (common_layers(dtype) if args.layers else [])


def _peaks(args: argparse.Namespace) -> Peaks:
    """The roof of the views. Other commands take the device of a profile for `auto`; no view here has one."""
    if args.peaks == "auto":
        raise CutefuseError("--peaks is auto, and no profile is read here; give a board, a JSON file or measured")
    return peaks_for(args.peaks or "H200")


def _print_peaks(rows: list[Peaks]) -> None:
    names = [n for n in ("FP32", "TF32", "FP16", "BF16", "FP8", "INT8", "FP4") if any(n in r.tflops for r in rows)]
    cells = []
    for r in rows:
        rates = [f"{r.tflops[n]:.4g}" if n in r.tflops else "-" for n in names]
        ridge = f"{roof.ridge:.0f}" if (roof := r.roof("FP16", 1, 1)) else "-"
        about = (r.device, r.memory_gb or "-", r.cores or "-", f"{r.bandwidth_gbs:.4g}")
        cells.append((*about, *rates, ridge, r.source))
    heads = ("device", "GB", "cores", "GB/s", *names, "FP16 ridge (FLOP/B)", "source")
    print("\n".join(table.aligned(heads, cells, range(1, len(heads) - 1))))
    print("TFLOP/s, dense; cores: FP32 lanes; GeForce: FP16 with FP16 accumulation")


def _print_layers(views: list[dict[str, Any]]) -> None:
    first = views[0]
    print(f"{first['device']}: ridge {first['ridge']:.1f} FLOP/byte ({first['type']}); every tensor moves once")
    cells = [
        (v["layer"], f"{v['flops'] / 1e9:.4g}", f"{v['bytes'] / 1e6:.4g}", f"{v['intensity']:.4g}", v["bound"],
         f"{v['attainable_tflops']:.4g}", f"{v['floor_us']:.3g}")
        for v in views
    ]  # fmt: skip
    heads = ("layer", "GFLOP", "MB", "FLOP/byte", "bound", "TFLOP/s max", "least us")
    print("\n".join(table.aligned(heads, cells, range(1, 7))))


def _print_llm(view: dict[str, Any]) -> None:
    print(
        f"{view['model']} ({view['weight_type']} weights, {view['kv_type']} cache) on {view['device']}: "
        f"ridge {view['ridge']:.0f} FLOP/byte ({view['precision']})"
    )
    for phase, key, other in (("prefill", "length", "batch"), ("decode", "batch", "context")):
        print(f"\n{phase} ({other} {view[other]})")
        cells = [
            (r[key], f"{r['intensity']:.2f}", r["bound"], f"{r['attainable_tflops']:.1f}", f"{r['floor_ms']:.3f}")
            for r in view[phase]
        ]
        heads = (key, "FLOP/byte", "bound", "TFLOP/s max", "least ms")
        print("\n".join(table.aligned(heads, cells, range(5))))
    length, batch = view["prefill_crossing_length"], view["decode_crossing_batch"]
    print(f"\nprefill turns compute-bound at {length} tokens" if length else "\nprefill stays memory-bound")
    limit = f"(an endless batch reaches {view['decode_intensity_limit']:.1f} FLOP/byte: the cache is read per sequence)"
    print(f"decode turns compute-bound at batch {batch} {limit}" if batch else f"decode stays memory-bound {limit}")
