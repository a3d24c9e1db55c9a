"""Work for the processes of benchmarks/lib/pool.py: functions that a new process can import."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import Any

BIG = 1 << 20  # bytes, more than a pipe holds


def by_word(task: str, talk: Any) -> str:
    """What the task's word says: give a long result, raise, end without a word, or sleep."""
    talk.say("began")
    if task == "raise":
        raise ValueError("no such\nnetwork")
    if task == "die":
        os.write(2, b"one line\nSegmentation fault\n")
        os._exit(7)
    if task == "sleep":
        time.sleep(60)
    return task * BIG


def die_alone(task: str, talk: Any) -> str:
    """End while all others are stopped, or wait for one's turn."""
    if task == "die":
        with talk.alone():
            os._exit(3)
    time.sleep(0.3)
    with talk.alone():
        return "went on"


def tick(task: tuple[str, Path], talk: Any) -> tuple[float, float, list[float]]:
    """A first task has the machine alone for a while, others write down when they ran."""
    name, folder = task
    times = []
    if name == "first":
        while len(list(folder.glob("runs*"))) < 2:
            time.sleep(0.01)
        with talk.alone(), talk.quiet():
            begin = time.monotonic()
            time.sleep(0.5)
            return begin, time.monotonic(), []
    (folder / f"runs {name}").touch()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        times.append(time.monotonic())
        time.sleep(0.01)
    return 0.0, 0.0, times


def leave(task: tuple[str, Path], talk: Any) -> str:
    """Once the pool is busy: ask for the machine, or give a result and take some time to end."""
    name, folder = task
    if name == "third":
        talk.say("keep the pool busy")
        return name
    while not (folder / "busy").exists():
        time.sleep(0.01)
    if name == "leaves":
        atexit.register(time.sleep, 2)
        return name
    time.sleep(0.3)
    with talk.alone():
        return name


def locked(task: Path, talk: Any) -> int:
    """How many processes were inside of `quiet` at once."""
    with talk.quiet():
        mark = task / f"in {os.getpid()}"
        mark.touch()
        time.sleep(0.1)
        count = len(list(task.glob("in *")))
        mark.unlink()
    return count
