"""The first guess among our tiles, and whether the fastest is among the first eight, which the PyTorch engine times.

The constants are cutlass_kernels/conv/sm90/cost.cpp's and the {ns, us} of the tables of mma.sync tiles; no script
refits those. A change of them is judged here: `make build`, then `make calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from calibration import rows
from cutefuse import kernels
from cutefuse.kernels import Call

NEAR = 1.1  # of the fastest tile's time
TRIED = 8  # that an engine times


def report() -> Iterator[str]:
    """The lines of the report; tiles that were recorded and are there no more count for nothing."""
    for title, shapes in rows.tile_sets().items():
        ratios = {name: _ratios(call, recorded) for name, call, recorded in shapes}
        far = {name: own[0] for name, own in ratios.items() if own[0] > NEAR}
        found = sum(min(own[:TRIED]) <= NEAR for own in ratios.values())
        yield (
            f"{title}: the first guess is within 10 % of the fastest tile on {len(shapes) - len(far)} of {len(shapes)} "
            f"shapes, one of the first {TRIED} on {found}"
        )
        for name, ratio in far.items():
            yield f"  {name}: " + (f"{ratio:.2f}" if math.isfinite(ratio) else "too slow to be recorded")


def _ratios(call: Call, recorded: rows.Tiles) -> list[float]:
    """The time of each tile over the fastest's, the first guess first; infinite where it was not recorded."""
    names = {c["id"]: str(c["name"]) for c in kernels.operator_of(call.op_type)["configs"]}
    times_us = [recorded.get(names[tile], math.inf) for tile in kernels.configs(call)]
    return [us / min(times_us) if math.isfinite(us) else us for us in times_us]
