"""What each architecture has, which code runs there, what a tile needs: by the library's table and in other builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import problems
import pytest
from devices import SHARED_KIB
from test_row_norm import norm
from test_sm90 import call as conv_call

from cutefuse import kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TEGRA = (87, 110)
TABLE = {a["sm"]: a for a in kernels.describe()["architectures"]}
BUILDS = [
    "80 90a",
    "86",
    "80 89",
    "87",
    "80-virtual",
    "89-virtual",
    "90",
    "90a",
    "120",
    "80 86 87 89 90a 100 103 110 120 121 100-virtual",
]


def runs_on(target: str, sm: int) -> bool:
    """CUDA's rule of compatibility, and no guess about compute capabilities that are not known."""
    number = int(target.removesuffix("-virtual").rstrip("a"))
    if target.endswith("-virtual"):
        return sm >= number
    if target.endswith("a") or sm == number:
        return sm == number
    cards = sm in SHARED_KIB and sm not in TEGRA and number not in TEGRA
    return cards and sm // 10 == number // 10 and sm > number


def test_every_architecture_has_its_shared_memory_and_what_kernels_may_use() -> None:
    assert {sm: a["shared_bytes"] // 1024 for sm, a in TABLE.items()} == SHARED_KIB
    for sm, a in TABLE.items():
        assert kernels.features(sm) == set(a["features"])
        assert ("clusters" in a["features"]) == (sm >= 90)
        assert ("wgmma" in a["features"]) == (sm == 90), "no other architecture has wgmma"
        assert ("float8" in a["features"]) == (sm >= 89), "mma.sync of float8: PTX ISA, sm_89 or higher"
    assert kernels.features(75) == kernels.features(130) == frozenset()


def test_the_library_takes_exactly_the_gpus_that_its_code_runs_on() -> None:
    targets = str(kernels.describe()["targets"]).split()
    for sm in range(50, 140):
        assert (kernels.reject_device(sm) is None) == any(runs_on(t, sm) for t in targets), sm
    for sm, a in TABLE.items():
        machine = any(runs_on(t, sm) for t in targets if not t.endswith("-virtual"))
        ptx = any(runs_on(t, sm) for t in targets if t.endswith("-virtual"))
        assert a["code"] == ("machine code" if machine else "PTX" if ptx else None)
    assert kernels.reject_device(0) is None


def test_a_tile_is_offered_where_the_gpu_has_what_it_needs() -> None:
    plain = conv_call(problems.Problem(1, 64, 64, (64, 64), 128, R=3, S=3, pads=(1, 1, 1, 1)))
    for call in (plain, norm("CuteRMSNorm", columns=16384)):
        tiles = {c["id"]: c for c in kernels.operator_of(call.op_type)["configs"]}
        needy = {i for i, c in tiles.items() if c["needs"]}
        assert needy & set(kernels.configs(replace(call, sm=0, _keep=[])))
        for sm in TABLE:
            offered = kernels.configs(replace(call, sm=sm, _keep=[]))
            assert all(kernels.features(sm).issuperset(tiles[i]["needs"]) for i in offered), sm
            if kernels.reject_device(sm) is None:
                assert set(offered) - needy, f"{sm} has tiles that need nothing"
                assert kernels.Plan(replace(call, sm=sm, sm_count=20, _keep=[])).config in offered


def test_the_tiles_that_need_nothing_fit_the_shared_memory_of_every_gpu() -> None:
    call = conv_call(problems.Problem(1, 64, 64, (64,), 256, R=3, S=3, pads=(1, 1, 1, 1)))
    plain = {c["id"] for c in kernels.operator_of(call.op_type)["configs"] if not c["needs"]}
    known = [sm for sm in TABLE if kernels.reject_device(sm) is None]
    offered = [plain & set(kernels.configs(replace(call, sm=sm, _keep=[]))) for sm in known]
    assert known and offered[0] and all(tiles == offered[0] for tiles in offered)


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 100, 103, 110, 120, 121])
def test_no_gpu_but_hopper_gets_a_tile_of_wgmma(sm: int) -> None:
    call = conv_call(problems.Problem(1, 64, 64, (64,), 128))
    tiles = kernels.operator_of(call.op_type)["configs"]
    wgmma = next(c for c in tiles if "wgmma" in c["needs"])
    assert kernels.gpus_of(wgmma) == "sm_90 alone" and kernels.gpus_of(tiles[0]) == "sm_80 and newer"
    assert kernels.made_for(call, 90) and not kernels.made_for(call, sm)
    with pytest.raises(kernels.KernelError):
        kernels.Plan(replace(call, sm=sm, sm_count=20, config=wgmma["id"], _keep=[]))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source of a program that prints, for a build's targets, sm, code and offered features of every GPU."""
    path = tmp_path_factory.mktemp("judge") / "judge.cpp"
    path.write_text(
        """#include <cstdio>
#include "architecture.h"
namespace cutefuse { char const *sentence(char const *format, ...) { return format; } }
int main() {
  using namespace cutefuse;
  for (int sm = 50; sm < 140; ++sm) {
    char const *code = code_for(sm);
    std::printf("%d,%s,%d%d%d\\n", sm, code ? code : "-", offers(sm, kClusters), offers(sm, kWgmma),
                offers(sm, kFloat8Mma));
  }
}
"""
    )
    return path


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("build", BUILDS)
def test_other_builds_judge_by_what_they_hold(judge: Path, build: str) -> None:
    program = judge.with_suffix(f".{BUILDS.index(build)}")
    sources = [ROOT / "cutlass_kernels/architecture.cpp", judge, f"-I{ROOT / 'cutlass_kernels'}"]
    subprocess.run(["g++", "-std=c++17", f'-DCUTEFUSE_TARGETS="{build}"', *sources, "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    rows = [line.split(",") for line in " ".join(lines).replace("machine code", "machine").split()]
    assert len(rows) == 90
    for number, code, offered in rows:
        sm, targets = int(number), build.split()
        machine = [t for t in targets if runs_on(t, sm) and not t.endswith("-virtual")]
        ptx = [t for t in targets if runs_on(t, sm) and t.endswith("-virtual")]
        assert code == ("machine" if machine else "PTX" if ptx else "-"), (sm, code)
        used = max((int(t.removesuffix("-virtual").rstrip("a")) for t in machine or ptx), default=0)
        # The code of 8.0 uses no cluster and no float8, wherever it runs; wgmma is in that of 90a alone.
        assert offered == f"{int(used >= 90)}{int(machine == ['90a'])}{int(used >= 89)}", (sm, offered)


GENCODES = {  # build, folder, number type -> front end and code of each architecture
    ("80;90a", "conv/sm80", "kInt8"): "80:sm_80 90a:sm_90a",
    ("80;90a", "conv/sm80", "kFloat8"): "90a:sm_90a",
    ("80;90a", "conv/sm90", "kFloat8"): "90a:sm_90a",
    ("80;86;87", "conv/sm80", "kFloat8"): "",
    ("89", "conv/sm80", "kFloat8"): "89:sm_89",
    ("89", "conv/sm80", "kInt8"): "80:sm_89",
    ("89", "conv/sm90", "kFloat8"): "",
    ("86;120;100-virtual", "conv/sm80", "kFloat8"): "100:sm_120 100:compute_100",
    ("80-virtual;89-virtual", "conv/sm80", "kFloat8"): "89:compute_89",
    ("90", "conv/sm80", "kFloat8"): "90:sm_90",
}


@pytest.mark.parametrize(("build", "folder", "number"), GENCODES)
def test_a_kernel_file_is_compiled_for_the_architectures_that_can_run_it(
    build: str, folder: str, number: str, tmp_path: Path
) -> None:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        pytest.skip("needs cmake")
    script = tmp_path / "gencode.cmake"
    script.write_text(
        f"""include({ROOT}/cmake/Architectures.cmake)
set(CUTEFUSE_CUDA_ARCHS "{build}")
cutefuse_gencode(found "{folder}" "{number}")
message("${{found}}")
"""
    )
    done = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True)
    found = re.findall(r"-gencode=arch=compute_(\w+),code=(\w+)", done.stderr)
    assert " ".join(f"{front}:{code}" for front, code in found) == GENCODES[build, folder, number]
