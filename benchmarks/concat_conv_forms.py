"""Views, residuals, several outputs and odd channel counts of ConcatConv beside PyTorch, in one run.

    python benchmarks/concat_conv_forms.py --json rows.json [--shapes NAME ...] [--dtype float32]

Peers, both channels-last on the same operands: `eager`, as a user writes it (interpolate, cat, convolution, activation,
add), and `cudnn`, where one cuDNN plan takes bias, ReLU and residual after interpolate and cat (ReLU or no activation).
`twin` is ours of the plain form, its fastest tile: behind a kernel that enlarges, without the residual, or with one
output of as many filters. With `--cutlass` also `cutlass2`: CUTLASS 2.x behind interpolate and cat, the instructions
of the sm_80 tiles, without the residual; nvcc builds its tiles first, which takes minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gpu  # noqa: E402
import problems  # noqa: E402
from problems import Problem  # noqa: E402

from benchmarks.lib import cutlass_peers, forms_cutlass, timing  # noqa: E402
from cutefuse import kernels  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
SHAPES = [
    Problem(16, 80, 80, (256, 128), 128, upsample=(2, 1), activation="Relu", name="up_yolo_neck_p3_b16"),
    Problem(1, 80, 80, (256, 128), 128, upsample=(2, 1), activation="Relu", name="up_yolo_neck_p3_b1"),
    Problem(1, 512, 512, (64, 64), 64, **SAME, upsample=(2, 1), activation="Relu", name="up_unet_up4_b1"),
    Problem(1, 128, 128, (256, 256), 256, **SAME, upsample=(2, 1), activation="Relu", name="up_unet_up2_b1"),
    Problem(1, 320, 1024, (32, 64), 32, **SAME, upsample=(2, 1), activation="Relu", name="up_depth_decoder_b1"),
    Problem(1, 512, 512, (32, 32, 32, 64), 32, **SAME, upsample=(1, 1, 1, 2), activation="Relu", name="up_unet_pp_b1"),
    Problem(8, 256, 256, (64, 64), 32, **SAME, upsample=(2, 1), activation="Relu", name="up_smp_unet_d3_b8"),
    Problem(2, 128, 128, (768,) * 4, 768, upsample=(8, 4, 2, 1), activation="Relu", name="up_segformer_b5_fuse_b2"),
    Problem(1, 128, 256, (48, 96, 192, 384), 720, upsample=(1, 2, 4, 8), activation="Relu", name="up_hrnet_head_b1"),
    Problem(8, 80, 80, (128, 128), 128, **SAME, activation="Relu", residual="before", name="add_relu_3x3_b8"),
    Problem(8, 80, 80, (128, 128), 128, **SAME, activation="Silu", residual="after", name="silu_add_3x3_b8"),
    Problem(8, 80, 80, (64,) * 4, 256, activation="Relu", residual="before", name="add_relu_1x1_b8"),
    Problem(16, 40, 40, (256, 256), 512, activation="Silu", outputs=(256, 256), name="csp_cv1_cv2_b16"),
    Problem(1, 55, 128, (128,) * 3, 256, 1, 5, pads=(0, 2, 0, 2), activation="Sigmoid", outputs=(128, 128), name="zr"),
    Problem(8, 80, 80, (128,) * 3, 256, starts=(128, 0, 0), tail=0, activation="Silu", name="c2f_ranges_b8"),
    Problem(1, 128, 256, (18, 36, 72, 144), 270, activation="Relu", name="hrnet_w18_head_b1"),
    Problem(1, 46, 46, (38, 19, 128), 128, 7, 7, pads=(3,) * 4, activation="Relu", name="openpose_stage_b1"),
    Problem(8, 46, 46, (38, 19, 128), 128, 7, 7, pads=(3,) * 4, activation="Relu", name="openpose_stage_b8"),
    Problem(1, 55, 128, (2, 126), 128, **SAME, activation="Relu", name="raft_motion_b1"),
]  # fmt: skip


def sources_of(instance: problems.Instance) -> list[Any]:
    """Torch tensors over the memory that our kernel reads, before they are enlarged."""
    p, found = instance.problem, []
    starts = p.starts or (0,) * len(p.C)
    for buffer, c, start, tensor in zip(instance.buffers, p.C, starts, instance.call.inputs, strict=False):
        n, _, h, w = tensor.dims
        found.append(buffer.view.view(n, h, w, -1).permute(0, 3, 1, 2)[:, start : start + c])
    return found


def enlarged(instances: list[problems.Instance]) -> Callable[[int], list[Any]]:
    """The parts of a set's concatenation; enlarging is part of what is timed."""
    import torch.nn.functional as F

    p, x = instances[0].problem, [sources_of(i) for i in instances]
    factors = p.upsample or (1,) * len(p.C)

    def parts(i: int) -> list[Any]:
        return [F.interpolate(t, scale_factor=u, mode="nearest") if u > 1 else t
                for t, u in zip(x[i], factors, strict=True)]  # fmt: skip

    return parts


