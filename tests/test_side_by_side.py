"""The order of an engine's steps, what it keeps, and who may run kernels side by side; no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from cutefuse import kernels

pytestmark = pytest.mark.torch


def program(text: str) -> Any:
    """A program of steps "abc>d": what it reads, and what it makes; a capital letter makes it a fused node's."""
    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
    from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

    steps = []
    for word in text.split():
        reads, made = word.split(">")
        run: Any = object.__new__(FusedNode) if made.isupper() else abs
        if made.isupper():
            run.name, run.kept, run.named = made, None, True
        steps.append(Step(run, list(reads), list(made.lower()), made, "", {}, []))
    return Program({"x": "x"}, {}, steps, {}, {}, {})


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ("x>A a>B b>C", "ABC"),
        ("x>a a>b b>c", "abc"),
        ("x>A a>b x>C c>d x>E", "ACEbd"),  # results that no fused node reads come last, in their order
        ("x>A a>B x>c c>D", "cABD"),  # what a fused node needs comes first
        ("x>A a>b b>C x>D d>E", "AbCDE"),
        ("x>A x>b bb>c c>D a>e x>F", "bcADFe"),
        ("x>A a>b b>c c>D a>E x>f", "AbcDEf"),
        ("x>AB a>c b>D", "ABDc"),  # a step with two outputs
        ("", ""),
    ],
)
def test_the_order_has_the_longest_runs_of_fused_nodes(given: str, order: str) -> None:
    from cutefuse.engines.pytorch.side_by_side import arrange

    made = program(given)
    arrange(made)
    assert "".join(step.name for step in made.steps) == order
    assert "".join(node.name for node in made.fused) == "".join(c for c in order if c.isupper())


def test_an_order_keeps_every_step_behind_those_that_it_reads() -> None:
    import random

    from cutefuse.engines.pytorch.side_by_side import arrange

    draw = random.Random(0)
    for _ in range(200):
        names = "abcdefghijklmnopqrst"
        words = [
            f"{''.join(draw.sample('x' + names[:i], min(i + 1, draw.randint(1, 3))))}>"
            f"{name.upper() if draw.random() < 0.6 else name}"
            for i, name in enumerate(names)
        ]
        made = program(" ".join(words))
        before = {step.name for step in made.steps}
        arrange(made)
        known = {"x"}
        for step in made.steps:
            assert set(step.inputs) <= known
            known |= set(step.outputs)
        assert {step.name for step in made.steps} == before


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ("x>A a>B b>C", ""),
        ("x>A a>B a>C bc>D", "BC"),
        ("x>A a>b a>C b>D", "CD"),
        ("x>A a>b b>C", ""),
        ("x>A x>b", ""),  # no other fused node
        ("x>A x>B", "AB"),
        ("", ""),
    ],
)
def test_nodes_with_others_beside_them(given: str, others: str) -> None:
    from cutefuse.engines.pytorch.side_by_side import with_others

    assert "".join(node.name for node in with_others(program(given))) == others


def test_what_was_made_last_is_kept() -> None:
    import torch

    from cutefuse.engines.pytorch.side_by_side import Kept

    kept = Kept(100)
    tensors = [torch.zeros(10) for _ in range(4)]
    for tensor in tensors[:3]:
        kept.add([tensor])
    assert list(kept._tensors) == tensors[1:3]  # 80 bytes; a third would be 120
    kept.add([torch.zeros(26)])  # more than all of it
    assert not kept._tensors
    kept.add(tensors[:2])
    assert list(kept._tensors) == tensors[:2]


def test_only_inside_of_the_scope_is_anything_kept() -> None:
    from cutefuse.engines.pytorch.side_by_side import side_by_side

    made = program("x>A a>B a>C")
    with pytest.raises(ValueError, match="an error inside"), side_by_side(made):
        assert [node.kept is not None for node in made.fused] == [False, True, True]
        assert kernels.library().cutefuse_side_by_side(1) == 1
        raise ValueError("an error inside")
    assert all(node.kept is None for node in made.fused)
    assert kernels.library().cutefuse_side_by_side(0) == 0


def test_each_thread_says_for_itself_whether_kernels_run_side_by_side() -> None:
    found = []
    with kernels.side_by_side():
        thread = threading.Thread(target=lambda: found.append(kernels.library().cutefuse_side_by_side(0)))
        thread.start()
        thread.join()
        with kernels.side_by_side():
            pass
        assert kernels.library().cutefuse_side_by_side(1) == 1
    assert found == [0] and kernels.library().cutefuse_side_by_side(0) == 0


@pytest.mark.parametrize(
    ("value", "at_first", "inside"),
    [(None, 0, 1), ("1", 1, 1), ("0", 0, 0), ("", 0, 1), ("yes", 0, 1)],
)
def test_the_environment_allows_it_to_all_or_to_none(value: str | None, at_first: int, inside: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUTEFUSE_SIDE_BY_SIDE"}
    environment |= {} if value is None else {"CUTEFUSE_SIDE_BY_SIDE": value}
    code = "from cutefuse import kernels; asked = kernels.library().cutefuse_side_by_side\nprint(asked(1), asked(0))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{at_first} {inside}\n"
