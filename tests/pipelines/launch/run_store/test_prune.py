"""What `runs prune` removes, what it leaves, and that a run which starts meanwhile loses nothing: with real processes."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from raystride.command import run as run_command
from raystride.jobs.runs import _parse_duration
from raystride.pipelines.config import Config, LaunchConfig, RecordConfig
from raystride.pipelines.launch.run_store import contents, prune
from raystride.pipelines.launch.run_store.lease import Owner, RunLease
from raystride.pipelines.launch.run_store.resume import refuse_removed
from raystride.pipelines.launch.run_store.uses import USES_FILE, marked_uses, wait_for_removals
from raystride.pipelines.observability.record.mlflow.removal import read_stages
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed
from raystride.pipelines.train.distributed.process_group import create_rendezvous_file, list_abandoned_rendezvous
from tests.errors import refused
from tests.ray_jobs.jobs import run_well, start_job
from tests.storage import uri as uri_of
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[4]
KEY = "15e2bd3b4dbfd10e"
MONTH_AGO = time.time() - 30 * 86400


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's caches and temporary folders: of no other test."""
    (folder := tmp_path / "machine").mkdir()
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(folder / "copies"))
    monkeypatch.setattr(contents.tempfile, "gettempdir", lambda: str(folder))
    return folder


