"""Sources are listed, checked and divided once a command, with little memory for a file."""

import os
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.data.prepare import opened_sources
from raystride.pipelines.data.prepare.opened_sources import OpenedSources
from raystride.pipelines.data.prepare.prepare import check_data, needs_ray, prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable
from tests.pipelines.conftest import settings


def _write_files(folder: Path, count: int) -> Path:
    for number in range(count):
        (folder / f"{number % 10}").mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 10}" / f"{number:06d}.txt").write_text(f"text {number}\n")
    return folder


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch, source: Path) -> Iterator[Counter[str]]:
    """Counts the listings of folders and the openings of files."""
    counts, scandir = Counter[str](), os.scandir

    def scan(folder: str) -> Any:
        counts["listed"] += str(folder).rstrip("/") == str(source)
        return scandir(folder)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scan)
        for name in ("check_sources", "divide_into_parts"):
            found = getattr(opened_sources, name)
            patched.setattr(opened_sources, name, lambda *given, f=found, n=name: (counts.update([n]), f(*given))[1])
        yield counts


def test_a_command_lists_checks_and_divides_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, lines = _write_files(tmp_path / "texts", 1_200), list[str]()
    context = RunContext(settings(source), Folder(str(tmp_path / "runs")), log=lines.append)
    with _counted(monkeypatch, source) as counts:
        check_data(context)
        assert not needs_ray(context)
        prepare(context, context.task, on_ray=context.on_ray)
    assert counts == {"listed": 1, "check_sources": 1, "divide_into_parts": 1}
    assert lines[0] == "data: 1,200 files found, 0 MB"


def test_a_source_is_listed_anew_after_a_long_wait_and_in_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _write_files(tmp_path / "texts", 3)
    config, opened = settings(source), OpenedSources()
    task = build_task(config)
    first = opened.open(config, task, print)
    (source / "new.txt").write_text("new\n")
    assert opened.open(config, task, print) is first
    monkeypatch.setattr(opened_sources, "MAX_UNUSED_S", -1.0)
    assert len(opened.open(config, task, print)[0].files) == 4
    (source / "0" / "000000.txt").write_bytes(b"caf\xe9")
    with unreadable("/000000.txt", settings=("data.encoding", "data.on_error"), names=["0xe9 at 3"]):
        check_data(RunContext(config, Folder(str(tmp_path / "runs"))))


def test_a_file_takes_less_than_a_kilobyte(tmp_path: Path) -> None:
    count = 2_000
    context = RunContext(settings(_write_files(tmp_path, count)), Folder(str(tmp_path / "runs")), log=lambda _: None)
    check_data(context)
    context.opened.close()
    tracemalloc.start()
    check_data(context)
    sources = context.open_sources(context.config, context.task)
    parts = context.divide_sources(context.config.data, sources)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(part.slices) for part in parts) == count
    assert peak / count < 1_000
