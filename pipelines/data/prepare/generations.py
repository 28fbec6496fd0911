"""Generations: immutable groups of finished shards that a training can read while the preparation is still running.

A generation is the next finished parts in order, or sections of a part that is not divided: a manifest of their shards in
`generations/000003/`. The first one contains both splits, and `end.json` says that no other follows. A reader that has read
a generation never has to read it again.

    publisher = Publisher(job.folder, min_bytes=64 << 20, describe=describe, is_sufficient=is_sufficient)
    with publisher.publishing(parts):
        prepare_parts(job, parts)
    first = read_generation(folder, 0)                        # None: it does not exist yet
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.sections import read_section
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.system.service_thread import ServiceThread, format_error
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

GENERATIONS_FOLDER = "generations"
END, FAILED = "end.json", "failed.json"
PREPARE_AGAIN = "remove the folder to prepare it again"
POLL_INTERVAL_S = 0.5
"""Seconds between two checks for finished parts."""

Records = Sequence[Mapping[str, Any]]
Describe = Callable[[Records], Manifest]
"""Returns the manifest of some parts' records."""


def read_generation(folder: Folder, number: int) -> Manifest | None:
    """Returns the manifest of a generation of a prepared folder, its own shards only; None if it does not exist yet."""
    try:
        return Manifest.load(folder / GENERATIONS_FOLDER / f"{number:06d}")
    except FileNotFoundError:
        return None


def generations(folder: Folder) -> int | None:
    """Returns the number of generations of a finished preparation; None if it is still running."""
    try:
        return int(read_sealed(folder / GENERATIONS_FOLDER, END, PREPARE_AGAIN)["generations"])
    except FileNotFoundError:
        return None


def read_failure(folder: Folder) -> str:
    """Returns the error of a failed preparation that others read from; "" if it has not failed."""
    try:
        return str(read_sealed(folder / GENERATIONS_FOLDER, FAILED, "remove it")["error"])
    except FileNotFoundError:
        return ""


def publish_failure(folder: Folder, error: str) -> None:
    """Tells all readers that wait for another generation that none will come."""
    put_sealed(folder / GENERATIONS_FOLDER, FAILED, {"error": error})


def clear_failure(folder: Folder) -> None:
    """Removes the failure of an earlier preparation when another one begins."""
    (folder / GENERATIONS_FOLDER).remove(FAILED)


def validation_first(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts in the order of generations: validation first, so that the first generation has both splits."""
    return sorted(parts, key=lambda part: part.split != "validation")


@dataclass(frozen=True)
class _Finished:
    """A part that has finished, or a section of one."""

    record: Mapping[str, Any]
    bytes: int
    """Approximate bytes of its text."""
    ends_part: bool = True


class Publisher:
    """Watches the records of parts and sections and writes generations of at least `min_bytes` of text.

    The first generation must also satisfy `is_sufficient`. It continues the generations of an interrupted preparation.
    """

    def __init__(
        self,
        folder: Folder,
        min_bytes: float,
        describe: Describe,
        is_sufficient: Callable[[Manifest], bool],
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._min_bytes, self._describe, self._is_sufficient, self._log = (
            folder,
            min_bytes,
            describe,
            is_sufficient,
            log,
        )
        self._parts: list[Part] = []
        self._finished: list[_Finished] = []
        """Parts and sections after the published ones."""
        self.published, self._sections, self._number = self._find_generations()
        """Parts that are in generations whole, sections that are of the part after them, and the number of generations."""

    @contextmanager
    def publishing(self, parts: Sequence[Part]) -> Iterator[None]:
        """Publishes these parts, which follow earlier ones, while the block prepares them, and the remaining ones at its
        end.

        Parts that do not suffice for the first generation wait for the parts that are given next. If the block or publishing
        raises, all waiting readers are told. Storage errors in between are retried, and once more at the end.
        """
        self._parts += validation_first(parts)
        clear_failure(self._folder)
        try:
            with ServiceThread(
                "generations",
                self._publish_due,
                every_s=POLL_INTERVAL_S,
                log=self._log,
                on_error=self._publish_unless_storage_error,
            ):
                yield
            self._publish_due()
            if self._number or (self._finished and self._is_sufficient(self._build_manifest())):
                self._write_generation()
        except Exception as error:
            with suppress(OSError):
                publish_failure(self._folder, format_error(error))
            raise

    @property
    def has_generation(self) -> bool:
        """Whether there is a generation with which a training can begin."""
        return self._number > 0

    def skip(self, parts: int) -> None:
        """Passes over parts that are already published."""
        self._parts += [Part(0, (), None)] * parts

    def end(self) -> None:
        """Records that no other generation follows."""
        put_sealed(self._folder / GENERATIONS_FOLDER, END, {"generations": self._number})

    def _publish_unless_storage_error(self, error: Exception) -> None:
        """Publishes an error that another try would meet again."""
        if not isinstance(error, OSError):
            publish_failure(self._folder, format_error(error))

    def _publish_due(self) -> None:
        """Publishes what has finished once it has the size of a generation, which does not depend on timing."""
        while True:
            due = self._finished and sum(found.bytes for found in self._finished) >= self._min_bytes
            if due and (self._number or self._is_sufficient(self._build_manifest())):
                self._write_generation()  # first, also if it has failed before: with exactly this content
            try:
                found = self._read_next()
            except FileNotFoundError:
                return
            if found is None:
                return
            self._finished.append(found)

    def _read_next(self) -> _Finished | None:
        """Reads what follows, None after all parts. Raises FileNotFoundError if it has not finished."""
        number, sections = self._position(self._finished)
        if number == len(self._parts):
            return None
        part = self._parts[number]
        if part.is_divided:
            return _Finished(self._read_record(part), part.bytes)
        try:
            section = read_section(self._folder, part.number, sections)
        except FileNotFoundError:
            if sections or self._read_record(part).get("sections"):
                raise
            return _Finished(self._read_record(part), part.bytes)  # a small one has none
        if not section["last"]:
            return _Finished(section, section["bytes"], ends_part=False)
        whole = self._read_record(part)
        return _Finished(section | {name: whole[name] for name in ("dropped", "lost_text")}, section["bytes"])

    def _read_record(self, part: Part) -> dict[str, Any]:
        return read_sealed(self._folder / "parts", f"{part.number:05d}.json", PREPARE_AGAIN)

    def _position(self, finished: Sequence[_Finished]) -> tuple[int, int]:
        """Returns the whole parts up to the end of what has finished, and the sections of the part after them."""
        parts, sections = self.published, self._sections
        for found in finished:
            parts, sections = (parts + 1, 0) if found.ends_part else (parts, sections + 1)
        return parts, sections

    def _build_manifest(self) -> Manifest:
        manifest = self._describe([found.record for found in self._finished])
        parts, sections = self._position(self._finished)
        position = {"parts": parts - self.published} | ({"sections": sections} if sections else {})
        return replace(manifest, source=manifest.source | position)

    def _write_generation(self) -> None:
        if self._finished:
            self._build_manifest().save(self._folder / GENERATIONS_FOLDER / f"{self._number:06d}")
            self.published, self._sections = self._position(self._finished)
            self._number, self._finished = self._number + 1, []

    def _find_generations(self) -> tuple[int, int, int]:
        """Returns the whole parts in generations of an interrupted preparation, the sections of the part after them, and the
        number of generations."""
        published, sections, number = 0, 0, 0
        while manifest := read_generation(self._folder, number):
            published, number = published + int(manifest.source["parts"]), number + 1
            sections = int(manifest.source.get("sections", 0))
        return published, sections, number
