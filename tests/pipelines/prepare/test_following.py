"""A source that grows: what is added comes once, after what was there, also after a kill; and what is published may go."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, Data
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare import following
from raystride.pipelines.prepare.fingerprint import open_sources
from raystride.pipelines.prepare.following import Followed, follow_source
from raystride.pipelines.prepare.generations import read_generation
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.pieces import File
from raystride.pipelines.tasks import build_task
from tests.errors import refused, unreadable
from tests.tiny import tiny
from tests.waiting import wait_until

CONTEXT = multiprocessing.get_context("spawn")
Steering = tuple[Semaphore, Semaphore]
"""One that a look takes, and one that it gives back when it is over."""


def _follow(config: Config, storage: str, steering: Steering | None = None) -> None:
    """Follows a source; with `steering` each look at it has to be let first, and is counted."""
    if steering:
        allowed, looks = steering

        def look(*given: Any) -> Any:
            allowed.acquire()
            try:
                return open_sources(*given)
            finally:
                looks.release()

        following.open_sources, following.LOOK_S = look, 0.0  # type: ignore[assignment]
    follow_source(config, Folder.at(storage), build_task(config), on_ray=False, echo=lambda _: None)


class Following:
    """A process that follows a source."""

    def __init__(self, source: Path, storage: Path) -> None:
        data = Data(source=str(source), kind="text", validation_fraction=0.3, start_after_mib=0.0001, follow=True)
        self.storage, self.source = storage, source
        self.config = replace(tiny(Path("unused")), data=data)
        self._steering = CONTEXT.Semaphore(0), CONTEXT.Semaphore(0)
        arguments = self.config, str(storage), self._steering
        self.process = CONTEXT.Process(target=_follow, args=arguments, daemon=True)
        self.process.start()

    def look(self) -> None:
        """Has it look at its source once; returns when it has."""
        allowed, looks = self._steering
        allowed.release()
        wait_until(lambda: looks.acquire(block=False) or not self.process.is_alive(), "a look")
        assert self.process.is_alive(), "it ended"

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()

    def texts(self) -> list[str]:
        """The documents that are published, of both splits, in order."""
        folders = list(self.storage.glob(".prepared/*"))
        if not folders:
            return []
        folder, found, number = Folder.at(str(folders[0])), [], 0
        while manifest := read_generation(folder, number):
            found += [text for split in manifest.splits for text in _texts(folder, manifest, split)]
            number += 1
        return found

    def wait(self, true: Callable[[list[str]], bool]) -> list[str]:
        """What is published, once it is as wanted."""
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
def followed(tmp_path: Path) -> Iterator[Following]:
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / f"data/b{number:02d}.txt").write_text(f"first {number} " + "x" * 60)
    process = Following(tmp_path / "data", tmp_path / "runs")
    yield process
    process.end()


def test_what_is_added_comes_once_and_last_and_what_is_published_may_go(followed: Following) -> None:
    first = followed.wait(lambda texts: len(texts) == 20)
    (followed.source / "a.txt").write_text("sorts before " + "y" * 60)
    then = followed.wait(lambda texts: len(texts) == 21)
    assert then[:20] == first
    assert then[20].startswith("sorts before")
    followed.end()
    for file in followed.source.iterdir():
        file.unlink()
    again = Following(followed.source, followed.storage)
    try:
        again.look()  # it begins where there is no file
        (followed.source / "c.txt").write_text("after a kill " + "z" * 60)
        last = again.wait(lambda texts: len(texts) == 22)
    finally:
        again.end()
    assert not list(followed.storage.glob(".prepared/*/parts/*")), "what is published is not listed any more"
    assert last[:21] == then
    assert last[21].startswith("after a kill")


def test_a_file_that_is_still_written_is_waited_for(followed: Following) -> None:
    followed.wait(lambda texts: len(texts) == 20)
    file = followed.source / "growing.txt"
    for size in range(1, 6):
        file.write_text("grows " + "w" * 100 * size)
        followed.look()
    found = followed.wait(lambda texts: len(texts) == 21)
    assert len(found[20]) == 506


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    config, data = tiny(Path("unused")), Data(source=str(tmp_path), follow=True, start_after_mib=1)
    with unreadable(str(tmp_path), settings=("data.source", "data.kind"), names=["data.kind"]):
        _follow(replace(config, data=data), str(tmp_path / "runs"))
    with unreadable(str(tmp_path), settings=("data.source",), names=["no files"]):
        _follow(replace(config, data=replace(data, kind="text")), str(tmp_path / "runs"))
    with refused("data.follow", True, names=["data.start_after_mib"]):
        replace(config, data=Data(follow=True))
    with refused("data.follow", True, names=["`tail`", "data.validation"]):
        replace(config, data=Data(follow=True, start_after_mib=1, validation="tail"))


def test_files_come_once_when_they_have_settled(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    followed = Followed(folder)
    first, second = File("a", "a", 10), File("b", "b", 20)
    assert not followed.known
    assert followed.next(0, [first]) == (), "it may still be written"
    assert followed.next(0, [replace(first, size=11)]) == (), "it was"
    assert followed.next(0, [replace(first, size=11), second]) == (replace(first, size=11),)
    assert followed.next(1, [replace(first, size=11), second]) == (second,)
    assert followed.next(2, [replace(first, size=11), second]) == ()
    assert followed.next(2, [second, File("c", "c", 1)], settle=False) == (File("c", "c", 1),)
    again = Followed(folder)
    assert again.known
    assert again.next(0, [replace(first, size=99)]) == (replace(first, size=11),), "as long as it was then"
    for files in ([], [replace(first, size=10)]):
        with pytest.raises(DataError, match="a has gone or become shorter"):
            again.next(0, files)


def test_another_name_of_a_file_is_not_another_file(tmp_path: Path) -> None:
    followed = Followed(Folder(str(tmp_path)))
    assert followed.next(0, [File("b", "b", 10)], settle=False) == (File("b", "b", 10),)
    linked = File("a", "a", 10, others=("b",))
    assert followed.next(1, [linked], settle=False) == ()
    assert followed.next(0, [linked]) == (linked,), "a batch that was begun goes on under the other name"


def test_a_batch_is_cut_as_it_was_before(tmp_path: Path) -> None:
    followed = Followed(Folder(str(tmp_path)))
    followed.next(0, [File("a", "a", 10)], settle=False)
    assert (followed.parts(0), followed.parts(1)) == (None, None)
    followed.cut(0, 3)
    again = Followed(Folder(str(tmp_path)))
    assert again.parts(0) == 3
    again.cut(0, 3)
    with pytest.raises(DataError, match=r"batch 0 of .* makes 4 parts now, not 3"):
        again.cut(0, 4)


def test_a_batch_writes_itself_and_not_all_that_were_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand batches were one file of 2.7 MB, written twice a batch."""
    monkeypatch.setattr(following, "MERGED", 5)
    folder = Folder(str(tmp_path))
    earlier = [{"files": [[f"f{number}", 10]], "parts": number + 1} for number in range(7)]
    earlier[-1]["parts"] = None
    folder.put_json("followed.json", {"batches": earlier})
    written = (tmp_path / "followed.json").read_bytes()
    for number in range(6, 33):
        followed = Followed(folder)  # as after a kill
        assert followed.parts(number - 1) == number
        assert followed.parts(number) is None
        files = [File(f"f{each}", f"f{each}", 10) for each in range(number + 1)]
        assert followed.next(number, files, settle=False) == (files[number],)
        again = Followed(folder)
        assert again.next(number, files) == (files[number],)
        again.cut(number, number + 1)
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "followed").iterdir()}
        assert len(sizes) <= number // 5 + 5
        assert max(sizes.values()) < 450, "of five batches"
    assert (tmp_path / "followed.json").read_bytes() == written
    whole = Followed(folder)
    assert [whole.parts(number) for number in range(34)] == [*range(1, 34), None]
    assert whole.next(33, files) == ()
    assert whole.next(12, files) == (files[12],)


def test_what_a_kill_leaves_of_batches_that_became_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MERGED", 3)
    folder, files = Folder(str(tmp_path)), [File(name, name, 1) for name in "abc"]
    followed = Followed(folder)
    for number, file in enumerate(files):
        followed.next(number, [file], settle=False)
        left = (folder / "followed").read_json(f"{number:08d}-{number:08d}.json")
        followed.cut(number, 7)
        if number != 1:
            (folder / "followed").put_json(f"{number:08d}-{number:08d}.json", left)
    again = Followed(folder)
    assert [again.parts(number) for number in range(4)] == [7, 7, 7, None]
    assert [again.next(number, files) for number in range(3)] == [(file,) for file in files]
