"""Sources of a command: each is listed, opened, checked and divided once, since that takes minutes with a million files.

opened = OpenedSources()
sources = opened.open(config, task, print)                # data: 200,000 files found, 133 MB
opened.check(config.data, sources, print)                 # checking: 40,000/200,000 files, after ten seconds
parts = opened.divide(config.data, sources, print)
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare.cleaning import build_cleaning
from raystride.pipelines.data.prepare.parts import divide_into_parts
from raystride.pipelines.data.prepare.progress import LINE_EVERY_S, CountMeter, show_progress
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.data.sources.source import Source, open_source
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.system.credentials import redact_uris
from raystride.pipelines.system.service_thread import ServiceThread

Log = Callable[[str], None]
Sources = tuple[Source, Source | None]
"""A source, and its validation source if it has one."""
Opener = Callable[[Config, Task], Sources]
"""`open_sources`, or the same for a command."""

MANY_FILES = 1_000
"""Files from which a source has a line with their number, and progress."""
MAX_UNUSED_S = 300.0
"""Seconds after its last use in which a source is listed anew: a driver may wait for a cluster for hours."""


def open_sources(config: Config, task: Task) -> Sources:
    """Returns the training source, and the validation source if `data.validation` is `source`. Raises DataError."""
    data = config.data
    if data.target_source and len(task.columns) == 1:
        raise DataError(
            f"data.target_source is {data.target_source!r}, but task `{config.task}` has no targets: leave it out",
            file=data.target_source,
            settings=("data.target_source",),
        )
    opened = partial(open_source, data, columns=task.columns, whole=_is_read_whole(config.data, config.task, task))
    own = data.validation_source if data.validation == "source" else None
    return opened(data.source), opened(own, split="") if own else None


def check_sources(data: DataConfig, sources: Sources, count_file: Callable[[], object] = lambda: None) -> None:
    """Raises DataError for a source that is visibly unreadable, unless faults are skipped."""
    for source in sources:
        if source and data.on_error == "raise":
            check_source(source, count_file)


def _is_read_whole(data: DataConfig, task_name: str, task: Task) -> bool:
    # Steps and measurements need whole documents.
    return task.window is None or build_cleaning(data, task_name, task) is not None


@dataclass
class _Opened:
    sources: Sources
    used: float = 0.0
    """Time of the last use, by the monotonic clock."""
    is_checked: bool = False
    parts: tuple[Part, ...] | None = None


class OpenedSources:
    """The opened sources of a command, by their settings. In another process it is empty."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}

    def __reduce__(self) -> "tuple[type[OpenedSources], tuple[()]]":
        return OpenedSources, ()

    def open(self, config: Config, task: Task, log: Log) -> Sources:
        """Returns what `open_sources` does. Raises DataError."""
        key = repr((config.task, config.data, task.columns, _is_read_whole(config.data, config.task, task)))
        opened = self._opened.get(key)
        if opened is None or time.monotonic() - opened.used > MAX_UNUSED_S:
            place = redact_uris(config.data.source)
            with ServiceThread("data", lambda: log(f"data: listing {place}"), every_s=LINE_EVERY_S, log=log):
                opened = self._opened[key] = _Opened(open_sources(config, task))
            for source in opened.sources:
                if source and len(source.files) >= MANY_FILES:
                    size = sum(file.size for file in source.files) / 1e6
                    log(f"data: {len(source.files):,} files found, {size:,.0f} MB")
        opened.used = time.monotonic()
        return opened.sources

    def check(self, data: DataConfig, sources: Sources, log: Log) -> None:
        """Raises DataError for a source that is visibly unreadable, unless faults are skipped."""
        opened = self._find(sources)
        if not opened.is_checked:
            with _show_files("checking", sources, log) as count_file:
                check_sources(data, sources, count_file)
            opened.is_checked, opened.used = True, time.monotonic()

    def divide(self, data: DataConfig, sources: Sources, log: Log) -> tuple[Part, ...]:
        """Returns the parts of the sources. Raises DataError."""
        opened = self._find(sources)
        if opened.parts is None:
            with _show_files("dividing", sources, log) as count_file:
                opened.parts = divide_into_parts(*sources, data, count_file)
            opened.used = time.monotonic()
        return opened.parts

    def _find(self, sources: Sources) -> _Opened:
        """Returns what is known of opened sources; of those that are read by earlier rules, nothing yet."""
        return next((opened for opened in self._opened.values() if opened.sources is sources), _Opened(sources))

    def close(self) -> None:
        """Forgets the sources, and so frees their memory."""
        self._opened.clear()


@contextmanager
def _show_files(label: str, sources: Sources, log: Log) -> Iterator[Callable[[], object]]:
    """Yields a function that counts a file, with progress if there are many."""
    meter = CountMeter(sum(len(source.files) + len(source.targets) for source in sources if source), "files")
    if meter.total < MANY_FILES:
        yield meter.count
        return
    with show_progress(label, meter, log):
        yield meter.count
