"""One process for each task, several at a time, on one GPU: they compile side by side and measure one after the other.

A worker takes the GPU with `Talk.quiet()` for everything that it tries there, and has the machine for itself inside of
`Talk.alone()`: every other worker is stopped meanwhile. A worker that crashes is a result, not the end of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Work = Callable[[Any, "Talk"], Any]  # a function of a module's top level: it runs in a process of its own


class Talk:
    """A worker's line to the pool, and its lock on the GPU."""

    def __init__(self, line: Connection, lock: Path) -> None:
        self._line, self._lock = line, os.open(lock, os.O_RDWR | os.O_CREAT)
        self._held = 0

    def say(self, stage: str) -> None:
        """One line of progress."""
        self._line.send(("stage", stage))

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No other worker is inside of its own `quiet`. May be nested."""
        if not self._held:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other worker runs at all."""
        with self.quiet():  # nobody is stopped in the middle of something on the GPU
            self._line.send(("alone", None))
            self._line.recv()
            try:
                yield
            finally:
                self._line.send(("over", None))


@dataclass
class _Worker:
    task: Any
    process: Any
    line: Connection
    log: Path


def sentence(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _main(work: Work, task: Any, line: Connection, lock: Path, log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        result = work(task, Talk(line, lock))
        # By a file: a worker that is stopped in the middle of a long message would make the pool wait for ever.
        log.with_suffix(".result").write_bytes(pickle.dumps(result))
        line.send(("result", None))
    except Exception as error:  # whatever stops one network must not stop the others
        import traceback

        traceback.print_exc()
        line.send(("failure", sentence(error)))


def run(
    work: Work, tasks: Sequence[Any], jobs: int, folder: Path, limit_s: float, say: Callable[[Any, str], None]
) -> Iterator[tuple[Any, Any, str]]:
    """(task, result, failure) of each task as it ends; the failure is one sentence, "" where there is a result.

    jobs: processes at a time. folder: for the lock and a log of each worker. limit_s: after so many seconds those that
    are not done are ended. say: is told each stage of a task.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    folder.mkdir(parents=True, exist_ok=True)
    waiting, workers, end = list(tasks), list[_Worker](), time.monotonic() + limit_s
    leaving = list[tuple[_Worker, str, Any]]()  # with their last words
    alone: _Worker | None = None  # the worker beside which all others are stopped
    try:
        while True:
            left_s = end - time.monotonic()
            while leaving and (alone is None or left_s <= 0):  # those on their way out may be stopped until then
                worker, kind, content = leaving.pop(0)
                yield worker.task, *_ended(worker, kind, content)
            if not (waiting or workers):
                return
            while waiting and len(workers) < jobs and alone is None:
                task = waiting.pop(0)
                log = folder / f"{len(tasks) - len(waiting)}.log"
                workers.append(_start(context, work, task, folder / "lock", log))
            if left_s <= 0:
                for late in [*(w.task for w in workers), *waiting]:
                    yield late, None, f"not done within {limit_s:g} s; give --limit-s more"
                return
            for line in wait([w.line for w in workers], left_s):
                worker = next(w for w in workers if w.line is line)
                kind, content = _heard(worker)
                others = [w for w in [*workers, *(w for w, _, _ in leaving)] if w is not worker]
                if kind == "stage":
                    say(worker.task, content)
                    continue
                if kind == "alone":
                    alone = worker
                    _signal(others, signal.SIGSTOP)
                    worker.line.send("go")
                    continue
                if alone is worker:  # it says that this is over, or it has ended
                    alone = None
                    _signal(others, signal.SIGCONT)
                if kind != "over":
                    workers.remove(worker)
                    leaving.append((worker, kind, content))
    finally:
        for worker in [*workers, *(w for w, _, _ in leaving)]:
            worker.process.kill()
            worker.process.join()


def _start(context: Any, work: Work, task: Any, lock: Path, log: Path) -> _Worker:
    own, other = context.Pipe()
    process = context.Process(target=_main, args=(work, task, other, lock, log), daemon=True)
    process.start()
    other.close()
    return _Worker(task, process, own, log)


def _heard(worker: _Worker) -> tuple[str, Any]:
    try:
        kind, content = worker.line.recv()
    except (EOFError, ConnectionError):
        return "gone", None
    return kind, content


def _ended(worker: _Worker, kind: str, content: Any) -> tuple[Any, str]:
    """(result, failure) of a worker that said its last word, or left without one."""
    _signal([worker], signal.SIGCONT)  # or its end would never come
    worker.process.join()
    if kind == "result":
        return pickle.loads(worker.log.with_suffix(".result").read_bytes()), ""
    if kind == "failure":
        return None, content
    lines = worker.log.read_text(errors="replace").splitlines() if worker.log.exists() else []
    last = f"; its last line: {lines[-1][:200]}" if lines else ""
    return None, f"its process ended with code {worker.process.exitcode}{last}"


def _signal(workers: Sequence[_Worker], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)
