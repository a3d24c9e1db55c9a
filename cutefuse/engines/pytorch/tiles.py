"""Which tile each fused node of a PyTorch engine runs: a given one, one of the kernels' first guesses by their times,
or the first guess itself. TensorRT's builder times the tactics of a plugin, cuDNN its algorithms, and this our tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from cutefuse.engines.pytorch.lock import alone
from cutefuse.engines.pytorch.onnx_ops.fused import TIMED, FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import Program
from cutefuse.engines.pytorch.tile_times import QUICK, TileTimer
from cutefuse.errors import CutefuseError, first_line
from cutefuse.timing.cache import TuneCache, cache_path
from cutefuse.timing.calls import Tiles, TileTuner, call_key
from cutefuse.timing.order import in_order

FIRST = "guess"
CHOICES = (TIMED, FIRST)


def choose_tiles(
    program: Program, tiles: Mapping[str, int] | str, known: Collection[str], tuner: TileTuner | None = None
) -> None:
    """Give every fused node of a program its tile.

    Distinct calls (op_type, shapes, types, attributes) are timed once: up to eight tiles in the order of the kernels'
    guesses (`tile_times.QUICK`, with the reason for that bound), warm, in turns, inside of CUDA graphs. The tiles are
    then chosen for all nodes together, since a launch takes longer after that of another kernel (`timing.order`). Times
    are kept by GPU, driver and library, so that both modes of a network and the next build share them.

    Args:
        tiles: TIMED, FIRST (every node keeps the first guess), or name of a fused node -> id of its tile, 0 for the
        first guess; nodes that it does not name are timed. Where none is given, the tile that a node asks for by its
        attribute counts as given, if it can run here. known: the names of all fused nodes of the model.
        tuner: takes the times, the GPU's where None.
    Raises: CutefuseError for a choice or a name that does not exist.
    """
    if isinstance(tiles, str) and tiles not in CHOICES:
        raise CutefuseError(f"tiles '{tiles}' is unknown; choose {' or '.join(CHOICES)}, or give a tile for each node")
    given = {} if isinstance(tiles, str) else dict(tiles)
    for node in (node for node in program.fused if node.asked and node.name not in given):
        if node.asked in node.tiles():
            given[node.name] = node.asked
        else:
            program.notes.append(f"{node.name} asks for tile {node.asked}, which cannot run it here, and gets another")
    program.choose_tiles(given, known)
    nodes = [node for node in program.fused if node.name not in given]
    if tiles != FIRST and nodes:
        tuner = tuner or TileTuner(TileTimer(QUICK), _kept(cache_path()))
        _time(program, nodes, tuner)


def _time(program: Program, nodes: list[FusedNode], tuner: TileTuner) -> None:
    found: dict[str, Tiles | None] = {}
    times: dict[int, Tiles | None] = {}  # by the handle of a node
    try:
        for node in nodes:
            key = call_key(node.call())
            if key not in found:
                with alone():
                    found[key] = _tiles_of(node, tuner, program.notes)
            times[node.handle] = found[key]
    finally:
        tuner.cache.save()
    given = {node.handle: Tiles({node.config: 0.0}, node.config) for node in program.fused if node.handle not in times}
    known = times | given
    tiles = in_order([node.call() for node in program.fused], [known[node.handle] for node in program.fused])
    for node, tile in zip(program.fused, tiles, strict=True):
        own = times.get(node.handle)
        if own is not None:
            node.config, node.tile_from, node.tiles_us = tile, TIMED, own.times_us
    program.notes += [*tuner.timer.notes, *filter(None, [tuner.cache.note])]
    if tuner.timed:
        torch.cuda.empty_cache()  # what the calls were tried with


def _tiles_of(node: FusedNode, tuner: TileTuner, notes: list[str]) -> Tiles | None:
    """The times of a node's tiles; None, with a note, where none can be taken: too little memory, for one."""
    try:
        return tuner.tiles(node.call())
    except (CutefuseError, torch.cuda.OutOfMemoryError) as error:
        why = first_line(error)
        notes.append(f"{node.name} and its like run the kernels' first guess, their tiles were not timed: {why}")
        return None


@functools.cache
def _kept(path: Path) -> TuneCache:
    """One cache for all engines of a process: they share their times even where the file cannot be written."""
    return TuneCache(path)
