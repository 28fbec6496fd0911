"""Choices of a machine are made once, whoever else begins, and kept for good: on the machine and in the storage."""

import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.system import machine_table as module
from raystride.pipelines.system.machine_table import ISA_VARIABLES, machine_table, measured_folder
from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def _choose(storage: str | None, key: str, answers: Any) -> None:
    with machine_table("tried", Folder(storage) if storage else None) as table:
        if "common" not in table:
            table["common"] = key
        table[key] = 1
        answers.put(table["common"])


def test_processes_that_begin_at_once_have_one_choice_and_lose_no_entry(tmp_path: Path) -> None:
    context = get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_choose, args=(str(tmp_path / "runs"), f"key {n}", answers)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len({answers.get() for _ in processes}) == 1
    for place in (tmp_path / "cache-measured", tmp_path / "runs" / ".machines"):
        (file,) = place.rglob("tried-*.json")
        assert {f"key {n}" for n in range(8)} <= json.loads(file.read_text()).keys()


def test_what_the_machine_has_precedes_the_storage_and_circumstances_are_apart(tmp_path: Path) -> None:
    one, two = Folder(str(tmp_path / "one")), Folder(str(tmp_path / "two"))
    with machine_table("tried", one) as table:
        table["a"] = 1
    with machine_table("tried", two) as table:
        assert table == {"a": 1}
        table["b"] = 2
    with machine_table("tried", one) as table:
        assert table == {"a": 1, "b": 2}
    with machine_table("tried", one, threads=2) as table:
        assert table == {}
    with machine_table("tried", None) as table:
        assert table == {"a": 1, "b": 2}


def test_a_table_lies_in_no_temporary_folder_unless_the_user_has_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert measured_folder() == tmp_path / "cache" / "raystride" / "measured"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured_folder() == tmp_path / ".cache" / "raystride" / "measured"
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert measured_folder().parent != tmp_path / "nowhere"


def test_each_circumstance_alone_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name, processor, PyTorch, each variable that disables instructions, and what the caller adds, one or more."""
    storage, seen = Folder(str(tmp_path)), list[str]()

    def open_table(name: str = "tried", **circumstances: Any) -> None:
        with machine_table(name, storage, **circumstances) as table:
            seen.extend(table)
            table[f"table {len(tables())}"] = 1

    def tables() -> list[str]:
        return (storage / ".machines").names() if storage.exists(".machines") else []

    cases: list[dict[str, Any]] = [{}, {"name": "other"}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"a": [[1, 2]]}]
    for case in cases:
        open_table(**case)
    assert len(tables()) == len(cases)
    for variable in ISA_VARIABLES:
        for value in ("sse2", "avx2"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, value)
                open_table()
    for name in ("processor_name", "version"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_: "another")
            open_table()
    assert len(tables()) == len(cases) + 2 * len(ISA_VARIABLES) + 2
    assert seen == [], "each was empty"
    for case in cases:
        open_table(**case)
    assert len(seen) == len(cases)
