"""What of a preparation that is under way can be trained on already: generations of its shards, each fixed once it stands.

A generation is the next parts that are whole, in their order: a manifest of their shards in `generations/000003/`. The first
one has something of both splits, and `end.json` says that no other follows. A reader that knows a generation never has to
look at it again.

    with publishing(job.folder, parts, least_bytes=64 << 20, describe=describe, echo=print):
        run_parts(job, parts)
    first = read_generation(folder, 0)                        # None: it is not there yet
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.pieces import Part

PLACE = "generations"
END, FAILED = "end.json", "failed.json"
LOOK_S = 0.5
"""Between two looks at what is done."""

Records = Sequence[Mapping[str, Any]]
Describe = Callable[[Records], Manifest]
"""The manifest of some parts' records."""


def read_generation(folder: Folder, number: int) -> Manifest | None:
    """The manifest of a generation of a prepared folder, its shards alone; None while it is not there."""
    try:
        return Manifest.load(folder / PLACE / f"{number:06d}")
    except FileNotFoundError:
        return None


def generations(folder: Folder) -> int | None:
    """How many generations a preparation has that has ended; None while it has not."""
    try:
        return int((folder / PLACE).read_json(END)["generations"])
    except FileNotFoundError:
        return None


def failure(folder: Folder) -> str:
    """Why a preparation that others read from went wrong; empty where it did not."""
    try:
        return str((folder / PLACE).read_json(FAILED)["error"])
    except FileNotFoundError:
        return ""


def tell_failure(folder: Folder, error: str) -> None:
    """Has all who wait for another generation know that none will come."""
    (folder / PLACE).put_json(FAILED, {"error": error})


def forget_failure(folder: Folder) -> None:
    """Has nobody believe any more that a preparation went wrong: another one begins."""
    (folder / PLACE).remove(FAILED)


def in_order(parts: Sequence[Part]) -> list[Part]:
    """The parts as generations have them: those that validate first, of which else the first one would have nothing."""
    return sorted(parts, key=lambda part: part.split != "validation")


@contextmanager
def publishing(
    folder: Folder, parts: Sequence[Part], least_bytes: float, describe: Describe, enough: Callable[[Manifest], bool]
) -> Iterator[None]:
    """Publishes generations of at least so many bytes of text while the block prepares the parts.

    Goes on with those of an interrupted preparation. The first one comes when it is `enough`. Where the block raises
    DataError, all who wait are told.
    """
    publisher = _Publisher(folder, in_order(parts), least_bytes, describe, enough)
    ended = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(ended,), name="generations", daemon=True)
    forget_failure(folder)
    thread.start()
    try:
        yield
    except DataError as error:
        tell_failure(folder, str(error))
        raise
    finally:
        ended.set()
        thread.join()
    publisher.publish(last=True)


class _Publisher:
    """Follows the records of parts and writes generations."""

    def __init__(
        self,
        folder: Folder,
        parts: Sequence[Part],
        least_bytes: float,
        describe: Describe,
        enough: Callable[[Manifest], bool],
    ) -> None:
        self._folder, self._parts, self._least = folder, parts, least_bytes
        self._describe, self._enough = describe, enough
        self._published, self._number = self._found()
        self._records: list[Mapping[str, Any]] = []
        """Of the parts after those that are published."""

    def run(self, ended: threading.Event) -> None:
        """Publishes until the event is set."""
        while not ended.wait(LOOK_S):
            self.publish()

    def publish(self, *, last: bool = False) -> None:
        """Publishes what is whole where it is as much as it has to be; with `last` all that is left, and that it is all.

        Where a generation ends depends on the parts alone, not on when one looks.
        """
        while self._published + len(self._records) < len(self._parts):
            part = self._parts[self._published + len(self._records)]
            try:
                self._records.append((self._folder / "parts").read_json(f"{part.number:05d}.json"))
            except FileNotFoundError:
                return
            parts = self._parts[self._published : self._published + len(self._records)]
            if sum(each.bytes for each in parts) >= self._least:
                self._write(last=False)
        if last:
            self._write(last=True)
            (self._folder / PLACE).put_json(END, {"generations": self._number})

    def _write(self, *, last: bool) -> None:
        if not self._records:
            return
        manifest = self._describe(self._records)
        if not self._number and not last and not self._enough(manifest):
            return
        manifest.save(self._folder / PLACE / f"{self._number:06d}")
        self._published, self._number, self._records = self._published + len(self._records), self._number + 1, []

    def _found(self) -> tuple[int, int]:
        """How many parts are in generations of an interrupted preparation, and how many generations there are."""
        published, number = 0, 0
        while manifest := read_generation(self._folder, number):
            published, number = published + int(manifest.source["parts"]), number + 1
        return published, number
