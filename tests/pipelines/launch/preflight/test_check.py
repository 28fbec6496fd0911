"""`raystride check` says what there is and whether a configuration will run on it, and its exit code says so, too."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.command import run as run_command
from raystride.pipelines.config import Config, DataConfig, LaunchConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.parse import Parsed, to_yaml
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.console.exit_codes import CANNOT_RUN, DONE
from raystride.pipelines.launch.preflight.check import (
    ResolvedRun,
    _runs_on_hosts,
    resolve_resources,
    run_check,
    run_preflight,
)
from raystride.pipelines.launch.preflight.prove_kernels import proving_beside
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.prover import ProofReport
from tests.tiny import tiny, write_text


def config_of(folder: Path) -> Config:
    """A training in this process on CPUs."""
    return tiny(
        write_text(folder),
        storage=str(folder / "runs"),
        launch=LaunchConfig(mode="inline"),
        scaling=ScalingConfig(device="cpu", threads=1),
    )


def test_what_will_run_passes_every_check_and_says_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check(Parsed(config_of(tmp_path), "tiny")) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "note data: files: 1 read"
    assert {line[:5] for line in lines[:-4]} == {"ok   "}
    assert {line[5:].split()[0] for line in lines[:-4]} == {"data", "kernels", "slots", "resources", "memory", "storage"}
    assert lines[-3] == f"results  {tmp_path / 'runs'}"
    assert lines[-2] == "mlflow   not logged"
    assert lines[-1].endswith(" train with the same settings")


def test_kernels_are_proved_ahead_where_there_is_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(to_yaml(config_of(tmp_path)))
    assert run_command(["check", "--config", str(settings), "--kernels"]) == DONE
    said = capsys.readouterr().out
    assert "note kernels on this machine: not run: it has no GPU, and CPUs compute by PyTorch" in said


def test_a_run_on_cpus_proves_nothing_and_a_problem_of_a_node_is_a_line(
    tmp_path: Path,
) -> None:
    context = RunContext(config_of(tmp_path), Folder.from_uri(str(tmp_path / "runs")))
    said: list[str] = []
    for device in ("cpu", "cuda"):
        resolved = ResolvedRun(context, Resources.of_this_machine(gpus=False), Allocation(1, device, threads=1))
        with proving_beside(resolved, said.append, lambda *_: {"h3": ProofReport(problem="no compiler")}):
            assert not said, "lines come at the end"
    assert said == ["kernels could not be proved on h3: no compiler"]


def test_data_that_no_training_can_read_is_found_by_its_first_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\ngood,yes\nbad,\n")
    data = DataConfig(source=str(tmp_path / "reviews.csv"), kind="csv")
    unreadable = replace(config_of(tmp_path), task="classification", data=data)
    assert run_check(Parsed(unreadable, "tiny")) == CANNOT_RUN
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL data")
    assert "column 'label' is empty" in lines[0]
    assert lines[-1] == "next     mend what failed, and check again"


def test_what_will_not_run_has_its_remedy_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    config = config_of(tmp_path)
    config = replace(config, model=replace(config.model, kernels="triton"))
    assert run_check(Parsed(config, "tiny")) == CANNOT_RUN
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert lines[failed].startswith("FAIL kernels")
    assert "model.kernels auto" in lines[failed + 1]
    assert lines[-1] == "next     mend what failed, and check again"


def test_data_that_is_prepared_takes_no_processor_beside_the_workers(tmp_path: Path) -> None:
    config, storage = config_of(tmp_path), Folder.from_uri(str(tmp_path / "runs"))
    beside = replace(
        config, data=replace(config.data, start_after_mib=1.0, follow=False), scaling=replace(config.scaling, workers="auto")
    )
    resolved = resolve_resources(RunContext(beside, storage))
    assert (resolved.context.config.data, resolved.allocation) == (beside.data, Allocation(1, "cpu", 1))
    assert resolved.resources == Resources.of_this_machine(gpus=False)
    prepare(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=False)
    resolved = resolve_resources(RunContext(beside, storage))
    assert resolved.context.config.data == beside.data, "the settings of a run are what they were"
    assert resolved.allocation == Allocation(1, "cpu", 1)


def test_checks_of_a_training_are_those_of_its_preflight_without_hosts(tmp_path: Path) -> None:
    config, there = config_of(tmp_path), Resources(4, 0, 2**36, None)
    run = ResolvedRun(RunContext(config, Folder(str(tmp_path / "runs"))), there, Allocation(1, "cpu", 1))
    assert [check.passed for check in run_preflight(run)] == [True] * 5
    few_slots = run.context.with_config(replace(config, train=TrainConfig(slots=2, steps=1)))
    many = run_preflight(replace(run, context=few_slots, allocation=Allocation(3, "cpu", 1)))
    assert [check.name for check in many if not check.passed] == ["slots"]


@pytest.mark.parametrize(
    ("mode", "address", "hosts"), [("inline", None, False), ("ray", None, False), ("ray", "10.0.0.1:6379", True)]
)
def test_hosts_are_looked_at_in_a_cluster_that_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, address: str | None, hosts: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launch = replace(config_of(tmp_path).launch, mode=mode, **({"address": address} if address else {}))
    assert bool(_runs_on_hosts(launch)) is hosts


def test_shares_that_cannot_be_dealt_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = config_of(tmp_path), str(write_text(tmp_path))
    sources = {"web": {"source": text}, "rare": {"source": text, "weight": 1e-9}}
    run_check(Parsed(replace(config, data=replace(config.data, source=DataConfig().source, sources=sources)), "tiny"))
    *files, note = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    assert files == ["note data: web: files: 1 read", "note data: rare: files: 1 read"]
    assert "rare has 9.54e-07 where 1e-09 is wanted" in note
