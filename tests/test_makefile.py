"""What the Makefile builds: kernels for `make test`, for the GPU at hand in `make demo`, else none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build_archs

ROOT = Path(__file__).resolve().parent.parent


def dry_run(*arguments: str, **environment: str) -> str:
    """The commands that `make` would run, with none of this process's own settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARCHS"))}
    command = ["make", "-n", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True).stdout


def cache(folder: Path, cuda: str = "ON", archs: str = "80;90a", compiler: str = sys.executable) -> Path:
    """A CMakeCache.txt; any file stands for the compiler."""
    path = folder / "CMakeCache.txt"
    entries = f"CUTEFUSE_CUDA:BOOL={cuda}\nCUTEFUSE_CUDA_ARCHS:STRING={archs}\nCMAKE_CUDA_COMPILER:PATH={compiler}\n"
    path.write_text(f"# cache\n{entries}")
    return path


class TestMake:
    @pytest.mark.parametrize("target", ["build", "test", "gpu-test", "setup"])
    def test_kernels_are_compiled_for_two_architectures_by_default(self, target: str) -> None:
        assert '-DCUTEFUSE_CUDA=ON -DCUTEFUSE_CUDA_ARCHS="80;90a"' in dry_run(target)

    def test_ci_runs_the_target_that_compiles_them(self) -> None:
        assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"

    def test_no_architecture_is_no_kernel(self) -> None:
        found = dry_run("build", "ARCHS=none")
        assert "-DCUTEFUSE_CUDA=OFF" in found and "CUTEFUSE_CUDA_ARCHS" not in found

    def test_the_demo_asks_for_the_gpu_and_the_fast_tests_do_not(self) -> None:
        assert 'archs="$(python3 scripts/build_archs.py --gpu)" && ' in dry_run("demo", "PYTHON=python3")
        assert re.search(r'archs="\$\(python3 scripts/build_archs.py *\)" && ', dry_run("test-fast", "PYTHON=python3"))

    @pytest.mark.parametrize("target", ["demo", "test-fast"])
    def test_given_architectures_are_taken(self, target: str) -> None:
        for found in (dry_run(target, "ARCHS=86"), dry_run(target, ARCHS="86")):
            assert 'archs="86" && ' in found and "build_archs.py" not in found

    def test_the_fast_tests_leave_out_what_is_slow_or_needs_torch_or_a_gpu(self) -> None:
        assert '-m "not slow and not torch and not gpu"' in dry_run("test-fast")


class TestConfigured:
    def test_a_folder_with_kernels(self, tmp_path: Path) -> None:
        assert build_archs.configured(cache(tmp_path)) == ["80", "90a"]

    def test_folders_without(self, tmp_path: Path) -> None:
        assert build_archs.configured(tmp_path / "CMakeCache.txt") == []
        assert build_archs.configured(cache(tmp_path, cuda="OFF")) == []
        assert build_archs.configured(cache(tmp_path, compiler="NOTFOUND")) == []
        (tmp_path / "CMakeCache.txt").write_text("CUTEFUSE_CUDA:BOOL=ON\n")
        assert build_archs.configured(tmp_path / "CMakeCache.txt") == []


class TestChoice:
    @pytest.mark.parametrize(
        ("built", "sm", "archs"),
        [
            ([], 0, "none"),
            ([], None, "none"),
            ([], 75, "none"),
            ([], 120, "none"),
            ([], 80, "80"),
            ([], 86, "86"),
            ([], 89, "89"),
            ([], 90, "90a"),
            (["80", "90a"], 0, "80;90a"),
            (["80", "90a"], None, "80;90a"),
            (["80", "90a"], 86, "80;90a"),
            (["80", "90a"], 90, "80;90a"),
            (["80", "90a"], 120, "80;90a"),
            (["80"], 90, "80;90a"),
            (["90a"], 89, "90a;89"),
            (["86"], 80, "86;80"),
        ],
    )
    def test_kernels_stay_and_the_gpus_are_added(self, built: list[str], sm: int | None, archs: str) -> None:
        assert build_archs.choose(built, sm)[0] == archs

    @pytest.mark.parametrize(("sm", "reason"), [(0, "There is no GPU"), (None, "need no kernels"), (75, "ability 7.5")])
    def test_without_kernels_one_sentence_says_how_to_get_them(self, sm: int | None, reason: str) -> None:
        sentence = build_archs.choose([], sm)[1]
        assert reason in sentence and '`make build ARCHS="80;90a"`' in sentence and sentence.count(". ") == 0

    def test_the_command_prints_architectures_alone(self, tmp_path: Path) -> None:
        cache(tmp_path, archs="86")
        command = [sys.executable, "scripts/build_archs.py", "--build", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == "86\n" and done.stderr == "The build folder keeps its kernels for 86.\n"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("nvcc"), reason="needs cmake and nvcc")
def test_a_folder_configured_without_kernels_finds_the_compiler_later(tmp_path: Path) -> None:
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-DPython3_EXECUTABLE={sys.executable}"]
    for options, built in (
        (["-DCUTEFUSE_CUDA=OFF"], []),
        (["-DCUTEFUSE_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND", "-DCUTEFUSE_CUDA_ARCHS=90a"], ["90a"]),
    ):
        subprocess.run([*configure, *options], check=True, capture_output=True)
        assert build_archs.configured(tmp_path / "CMakeCache.txt") == built


def test_setting_up_leaves_the_command_behind() -> None:
    made = dry_run("-B", "setup")
    assert made.index("pip install") < made.index("scripts/link_package.py") < made.index(".venv/.ready")