def peers(instances: list[problems.Instance]) -> dict[str, Callable[[int], Any]]:
    """Launches of one operand set as PyTorch runs them."""
    import torch
    import torch.nn.functional as F

    p, parts = instances[0].problem, enlarged(instances)
    w = instances[0].w.to(memory_format=torch.channels_last)
    b = instances[0].b.to(w.dtype)
    z = [None if i.z is None else i.z.to(memory_format=torch.channels_last) for i in instances]
    pads = p.pads[:2]

    def joined(i: int) -> Any:
        found = parts(i)
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def eager(i: int) -> Any:
        y = F.conv2d(joined(i), w, b, p.strides, pads, p.dilations)
        y = y + z[i] if p.residual == "before" else y
        y = problems.activate(y, p.activation)
        y = y + z[i] if p.residual == "after" else y
        return y.split(p.outputs, 1) if p.outputs else y

    def cudnn(i: int) -> Any:
        if z[i] is not None:
            return torch.cudnn_convolution_add_relu(joined(i), w, z[i], 1.0, b, p.strides, pads, p.dilations, 1)
        return torch.cudnn_convolution_relu(joined(i), w, b, p.strides, pads, p.dilations, 1)

    fused = p.activation == "Relu" and p.residual != "after" and not p.outputs
    return {"eager": eager} | ({"cudnn": cudnn} if fused else {})


def twins(instances: list[problems.Instance], dtype: str) -> dict[str, Callable[[int], Any]]:
    """Launches of every tile of the plain form, behind a kernel that enlarges the sources that are to be."""
    import torch
    import torch.nn.functional as F

    p = instances[0].problem
    plain = [problems.instantiate(replace(p, upsample=(), residual="", outputs=()), dtype, n)
             for n in range(len(instances))]  # fmt: skip
    x = [[(t, u) for t, u in zip(sources_of(i), p.upsample, strict=False) if u > 1] for i in instances]

    def launch(tile: int) -> Callable[[int], Any]:
        made = [kernels.Launcher(replace(i.call, config=tile)) for i in plain]

        def run_both(i: int) -> None:
            for t, u in x[i]:
                F.interpolate(t, scale_factor=u, mode="nearest")
            made[i](torch.cuda.current_stream().cuda_stream)

        run_both.__dict__["kept"] = plain  # launchers know addresses alone
        return run_both

    return {f"twin:{tile}": launch(tile) for tile in kernels.configs(plain[0].call)}


