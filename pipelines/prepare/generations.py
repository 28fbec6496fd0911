"""What of a preparation that is under way can be trained on already: generations of its shards, each fixed once it stands.

A generation is the next parts that are whole, in their order: a manifest of their shards in `generations/000003/`. The first
one has something of both splits, and `end.json` says that no other follows. A reader that knows a generation never has to
look at it again.

    publisher = Publisher(job.folder, least_bytes=64 << 20, describe=describe, enough=enough)
    with publisher.publishing(parts):
        run_parts(job, parts)
    first = read_generation(folder, 0)                        # None: it is not there yet
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.service_thread import ServiceThread, error_text
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


class Publisher:
    """Follows the records of parts and writes generations of at least so many bytes of text; the first is `enough`.

    It goes on with those of an interrupted preparation.
    """

    def __init__(
        self,
        folder: Folder,
        least_bytes: float,
        describe: Describe,
        enough: Callable[[Manifest], bool],
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._least, self._describe, self._enough, self._log = folder, least_bytes, describe, enough, log
        self._parts: list[Part] = []
        self._records: list[Mapping[str, Any]] = []
        """Of the parts after those that are published."""
        self.published, self._number = self._found()
        """Parts that are in generations."""

    @contextmanager
    def publishing(self, parts: Sequence[Part]) -> Iterator[None]:
        """Publishes these parts, which come after those before, while the block prepares them, and at its end the rest.

        What is not enough for the first generation waits for the parts that are given next. If the block or publishing
        raises, all who wait are told. A storage that fails in between is tried again, and at the end once more.
        """
        self._parts += in_order(parts)
        forget_failure(self._folder)
        try:
            with ServiceThread(
                "generations", self._publish, every_s=LOOK_S, log=self._log, on_error=self._tell_unless_storage
            ):
                yield
            self._publish()
            if self._number or (self._records and self._enough(self._manifest())):
                self._write()
        except Exception as error:
            with suppress(OSError):
                tell_failure(self._folder, error_text(error))
            raise

    @property
    def begun(self) -> bool:
        """Whether there is a generation, with which a training can begin."""
        return self._number > 0

    def skip(self, parts: int) -> None:
        """Passes over parts that are published."""
        self._parts += [Part(0, (), None)] * parts

    def end(self) -> None:
        """Says that no other generation follows."""
        (self._folder / PLACE).put_json(END, {"generations": self._number})

    def _tell_unless_storage(self, error: Exception) -> None:
        """Tells who waits of an error that another try would meet again."""
        if not isinstance(error, OSError):
            tell_failure(self._folder, error_text(error))

    def _publish(self) -> None:
        """Publishes what is whole where it is as much as it has to be: which parts that are is no matter of time."""
        while True:
            parts = self._parts[self.published : self.published + len(self._records)]
            due = parts and sum(each.bytes for each in parts) >= self._least
            if due and (self._number or self._enough(self._manifest())):
                self._write()  # first, also where it has failed before: with these parts and no others
            if self.published + len(self._records) == len(self._parts):
                return
            part = self._parts[self.published + len(self._records)]
            try:
                self._records.append((self._folder / "parts").read_json(f"{part.number:05d}.json"))
            except FileNotFoundError:
                return

    def _manifest(self) -> Manifest:
        manifest = self._describe(self._records)
        return replace(manifest, source=manifest.source | {"parts": len(self._records)})

    def _write(self) -> None:
        if self._records:
            self._manifest().save(self._folder / PLACE / f"{self._number:06d}")
            self.published, self._number, self._records = self.published + len(self._records), self._number + 1, []

    def _found(self) -> tuple[int, int]:
        """How many parts are in generations of an interrupted preparation, and how many generations there are."""
        published, number = 0, 0
        while manifest := read_generation(self._folder, number):
            published, number = published + int(manifest.source["parts"]), number + 1
        return published, number
