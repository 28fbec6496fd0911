"""A node proves in a process of its own; on stand-ins of a GPU's facts, as there is none here."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.kernel_needs import list_needs
from raystride.pipelines.train.worker.prover import (
    NodeProof,
    ProofReport,
    find_gpu,
    predict_kernels,
    proof_table,
    prove_on_node,
)
from tests.pipelines.train.worker.test_kernel_proof import CONFIG, H100, store_proof

pytestmark = pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU")


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return Folder(str(tmp_path / "runs"))


def test_a_node_without_a_gpu_proves_nothing_and_starts_no_process(storage: Folder) -> None:
    assert pickle.loads(pickle.dumps(NodeProof(CONFIG, storage, 60.0)))() == ProofReport()


def test_what_is_proved_is_not_proved_again(storage: Folder) -> None:
    store_proof(storage)
    report = prove_on_node(CONFIG, storage, 0.0, H100)
    assert (report.gpu, report.open, report.problem) == (H100, (), "")
    assert set(report.rows) == {key for need in list_needs(CONFIG) for key in (need.key, need.own_key) if key}


def test_a_gpu_that_pytorch_cannot_use_is_a_problem_of_the_node(storage: Folder) -> None:
    """The process is started, as the driver shows a GPU, and finds none."""
    report = prove_on_node(CONFIG, storage, 1.0, H100)
    assert (report.gpu, report.rows) == (None, {})
    assert report.problem == "PyTorch cannot use the GPU that there is"


def test_the_table_names_verdict_error_times_and_what_is_open(storage: Folder) -> None:
    store_proof(storage, wrong="gelu")
    text = proof_table(replace(prove_on_node(CONFIG, storage, 0.0, H100), open=("rope bfloat16",)))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "WRONG: 31 times the allowed error" in lines["gelu float32"]
    assert "right" in lines["adamw float32"]
    assert "3e+03 / 2e+03 ms, slower" in lines["layer_norm 16x16 16 16, float32"]
    assert lines["rope bfloat16"].endswith("not run: the time was over")


def test_the_estimate_of_memory_knows_the_choice(storage: Folder) -> None:
    assert predict_kernels(CONFIG, storage) == "auto", "the GPUs are elsewhere"
    assert predict_kernels(CONFIG, storage, H100) == "auto"
    store_proof(storage, slow="")
    assert predict_kernels(CONFIG, storage, H100) == "triton"
    other = H100._replace(driver="580.1")
    store_proof(storage, other)
    assert predict_kernels(CONFIG, storage, other) == "torch", "one is slower"
