"""Names that others have written down: they stay, whatever code is renamed.

The lists are literals, compared with what a small run leaves in its folder and in MLflow, with what commands print, and with
what processes return. A new name is added to its list; a name that is gone fails here.

    python -m tests.end_to_end.test_frozen_names        # writes frozen_settings.json anew: flags of all commands, and places
"""

import contextlib
import errno
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raystride
from raystride import command
from raystride.pipelines.config import Config, LaunchConfig, RecordConfig, SampleConfig
from raystride.pipelines.config.deploy import TargetConfig
from raystride.pipelines.system.storage.folder import Folder
from tests.end_to_end.tracking import artifacts, only_run
from tests.ray_jobs.jobs import run_well
from tests.tiny import tiny, write_text

SETTINGS = Path(__file__).with_name("frozen_settings.json")
"""The flags of each command, and the settings of a place."""

LIBRARY = """
CannotRun CheckpointConfig Config DataConfig DataError FitConfig GuardConfig LaunchConfig LoraConfig ModelConfig
ObjectiveConfig Observer OptimizerConfig ProfileConfig RecordConfig ResumeConfig Run SampleConfig ScalingConfig SettingError
SweepConfig SweepInterrupted SweepJobConfig SweepTerminated Task TokenizerConfig TrainConfig TrainingFailed
TrainingInterrupted TrainingTerminated ValidationConfig check evaluate export fit generate predict prepare
register_model register_observer register_source register_task sweep train
"""
COMMANDS = """
certificates check completion deploy evaluate export generate node predict prepare presets report runs serve storage sweep
train ui
"""
SUMMARY = """
average_power_watts best_step complete data_wait_share ending energy_covers energy_joules flops_per_token gpu_idle_share
gpu_seconds joules_per_token journal kernels metric metrics mfu mlflow_run_id owner parameters parameters_sha256
peak_memory_bytes precision products resumed_from run samples_seen seconds_to_first_step sha256 slowest_node slowest_rank
status step_seconds_p50 step_seconds_p95 steps straggler_loss_share throttled_seconds throttled_seconds_by_reason
tokens_per_second tokens_seen train_loss unit usage val_loss waiting_share worker_seconds workers writer
"""
KINDS = "artifact checkpoint error event metrics parameters rank ranks summary system tags totals"
WRITTEN_KINDS = "checkpoint event metrics parameters summary system tags"
"""The kinds that a run of one worker without errors writes."""
ENTRY = "attempt kind sender sequence step time values"
VALUES = {
    "Artifact": "name",
    "CheckpointDone": "path",
    "Error": "rank text",
    "Event": "name text",
    "Rank": "data_s node own_s rank seconds steps world",
    "RanksTime": "own_s ranks steps",
    "Totals": "covers idle joules node nodes readings seconds source throttled_by_reason throttled_seconds tokens unmetered",
}
"""Keys of the values of an entry, by its class."""
EVENTS = "attempt end note phase"
METRICS = """
data_wait_share epoch gradient_norm learning_rate peak_memory_bytes phase_backward_share phase_checkpoint_share
phase_data_share phase_forward_share phase_reduce_share phase_update_share phase_validation_share seconds_to_first_step
start/build_s start/cluster_s start/data_s start/driver_s start/first_step_s start/torch_s step_seconds_mean step_seconds_p50
step_seconds_p95 tokens_per_second tokens_seen train_loss val_loss val_perplexity
"""
IN_MLFLOW = """
data_wait_share peak_memory_bytes phase_backward_share phase_checkpoint_share phase_data_share phase_forward_share
phase_reduce_share phase_update_share phase_validation_share seconds_to_first_step start.build_s start.cluster_s start.data_s
start.driver_s start.first_step_s start.torch_s step_seconds_mean step_seconds_p50 step_seconds_p95 tokens_per_second
train/epoch train/gradient_norm train/learning_rate train/loss train/tokens_seen val/loss val/perplexity
"""
"""The figures of `METRICS` in MLflow, constants among the parameters; `pipelines.observability.record.mlflow.names`."""
READINGS = """
run_data_wait_share run_peak_memory_bytes run_step_seconds_p50 run_step_seconds_p95 run_tokens_per_second
system/cpu_utilization_percentage system/disk_available_megabytes system/disk_usage_megabytes system/disk_usage_percentage
system/network_receive_megabytes system/network_transmit_megabytes system/system_memory_usage_megabytes
system/system_memory_usage_percentage
"""
"""Machines with other devices have more."""
TAGS = """
raystride.attempt raystride.changed raystride.checkpoint raystride.commit raystride.data raystride.device raystride.dirty
raystride.kernels raystride.opening raystride.owner raystride.preset raystride.strategy raystride.version raystride.workers
"""
ARTIFACTS = "config.yaml curve.png environment.json log.txt report.html sample.txt summary.json"
GAUGES = """
raystride_data_wait_share raystride_loss raystride_mfu raystride_step raystride_step_seconds raystride_tokens_per_second
raystride_val_loss
"""
FILES = """
.lock attempts/ATTEMPT/config.yaml attempts/ATTEMPT/environment.json checkpoints/.attempt-GROUP.lock checkpoints/attempt
checkpoints/best checkpoints/last checkpoints/step-00000006/ATTEMPT-GROUP/facts.json
checkpoints/step-00000006/ATTEMPT-GROUP/rank-0.bin
checkpoints/step-00000006/ATTEMPT-GROUP/tokenizer/tokenizer_kind.json checkpoints/step-00000006/MANIFEST-1.json
checkpoints/step-00000006/MANIFEST.json config.yaml
curve.png environment.json journal/ATTEMPT-000001.jsonl log.txt metrics.jsonl mlflow.json owner.json report.html sample.txt
summary.json uses.json
"""
PREPARED_FILES = """
documents.hashes documents.hashes.sha256 files.parquet files.parquet.sha256 manifest.json manifest.json.sha256 stages.json
tokenizer/tokenizer_kind.json
train/00000.arrow train/00000.hashes validation/00001.arrow validation/00001.hashes
"""
KEYS = {
    "checkpoints/step-00000006/MANIFEST.json": """
attempt bits commit data device fed files folder format order parent_step positions python run sha256 state step tensors term
threads versions world writer
""",
    "environment.json": """
attempt base code_sha256 command commit content cores cpu data data_lines dirty gpus host memory_bytes owner platform
prepared_at python settings_sha256 sha256 tags versions writer
""",
    "uses.json": "attempt prepared sha256 writer",
    "mlflow.json": "ended experiment_id logged names run_id sha256 token uri writer",
    "owner.json": "released sha256 term writer",
}
"""Keys of files in a run's folder, beside those of the summary."""
MANIFEST_PARTS = {
    "order": "block first_window samples seed shuffle window",
    "state": """
best best_loss best_step dropped interval left_out loss_scale loss_seen position rewinds seconds step tokens_seen train_loss
val_loss worse_validations
""",
}
PREPARED = "end_id fingerprint format id_type learned skipped source splits tokenizers vocabulary_size"
SHARD = "bytes documents file ids_offset mask_offset rows rows_offset sha256 tokens top_hash"

