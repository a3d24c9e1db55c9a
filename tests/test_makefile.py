"""What the Makefile builds: kernels for `make test`, for the GPU at hand in `make demo`, else none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import build_archs

ROOT = Path(__file__).resolve().parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TIERS = ("test-fast", "test", "test-all")


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
    @pytest.mark.parametrize("target", ["build", "test", "test-all", "gpu-test", "setup"])
    def test_kernels_are_compiled_for_two_architectures_by_default(self, target: str) -> None:
        assert '-DCUTEFUSE_CUDA=ON -DCUTEFUSE_CUDA_ARCHS="80;90a"' in dry_run(target)

    def test_ci_runs_every_test(self) -> None:
        assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test-all"

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

    def test_each_tier_holds_the_one_below_it(self) -> None:
        left_out = [set(re.findall(r"not (\w+)", re.findall(r'-m "(.*?)"', dry_run(tier))[-1])) for tier in TIERS]
        assert left_out == [{"slow", "long", "torch", "gpu"}, {"long", "torch", "gpu"}, {"torch", "gpu"}]
        assert "torch_tests.py" in dry_run("test-all") and "--hypothesis-profile=all" in dry_run("test-all")

    def test_all_examples_are_ten_times_as_many(self) -> None:
        script = (
            "from hypothesis import settings; import sys; sys.path.append('tests'); from examples import examples\n"
        )
        script += (
            "few = examples(300); settings.load_profile('all'); print(few.max_examples, examples(300).max_examples)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.split() == ["30", "300"], done.stderr
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--collect-only",
            "--hypothesis-profile=all",
            "-m",
            "not torch",
        ]
        done = subprocess.run([*command, "tests/test_islands_fuzz.py"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "test_random_graphs" in done.stdout, done.stdout + done.stderr

    @pytest.mark.parametrize("tier", TIERS)
    def test_a_tier_says_how_long_it_took_and_whether_that_is_too_long(self, tier: str, tmp_path: Path) -> None:
        (last,) = [line for line in dry_run(tier).replace("\\\n", " ").splitlines() if line.startswith("took=")]
        budget_s = int(re.findall(rf"{tier}: \$took s of its budget of (\d+) s", last)[0])
        assert f"| `make {tier}` " in CONTRIBUTING and f"| {budget_s // 60} minutes |" in CONTRIBUTING
        (tmp_path / "build").mkdir()
        for took_s, over in ((0, False), (budget_s + 60, True)):
            (tmp_path / "build/.began").write_text(str(int(time.time()) - took_s))
            said = subprocess.run(["bash", "-c", last], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            assert said.startswith(f"{tier}: ") and ("over its budget" in said) == over

    def test_a_wheel_takes_every_architecture_unless_some_are_given(self) -> None:
        assert 'CUTEFUSE_CUDA_ARCHS="" ' in dry_run("wheel") and 'CUTEFUSE_CUDA_ARCHS="89" ' in dry_run(
            "wheel", "ARCHS=89"
        )
        every = ["80", "86", "87", "89", "90a", "100", "103", "110", "120", "121", "100-virtual"]
        assert build_archs.known() == every


class TestConfigured:
    def test_a_folder_with_kernels(self, tmp_path: Path) -> None:
        assert build_archs.configured(cache(tmp_path)) == ["80", "90a"]
        assert build_archs.configured(cache(tmp_path, archs="")) == build_archs.known()

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
            ([], 84, "none"),
            ([], 120, "120"),
            ([], 110, "110"),
            ([], 130, "100-virtual"),
            (["86"], 87, "86;87"),
            (["80", "100-virtual"], 121, "80;100-virtual"),
            ([], 87, "87"),
            ([], 80, "80"),
            ([], 86, "86"),
            ([], 89, "89"),
            ([], 90, "90a"),
            (["80", "90a"], 0, "80;90a"),
            (["80", "90a"], None, "80;90a"),
            (["80", "90a"], 86, "80;90a"),
            (["80", "90a"], 90, "80;90a"),
            (["80", "90a"], 120, "80;90a;120"),
            (["80", "90a"], 75, "80;90a"),
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


NEEDS_NVCC = pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("nvcc"), reason="needs cmake and nvcc")


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(command, capture_output=True, text=True)


def gencodes(folder: Path, unit: str) -> set[str]:
    """What the generated Makefiles compile a kernel unit for."""
    flags = (folder / "CMakeFiles/cutefuse.dir/flags.make").read_text().splitlines()
    (line,) = [ln for ln in flags if unit in ln and "OPTIONS" in ln] or [""]
    return set(re.findall(r"-gencode=arch=(\S+?)(?:;|$)", line))


@pytest.mark.long
@NEEDS_NVCC
def test_architectures_share_front_ends_and_wgmma_is_compiled_for_hopper_alone(tmp_path: Path) -> None:
    assert configure(tmp_path, "-DCUTEFUSE_CUDA_ARCHS=86;87;89;90a;121;100-virtual").returncode == 0
    found = gencodes(tmp_path, "sm80/concat_conv_kFloat16_kPlain.cu")
    assert found == {"compute_80,code=sm_86", "compute_80,code=sm_87", "compute_80,code=sm_89",
                     "compute_90a,code=sm_90a", "compute_100,code=sm_121", "compute_100,code=compute_100"}  # fmt: skip
    assert gencodes(tmp_path, "sm90/concat_conv_kFloat16_kHopper.cu") == {"compute_90a,code=sm_90a"}
    assert configure(tmp_path / "old", "-DCUTEFUSE_CUDA_ARCHS=80").returncode == 0
    assert not list(tmp_path.glob("old/generated/**/*Hopper*.cu")), "nothing else has wgmma"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
@pytest.mark.parametrize(
    "options", [["-DCUTEFUSE_CUDA_ARCHS=none"], ["-DCUTEFUSE_CUDA=OFF", "-DCUTEFUSE_CUDA_ARCHS=80;90a"]]
)
def test_a_build_without_kernels_judges_for_all_architectures(tmp_path: Path, options: list[str]) -> None:
    assert configure(tmp_path, *options).returncode == 0
    flags = (tmp_path / "CMakeFiles/cutefuse.dir/flags.make").read_text()
    assert " ".join(build_archs.known()) in flags and "gencode" not in flags
    contents = (tmp_path / "generated/contents.txt").read_text()
    assert "cutefuse " in contents and contents.rstrip().endswith(": none")


@pytest.mark.long
@NEEDS_NVCC
@pytest.mark.parametrize(("archs", "words"), [
    ("sm_90", "names 'sm_90', which is no architecture"), ("80;9.0", "'9.0', which is no architecture"),
    ("70", "does not compile for 70; leave that out"), ("80;999-virtual", "does not compile for 999-virtual"),
])  # fmt: skip
def test_an_architecture_that_is_none_stops_the_build_in_a_sentence(tmp_path: Path, archs: str, words: str) -> None:
    done = configure(tmp_path, f"-DCUTEFUSE_CUDA_ARCHS={archs}")
    assert done.returncode != 0 and words in " ".join(done.stderr.split())


@pytest.mark.long
@NEEDS_NVCC
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
