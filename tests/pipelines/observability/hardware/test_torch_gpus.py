"""Usability of GPUs by PyTorch: a driver alone, faked by a library, does not make a run use CUDA."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.pipelines.observability.hardware.torch_gpus import diagnose_torch_gpus, query_torch, query_torch_in_subprocess
from tests.another_cluster import another_cluster
from tests.ray_jobs.jobs import Outcome, finish_job, start_job
from tests.tiny import tiny, write_text

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that PyTorch can use")
SOURCE = Path(__file__).parents[1] / "observers" / "scripted_nvml.c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables for a fake driver with two cards."""
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc) to build the library that plays NVML")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    card = "{0} name Pretending Card\n{0} uuid GPU-{0}\n{0} memory 80000000000 1000\n"
    (folder / "script").write_text("* cards 2\n* driver 470.82\n" + card.format(0) + card.format(1))
    return {"LD_LIBRARY_PATH": str(folder), "SCRIPTED_NVML": str(folder / "script")}


def train(tmp_path: Path, driver: dict[str, str], *flags: str) -> Outcome:
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"))
    return finish_job(start_job("train", config, "--run", "a", *flags, env=driver))


def test_what_pytorch_says_here() -> None:
    here = query_torch()
    assert here == query_torch_in_subprocess()
    assert here["count"] == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_each_cause_names_what_to_install() -> None:
    for_cpus = {"version": "2.13.0+cpu", "built_for": None, "said": "", "count": 0}
    assert diagnose_torch_gpus(for_cpus, 0) == ""
    assert diagnose_torch_gpus(for_cpus | {"count": 2}, 2) == ""
    assert "PyTorch 2.13.0+cpu is built for CPUs alone: install its build for CUDA" in diagnose_torch_gpus(for_cpus, 2)
    old = {"version": "2.13.0", "built_for": "13.0", "said": "The NVIDIA driver on your system is too old", "count": 0}
    assert diagnose_torch_gpus(old, 1).startswith(
        "there is 1 GPU, but PyTorch 2.13.0, built for CUDA 13.0, cannot use it (The NVIDIA"
    )
    assert "update the NVIDIA driver" in diagnose_torch_gpus(old, 1)


def test_a_driver_says_which_build_it_needs() -> None:
    old = {"version": "2.13.0", "built_for": "13.0", "said": "", "count": 0, "driver": "570.86.15"}
    said = diagnose_torch_gpus(old, 8)
    assert "update the NVIDIA driver, which is 570.86.15, to 580 or newer" in said
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" in said
    for_cpus = {"version": "2.13.0+cpu", "built_for": None, "said": "", "count": 0}
    assert diagnose_torch_gpus(for_cpus | {"driver": "580.95"}, 1).endswith("torch==2.13.0 (docs/gpus.md)")
    assert "whl/cu126" in diagnose_torch_gpus(for_cpus | {"driver": "550.1"}, 1)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_no_problem(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert diagnose_torch_gpus({"version": "2", "built_for": None, "said": "", "count": 0}, 2) == ""


@needs_none
@pytest.mark.long
@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=pytest.mark.weekly)])
def test_a_driver_alone_trains_on_cpus_with_one_warning(tmp_path: Path, driver: dict[str, str], mode: str) -> None:
    outcome = train(tmp_path, driver, "--launch", mode, "--scaling.workers", "1")
    assert outcome.code == 0, outcome.err
    warned = [line for line in outcome.err.splitlines() if line.startswith("warning: training on CPUs: there are 2 GPUs")]
    assert len(warned) == 1
    assert "install" in warned[0]
    assert "on cpu" in outcome.out


@pytest.mark.long
@needs_none
@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=[pytest.mark.long, pytest.mark.weekly])])
def test_cuda_there_is_an_error_with_its_remedy(tmp_path: Path, driver: dict[str, str], mode: str) -> None:
    outcome = train(tmp_path, driver, "--launch", mode, "--scaling.device", "cuda")
    assert outcome.code == 3, outcome.out + outcome.err
    assert "GPU: 1 asked, 0 there: there are 2 GPUs, but PyTorch" in outcome.err
    assert "install" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.fixture
def with_cards() -> Iterator[Any]:
    """A head without GPUs, and a node that claims two."""
    with another_cluster(num_cpus=1, num_gpus=0) as found:
        found.add_node(num_cpus=1, num_gpus=2)
        yield found


@needs_none
@pytest.mark.long
def test_the_node_with_gpus_is_asked(with_cards: Any) -> None:
    program = (
        "import ray, sys; from raystride.pipelines.launch.cluster.cluster import run_on_node, has_several_nodes\n"
        "from raystride.pipelines.launch.cluster.resources import Resources\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "there = Resources.of_cluster()\n"
        "where = run_on_node(lambda: __import__('ray').get_runtime_context().get_node_id(), 60, gpu=True)\n"
        "cards = next(n['NodeID'] for n in ray.nodes() if n['Resources'].get('GPU'))\n"
        "print(there.gpus, where == cards, has_several_nodes(), there.gpu_problem)\n"
    )
    surroundings = {name: value for name, value in os.environ.items() if name == "RAY_AUTH_MODE" or name[:4] != "RAY_"}
    done = subprocess.run(
        [sys.executable, "-c", program, with_cards.address],
        env=surroundings, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].startswith("0 True True there are 2 GPUs, but PyTorch")
