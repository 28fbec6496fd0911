"""The command that says what lies in a storage, as a user starts it: on a storage of 0.3, on a made one, and on a store."""

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from raystride.command import run as run_command
from raystride.pipelines.launch.run_store import contents
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed
from tests.privileges import bound_by_permissions
from tests.storage import uri as uri_of

STORED = Path(__file__).parents[3] / "end_to_end" / "stored-0.3.0.tar.gz"
KEY = "15e2bd3b4dbfd10e"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's caches and temporary folders: of no other test."""
    (folder := tmp_path / "machine").mkdir()
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(folder / "copies"))
    monkeypatch.setattr(contents.tempfile, "gettempdir", lambda: str(folder))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep with a trial, a run that began with another's export, data of a mixture, and MLflow's files."""
    folder = tmp_path / "runs"
    for name, size in {
        "swept/config.yaml": 1,
        f"swept/trials/{KEY}.json": 2,
        f"swept-{KEY}/config.yaml": 10,
        f"swept-{KEY}/checkpoints/step-00000003/a/rank-0.bin": 90,
        "swept-01234567/journal/a-000001.jsonl": 7,
        "base/journal/a-000001.jsonl": 30,
        "base/export/hugging_face/model.safetensors": 500,
        "tuned/journal/a-000001.jsonl": 40,
        ".prepared/mixed/manifest.json": 5,
        ".prepared/part/train/00000.arrow": 600,
        ".prepared/forgotten/train/00000.arrow": 700,
        "mlflow.db": 50,
        "mlflow.db-wal": 3,
        "mlflow.db.before-abc": 20,
        "mlartifacts/run1/artifacts/report.html": 60,
        "mlartifacts/run2/artifacts/report.html": 70,
        "mlartifacts/models/m-1/artifacts/weights": 80,
        "notes/a.txt": 4,
        "README": 6,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    (folder / f"swept-{KEY}/config.yaml").write_text("seed: 3\n")
    (folder / "mlartifacts/models/m-1/artifacts/MLmodel").write_text("flavors: {}\nrun_id: run1\n")
    (folder / "swept/config.yaml").write_text("")
    (folder / "tuned/config.yaml").write_text(f"model:\n  init_from: {folder}/base/export/hugging_face\n")
    put_sealed(Folder(str(folder / "tuned")), "environment.json", {"data": "mixed", "sources": {"a": "part"}})
    put_sealed(Folder(str(folder / "tuned")), "mlflow.json", {"run_id": "run1", "uri": "storage:", "names": 1})
    put_sealed(Folder(str(folder / "base")), "mlflow.json", {"run_id": "run9", "uri": "http://server:5000", "names": 1})
    return folder


def show(place: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command says for programs."""
    assert run_command(["storage", "--storage", str(place), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def entries_of(shown: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    return {entry["name"]: (entry["kind"], entry["used_by"]) for entry in shown["entries"]}


def test_every_entry_has_its_kind_and_its_users(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entries_of(show(runs, capsys)) == {
        "swept": ("sweep", []),
        f"swept-{KEY}": ("trial", ["swept"]),
        "swept-01234567": ("run", []),  # a name of eight digits, and no result of the sweep
        "base": ("run", []),
        "base/export/hugging_face": ("export", ["base", "tuned"]),
        "tuned": ("run", []),
        ".prepared/mixed": ("prepared", ["tuned"]),
        ".prepared/part": ("prepared", ["tuned"]),
        ".prepared/forgotten": ("prepared", []),
        "mlflow.db": ("mlflow", ["tuned"]),
        "mlflow.db.before-abc": ("mlflow", []),
        "mlartifacts/run1": ("artifacts", ["tuned"]),
        "mlartifacts/run2": ("artifacts", []),
        "mlartifacts/models/m-1": ("artifacts", ["tuned"]),
        "notes": ("other", []),
        "README": ("other", []),
    }


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def test_every_byte_of_a_storage_of_0_3_counts_once_and_nothing_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "raystride-0.3.0" / "runs"
    before = state_of(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    shown = show(folder, capsys)
    assert state_of(folder) == before
    assert (shown["bytes"], shown["files"]) == (sum(path.stat().st_size for path in files), len(files))
    assert shown["bytes"] == sum(entry["bytes"] for entry in shown["entries"])
    found = entries_of(shown)
    assert not shown["unreadable"]
    assert {name: found[name][0] for name in ("adapter", "base", "labels", "plugged")} == dict.fromkeys(
        ("adapter", "base", "labels", "plugged"), "run"
    )
    assert found["labels/export/mlflow"] == ("export", ["labels"])
    prepared = {name: users for name, (kind, users) in found.items() if kind == "prepared"}
    assert sorted(prepared.values()) == [["adapter", "base"], ["labels"], ["plugged"]]
    newest = max(path.stat().st_mtime for path in (folder / "base").rglob("*") if path.is_file())
    (changed,) = [entry["changed"] for entry in shown["entries"] if entry["name"] == "base"]
    assert contents.datetime.fromisoformat(changed).timestamp() == pytest.approx(newest, abs=1)


def test_the_table_has_a_row_for_all_trials_and_says_what_no_run_uses(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = runs / "swept-32b351f7f1c91407"
    shutil.copytree(runs / f"swept-{KEY}", other)
    assert run_command(["storage", "--storage", str(runs)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert rows[0] == "what name size files changed used by"
    assert sum(row.startswith("2 trials swept-* 196 B 4 ") and row.endswith(" swept") for row in rows) == 1
    assert not [row for row in rows if KEY in row]
    sizes = [path.stat().st_size for path in runs.rglob("*") if path.is_file()]
    assert f"total {sum(sizes) / 1024:.1f} KiB in {len(sizes)} files in {runs}" in rows
    assert "of it 700 B in prepared data that no run names" in rows
    assert "of it 70 B in MLflow's artifacts of no run here" in rows


def test_caches_of_this_machine_are_listed_beside_the_total(
    runs: Path, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = contents.node_folder()
    copies.mkdir(parents=True)
    (copies / "piece").write_bytes(b"x" * 11)
    for name in ("raystride-meeting-a", "raystride-meeting-b"):
        (machine / name).mkdir()
        (machine / name / "store").write_bytes(b"x")
    total = show(runs, capsys)["bytes"]
    assert run_command(["storage", "--storage", str(runs)]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(row.startswith(f"cache {copies} 11 B 1 ") for row in rows)
    assert any(row.startswith(f"2 temporary {machine}/raystride-meeting-* 2 B 2 ") for row in rows)
    assert rows[-1] == "total 13 B in 3 files"
    assert show(runs, capsys)["bytes"] == total


def test_what_cannot_be_read_is_named_and_the_rest_is_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sealed = runs / "tuned" / "environment.json"
    sealed.write_text(sealed.read_text().replace("mixed", "mixes"))
    (runs / "base" / "export").chmod(0)
    try:
        with bound_by_permissions():
            shown = show(runs, capsys)
            assert run_command(["storage", "--storage", str(runs)]) == 0
    finally:
        (runs / "base" / "export").chmod(0o755)
    assert set(shown["unreadable"]) == {str(sealed), str(runs / "base" / "export")}
    found = entries_of(shown)
    assert "base/export/hugging_face" not in found
    assert found["base"] == ("run", ["tuned"])
    assert found["mlflow.db"] == ("mlflow", ["tuned"])
    warned = capsys.readouterr().err
    assert (
        f"warning: cannot be read: {runs}/base/export (Permission denied): its size, or what it uses, is not known" in warned
    )
    assert str(sealed) in warned


def test_a_store_has_the_same_contents_as_the_disk_that_it_was_copied_from(
    runs: Path, tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Folder(uri_of(s3, f"contents{tmp_path}"))
    (runs / "tuned/config.yaml").write_text(f"model:\n  init_from: {place.uri.partition('?')[0]}/base/export/hugging_face\n")
    for path in runs.rglob("*"):
        if path.is_file():
            place.put(str(path.relative_to(runs)), path.read_bytes())
    stored, local = show(place.uri, capsys), show(runs, capsys)
    (runs / "tuned/config.yaml").write_text(f"model:\n  init_from: {runs}/base/export/hugging_face\n")
    assert entries_of(stored) == entries_of(show(runs, capsys))
    assert (stored["bytes"], stored["files"]) == (local["bytes"], local["files"])
    assert all(entry["changed"] for entry in stored["entries"])


@pytest.mark.parametrize(("section", "name"), [("lora", "init_from"), ("objective", "teacher")])
def test_an_adapter_and_a_teacher_are_used(section: str, name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "tuned/config.yaml").write_text(f"{section}:\n  {name}: {runs}/base/export/hugging_face\n")
    assert [name for name, (_, users) in entries_of(show(runs, capsys)).items() if name.startswith("base") and users]


def test_a_run_behind_a_link_uses_what_it_uses(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = show(runs, capsys)
    shutil.move(runs / "tuned", tmp_path / "elsewhere")
    (runs / "tuned").symlink_to(tmp_path / "elsewhere")
    assert show(runs, capsys) == whole


def test_a_long_listing_says_how_far_it_is(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contents, "NOTICE_S", 0.0)
    assert run_command(["storage", "--storage", str(runs)]) == 0
    said = capsys.readouterr().err
    assert f"listing {runs / 'base'}: " in said
    assert "reading what tuned uses: run " in said


def test_a_storage_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["storage", "--storage", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no storage {tmp_path / 'nowhere'}")
    os.mkdir(tmp_path / "empty")
    assert show(tmp_path / "empty", capsys) | {"storage": ""} == {
        "storage": "", "bytes": 0, "files": 0, "entries": [], "caches": [], "unreadable": {}
    }  # fmt: skip
