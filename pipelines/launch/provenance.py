"""Provenance of a run: the environment and data that it records, its tags, and the links to its pages.

environment = describe_run(config, resources, allocation, attempt, base, prepared, previous)    # environment.json
tags = run_tags(environment, config, allocation, dashboard)                                      # of its MLflow run
"""

import getpass
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

from raystride.pipelines.config import Config, LaunchConfig, RecordConfig, ScalingConfig
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.train import parse_branch
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.progress import describe_speeds, load_stages
from raystride.pipelines.data.prepare.raw_files import hash_raw_files, read_raw_files
from raystride.pipelines.data.pretrained import BaseInfo
from raystride.pipelines.data.stored_code import hash_named_code
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.cluster import has_several_nodes, run_on_node
from raystride.pipelines.launch.cluster.internals import submission_id, submitted_metadata
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.hang.process import process_start_time
from raystride.pipelines.launch.run_store.changes import identify_own_model
from raystride.pipelines.launch.run_store.resume import (
    CHANGED_AT,
    PreviousAttempt,
    accept_bits,
    describe_bit_dependencies,
    read_previous_bits,
)
from raystride.pipelines.observability.record import describe_environment
from raystride.pipelines.observability.record.environment import DataFingerprints, Environment, RunEnvironment, describe_node
from raystride.pipelines.observability.record.mlflow.links import is_on_server, job_link, run_link
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import newest_manifest

OWNER_TAG = "raystride.owner"
RAY_WORKER_SCRIPT = "default_worker.py"
"""The script of Ray's worker processes, in which trials are driven."""


def driver_start(fallback: float) -> float:
    """Returns the start of this process in seconds since 1970, `fallback` if it is unknown."""
    return process_start_time(os.getpid()) or fallback


def describe_run(
    config: Config,
    resources: Resources,
    allocation: Allocation,
    attempt: str,
    base: BaseInfo | None,
    prepared: PreparedData,
    previous: PreviousAttempt | None,
    owner: str = "",
) -> RunEnvironment:
    """Returns the content of a run's `environment.json`: machine, versions, base, code, data. Needs Ray unless inline."""
    found = {
        **describe_surroundings(config.launch, resources, allocation),
        "attempt": attempt,
        **({"owner": owner} if owner else {}),
        **({"tags": dict(config.record.tags)} if config.record.tags else {}),
        "base": asdict(base) if base else {},
        "code_sha256": hash_named_code(config),
        **describe_data(prepared, previous),
    }
    if (task := build_task(config)).reads_dataset:
        found["own_model"] = identify_own_model(task)
    return cast(RunEnvironment, found)


def describe_surroundings(launch: LaunchConfig, resources: Resources, allocation: Allocation) -> Environment:
    """Returns the environment of the run: this process's, with versions and hardware of a node with workers."""
    found = describe_environment()
    if launch.mode == "ray" and has_several_nodes():
        found.update(
            cast(Environment, run_on_node(describe_node, launch.cluster_timeout_s, gpu=allocation.device == "cuda"))
        )
    if allocation.device == "cuda" and not found["gpus"] and resources.gpu_name:  # no NVML there, or GPUs of another vendor
        found["gpus"] = [{"name": resources.gpu_name, "memory_bytes": int(resources.gpu_memory_bytes or 0), "driver": ""}]
    return found


def describe_data(prepared: PreparedData, previous: PreviousAttempt | None) -> DataFingerprints:
    """Returns the data's fingerprints for `environment.json`, to compare later attempts with, ended sources included."""
    fingerprints, stages = prepared.identity, load_stages(prepared.folder)
    found = DataFingerprints(data=fingerprints.data)
    if content := {**(previous.content if previous else {}), **_hash_raw_content(prepared)}:
        found["content"] = content
    if stages:
        found["prepared_at"] = describe_speeds(stages)
    if prepared.lines:
        found["data_lines"] = list(prepared.lines)
    if not fingerprints.sources:
        return found
    sources = {**(previous.sources if previous else {}), **fingerprints.sources}
    return {**found, "sources": sources, "learned": fingerprints.learned}


def _hash_raw_content(prepared: PreparedData) -> dict[str, str]:
    """Returns hashes of the raw files by source, as far as their preparations have stored them."""
    sources = prepared.manifest.sources
    folders = {name: prepared.folder.parent / folder for name, folder in sources.items()} or {"": prepared.folder}
    return {name: hash_raw_files(files) for name, folder in folders.items() if (files := read_raw_files(folder))}


