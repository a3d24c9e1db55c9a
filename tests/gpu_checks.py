"""What holds for every tile of a convolution on the GPU, whichever operator and form it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import emulated
import gpu
import problems

from cutefuse import kernels

WORST: dict[str, float] = {}  # type of the output -> largest error over its bound, printed at the end of a run


def judged(call: kernels.Call, tiles: Sequence[int]) -> list[int]:
    """The tiles that the sanitizer in use can judge. racecheck does not see that threads which met at a named barrier
    have read what one of them then frees by arriving at an mbarrier, as Hopper's large tiles do with a pre-activation's
    vectors."""
    if os.environ.get("CUTEFUSE_SANITIZED") != "racecheck" or "Pre" not in call.op_type:
        return list(tiles)
    kinds = {c["id"]: c["kind"] for c in kernels.operator_of(call.op_type)["configs"]}
    return [tile for tile in tiles if tile < 100 or kinds[tile] == "small"]


def tiles_of(call: kernels.Call) -> list[int]:
    """The legal tiles of a call; a call without any fails the test that would go over them."""
    tiles = kernels.configs(call)
    assert tiles, kernels.reject(call)
    return judged(call, tiles)


def assert_the_same_bits(instance: Any, config: int) -> None:
    """Each run of a tile writes what the first one wrote."""
    instance.run(config)
    first = instance.output()[0].clone()
    for _ in range(emulated.repeats(20)):
        instance.run(config)
        assert bool((instance.output()[0] == first).all())


def assert_every_tile_is_right(instance: Any, tiles: Sequence[int]) -> None:
    """Each tile within its elementwise bound of float64, pad lanes zero, nothing written beside the output."""
    import torch

    assert tiles, kernels.reject(instance.call)
    for config in emulated.compiled(instance, judged(instance.call, tiles)):
        instance.run(config)
        _, pad_lanes = instance.output()
        ratio = instance.error_ratio()
        guards = [buffer.guards_intact() for buffer in instance.buffers]
        # One wait for all: where many processes share the GPU, under compute-sanitizer, waiting is what takes time.
        facts = (ratio, (pad_lanes == 0).all(), torch.stack(guards).all())
        error, lanes, intact = torch.stack([fact.double() for fact in facts]).tolist()
        what = f"tile {config} of {instance}"
        assert error <= 1, f"{what}: error {error:.3g} times its bound"
        WORST[instance.kind] = max(error, WORST.get(instance.kind, 0.0))
        assert lanes, f"{what} leaves the output's pad lanes unwritten"
        assert intact, f"{what} wrote outside its output"


def assert_only_their_outputs(instance: Any, tiles: Sequence[int]) -> None:
    """NaN and infinity stand where they do in the reference, and all else is right."""
    truth, bound = problems.reference(instance)
    for tile in tiles:
        instance.run(tile)
        values = instance.output()[0].double()
        assert bool((values.isnan() == truth.isnan()).all()), tile
        assert bool((values[truth.isinf()] == truth[truth.isinf()]).all()), tile
        near = truth.isfinite()
        assert bool(((values - truth).abs() <= bound)[near].all()), tile
        assert 0 < int((~near).sum()) < near.numel() / 20


def with_workspace(instance: Any, sm_count: int, size: int) -> Any:
    """The instance as a GPU with that many multiprocessors would run it, in a guarded workspace of exactly `size`."""
    kept = [b for b in instance.buffers if b.view.data_ptr() != instance.call.workspace]
    if size > 0:
        kept.insert(0, gpu.Buffer.of((size + 3) // 4, "float32", float("nan")))
    address = kept[0].view.data_ptr() if size > 0 else 0
    call = replace(instance.call, sm_count=sm_count, workspace=address, workspace_bytes=size, _keep=[])
    return replace(instance, call=call, buffers=kept)


def assert_replays_equal_eager(instance: Any, tiles: Sequence[int] | None = None) -> None:
    """Tiles (all without `tiles`), captured in a CUDA graph, give their eager bits, whatever lay in the output."""
    import torch

    stream = gpu.new_stream()
    for config in tiles or tiles_of(instance.call):
        instance.run(config)
        eager = instance.output()[0].clone()
        launch = kernels.Launcher(replace(instance.call, config=config))
        graph = gpu.capture(launch, stream)
        for _ in range(3):  # replays must not depend on what an earlier one left behind
            instance.buffers[-1].view.fill_(float("nan") if instance.buffers[-1].view.is_floating_point() else -77)
            graph.replay()
            gpu.synchronize()
            assert torch.equal(instance.output()[0], eager), f"tile {config}"


def chained(stages: Sequence[Any]) -> Sequence[Any]:
    """The stages, each of which reads what the one before it wrote."""
    for previous, stage in zip(stages, stages[1:], strict=False):
        stage.call.inputs[0] = previous.call.outputs[0]
    return stages


def assert_dependent_launches_wait(stages: Sequence[Any], config: int) -> None:
    """One tile, launched for each instance in turn, of which each reads what the one before wrote, gives the same bits
    whether or not the host waits in between: programmatic dependent launch starts a kernel early."""
    import torch

    launches = [kernels.Launcher(replace(stage.call, config=config)) for stage in stages]
    results = []
    for wait in (True, False):
        for stage in stages:
            view = stage.buffers[-1].view
            view.fill_(float("nan") if view.is_floating_point() else 77)
        gpu.synchronize()
        for launch in launches:
            launch(gpu.current_stream())
            if wait:
                gpu.synchronize()
        gpu.synchronize()
        results.append(stages[-1].output()[0].clone())
    assert torch.equal(*results) and not bool(results[0].isnan().any()), f"tile {config}"


def assert_specials_reach_their_outputs_alone(problem: problems.Problem, dtype: str, tiles: Sequence[int]) -> None:
    """NaN and infinity in two images of at least 38 x 70 pixels, whose first source of 72 channels may be enlarged: all
    outputs under whose taps they lie are those of the reference, and no other is touched."""
    instance = problems.instantiate(problem, dtype)
    factor = (problem.upsample or (1,))[0]
    x = instance.buffers[0].view.view(problem.N, problem.H // factor, problem.W // factor, -1)
    side = instance.x[0]
    places = ((0, 0, 0, 71), (0, 9, 13, 3), (0, 9, 18, 40), (1, 18, 34, 0), (1, 5, 8, 64))
    for (n, h, w, c), value in zip(places, ("nan", "inf", "nan", "-inf", "inf"), strict=True):
        x[n, h, w, c] = float(value)
        side[n, c, h * factor : (h + 1) * factor, w * factor : (w + 1) * factor] = float(value)
    truth, bound = problems.reference(instance)
    for config in tiles:
        instance.run(config)
        values = instance.output()[0].double()
        assert bool((values.isnan() == truth.isnan()).all()), config
        assert bool((values[truth.isinf()] == truth[truth.isinf()]).all()), config
        near = truth.isfinite()
        assert bool(((values - truth).abs() <= bound)[near].all()), config
        assert 0 < int((~near).sum()) < near.numel() / 20
