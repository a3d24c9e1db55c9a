"""What a run writes comes into place as one: beside other runs, after a kill, as private as its source."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, weights
from onnx import numpy_helper

from cutefuse.commands.patch import main
from cutefuse.graph import staging, store
from cutefuse.rewrite.patch import Options, patch
from cutefuse.rewrite.unpatch import unpatch

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) z = Relu(x) v = Conv(z, u) y = Add(v, s)"


def model(folder: Path, name: str, seed: int, external: bool = True) -> Path:
    values = weights(seed, w=(40, 24, 3, 3), k=(40,), u=(12, 40, 1, 1), s=(1, 12, 1, 1))
    path = folder / f"{name}.onnx"
    onnx.save(
        graph(BODY, values), str(path), save_as_external_data=external, location=f"{name}.bin", size_threshold=512
    )
    return path


def whose(output: Path, sources: list[Path]) -> set[str]:
    """The sources that the model, its weights and its report at `output` come from."""
    found = {Path(json.loads(output.with_suffix(".patch.json").read_text())["input"]["path"]).stem}
    values = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(output)).graph.initializer}
    for source in sources:
        own = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(source)).graph.initializer}
        found |= (
            {source.stem} if np.array_equal(own["u"], values["u"]) or np.array_equal(own["s"], values["s"]) else set()
        )
    return found


def race(sources: list[Path], output: Path, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    for source in sources:
        patch(source, output, Options(all_sites=True))


@pytest.mark.slow
def test_runs_with_one_output_never_mix_their_files(tmp_path: Path) -> None:
    sources = [model(tmp_path, "one", 1), model(tmp_path, "two", 2), model(tmp_path, "three", 3, external=False)]
    # Not a fork of this process, which the threads of the engines in other tests would make crash.
    context, output = multiprocessing.get_context("forkserver"), tmp_path / "out.onnx"
    for _ in range(3):
        start = context.Event()
        runs = [context.Process(target=race, args=(sources[i:] + sources[:i], output, start)) for i in range(3)]
        for run in runs:
            run.start()
        start.set()
        for run in runs:
            run.join()
        assert [run.exitcode for run in runs] == [0, 0, 0]
        assert len(whose(output, sources)) == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs but the system's own release of locks."""


@pytest.mark.parametrize("second", ["two", "three"])
@pytest.mark.parametrize("moves", range(7))
def test_a_kill_between_two_moves_leaves_no_model_beside_others_files(
    moves: int, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [model(tmp_path, "one", 1), model(tmp_path, "two", 2), model(tmp_path, "three", 3, external=False)]
    output, done = tmp_path / "out.onnx", []
    patch(sources[0], output, Options(all_sites=True))
    move = os.replace

    def dying(old: os.PathLike[str], new: os.PathLike[str]) -> None:
        done.append(new)
        if len(done) > moves:
            raise Killed
        move(old, new)

    monkeypatch.setattr(staging.os, "replace", dying)
    try:
        patch(next(s for s in sources if s.stem == second), output, Options(all_sites=True))
    except Killed:
        pass
    if output.exists():
        report = output.with_suffix(".patch.json")
        owners = whose(output, sources) if report.exists() else {"no report"}
        assert len(owners) == 1
        data = {
            store.external_fields(t).get("location")
            for t in onnx.load(str(output), load_external_data=False).graph.initializer
        }
        assert data <= {None, "out.onnx.data"}
        onnx.checker.check_model(onnx.load(str(output)), full_check=True)
    monkeypatch.undo()
    patch(sources[1], output, Options(all_sites=True))
    assert whose(output, sources) == {"two"}


def test_a_move_that_fails_puts_the_earlier_files_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, output = model(tmp_path, "one", 1), model(tmp_path, "two", 2), tmp_path / "out.onnx"
    assert main([str(first), "-o", str(output), "--all"]) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    move = os.replace

    def refusing(old: os.PathLike[str], new: os.PathLike[str]) -> None:
        if Path(new) == output and ".previous" not in str(old):
            raise PermissionError(1, "Operation not permitted", str(new))
        move(old, new)

    monkeypatch.setattr(staging.os, "replace", refusing)
    assert main([str(second), "-o", str(output), "--all"]) == 2
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_next_run_removes_what_killed_runs_left_and_no_folder_of_a_living_one(tmp_path: Path) -> None:
    source = model(tmp_path, "m", 1)
    names = (
        ".m.cutefuse.onnx.abcdefgh",
        ".m.cutefuse.onnx.12345678",
        ".m.cutefuse.onnx.notours",
        ".n.cutefuse.onnx.abcdefgh",
    )
    dead, living, *others = (tmp_path / name for name in names)
    for folder in (dead, living, *others):
        folder.mkdir()
        (folder / "m.cutefuse.onnx.data").write_bytes(b"x" * 100)
    with (living / staging.ALIVE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([str(source), "--all"]) == 0
        assert not dead.exists() and living.exists() and all(o.exists() for o in others)
    assert main([str(source), "--all"]) == 0
    assert not living.exists()


def test_process_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    from cutefuse.engines.onnxruntime.run import profile

    left = tmp_path / "out" / ".ort-abcdefgh"
    left.mkdir(parents=True)
    profile(
        model(tmp_path, "m", 1, external=False), tmp_path / "out", ["--shapes=a:1x8x9x7,b:1x16x9x7", "--duration=0"]
    )
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o644, 0o666])
def test_outputs_are_as_private_as_the_source(mode: int, external: bool, tmp_path: Path) -> None:
    source, umask = model(tmp_path, "m", 1, external), os.umask(0)
    os.umask(umask)
    for path in tmp_path.iterdir():
        path.chmod(mode)
    assert main([str(source), "--all"]) == 0
    unpatch(tmp_path / "m.cutefuse.onnx", tmp_path / "plain.onnx")
    written = [p for p in tmp_path.iterdir() if p.name not in ("m.onnx", "m.bin")]
    assert len(written) == (5 if external else 3)
    assert {stat.S_IMODE(p.stat().st_mode) for p in written} == {mode & ~umask}