HELPS = (
    *("train", "sweep", "evaluate", "predict", "generate", "export", "serve", "report", "storage", "ui", "certificates"),
    *("runs list", "runs show", "runs compare", "runs audit", "runs prune", "runs delete", "runs replay"),
    *("deploy slurm", "deploy serve"),
)
"""The commands that have flags; `train` stands for `check` and `prepare`, too, `slurm` for the other places."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a run of six steps with MLflow, a sample and readings of the machine."""
    path = tmp_path_factory.mktemp("frozen")
    settings = tiny(write_text(path), storage=str(path / "runs"), launch=LaunchConfig(mode="inline"))
    record = RecordConfig(system_every_s=0.02, owner="me", tags={"project": "parser"})
    return replace(settings, record=record, sample=SampleConfig(tokens=4, prompt="line "))


@pytest.fixture(scope="module")
def folder(config: Config) -> Path:
    """The folder of that run."""
    run_well("train", config, "--run", "frozen")
    return Path(config.storage) / "frozen"


@pytest.fixture(scope="module")
def entries(folder: Path) -> list[dict[str, Any]]:
    """Its journal."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def _same(found: Iterable[str], frozen: str) -> None:
    """Fails if names are gone or new, and lists both."""
    there, listed = set(found), set(frozen.split())
    gone, new = sorted(listed - there), sorted(there - listed)
    assert (gone, new) == ([], []), f"gone: {gone}; new, to be added to the list: {new}"


def _names_of_files(folder: Path) -> set[str]:
    """Returns all files below a folder, with a word for each attempt and group, and one file of each series."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    plain = (re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "ATTEMPT", name) for name in names)
    plain = (re.sub(r"(?<=ATTEMPT-)[0-9a-f]{8}|(?<=attempt-)[0-9a-f]{8}", "GROUP", name) for name in plain)
    return {name for name in plain if not re.search(r"ATTEMPT-0000(?!01)|step-0000000[0-5]", name)}