def checkpoint_facts(
    config: Config, folder: Folder, environment: RunEnvironment, allocation: Allocation
) -> dict[str, object]:
    """Returns the environment facts of every checkpoint; `environment` gets the steps after which exact bits were others.

    Raises SettingError if an exact run would not resume exactly, unless `resume.accept bits`.
    """
    kept = {key: environment.get(key) for key in ("commit", "python", "versions") if key in environment}
    facts: dict[str, object] = kept | {"device": allocation.device, "threads": allocation.threads}
    if config.train.exact:
        checkpoints, until = folder / "checkpoints", math.inf
        if config.train.branch_from and not newest_manifest(folder):
            run, step = parse_branch(config.train.branch_from)
            checkpoints, until = folder.parent / run / "checkpoints", step or math.inf
        bits = describe_bit_dependencies(config, environment, allocation, read_previous_bits(checkpoints, until)[1])
        facts["bits"] = bits = accept_bits(checkpoints, bits, config.resume, until)
        if CHANGED_AT in bits:
            environment["bits_changed_at"] = cast(list[int], bits[CHANGED_AT])
    return facts


def find_owner(record: RecordConfig) -> str:
    """Returns whom this run is charged to: `record.owner`, else the job's metadata, else $USER, "" if nobody is named."""
    metadata = {} if record.owner else submitted_metadata()
    return record.owner or metadata.get("owner") or metadata.get("user") or os.environ.get("USER", "")


def metric_labels(owner: str, record: RecordConfig) -> dict[str, str]:
    """Returns owner and tags of a run as labels of its metrics."""
    return {"owner": owner, "tags": ",".join(f"{name}={value}" for name, value in sorted(record.tags.items()))}


def owner_tags(owner: str, record: RecordConfig) -> dict[str, str]:
    """Returns owner and tags of a run as its tags in MLflow and the metadata of its job in Ray."""
    given = {str(name): str(value) for name, value in record.tags.items()}
    return given | ({OWNER_TAG: owner} if owner else {})


def describe_changes(config: Config, preset: str) -> dict[str, str]:
    """Returns, as tags, the preset that a training was started with and the settings that differ from it, else from their
    defaults.
    """
    if preset == "run":  # a run that goes on, or settings without a file
        return {}
    base = load_settings(Config, preset if preset in presets() else {}).settings.flat()
    values = {key: value for key, value in config.flat().items() if key not in ("run", "storage")}
    changed = [f"{key}={value}" for key, value in values.items() if base.get(key) != value]
    return {"raystride.preset": preset, "raystride.changed": " ".join(changed) or "nothing"}


def run_tags(
    environment: RunEnvironment, scaling: ScalingConfig, record: RecordConfig, allocation: Allocation, dashboard: str | None
) -> dict[str, str]:
    """Returns the tags of the run in MLflow; with a dashboard also the job's id and page in Ray."""
    owner = environment.get("owner", "")
    strategy = scaling.strategy
    tags = {
        "strategy": strategy if strategy != "auto" else "ddp" if allocation.workers > 1 else "single",
        "version": environment["versions"]["raystride"],
        "commit": environment.get("commit"),
        "dirty": environment.get("dirty"),
        "data": environment["data"],
        "workers": allocation.workers,
        "device": allocation.device,
        "bits_changed_at": environment.get("bits_changed_at"),
    }
    ours = {f"raystride.{key}": str(value) for key, value in tags.items() if value is not None}
    return ours | owner_tags(owner, record) | _ray_tags(dashboard) | _mlflow_tags(environment, dashboard)


def _mlflow_tags(environment: RunEnvironment, dashboard: str | None) -> dict[str, str]:
    """Returns the tags that MLflow shows as "Source" and "Created by"."""
    script = Path(sys.argv[0]).name
    script = "" if script == RAY_WORKER_SCRIPT else script
    tags = {"mlflow.source.name": script or "raystride", "mlflow.source.type": "JOB" if dashboard else "LOCAL"}
    if commit := environment.get("commit"):
        tags["mlflow.source.git.commit"] = commit
    with suppress(OSError, KeyError, ImportError):  # no such user in this container
        tags["mlflow.user"] = environment.get("owner") or getpass.getuser()  # noqa: TID251
    return tags


def _ray_tags(dashboard: str | None) -> dict[str, str]:
    """Returns the job's id in Ray and its page, if there is a dashboard."""
    if not dashboard:
        return {}
    import ray

    job = submission_id() or str(ray.get_runtime_context().get_job_id())
    return {"raystride.ray_job_id": job, "raystride.ray_job": job_link(dashboard, job)}


def show_pages(folder: Folder, tags: dict[str, str], log: Callable[[str], None]) -> None:
    """Shows the steps after which an exact run has other bits, and at the beginning of a submitted job's log the links."""
    if steps := tags.get("raystride.bits_changed_at"):
        log(f"exact    after step {steps.strip('[]')} its bits are others than they would have been (resume.accept bits)")
    if page := tags.get("raystride.ray_job"):
        log(f"ray      {page}")
    with suppress(ValueError):
        reference = read_reference(folder)
        if is_on_server(reference):
            log(f"mlflow   {run_link(reference)}")
