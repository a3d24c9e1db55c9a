"""`python -m calibration` (`make calibrate`): how far the predictions are from what was recorded, constants refitted.

It needs the library and no GPU, changes nothing, and takes some minutes; `--no-networks` leaves out the part that does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from calibration import convolutions, depthwise, four, networks, odd_channels, patch_rows, small_patches, tiles
from calibration.rows import SM
from cutefuse.errors import CutefuseError, run_command
from cutefuse.kernels import reject_device


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="calibration", description=__doc__)
    parser.add_argument("--no-networks", action="store_true", help="leave out whole networks, which take minutes")
    args = parser.parse_args(argv)

    def command() -> int:
        if reason := reject_device(SM):
            raise CutefuseError(f"{reason}; the rows are an H200's: build the library with ARCHS=90a or ARCHS=none")
        parts = [
            ("Kernels", convolutions),
            ("Odd channels", odd_channels),
            ("Tiles", tiles),
            ("Patch rows", patch_rows),
            ("Patches on small tiles", small_patches),
            ("Four warpgroups in turn", four),
            ("Depthwise tiles", depthwise),
        ]
        for title, part in parts if args.no_networks else [*parts, ("Networks", networks)]:
            print(f"== {title}")
            for line in part.report():
                print(line, flush=True)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