def test_names_of_the_library_are_the_same() -> None:
    _same(raystride.__all__, LIBRARY)
    assert all(hasattr(raystride, name) for name in LIBRARY.split())


def test_commands_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--help"]) == 0
    _same(re.findall(r"^  (\w+)", capsys.readouterr().out, re.MULTILINE), COMMANDS)


def _settings() -> Iterator[tuple[str, list[str]]]:
    """Yields each command with its flags, except for those of the parser itself, and the settings of a place."""
    for name in HELPS:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            command.run([*name.split(), "--help", "all"])
        flags = re.findall(r"^  (?:-\w, )?--([\w.-]+)", printed.getvalue(), re.MULTILINE)
        yield name, sorted(set(flags) - {"help", "print_config", "config"})
    yield "a place", sorted(_leaves(asdict(TargetConfig())))


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]


def test_settings_are_the_same() -> None:
    frozen = json.loads(SETTINGS.read_text())
    for name, found in _settings():
        _same(found, " ".join(frozen.pop(name)))
    assert not frozen


def test_a_runs_files_are_the_same(folder: Path) -> None:
    _same(_names_of_files(folder), FILES)
    (prepared,) = (folder.parent / ".prepared").iterdir()
    _same(_names_of_files(prepared), PREPARED_FILES)


def test_keys_of_a_runs_files_are_the_same(folder: Path) -> None:
    _same(_json(folder, "summary.json"), SUMMARY)
    for name, keys in KEYS.items():
        _same(_json(folder, name), keys)
    manifest = _json(folder, "checkpoints/step-00000006/MANIFEST.json")
    for part, keys in MANIFEST_PARTS.items():
        _same(manifest[part], keys)
    for file in manifest["files"].values():
        _same(set(file) - {"ends"}, "bytes sha256")  # of tensors, the first and the last part
    for tensor in manifest["tensors"].values():
        _same(tensor, "chunks dtype size")
        _same(tensor["chunks"][0], "bytes file offset offsets sizes")
    (prepared,) = (folder.parent / ".prepared").iterdir()
    described = _json(prepared, "manifest.json")
    _same(described, PREPARED)
    _same(described["source"], "bytes files kind name tokenizer_files")
    _same(described["splits"], "train validation")
    _same(described["splits"]["train"][0], SHARD)


def test_settings_that_a_run_stores_are_the_flags(folder: Path, entries: list[dict[str, Any]]) -> None:
    flags = set(json.loads(SETTINGS.read_text())["train"]) - {"config"}
    (parameters,) = [entry["values"] for entry in entries if entry["kind"] == "parameters"]
    sections = {flag for flag in flags if any(other.startswith(f"{flag}.") for other in flags)}
    # A mixture has its own, by the names of its parts; a model of the user's own, by the names of its arguments.
    unset = {"data.sources", "record.tags", "fit.model_args", "fit.data_args"}
    assert flags - sections - unset <= set(parameters)


