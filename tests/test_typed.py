"""Commands of README and docs, typed as they stand in a folder far from the checkout, after `make demo`.

An environment of its own has what `make` installs: the dependencies, and the command of scripts/link_package.py.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cutefuse.cli import COMMANDS
from cutefuse.engines.build import choose_backend
from cutefuse.errors import CutefuseError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("typed")]  # one environment for all of them
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
INLINE = re.compile(r"`((?:cutefuse|python -m cutefuse) [a-z][^`]*)`")
TYPED = sorted({line for text in TEXT.values() for line in INLINE.findall(text) if len(line.split()) > 2})
# What cannot succeed in this folder: the exit code, and words of the sentence that says why.
ELSEWHERE = {
    "cutefuse accuracy model.engine": (2, "error: "),
    "cutefuse diff a.onnx b.onnx": (1, "the models differ"),
    "cutefuse build --backend torch": (2, "usage: "),  # an option, without its model
    "cutefuse patch --profile outdir --min-gain": (2, "usage: "),
    "cutefuse optimize model.onnx": (2, "error: "),
    "cutefuse patch model.onnx --include-op row_norm": (3, "nothing was written"),
    "cutefuse trt-check model.onnx": (2, "error: "),
}
PLACEHOLDERS = ("NAME", "module:factory", "--engine")


@dataclass
class Terminal:
    home: Path
    path: str

    def __call__(self, line: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUTEFUSE"))}
        return subprocess.run(
            line, shell=True, cwd=self.home, env={**inherited, "PATH": self.path}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """A folder with the files that the pages speak of, and an environment with the command."""
    base = tmp_path_factory.mktemp("a newcomer")
    home, venv = base / "home", base / ".venv"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    subprocess.run([str(venv / "bin/python"), str(ROOT / "scripts/link_package.py")], check=True, capture_output=True)
    made = Terminal(home, f"{venv / 'bin'}:{os.environ['PATH']}")
    for line in (
        f"python '{ROOT}/scripts/make_models.py' --out . --small yolo_neck",
        "mv yolo_neck-float32.onnx model.onnx",
        "cutefuse patch model.onnx --all --verify",
        "cutefuse unpatch model.cutefuse.onnx",
        "cutefuse process model.onnx plain/ --iterations=10 --duration=0.1",
        "cutefuse process model.cutefuse.onnx patched/ --iterations=10 --duration=0.1",
    ):
        done = made(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    shutil.copytree(home / "plain", home / "outdir")
    shutil.copy(home / "model.onnx", home / "a.onnx")
    shutil.copy(home / "model.cutefuse.onnx", home / "b.onnx")
    return made


def has_engines() -> bool:
    """Whether this machine has TensorRT, or a GPU that PyTorch sees."""
    try:
        return bool(choose_backend("auto"))
    except CutefuseError:
        return False


@pytest.mark.parametrize("line", [line for line in TYPED if not any(p in line for p in PLACEHOLDERS)])
def test_a_command_of_the_pages_runs_as_it_stands(line: str, terminal: Terminal) -> None:
    code, words = next((v for k, v in ELSEWHERE.items() if line.startswith(k)), (0, ""))
    if words == "error: " and has_engines():
        pytest.skip("here it would build engines")
    done = terminal(line)
    said = done.stdout + done.stderr
    assert done.returncode == code and words in said and "Traceback" not in said, f"{line}\n{said}"


def test_each_command_names_the_next_until_two_engines_are_compared(terminal: Terminal) -> None:
    short = "--iterations=10 --duration=0.1"

    def follow(line: str) -> list[str]:
        done = terminal(f"cd chain && {line}")
        assert done.returncode == 0, done.stderr
        return re.findall(r"^next: (.*?)(?:  #.*)?$", done.stdout, re.M)

    terminal("mkdir chain && cp model.onnx chain/")
    build, process = follow("cutefuse patch model.onnx --all")
    follow(f"{build} --dry-run")
    plain, compare = follow(f"{process} {short}")
    follow(f"{plain} {short}")
    follow(compare)
    assert list((terminal.home / "chain").rglob("compare.html"))


@pytest.mark.parametrize("line", ["cutefuse", "python -m cutefuse"])
def test_the_command_and_the_module_are_one(line: str, terminal: Terminal) -> None:
    assert terminal(f"{line} --version").stdout.startswith("cutefuse ")
    assert "usage: cutefuse <command>" in terminal(f"{line} --help").stdout
    unknown = terminal(f"{line} frobnicate")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: unknown command 'frobnicate'")


def test_the_package_is_imported_from_any_folder_and_another_checkout_goes_before_it(terminal: Terminal) -> None:
    assert terminal("python -c 'import cutefuse; print(cutefuse.__file__)'").stdout.startswith(str(ROOT))
    other = terminal.home / "checkout" / "cutefuse"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = 'other'\n")
    assert terminal("cd checkout && python -c 'import cutefuse; print(cutefuse.__version__)'").stdout == "other\n"


def test_the_line_of_the_plugin_page_prints_the_librarys_path(terminal: Terminal) -> None:
    line = next(m for m in re.findall(r"`(python -c \"import cutefuse[^`]*)`", TEXT["plugin.md"]))
    assert terminal(line).stdout.strip().endswith("libcutefuse.so")


def in_blocks(page: str) -> list[tuple[str, str]]:
    """The commands of a page's blocks, fenced or indented, with their own options alone: those of another program stand
    behind -- or in quotes."""
    blocks = [*re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S), *re.findall(r"^(?: {4}.*\n)+", page, re.M)]
    lines = re.findall(r"^ *(?:\$ )?cutefuse ([a-z-]+)(.*)$", "\n".join(blocks).replace("\\\n", " "), re.M)
    return [(name, re.split(" -- |#", re.sub(r"\"[^\"]*\"|'[^']*'", "", rest))[0]) for name, rest in lines]


def test_commands_of_blocks_are_found() -> None:
    page = "cutefuse makes\n\n    cutefuse patch m \\\n      --all 'x --no'  # --not\n"
    page += '```\n$ cutefuse profile-kernels --json "x --no" -- x --y\n```\n'
    found = [(name, re.findall(r"--[a-z]+", rest)) for name, rest in in_blocks(page)]
    assert sorted(found) == [("patch", ["--all"]), ("profile-kernels", ["--json"])]


@pytest.mark.parametrize("page", sorted(TEXT))
def test_commands_and_options_that_a_page_names_exist(page: str, terminal: Terminal) -> None:
    for name, rest in re.findall(r"`cutefuse ([a-z-]+)([^`]*)`", TEXT[page]) + in_blocks(TEXT[page]):
        assert name in COMMANDS, name
        options = re.findall(r"(--[a-z-]+)", rest)
        shown = terminal(f"cutefuse {name} --help").stdout if options else ""
        assert [o for o in options if o not in shown] == [], name