def measure(problem: Problem, dtype: str, rounds: int, forced: bool, cutlass: bool) -> list[dict[str, Any]]:
    """Rows of one shape: every tile of ours (with `forced` the sm_80 ones alone) and the peers."""
    import torch

    size = problem.bytes_moved(4 if dtype == "float32" else 2)
    sets = timing.rotation_sets(size, timing.l2_bytes())
    instances = [problems.instantiate(problem, dtype, seed) for seed in range(sets)]
    table = {c["id"]: c for c in kernels.operator_of(problem.op_type)["configs"]}
    variants: dict[str, Any] = {}
    for tile in kernels.configs(instances[0].call):
        if forced and table[tile]["min_sm"] > 80:
            continue
        launchers = [kernels.Launcher(replace(i.call, config=tile)) for i in instances]
        variants[table[tile]["name"]] = lambda i, made=launchers: made[i](torch.cuda.current_stream().cuda_stream)
    guess, failures = next(iter(variants)), {}
    variants |= peers(instances)
    if not forced and (problem.upsample or problem.residual or problem.outputs):
        variants |= twins(instances, dtype)
    if cutlass:
        try:
            variants["cutlass2"] = forms_cutlass.launch(instances, enlarged(instances), rounds=3)
        except CutefuseError as error:
            failures["cutlass2"] = str(error)
    rows = []
    for name, result in (timing.interleaved(variants, sets, rounds) | failures).items():
        row: dict[str, Any] = {"shape": problem.name, "dtype": dtype, "variant": name}
        if isinstance(result, str):
            rows.append(row | {"failure": result})
        else:
            row |= {"time_us": result.median_us, "tflops": problem.flops / result.median_us / 1e6}
            rows.append(row | {"guess": name == guess})
    del instances
    torch.cuda.empty_cache()
    return rows


def line(rows: list[dict[str, Any]]) -> str:
    """One line of the table: best tile, first guess, peers, and ours over the faster of PyTorch's."""
    timed = {r["variant"]: r["time_us"] for r in rows if "time_us" in r}
    ours = {k: v for k, v in timed.items() if k.startswith("sm")}
    best, guess = min(ours, key=ours.__getitem__), next(r["variant"] for r in rows if r.get("guess"))
    peer = min(v for k, v in timed.items() if k in ("eager", "cudnn"))
    tail = "  ".join(f"{k} {v:.1f}" for k, v in timed.items() if k not in ours and not k.startswith("twin:"))
    if twin := min((v for k, v in timed.items() if k.startswith("twin:")), default=0.0):
        tail += f"  twin {twin:.1f} {ours[best] / twin:.2f}"
    return (
        f"{rows[0]['shape']:26} {ours[best]:8.1f} {best:30} guess {ours[guess]:8.1f}  {tail}  {ours[best] / peer:.2f}"
    )


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds; default 10")
    parser.add_argument("--sm80", action="store_true", help="leave the Hopper tiles out")
    parser.add_argument("--cutlass", action="store_true", help="CUTLASS 2.x behind cat as a peer; builds it with nvcc")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    timing.require_gpu()
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    known = {p.name: p for p in SHAPES}
    if unknown := sorted(set(args.shapes or []) - set(known)):
        raise CutefuseError(f"shape '{unknown[0]}' does not exist; choose from {', '.join(known)}")
    if args.cutlass:
        arch = forms_cutlass.arch(gpu.device_facts()[0])
        if (peer := forms_cutlass.PEERS.get(args.dtype)) is None:
            raise CutefuseError(f"--cutlass knows {' and '.join(forms_cutlass.PEERS)}, not {args.dtype}; leave it out")
        for tile, text in cutlass_peers.build(peer, arch, os.cpu_count() or 1).items():
            print(f"cutlass2 {tile} was not built: {text}", file=sys.stderr)
    device = timing.device_row()
    print(f"{device['gpu']}, torch {device['torch']}, cuDNN {device['cudnn']}, {args.dtype}, microseconds, best / peer")
    rows = []
    for name in args.shapes or known:
        found = measure(known[name], args.dtype, args.rounds, args.sm80, args.cutlass)
        rows += [row | device for row in found]
        print(line(found), flush=True)
    if args.json:
        write_json(args.json, rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
