"""Profiles of real trainings on CPUs: the trace opens, the table names costly operations, and failures become warnings."""

import gzip
import json
import os
import re
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, ProfileConfig, TrainConfig, ValidationConfig
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.observers.throughput import Throughput
from raystride.pipelines.observability.profiling.profile import ProfileObserver
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.run import run_worker
from tests.distributed import LIMIT_S
from tests.errors import refused
from tests.fork_server import CONTEXT
from tests.processes import make_job
from tests.receipts import taken
from tests.tiny import tiny, write_text


def _train(job: Job, variables: dict[str, str], tell: Connection) -> None:
    os.environ.update(variables)
    posted: list[Entry] = []

    def post(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        posted.extend(entries)
        return taken(entries)

    run_worker(job, WorkerInfo(), post, lambda: False)
    tell.send(posted)


def train(
    tmp_path: Path, profile: ProfileConfig, run: str = "mine", variables: dict[str, str] | None = None, **changes: Any
) -> tuple[Path, list[Entry]]:
    """Trains six steps; returns the folder of the profiles, and the sent entries.

    In a process of its own, as trainings are: in one where much else has run, a profile with stacks may hold names that are
    none, by which PyTorch fails (UnicodeDecodeError, RecursionError).
    """
    config = tiny(
        write_text(tmp_path),
        train=TrainConfig(steps=6, slots=2, slot_size=1),
        validation=ValidationConfig(every=0, samples=2),
    )
    hear, tell = CONTEXT.Pipe(duplex=False)
    job = make_job(replace(config, profile=profile, **changes), tmp_path, run)
    process = CONTEXT.Process(target=_train, args=(job, variables or {}, tell), daemon=True)
    process.start()
    tell.close()
    posted = hear.recv()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    return tmp_path / run / "profiles", posted


def event_texts(posted: list[Entry], name: str) -> list[str]:
    """Returns the texts of the events with this name."""
    return [entry["values"]["text"] for entry in posted if entry["kind"] == "event" and entry["values"]["name"] == name]


def test_torchs_trace_holds_the_windows_phases_and_the_table_what_costs(tmp_path: Path) -> None:
    folder, posted = train(tmp_path, ProfileConfig(tool="torch", steps=(3, 4)))
    stem = "torch-rank0-steps3-4"
    assert not event_texts(posted, "warning")
    (line,) = event_texts(posted, "profile")
    assert "3-4" in line
    assert "rank 0" in line
    assert f"profiles/{stem}.html" in line
    trace = json.loads(gzip.decompress((folder / f"{stem}.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("step") == 2
    assert {"data", "slot", "forward", "backward", "reduce", "update"} <= set(names)
    rows = json.loads((folder / f"{stem}-operations.json").read_text())
    assert any(row["name"].startswith("aten::") for row in rows[:10])
    assert rows[0]["self_cpu_us"] == max(row["self_cpu_us"] for row in rows)
    assert rows[0]["name"][:50] in (folder / f"{stem}-operations.txt").read_text()
    text = (folder / f"{stem}.html").read_text()
    assert re.search(rf"costliest [^<]*{re.escape(rows[0]['name'])}", text)
    assert "went into" in text
    files = {entry["values"]["name"] for entry in posted if entry["kind"] == "artifact"}
    assert files == {f"profiles/{path.name}" for path in folder.iterdir()}


@pytest.mark.long
def test_memorys_time_line_and_who_takes_most(tmp_path: Path) -> None:
    for number in range(3):
        (place := tmp_path / str(number)).mkdir()
        folder, posted = train(place, ProfileConfig(tool="memory", steps=(3, 3)))
        # PyTorch 2.13 rarely reads names that are freed (once in some seventy runs of this test).
        if "UnicodeDecodeError" not in str(event_texts(posted, "warning")):
            break
    assert not event_texts(posted, "warning")
    assert (folder / "memory-rank0-steps3-3-timeline.html").stat().st_size > 10_000
    rows = json.loads((folder / "memory-rank0-steps3-3-allocations.json").read_text())
    assert rows[0]["self_bytes"] >= rows[-1]["self_bytes"] > 0
    assert rows[0]["name"][:50] in (folder / "memory-rank0-steps3-3.html").read_text()


def test_a_profiles_own_seconds_are_no_training(tmp_path: Path) -> None:
    """On a clock on which a step takes a second, and each of the profile's messages a hundred."""
    now = [0.0]

    class SlowSender:
        def put(self, entry: Entry) -> None:
            now[0] += 100

    throughput = Throughput(lambda: now[0])
    profile = ProfileConfig(tool="torch", steps=(2, 2))
    profiled = ProfileObserver(profile, Folder(str(tmp_path)), SlowSender(), throughput.on_pause, lambda: now[0])  # type: ignore[arg-type]
    observers = [profiled, throughput]  # as a worker has them
    for observer in observers:
        observer.on_start(RunFacts(run="mine", attempt="a1", tokens_per_step=8))
    for step in range(1, 7):
        now[0] += 1
        for observer in observers:
            observer.on_step(step)
    summary: Any = {}
    throughput.on_end(summary)
    assert now[0] > 6, "the profile told nothing"
    assert (summary["step_seconds_p50"], summary["step_seconds_p95"]) == (1, 1)


def test_a_window_that_the_run_does_not_reach_is_said(tmp_path: Path) -> None:
    folder, posted = train(tmp_path, ProfileConfig(tool="torch"))
    (warning,) = event_texts(posted, "warning")
    assert "step 20," in warning
    assert "profile.steps" in warning
    assert not folder.exists()
    folder, posted = train(tmp_path, ProfileConfig(tool="torch", steps=(5, 9)), run="cut")
    assert (folder / "torch-rank0-steps5-6.html").exists()


def test_other_ranks_are_not_watched(tmp_path: Path) -> None:
    folder, posted = train(tmp_path, ProfileConfig(tool="torch", steps=(2, 3), ranks=(1,)))
    assert not event_texts(posted, "warning")
    assert not folder.exists()


def test_without_nsight_the_training_goes_on_and_says_why(tmp_path: Path) -> None:
    _, posted = train(tmp_path, ProfileConfig(tool="nsys", steps=(2, 3)), variables={"PATH": "/nowhere"})
    (warning,) = event_texts(posted, "warning")
    assert "rank 0: nsys " in warning
    assert "PATH" in warning
    assert [entry for entry in posted if entry["kind"] == "summary"]


def test_ncu_needs_a_process_of_its_own() -> None:
    with refused("profile.tool", "ncu", names=["launch.mode"]):
        Config(profile=ProfileConfig(tool="ncu"))
    with refused("profile.steps", (5, 4)):
        ProfileConfig(steps=(5, 4))
