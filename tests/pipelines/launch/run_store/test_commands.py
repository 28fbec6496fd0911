"""The command that lists, shows and prunes runs, as a user starts it."""

import errno
import json
import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raystride.command import run as run_command
from raystride.jobs.runs import _build_parser
from raystride.pipelines.launch.run_store import lease
from raystride.pipelines.launch.run_store.lease import Owner, RunLease, RunLocked
from raystride.pipelines.system.storage.folder import Folder

ELSEWHERE = {"machine": "another", "host": "another-host"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, of which the first is the best."""
    folder = tmp_path / "small-1f3a"
    for step in (100, 200, 300):
        data = folder / f"checkpoints/step-{step:08}" / "a1"
        data.mkdir(parents=True)
        (data / "rank0.bin").write_bytes(b"x" * 2**20)
        (data.parent / "MANIFEST.json").write_text('{"attempt": "a1"}')
    (folder / "checkpoints/best").write_text("step-00000100\n")
    (folder / "checkpoints/last").write_text("step-00000300\n")
    (folder / "journal").mkdir()
    entry = {"attempt": "a1", "sender": "r", "sequence": 1, "kind": "metrics", "time": 1.0, "step": 300}
    (folder / "journal/a1-000001.jsonl").write_text(json.dumps(entry | {"values": {"train_loss": 2.5}}) + "\n")
    summary = {"run": folder.name, "status": "finished", "steps": 300, "train_loss": 2.5, "val_loss": "NaN"}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def own(run: Path, **changes: Any) -> None:
    """Writes the owner file of this very process, with changes."""
    (run / "owner.json").write_text(json.dumps(asdict(Owner.this_process("a1")) | changes))


def data_of(run: Path) -> list[str]:
    """Steps whose data is still there."""
    return sorted(path.parent.parent.name for path in run.glob("checkpoints/*/a1/rank0.bin"))


def test_list_and_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "list", "--storage", str(run.parent)]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("small-1f3a", "finished", "300", "2.5000", "NaN"))
    assert run_command(["runs", "show", run.name, "--storage", str(run.parent)]) == 0
    shown = capsys.readouterr().out
    assert "training loss    2.5000" in shown
    assert [line.split()[0] for line in shown.splitlines()[-3:]] == ["results", "mlflow", "next"]


def test_a_storage_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "list", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


def test_a_replay_is_told_where_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _build_parser().parse_args(["replay", run.name, "--mlflow-uri", "http://there", "--experiment", "words"])
    assert (given.mlflow_uri, given.experiment, given.storage, given.name) == ("http://there", "words", "runs", run.name)
    given = _build_parser().parse_args(["replay", run.name])
    assert (given.mlflow_uri, given.experiment) == (None, None)


def test_two_runs_are_compared_by_what_they_differ_in(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.with_name("large-2b4c")
    shutil.copytree(run, other)
    (other / "summary.json").write_text(
        (run / "summary.json").read_text().replace("2.5", "2.25").replace(run.name, other.name)
    )
    for folder, width in ((run, 64), (other, 128)):
        (folder / "config.yaml").write_text(f"seed: 3\nmodel:\n  width: {width}\n")
    assert run_command(["runs", "compare", run.name, other.name, "--storage", str(run.parent)]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == [run.name, other.name]
    assert ["model.hidden_size", "64", "128"] in lines
    assert not [line for line in lines if line and line[0] == "seed"], "they have it in common"
    assert "mlflow   has no page that compares them" in shown
    assert run_command(["runs", "compare", run.name, run.name, "--storage", str(run.parent)]) == 2
    assert f"compare is given one run, {run.name}" in capsys.readouterr().err


def test_prune_keeps_the_newest_the_best_and_every_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "prune", run.name, "--keep", "1", "--storage", str(run.parent)]) == 0
    assert "1.0 MiB freed" in capsys.readouterr().out
    assert data_of(run) == ["step-00000100", "step-00000300"]
    assert len(list(run.glob("checkpoints/*/MANIFEST.json"))) == 3


def test_prune_takes_the_greatest_step_for_the_newest(run: Path) -> None:
    for before, after in (("step-00000200", "step-99999999"), ("step-00000300", "step-100000000")):
        (run / "checkpoints" / before).rename(run / "checkpoints" / after)
    for hint in ("best", "last"):
        (run / "checkpoints" / hint).write_text("step-00000100\n")
    assert run_command(["runs", "prune", run.name, "--keep", "1", "--storage", str(run.parent)]) == 0
    assert data_of(run) == ["step-00000100", "step-100000000"]


@pytest.mark.parametrize("words", [["prune", "--all"], ["delete"]], ids=" ".join)
def test_a_whole_run_is_removed_if_it_is_meant(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [words[0], run.name, *words[1:], "--storage", str(run.parent)]
    assert run_command(["runs", *command, "--dry-run"]) == 0
    assert run_command(["runs", *command]) == 2, "there is nobody to ask"
    assert run.exists()
    assert run_command(["runs", *command, "--yes"]) == 0
    assert str(run) in capsys.readouterr().out
    assert not run.exists()


def test_the_figures_of_a_killed_run_are_those_of_its_journal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    assert run_command(["runs", "list", "--storage", str(run.parent)]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:3] == [run.name, "interrupted", "300"]
    assert "2.5000" in row


COMMANDS = (["prune", "small-1f3a", "--all", "--yes"], ["prune", "small-1f3a"], ["replay", "small-1f3a"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_with_a_living_owner_is_not_touched(run: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own(run)
    assert run_command(["runs", *command, "--storage", str(run.parent)]) == 2
    assert "stop it first" in capsys.readouterr().err
    assert len(data_of(run)) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_an_owner_on_another_host_is_watched_whatever_its_clock_says(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is five minutes behind: by one read, its run was removed while it trained."""
    monkeypatch.setattr(lease, "POLL_S", 0.01)
    ended, began = threading.Event(), time.time() - 300

    def renew() -> None:
        while not ended.wait(0.01):
            (run / "owner.new").write_text(
                json.dumps(asdict(Owner.this_process("a1")) | ELSEWHERE | {"renewed": began + time.monotonic()})
            )
            (run / "owner.new").replace(run / "owner.json")

    own(run, **ELSEWHERE, renewed=began)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert run_command(["runs", *command, "--storage", str(run.parent)]) == 2
        assert run_command(["runs", "list", "--storage", str(run.parent)]) == 0
    finally:
        ended.set()
        thread.join()
    said = capsys.readouterr()
    assert re.search(r"waiting up to 60 s: process \d+ on another-host has trained run small-1f3a", said.err)
    assert "on another-host: stop it first" in said.err
    assert len(data_of(run)) == 3
    assert re.search(r"running\? \(lease \S+ \S+ old\)", said.out)


def test_runs_of_dead_hosts_are_watched_at_once(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    others = [run.with_name(f"other{number}") for number in range(20)]
    for other in others:
        shutil.copytree(run, other)
        own(other, **ELSEWHERE)
    assert (
        run_command(["runs", "prune", *(other.name for other in others), "--all", "--yes", "--storage", str(run.parent)])
        == 0
    )
    assert len(re.findall("waiting up to", capsys.readouterr().err)) == 1
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_a_run_is_owned_while_it_is_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, refused = Folder.remove, list[RunLocked]()

    def start(folder: Folder, name: str = "") -> None:
        if name and folder.uri == str(run):
            with pytest.raises(RunLocked) as raised:
                RunLease.acquire(folder, "a2")
            refused.append(raised.value)
        remove(folder, name)

    monkeypatch.setattr(Folder, "remove", start)
    assert run_command(["runs", "prune", run.name, "--all", "--yes", "--storage", str(run.parent)]) == 0
    assert len(refused) == 3  # checkpoints, journal, summary
    assert not run.exists()


def test_a_storage_that_cannot_be_written_is_a_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(run))

    monkeypatch.setattr(Folder, "put", refuse)
    assert run_command(["runs", "prune", run.name, "--storage", str(run.parent)]) == 3
    assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"ticks": 1}])