def test_a_failed_proof_writes_a_report_as_private_as_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutefuse.match.conv import read as conv_facts

    source = model(tmp_path, "m", 1)
    source.chmod(0o600)
    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w[:, ::-1], *of))
    assert main([str(source), "--all", "--verify"]) == 1
    assert stat.S_IMODE((tmp_path / "m.patch.json").stat().st_mode) == 0o600


def test_data_of_an_earlier_model_goes_and_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    outside, inside, output = (
        model(tmp_path, "one", 1),
        model(tmp_path, "two", 2, external=False),
        tmp_path / "out.onnx",
    )
    assert main([str(outside), "-o", str(output), "--all"]) == 0 and (tmp_path / "out.onnx.data").exists()
    assert main([str(inside), "-o", str(output), "--all"]) == 0 and not (tmp_path / "out.onnx.data").exists()
    (tmp_path / "out.onnx.data").write_text("of somebody else")
    assert main([str(inside), "-o", str(output), "--all"]) == 0 and (tmp_path / "out.onnx.data").exists()


@pytest.mark.parametrize("place", ["input", "output", "unpatched", "weights"])
def test_symbolic_links_in_a_circle_are_one_sentence(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cutefuse.cli import main as cutefuse

    loop, source = tmp_path / "loop.onnx", model(tmp_path, "m", 1)
    loop.symlink_to(loop.name)
    if place == "weights":
        (tmp_path / "m.bin").unlink()
        (tmp_path / "m.bin").symlink_to("m.bin")
    words = {"input": ["patch", loop], "output": ["patch", source, "-o", loop], "unpatched": ["unpatch", loop],
             "weights": ["patch", source, "--all"]}  # fmt: skip
    assert cutefuse([str(w) for w in words[place]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and ("link" in line or "tensor" in line)


@pytest.mark.parametrize("location", ["m\0.bin", "m\n.bin", "../\0", "no\r\nsuch.bin"])
def test_a_location_that_no_file_can_have_is_one_sentence(
    location: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model(tmp_path, "m", 1)
    broken = onnx.load(str(source), load_external_data=False)
    for t in broken.graph.initializer:
        for entry in t.external_data:
            if entry.key == "location":
                entry.value = location
    source.write_bytes(broken.SerializeToString())
    for words in (["--all"], ["--all", "--dtype", "fp16"], ["--all", "--dry-run"]):
        code = main([str(source), *words])
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1 or "--dry-run" in words