@pytest.fixture
def storage(tmp_path: Path, machine: Path) -> Path:
    """Runs of a month ago: a sweep with a trial, a base and what began with it, a failed one; and prepared data."""
    folder = tmp_path / "runs"
    for name, size in {
        "swept/config.yaml": 1,
        f"swept/trials/{KEY}.json": 2,
        f"swept-{KEY}/config.yaml": 10,
        f"swept-{KEY}/checkpoints/step-00000003/a/rank-0.bin": 90,
        "base/journal/a-000001.jsonl": 30,
        "base/export/hugging_face/model.safetensors": 500,
        "tuned/journal/a-000001.jsonl": 40,
        "broken/config.yaml": 1,
        ".prepared/used/manifest.json": 5,
        ".prepared/earlier/manifest.json": 5,
        ".prepared/forgotten/train/00000.arrow": 700,
        "mlartifacts/run2/artifacts/report.html": 70,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    for run in ("swept", f"swept-{KEY}", "broken"):
        (folder / run / "config.yaml").write_text("")
    (folder / "broken/summary.json").write_text('{"run": "broken", "status": "failed"}')
    (folder / "tuned/config.yaml").write_text(f"model:\n  init_from: {folder}/base/export/hugging_face\n")
    put_sealed(Folder(str(folder / "tuned")), "environment.json", {"data": "used"})
    put_sealed(Folder(str(folder / "tuned/attempts/a1")), "environment.json", {"data": "earlier"})
    age(folder)
    return folder


def age(folder: Path, to: float = MONTH_AGO) -> None:
    """Sets the time of everything in a folder."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (to, to))


def run(place: object, *flags: str) -> int:
    return run_command(["runs", "prune", *flags, "--storage", str(place)])


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


ALL = {"swept", f"swept-{KEY}", "base", "tuned", "broken", "mlartifacts"}


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--older", "7"], {"swept", f"swept-{KEY}", "base", "tuned", "broken"}),
        (["--older", "31d"], set()),
        (["--status", "failed"], {"broken"}),
        (["--sweep", "swept"], {"swept", f"swept-{KEY}"}),
        (["swept"], {"swept", f"swept-{KEY}"}),
        ([f"swept-{KEY}"], {f"swept-{KEY}"}),
        (["base", "tuned", "--status", "interrupted"], {"base", "tuned"}),
        (["--older", "7", "--status", "failed"], {"broken"}),
    ],
)
def test_whole_runs_go_by_age_status_and_sweep(storage: Path, flags: list[str], gone: set[str]) -> None:
    assert run(storage, *flags, "--all", "--yes") == 0
    assert left(storage) == ALL - gone


def test_the_age_of_a_sweep_is_that_of_its_newest_file(storage: Path) -> None:
    os.utime(storage / f"swept-{KEY}" / "config.yaml")
    assert run(storage, "--older", "7", "--all", "--yes") == 0
    assert left(storage) == {"swept", f"swept-{KEY}", "mlartifacts"}


def test_a_base_stays_as_long_as_what_began_with_it(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(storage / "tuned/config.yaml")
    assert run(storage, "--older", "7", "--all", "--yes") == 0
    assert left(storage) == {"base", "tuned", "mlartifacts"}
    assert f"left: {storage}/base/export/hugging_face is the base of tuned" in capsys.readouterr().err
    assert run(storage, "base", "--all", "--yes") == 0
    assert left(storage) == {"tuned", "mlartifacts"}


def test_what_would_go_is_listed_and_nothing_goes_unasked(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(storage.rglob("*"))
    assert run(storage, "--older", "7", "--all", "--dry-run") == 0
    listed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(row.startswith("sweep swept ") for row in listed)
    assert any(row.startswith("trial swept-* ") for row in listed)
    total = sum(path.stat().st_size for path in storage.rglob("*") if path.is_file())
    assert any(row.startswith("total ") and row.endswith(f", of {total / 1024:.1f} KiB") for row in listed)
    assert run(storage, "--older", "7", "--all") == 2
    assert "give --yes" in capsys.readouterr().err
    assert sorted(storage.rglob("*")) == before


def test_a_prompt_is_asked_and_no_is_no(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, remaining in (("", ALL), ("n", ALL), ("yes", ALL - {"broken"})):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert run(storage, "broken", "--all") == 0
        assert left(storage) == remaining


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no run is named"),
        (["--sweep", "tuned"], "there is no such sweep"),
        (["nobody", "--all"], "there is no run"),
        (["--unused", "--all"], "--unused is about"),
        (["tuned", "--unused"], "--unused is about"),
    ],
)
def test_a_selection_without_sense_is_refused(
    storage: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(storage, *flags, "--yes") == 2
    assert said in capsys.readouterr().err
    assert left(storage) == ALL


@pytest.mark.parametrize(("text", "seconds"), [("30", 30 * 86400), ("2w", 14 * 86400), ("1.5h", 5400), ("90min", 5400)])
def test_an_age_is_days_or_has_a_unit(text: str, seconds: float) -> None:
    assert _parse_duration(text) == seconds
    with pytest.raises(ValueError, match="3x"):
        _parse_duration("3x")


def test_a_run_that_is_trained_is_left_and_named(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLease.acquire(Folder(str(storage / "broken")), "a2"):
        age(storage / "broken")
        assert run(storage, "--older", "7", "--all", "--yes") == 0
        assert f"left: {storage}/broken is owned by process {os.getpid()}" in capsys.readouterr().err
    assert left(storage) == {"broken", "mlartifacts"}


def test_a_share_of_a_sweep_that_is_measured_keeps_it(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLease.acquire(Folder(str(storage / "swept/shares/0-of-2")), "a2"):
        assert run(storage, "swept", "--all", "--yes") == 2
        assert "stop it first" in capsys.readouterr().err
    assert left(storage) == ALL


def test_a_run_that_was_used_since_it_was_listed_is_left(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    confirm = prune._is_confirmed

    def use_meanwhile(*given: bool) -> bool:
        with RunLease.acquire(Folder(str(storage / "broken")), "a2"):
            return confirm(*given)

    monkeypatch.setattr(prune, "_is_confirmed", use_meanwhile)
    assert run(storage, "--status", "failed", "--all", "--yes") == 0
    assert "was used since it was listed" in capsys.readouterr().err
    assert left(storage) == ALL


def test_old_checkpoints_of_many_runs_go_at_once(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        (storage / f"tuned/checkpoints/step-{step:08}/a1").mkdir(parents=True)
        (storage / f"tuned/checkpoints/step-{step:08}/a1/rank-0.bin").write_bytes(b"x" * 2**20)
    age(storage)
    assert run(storage, "--older", "7", "--dry-run") == 0
    assert f"{storage}/tuned: 2.0 MiB of 2 checkpoints; 1 stay" in capsys.readouterr().out
    assert run(storage, "--older", "7", "--yes") == 0
    assert [path.parent.name for path in storage.glob("tuned/checkpoints/*/a1")] == ["step-00000003"]
    assert left(storage) == ALL


def test_unused_is_what_no_run_no_mark_and_no_recent_attempt_names(storage: Path, machine: Path) -> None:
    marked = Folder(str(storage / "starting"))
    (storage / ".prepared/marked").mkdir()
    (storage / ".prepared/marked/manifest.json").write_text("{}")
    age(storage)
    os.utime(storage / "tuned/attempts/a1/environment.json")
    with RunLease.acquire(marked, "a1"), marked_uses(marked, "a1", ["marked"]):
        assert run(storage, "--unused", "--yes") == 0
    assert {path.name for path in (storage / ".prepared").iterdir()} == {"used", "earlier", "marked"}
    assert not (storage / "mlartifacts/run2").exists()
    assert not (storage / "starting" / USES_FILE).exists()
    age(storage)
    assert run(storage, "--unused", "--yes") == 0
    assert {path.name for path in (storage / ".prepared").iterdir()} == {"used"}


def test_what_was_written_today_is_not_unused(storage: Path) -> None:
    os.utime(storage / ".prepared/forgotten/train/00000.arrow")
    assert run(storage, "--unused", "--older", "1h", "--yes") == 0
    assert (storage / ".prepared/forgotten").exists()


def test_where_use_is_not_known_nothing_is_unused(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sealed = storage / "tuned/environment.json"
    sealed.write_text(sealed.read_text().replace('"used"', '"uses"'))
    (storage / "tuned/attempts/a1/environment.json").unlink()
    assert run(storage, "--unused", "--yes") == 2
    assert str(sealed) in capsys.readouterr().err
    assert (storage / ".prepared/forgotten").exists()


def test_prepared_data_on_a_store_goes_by_the_store_s_times(storage: Path, s3: str, tmp_path: Path) -> None:
    place = Folder(uri_of(s3, f"prune{tmp_path}"))
    for path in storage.rglob("*"):
        if path.is_file():
            place.put(str(path.relative_to(storage)), path.read_bytes())
    assert run(place.uri, "--unused", "--yes") == 0
    assert (place / ".prepared/forgotten").exists()
    assert run(place.uri, "--older", "7", "--all", "--yes") == 0
    assert {"base", "swept"} <= set(place.names())
    assert run(place.uri, "--status", "failed", "--all", "--yes") == 0
    assert "broken" not in place.names()


def test_rendezvous_folders_of_dead_processes_go(storage: Path, machine: Path) -> None:
    script = "from raystride.pipelines.train.distributed.process_group import create_rendezvous_file as make; print(make())"
    environment = os.environ | {"TMPDIR": str(machine)}
    dead = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    alive, without_lock = Path(create_rendezvous_file()).parent, machine / "raystride-meeting-of-0.3"
    without_lock.mkdir()
    assert list_abandoned_rendezvous() == [Path(dead.stdout.strip()).parent]
    assert run(storage, "--unused", "--yes") == 0
    assert [path.exists() for path in (Path(dead.stdout.strip()).parent, alive, without_lock)] == [False, True, True]


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    """Settings of a run whose data is prepared in a storage, and used by none there."""
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=LaunchConfig(mode="inline"))
    run_well("train", config, "--run", "first")
    shutil.rmtree(tmp_path / "runs/first")
    age(tmp_path / "runs")
    return config


def test_mlflow_s_row_and_artifacts_go_with_a_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=LaunchConfig(mode="inline"))
    for name in ("one", "two"):
        run_well("train", replace(config, record=RecordConfig()), "--run", name)
    place = tmp_path / "runs"
    temporary = tempfile.gettempdir()
    request.getfixturevalue("machine")
    assert set(read_stages(Folder(str(place))).values()) == {"active"}
    assert run(place, "one", "--all", "--yes") == 0
    (kept,) = read_stages(Folder(str(place)))
    assert {path.name for path in (place / "mlartifacts").iterdir()} == {kept}
    assert not (place / "one").exists()
    age(place)
    assert run(place, "--unused", "--yes") == 0
    assert {path.name for path in (place / "mlartifacts").iterdir()} == {kept}
    MlflowClient(f"sqlite:///{place}/mlflow.db").delete_run(kept)  # as MLflow's page does
    assert read_stages(Folder(str(place))) == {kept: "deleted"}
    age(place)
    assert run(place, "--unused", "--yes") == 0
    assert (place / "mlartifacts" / kept / "artifacts/report.html").exists(), "its run is here, and names it"
    shutil.rmtree(place / "mlartifacts" / kept)
    request.getfixturevalue("monkeypatch").setattr(tempfile, "gettempdir", lambda: temporary)
    assert run_command(["runs", "replay", "two", "--storage", str(place)]) == 0
    assert read_stages(Folder(str(place))) == {kept: "active"}
    assert (place / "mlartifacts" / kept / "artifacts/report.html").exists()


PRUNING = """
import sys, time
from pathlib import Path
from raystride.command import run as run_command
from raystride.pipelines.launch.run_store import prune
gate, where = Path(sys.argv[2]), sys.argv[3]
original = getattr(prune, where)
def wait(*given):
    gate.with_suffix(".reached").touch()
    while not gate.exists():
        time.sleep(0.01)
    return original(*given)
setattr(prune, where, wait)
sys.exit(run_command(["runs", "prune", "--unused", "--yes", "--storage", sys.argv[1]]))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes of the product, which are ended with the test."""
    started = []

    (tmp_path / "machine").mkdir()

    def start_process(*arguments: object) -> "subprocess.Popen[str]":
        command_line = [sys.executable, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        own = {"TMPDIR": str(tmp_path / "machine"), "RAYSTRIDE_CACHE": str(tmp_path / "machine/copies")}
        environment = os.environ | (own if "-c" in command_line else {})
        started.append(subprocess.Popen(command_line, cwd=ROOT, text=True, env=environment, **pipes))  # type: ignore[call-overload]
        return started[-1]  # type: ignore[no-any-return]

    yield start_process
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("where", ["list_marked", "remove_prepared"])
def test_a_run_that_starts_while_its_data_is_pruned_trains_and_keeps_it(
    trained: Config, tmp_path: Path, start: Start, where: str
) -> None:
    """It starts after the data was announced, or decided: it waits, and finds it, or prepares it again."""
    gate, storage = tmp_path / "gate", tmp_path / "runs"
    pruning = start("-c", PRUNING, storage, gate, where)
    wait_until(gate.with_suffix(".reached").exists, "the announcement", pruning)
    run_of_data = start_job("train", trained, "--run", "second")
    wait_until((storage / "second" / USES_FILE).exists, "the mark")
    gate.touch()
    said, pruned = "".join(run_of_data.communicate()), pruning.communicate()[0]
    assert (run_of_data.returncode, pruning.returncode) == (0, 0), said + pruned
    assert ("is used by run second, which has just started" in pruned) is (where == "list_marked")
    assert "looks whether anybody uses" in said
    assert run_command(["runs", "audit", "second", "--storage", str(storage)]) == 0
    (data,) = [path for path in (storage / ".prepared").iterdir() if not path.name.startswith(".")]
    assert (data / "manifest.json").exists()
    assert not (data / "removal.json").exists()


@pytest.mark.parametrize(("where", "is_decided"), [("list_marked", False), ("remove_prepared", True)])
def test_a_run_finishes_what_a_killed_removal_had_decided(
    trained: Config, tmp_path: Path, start: Start, where: str, is_decided: bool
) -> None:
    gate, storage = tmp_path / "gate", tmp_path / "runs"
    pruning = start("-c", PRUNING, storage, gate, where)
    wait_until(gate.with_suffix(".reached").exists, "the announcement", pruning)
    (data,) = (storage / ".prepared").iterdir()
    made, file = (data / "manifest.json").stat().st_mtime_ns, Folder(str(data))
    pruning.send_signal(signal.SIGKILL)
    pruning.wait()
    lines: list[str] = []
    wait_for_removals(Folder(str(storage)), [data.name], lines.append)
    assert (not data.exists()) is is_decided
    if not is_decided:
        assert (data / "manifest.json").stat().st_mtime_ns == made
        assert not file.exists("removal.json")
    run_well("train", trained, "--run", "second")


def test_a_dead_owner_s_mark_of_a_run_that_never_began_counts_for_a_day(storage: Path) -> None:
    """So a run that was killed in its first seconds does not keep data for ever."""
    starting = Folder(str(storage / "starting"))
    put_sealed(starting, USES_FILE, {"attempt": "a1", "prepared": ["forgotten"]})
    put_sealed(starting, "owner.json", vars(Owner.this_process("a1")) | {"ticks": 1})
    assert run(storage, "--unused", "--yes") == 0
    assert (storage / ".prepared/forgotten").exists()


def test_a_start_is_refused_if_its_run_was_removed_before_it_owned_it(storage: Path) -> None:
    """It would have gone on with the settings of a run whose checkpoints are gone."""
    folder = Folder(str(storage / "broken"))
    refuse_removed(folder)
    assert run(storage, "broken", "--all", "--yes") == 0
    with refused("run", "broken"):
        refuse_removed(folder)


def test_a_network_drive_is_told_from_a_local_one(tmp_path: Path) -> None:
    assert not prune.shows_late(Folder("s3://bucket/runs"))
    assert prune.shows_late(Folder("/proc/self"))  # any file system that is not known to be local
