"""Progress on a terminal, which a pseudo-terminal plays, and its silence everywhere else."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")


def run(body: str, terminal: bool = True) -> tuple[str, str]:
    """(stderr, stdout) of a program whose stderr is a terminal and whose stdout is a pipe."""
    code = f"import sys, time\nfrom cutefuse.progress import spinner, track, waiting\n{body}"
    ours, theirs = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE,
                             stderr=theirs if terminal else subprocess.PIPE, text=not terminal)  # fmt: skip
    os.close(theirs)
    if not terminal:
        out, err = child.communicate(timeout=60)
        os.close(ours)
        assert child.returncode == 0, err
        return err, out
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        ready, _, _ = select.select([ours], [], [], 0.1)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:  # the other side is closed
            break
        shown += part
        if child.poll() is not None and not part:
            break
    assert child.stdout is not None
    out = child.stdout.read()
    os.close(ours)
    assert child.wait(10) == 0, shown
    return shown.decode(), out.decode()


def test_what_takes_long_shows_that_it_works_and_what_is_quick_does_not() -> None:
    shown, _ = run("with waiting('long one', 0.1): time.sleep(0.8)")
    assert "long one" in shown
    shown, _ = run("with waiting('quick one', 5): pass")
    assert shown == ""


def test_another_spinner_takes_its_place_for_a_while() -> None:
    shown, _ = run("""
with waiting('outer', 0.2):
    with spinner('inner'):
        time.sleep(0.8)
        sys.stderr.write('<INSIDE>\\n')
    sys.stderr.write('<AFTER>\\n')
    time.sleep(0.8)
    for i in track(range(3), 'bar', 3):
        time.sleep(0.3)
""")
    inside, after = shown.split("<INSIDE>")[0], shown.split("<AFTER>")[1]
    assert "inner" in inside and "outer" not in inside and "outer" in after
    assert after.rindex("outer") < after.index("bar")


@pytest.mark.parametrize("context", ["waiting('w', 0.1)", "spinner('w')"])
def test_lines_for_a_pipe_go_there(context: str) -> None:
    shown, out = run(f"with {context}:\n    time.sleep(0.6)\n    print('a result')\n    time.sleep(0.3)")
    assert out == "a result\n" and "a result" not in shown and "w" in shown


def test_a_title_with_brackets_is_no_markup() -> None:
    assert "[red]m.onnx" in run("with spinner('[red]m.onnx'): time.sleep(0.5)")[0]


def test_logs_have_a_line_for_a_spinner_and_nothing_else() -> None:
    err, out = run("with waiting('w', 0.05):\n    time.sleep(0.3)\n    with spinner('s'): print('x')", terminal=False)
    assert (err, out) == ("s ...\n", "x\n")


def test_an_error_inside_ends_the_spinner() -> None:
    shown, _ = run("try:\n    with waiting('w', 0.1):\n        time.sleep(0.5)\n        raise ValueError\n"
                   "except ValueError:\n    time.sleep(0.5); sys.stderr.write('<END>')")  # fmt: skip
    assert shown.endswith("<END>") and "w" in shown


@pytest.mark.slow
def test_every_command_waits_so(tmp_path: Path) -> None:
    body = """
import cutefuse.progress as progress
from cutefuse import errors
progress.waiting.__wrapped__.__defaults__ = (0.1,)
sys.argv = ['/bin/cutefuse']
assert errors.run_command(lambda: time.sleep(0.8)) == 0
"""
    assert "cutefuse" in run(body)[0]
