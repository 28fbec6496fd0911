"""A watched source: added files come once, after earlier ones, also after a kill; published files may be deleted."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare import watch_source as following
from raystride.pipelines.data.prepare.generations import read_generation
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.prepare.watch_source import WatchedSource, follow_source
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import File
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.tiny import tiny
from tests.waiting import wait_until

CONTEXT = multiprocessing.get_context("spawn")
Steering = tuple[Semaphore, Semaphore]
"""One that a look takes, and one that it gives back when it is over."""


def _follow(config: Config, storage: str, steering: Steering | None = None) -> None:
    """Follows a source; with `steering` each listing of it waits for permission, and is counted."""
    if steering:
        allowed, looks = steering

        def look(*given: Any) -> Any:
            allowed.acquire()
            try:
                return open_sources(*given)
            finally:
                looks.release()

        following.open_sources, following.POLL_INTERVAL_S = look, 0.0  # type: ignore[assignment]
    follow_source(RunContext(config, Folder.from_uri(storage), log=lambda _: None), build_task(config), on_ray=False)


class Following:
    """A process that follows a source."""

    def __init__(self, source: Path, storage: Path) -> None:
        data = DataConfig(source=str(source), kind="text", validation_fraction=0.3, start_after_mib=0.0001, follow=True)
        self.storage, self.source = storage, source
        self.config = replace(tiny(Path("unused")), data=data)
        self._steering = CONTEXT.Semaphore(0), CONTEXT.Semaphore(0)
        arguments = self.config, str(storage), self._steering
        self.process = CONTEXT.Process(target=_follow, args=arguments, daemon=True)
        self.process.start()

    def look(self) -> None:
        """Lets it list its source once; returns when it has."""
        allowed, looks = self._steering
        allowed.release()
        wait_until(lambda: looks.acquire(block=False) or not self.process.is_alive(), "a look")
        assert self.process.is_alive(), "it ended"

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()

    def texts(self) -> list[str]:
        """Returns the published documents, of both splits, in order."""
        folders = list(self.storage.glob(".prepared/*"))
        if not folders:
            return []
        folder, found, number = Folder.from_uri(str(folders[0])), [], 0
        while manifest := read_generation(folder, number):
            found += [text for split in manifest.splits for text in _texts(folder, manifest, split)]
            number += 1
        return found

    def wait(self, true: Callable[[list[str]], bool]) -> list[str]:
        """Returns the published documents once they satisfy a condition."""
        while not true(found := self.texts()):
            self.look()
        return found


def _texts(folder: Folder, manifest: Manifest, split: str) -> Iterator[str]:
    import pyarrow as pa

    assert folder.local
    for shard in manifest.splits[split]:
        with pa.memory_map(str(folder.local / shard.file)) as file:
            for ids in pa.ipc.open_file(file).get_batch(0)["ids"].to_pylist():
                yield bytes(each for each in ids if each < 256).decode()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Following]:
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / f"data/b{number:02d}.txt").write_text(f"first {number} " + "x" * 60)
    process = Following(tmp_path / "data", tmp_path / "runs")
    yield process
    process.end()


def test_added_files_come_once_and_published_ones_may_be_deleted(watched: Following) -> None:
    first = watched.wait(lambda texts: len(texts) == 20)
    (watched.source / "a.txt").write_text("sorts before " + "y" * 60)
    then = watched.wait(lambda texts: len(texts) == 21)
    assert then[:20] == first
    assert then[20].startswith("sorts before")
    watched.end()
    for file in watched.source.iterdir():
        file.unlink()
    again = Following(watched.source, watched.storage)
    try:
        again.look()  # it begins where there is no file
        (watched.source / "c.txt").write_text("after a kill " + "z" * 60)
        last = again.wait(lambda texts: len(texts) == 22)
    finally:
        again.end()
    assert not list(watched.storage.glob(".prepared/*/parts/*")), "what is published is not listed any more"
    assert last[:21] == then
    assert last[21].startswith("after a kill")


def test_a_file_that_is_still_written_is_waited_for(watched: Following) -> None:
    watched.wait(lambda texts: len(texts) == 20)
    file = watched.source / "growing.txt"
    for size in range(1, 6):
        file.write_text("grows " + "w" * 100 * size)
        watched.look()
    found = watched.wait(lambda texts: len(texts) == 21)
    assert len(found[20]) == 506


def test_sources_that_cannot_be_watched_are_refused(tmp_path: Path) -> None:
    config, data = tiny(Path("unused")), DataConfig(source=str(tmp_path), follow=True, start_after_mib=1)
    with unreadable(str(tmp_path), settings=("data.source", "data.kind"), names=["data.kind"]):
        _follow(replace(config, data=data), str(tmp_path / "runs"))
    with unreadable(str(tmp_path), settings=("data.source",), names=["no files"]):
        _follow(replace(config, data=replace(data, kind="text")), str(tmp_path / "runs"))
    with refused("data.follow", True, names=["data.start_after_mib"]):
        replace(config, data=DataConfig(follow=True))
    with refused("data.follow", True, names=["`tail`", "data.validation"]):
        replace(config, data=DataConfig(follow=True, start_after_mib=1, validation="tail"))


def test_stable_files_come_once(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    watched = WatchedSource(folder)
    first, second = File("a", "a", 10), File("b", "b", 20)
    assert not watched.has_batches
    assert watched.next_batch(0, [first]) == (), "it may still be written"
    assert watched.next_batch(0, [replace(first, size=11)]) == (), "it was"
    assert watched.next_batch(0, [replace(first, size=11), second]) == (replace(first, size=11),)
    assert watched.next_batch(1, [replace(first, size=11), second]) == (second,)
    assert watched.next_batch(2, [replace(first, size=11), second]) == ()
    assert watched.next_batch(2, [second, File("c", "c", 1)], must_be_stable=False) == (File("c", "c", 1),)
    again = WatchedSource(folder)
    assert again.has_batches
    assert again.next_batch(0, [replace(first, size=99)]) == (replace(first, size=11),), "as long as it was then"
    for files in ([], [replace(first, size=10)]):
        with pytest.raises(DataError, match="a has gone or become shorter"):
            again.next_batch(0, files)


def test_another_name_of_a_file_is_not_another_file(tmp_path: Path) -> None:
    watched = WatchedSource(Folder(str(tmp_path)))
    assert watched.next_batch(0, [File("b", "b", 10)], must_be_stable=False) == (File("b", "b", 10),)
    linked = File("a", "a", 10, others=("b",))
    assert watched.next_batch(1, [linked], must_be_stable=False) == ()
    assert watched.next_batch(0, [linked]) == (linked,), "a batch that was begun goes on under the other name"


def test_a_batch_is_cut_as_it_was_before(tmp_path: Path) -> None:
    watched = WatchedSource(Folder(str(tmp_path)))
    watched.next_batch(0, [File("a", "a", 10)], must_be_stable=False)
    assert (watched.parts(0), watched.parts(1)) == (None, None)
    watched.record_parts(0, 3)
    again = WatchedSource(Folder(str(tmp_path)))
    assert again.parts(0) == 3
    again.record_parts(0, 3)
    with pytest.raises(DataError, match=r"batch 0 of .* makes 4 parts now, not 3"):
        again.record_parts(0, 4)


def test_a_batch_writes_itself_and_not_all_that_were_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand batches were one file of 2.7 MB, written twice a batch."""
    monkeypatch.setattr(following, "BATCHES_PER_SEGMENT", 5)
    folder = Folder(str(tmp_path))
    earlier = [{"files": [[f"f{number}", 10]], "parts": number + 1} for number in range(7)]
    earlier[-1]["parts"] = None
    folder.put_json("followed.json", {"batches": earlier})
    written = (tmp_path / "followed.json").read_bytes()
    for number in range(6, 33):
        watched = WatchedSource(folder)  # as after a kill
        assert watched.parts(number - 1) == number
        assert watched.parts(number) is None
        files = [File(f"f{each}", f"f{each}", 10) for each in range(number + 1)]
        assert watched.next_batch(number, files, must_be_stable=False) == (files[number],)
        again = WatchedSource(folder)
        assert again.next_batch(number, files) == (files[number],)
        again.record_parts(number, number + 1)
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "followed").iterdir()}
        assert len(sizes) <= number // 5 + 5
        assert max(sizes.values()) < 550, "of five batches"
    assert (tmp_path / "followed.json").read_bytes() == written
    whole = WatchedSource(folder)
    assert [whole.parts(number) for number in range(34)] == [*range(1, 34), None]
    assert whole.next_batch(33, files) == ()
    assert whole.next_batch(12, files) == (files[12],)


def test_a_kill_while_merging_batches_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BATCHES_PER_SEGMENT", 3)
    folder, files = Folder(str(tmp_path)), [File(name, name, 1) for name in "abc"]
    watched = WatchedSource(folder)
    for number, file in enumerate(files):
        watched.next_batch(number, [file], must_be_stable=False)
        left = (folder / "followed").read_json(f"{number:08d}-{number:08d}.json")
        watched.record_parts(number, 7)
        if number != 1:
            (folder / "followed").put_json(f"{number:08d}-{number:08d}.json", left)
    again = WatchedSource(folder)
    assert [again.parts(number) for number in range(4)] == [7, 7, 7, None]
    assert [again.next_batch(number, files) for number in range(3)] == [(file,) for file in files]
