"""Kernels are launched by Triton's real launcher on a stand-in driver, which refuses what a GPU's driver would refuse.

The interpreter and the compile report leave out what a first launch does: specialisation, the launcher in C with its nested
arguments, tensor maps, grids, shared memory above 48 KiB. `driver_stub.c` takes the place of libcuda.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
triton = pytest.importorskip("triton")
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not (INCLUDE / "cuda.h").exists(), reason="needs gcc and CUDA's header, as Triton has it"
)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in `libcuda.so.1`."""
    folder = tmp_path_factory.mktemp("stub")
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{INCLUDE}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(HERE / "driver_stub.c")], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    return folder


def launch(stub: Path, architecture: str, *patterns: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Launches the specimens whose names match."""
    places = {"TRITON_LIBCUDA_PATH": str(stub), "LD_LIBRARY_PATH": str(stub), "TRITON_CACHE_DIR": str(stub / "cache")}
    command = [sys.executable, "-m", "tests.triton_kernels.launch_specimens", architecture, *patterns]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parents[1])} | places | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("architecture", "maps"), [("sm_90", True), ("sm_80", False)])
def test_launches_pass_the_real_launcher(stub: Path, architecture: str, maps: bool) -> None:
    done = launch(stub, architecture, "gelu bf16 exact", "adamw bf16, masters", "attention bf16 D 64 causal")
    assert done.returncode == 0, done.stderr
    assert "refused" not in done.stderr
    launched = {name: int(count) for name, _, count in (line.rpartition(": ") for line in done.stdout.splitlines())}
    assert launched == {"gelu bf16 exact": 2, "adamw bf16, masters": 2, "attention bf16 D 64 causal": 4}
    said = done.stderr.splitlines()
    assert said.count("launch") == 8
    assert ("map" in said) == maps, "tensor maps where tensor cores read what TMA loads"


def test_what_does_not_fit_is_refused(stub: Path) -> None:
    done = launch(stub, "sm_90", "attention bf16 D 64 causal", STUB_SHARED="16384")
    assert done.returncode != 0
    assert "shared memory" in done.stderr


def test_the_stand_in_knows_the_rules_of_tensor_maps(stub: Path) -> None:
    driver, bf16 = ctypes.CDLL(str(stub / "libcuda.so.1")), 9

    def encode(base: int = 64, stride: int = 128, box: int = 64, swizzle: int = 3) -> int:
        sizes, strides = (ctypes.c_uint64 * 2)(64, 1000), (ctypes.c_uint64 * 1)(stride)
        boxes, steps = (ctypes.c_uint32 * 2)(box, 64), (ctypes.c_uint32 * 2)(1, 1)
        tensor = None, bf16, 2, ctypes.c_void_p(base), sizes, strides, boxes, steps
        return int(driver.cuTensorMapEncodeTiled(*tensor, 0, swizzle, 0, 0))

    assert encode() == 0
    for broken in ({"base": 68}, {"stride": 130}, {"box": 512}, {"box": 128}, {"box": 0}):
        assert encode(**broken) == 1, broken


@pytest.mark.weekly
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90", "sm_100"])
def test_all_that_is_shipped_passes_the_real_launcher(stub: Path, architecture: str) -> None:
    shared = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227}[architecture] << 10
    done = launch(stub, architecture, "*", STUB_SHARED=str(shared))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused" not in done.stderr
    assert len(done.stdout.splitlines()) > 100