def test_a_dead_owner_is_none(run: Path, changes: dict[str, Any]) -> None:
    own(run, **changes)  # no such process, one that took the number over
    assert run_command(["runs", "prune", run.name, "--storage", str(run.parent)]) == 0


@pytest.mark.parametrize(("command", "times"), [(["show", "small-1f3a"], 0), (["list"], 1)])
def test_other_runs_are_listed_no_more_than_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], times: int
) -> None:
    """Each run's folder was listed for each run: 1,000 runs took a minute, and behind S3 a million requests."""
    listed, names = Counter[str](), Folder.names
    monkeypatch.setattr(Folder, "names", lambda folder: listed.update([folder.uri]) or names(folder))
    for number in range(3):
        shutil.copytree(run, run.with_name(f"other{number}"))
    assert run_command(["runs", *command, "--storage", str(run.parent)]) == 0
    assert [listed[str(run.with_name(f"other{number}"))] for number in range(3)] == [times] * 3


@pytest.mark.parametrize("name", ["small-1f3a/checkpoints", ".", "", "../small-1f3a"])
def test_a_path_is_no_run(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "prune", name, "--all", "--storage", str(run.parent)]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert len(data_of(run)) == 3


def test_an_unknown_run_is_refused_with_those_that_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "show", "other", "--storage", str(run.parent)]) == 2
    assert "small-1f3a" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run_command(["runs", "prune", run.name, "--keep", "0"])
    assert ended.value.code == 2
