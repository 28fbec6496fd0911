"""A training's data: prepared before it, or in a process of its own beside it (`data.start_after_mib`).

    with data_for(config, storage, screen, carried, "", 2.0) as prepared:
        ...                                               # trains, while the rest may be prepared

One process at a time prepares a folder: another one, of another training or `raystride prepare`, waits for its end, and goes
on where it was if it dies.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event

from raystride.pipelines.cluster.cluster import cluster
from raystride.pipelines.cluster.internals import on_loopback
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.feed.samples import windows_in
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.owner import Owned, Ownership, new_attempt
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.plugins import Carried
from raystride.pipelines.prepare.fingerprint import NOTHING_KEPT, Kept, identity
from raystride.pipelines.prepare.generations import failure, forget_failure, read_generation, tell_failure
from raystride.pipelines.prepare.one_source import Prepared, finished
from raystride.pipelines.prepare.prepare import prepare
from raystride.pipelines.service_thread import ServiceThread
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks import build_task
from raystride.triton_kernels.processes import end_with_parent, fresh_context

LOOK_S = 0.5
"""Between two looks at whether there is enough to begin."""
OTHERS_S = 5.0
"""Between two looks at whether another process has prepared it, or has died."""


def prepare_data(
    config: Config, storage: Folder, screen: Screen, kept: Kept = NOTHING_KEPT, *, alone: bool = False
) -> Prepared:
    """Prepares the data, if it is not there yet; `kept` as in `prepare`; `alone`: when no other process does.

    Raises SettingError, DataError.
    """
    on_ray = config.launch.mode != "inline"
    if alone:
        prepared = prepare_alone(config, storage, screen.line, kept)
    else:
        prepared = prepare(config, storage, build_task(config), kept=kept, on_ray=on_ray, echo=screen.line)
    _check_samples(config, prepared)
    return prepared


@contextmanager
def data_for(
    config: Config, storage: Folder, screen: Screen, carried: Carried, kept: Kept, cpus: float
) -> Iterator[Prepared]:
    """The prepared data of a training; with `data.start_after_mib` what is ready of it, while another process goes on.

    That one has so many of the cluster's `cpus` at a time, one at least. Raises SettingError, DataError.
    """
    if not config.data.start_after_mib or prepared_before(config, storage, kept):
        yield prepare_data(config, storage, screen, kept)
        return
    with beside(config, storage, screen, carried, kept, cpus) as begun:
        prepared = begun.first()
        _check_samples(config, prepared)
        screen.line(f"data: {prepared.manifest.tokens('train'):,} tokens are prepared to begin with, the rest follows")
        yield prepared


def prepared_before(config: Config, storage: Folder, kept: Kept = NOTHING_KEPT) -> bool:
    """Whether data that would be prepared beside a training is there as a whole. Raises SettingError, DataError."""
    return config.data.start_after_mib > 0 and finished(_place(config, storage, kept)) is not None


class Begun:
    """A preparation that has begun."""

    def __init__(self, folder: Folder, process: BaseProcess) -> None:
        self.folder, self._process = folder, process

    def first(self) -> Prepared:
        """What training begins on, once it is there. Raises DataError, SettingError where the preparation goes wrong."""
        while True:
            ended = self._process.exitcode
            if (manifest := read_generation(self.folder, 0)) or (manifest := finished(self.folder)):
                return Prepared(self.folder, manifest, reused=False)
            if error := failure(self.folder):
                raise DataError(error)
            if ended is not None:
                raise DataError(f"the preparation in process {self._process.pid} ended with code {ended}: start it again")
            time.sleep(LOOK_S)


def _check_samples(config: Config, prepared: Prepared) -> None:
    """Refuses data that does not fill one window."""
    task = build_task(config)
    for name, (_, manifest) in prepared.manifest.by_source(prepared.folder).items():
        of = f"of data.sources.{name} " if name else ""
        for split in ("train", "validation") if task.window else ():
            tokens = manifest.tokens(split)
            if not windows_in(task, tokens):
                raise SettingError(
                    f"model.context is {config.model.context}: the {split} data {of}has {tokens} tokens, which is not one "
                    f"sample of {config.model.context + 1}. Lower model.context, give more data, or set "
                    "data.validation_fraction",
                    setting="model.context",
                    value=config.model.context,
                )


@contextmanager
def beside(config: Config, storage: Folder, screen: Screen, carried: Carried, kept: Kept, cpus: float) -> Iterator[Begun]:
    """Prepares in another process until the block ends. With Ray, this process has joined the cluster.

    The tasks at a time are as many as `cpus`, or workers would wait for their places until all is prepared.
    """
    from ray import cloudpickle  # what the user's script has registered lies nowhere that another process could import

    if not config.data.sources:  # the process could see another script than this one
        kept = Kept(fingerprints={"": identity(config, build_task(config), kept, storage).data})
    folder, address = _place(config, storage, kept), None
    if config.launch.mode != "inline":
        import ray

        address = ray.get_runtime_context().gcs_address
    context = fresh_context()
    hear, tell = context.Pipe(duplex=False)
    forget_failure(folder)
    process = context.Process(
        target=_prepare, args=(cloudpickle.dumps((config, storage, carried, kept)), address, cpus, tell), daemon=True
    )
    process.start()
    tell.close()
    ended = Event()
    watch = partial(_watch, process, hear, ended, folder, screen.line)
    ServiceThread("preparation", watch, every_s=0.0, log=screen.line).start()
    try:
        yield Begun(folder, process)
    finally:
        ended.set()
        process.kill()
        process.join()


def prepare_alone(config: Config, storage: Folder, echo: Callable[[str], None], kept: Kept = NOTHING_KEPT) -> Prepared:
    """Prepares where no other process does; waits for one that does. Raises DataError, SettingError."""
    task, folder, said = build_task(config), _place(config, storage, kept), False
    while finished(folder) is None:
        try:
            with Ownership.take(folder, new_attempt()):
                return prepare(config, storage, task, kept=kept, on_ray=config.launch.mode != "inline", echo=echo)
        except Owned:
            if not said:
                echo(f"data: another process prepares {folder}, and this one waits for it")
            said = True
            time.sleep(OTHERS_S)
    return prepare(config, storage, task, kept=kept, on_ray=False, echo=echo)


def _prepare(pickled: bytes, address: str | None, cpus: float, tell: Connection) -> None:
    """The other process.

    A terminal's ^C, and whoever ends a job, send their signals to this one, too: the training heeds them, and goes on with
    what it reads until it has saved. When it ends so does this process, by a signal that is not blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    end_with_parent()
    from ray import cloudpickle

    config, storage, carried, kept = cloudpickle.loads(pickled)
    carried.register()
    own = address and not (config.launch.address or os.environ.get("RAY_ADDRESS"))
    if address:
        os.environ["RAY_ADDRESS"] = address
        use_at_most(cpus)
    try:
        with on_loopback() if own else nullcontext(), cluster(config.launch):
            prepare_alone(config, storage, tell.send, kept)
    except (DataError, SettingError) as error:
        tell_failure(_place(config, storage, kept), str(error))


def use_at_most(cpus: float) -> None:
    """Has Ray Data in this process use so many processors at a time."""
    from ray.data import DataContext, ExecutionResources

    DataContext.get_current().execution_options.resource_limits = ExecutionResources.for_limits(cpu=max(1.0, cpus))


def _place(config: Config, storage: Folder, kept: Kept) -> Folder:
    """The folder of the prepared data. Raises SettingError, DataError."""
    return storage / ".prepared" / identity(config, build_task(config), kept, storage).data


def _watch(process: BaseProcess, hear: Connection, ended: Event, folder: Folder, said: Callable[[str], None]) -> bool:
    """Passes on what the process says; if it dies before it was `ended`, tells all who wait for it. True: it has ended."""
    with suppress(EOFError):
        while True:
            try:
                text = hear.recv()
            except OSError:
                break
            said(text)
    process.join()
    if process.exitcode and not ended.is_set() and finished(folder) is None:
        tell_failure(folder, f"its process ended with code {process.exitcode}: start this run again")
    return True