def test_entries_of_the_journal_are_the_same(entries: list[dict[str, Any]]) -> None:
    from raystride.pipelines.observability.record import entry as defined

    _same(defined.KINDS, KINDS)
    assert {*WRITTEN_KINDS.split()} <= {entry["kind"] for entry in entries}
    for entry in entries:
        _same(entry.keys() - {"writer"}, ENTRY)
    assert entries[0]["writer"] == raystride.__version__, "the first of a segment says it"
    for name, keys in VALUES.items():
        _same(getattr(defined, name).__annotations__["values"].__annotations__, keys)
    events = [entry["values"] for entry in entries if entry["kind"] == "event"]
    assert {*EVENTS.split()} <= {event["name"] for event in events}
    assert all(set(event) == {"name", "text"} for event in events)
    (path,) = {key for entry in entries if entry["kind"] == "checkpoint" for key in entry["values"]}
    assert path == "path"


def test_figures_of_the_journal_are_the_same(entries: list[dict[str, Any]]) -> None:
    for kind, names in (("metrics", METRICS), ("system", READINGS)):
        found = {name for entry in entries if entry["kind"] == kind for name in entry["values"]}
        assert not set(names.split()) - found, "these names are gone"


def test_names_in_mlflow_are_the_same(config: Config, folder: Path) -> None:
    run = only_run(config, folder.name)
    assert not {*IN_MLFLOW.split(), *READINGS.split()} - {*run.data.metrics, *run.data.params}, "these names are gone"
    _same((name for name in run.data.tags if name.startswith("raystride.")), TAGS)
    _same(artifacts(config, run), ARTIFACTS)


def test_gauges_are_the_same() -> None:
    from raystride.pipelines.observability.observers import ray_metrics

    _same([ray_metrics.STEP.name, *(shown.name for shown in ray_metrics.GAUGES.values())], GAUGES)


def test_names_of_actors_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from raystride.pipelines.launch.cluster import resubmission

    asked: dict[str, Any] = {}

    def remote(**options: Any) -> Callable[[type], Any]:
        asked.update(options)
        ready = SimpleNamespace(remote=lambda: None)
        actor = SimpleNamespace(**dict.fromkeys(vars(resubmission.ResubmissionActor), ready))
        return lambda actor_class: SimpleNamespace(remote=lambda *_: actor)

    context = SimpleNamespace(get_node_id=lambda: "head")
    ray = SimpleNamespace(remote=remote, nodes=list, get=lambda _: None, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert resubmission.start_resubmission("http://head:8265", "raysubmit_x", 1)
    assert (asked["name"], asked["namespace"]) == ("resubmission-raysubmit_x", "raystride")
    assert resubmission.next_job_name("raysubmit_x") == "raysubmit_x-again-1"


def _raised(error: BaseException) -> Callable[[], int]:
    def job() -> int:
        raise error

    return job


def test_exit_codes_are_the_same() -> None:
    from raystride.pipelines.launch.console.exit_codes import run_with_exit_code
    from raystride.pipelines.launch.run_store.lease import DriverIsolated
    from raystride.pipelines.system.signals import HungUp, Terminated

    failed = raystride.TrainingFailed(ValueError("x"), step=None, folder=Folder("memory://x"))
    codes = {
        0: [],
        1: [failed],
        2: [raystride.SettingError("x"), raystride.DataError("x")],
        3: [raystride.CannotRun("x"), OSError(errno.ENOSPC, "x")],
        75: [DriverIsolated("x")],
        129: [HungUp()],
        130: [KeyboardInterrupt()],
        143: [Terminated()],
    }
    assert run_with_exit_code(lambda: 0) == 0
    for code, errors in codes.items():
        for error in errors:
            assert run_with_exit_code(_raised(error)) == code, repr(error)
    assert command.run(["no-such-word"]) == 2


if __name__ == "__main__":
    SETTINGS.write_text(json.dumps(dict(_settings()), indent=1) + "\n")
