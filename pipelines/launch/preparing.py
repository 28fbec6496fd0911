"""Prepares a training's data before it, or in another process during it (`data.start_after_mib`).

    with open_prepared_data(config, storage, screen, plugin_bundle, kept, 2.0) as prepared:
        ...                                               # trains, while the rest may still be prepared

One process at a time prepares a folder: another one, of another training or `raystride prepare`, waits for its end, and
continues its work if it dies.
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
from raystride.pipelines.cluster.internals import listen_on_loopback
from raystride.pipelines.commands import launch_command, storage_flag
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.console.exit_codes import DONE, run_with_exit_code
from raystride.pipelines.console.screen import Screen
from raystride.pipelines.feed.samples import count_windows
from raystride.pipelines.plugins import PluginBundle
from raystride.pipelines.preflight.check import resolve_resources
from raystride.pipelines.prepare.fingerprint import NO_KEPT_PREPARATIONS, KeptPreparations, identity
from raystride.pipelines.prepare.generations import clear_failure, publish_failure, read_failure, read_generation
from raystride.pipelines.prepare.one_source import PreparedData, load_finished_manifest
from raystride.pipelines.prepare.prepare import check_data, prepare
from raystride.pipelines.prepare.prepared_folder import is_prepared, prepared_folder
from raystride.pipelines.run_store.lease import RunLease, RunLocked, new_attempt
from raystride.pipelines.run_store.location import locate_run
from raystride.pipelines.service_thread import ServiceThread
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.storage.folder import Folder
from raystride.pipelines.tasks import build_task
from raystride.triton_kernels.processes import end_with_parent, fresh_context

POLL_S = 0.5
"""Seconds between two checks whether there is enough data to begin."""
OTHER_PROCESS_POLL_S = 5.0
"""Seconds between two checks whether another process has finished the preparation, or has died."""


def run_preparation(parsed: Parsed[Config]) -> int:
    """Prepares the data of a configuration; returns the exit code."""
    return run_with_exit_code(lambda: _prepare(*locate_run(parsed)))


def _prepare(config: Config, storage: Folder) -> int:
    check_data(config, storage, build_task(config))
    with cluster(config.launch):
        if config.data.start_after_mib and config.launch.mode != "inline":
            with suppress(SettingError):  # a training that does not fit here runs elsewhere
                _, resources, allocation = resolve_resources(config, storage, Screen().log)
                limit_ray_data_cpus(resources.cpus - allocation.cpus)
        prepared = prepare_data(config, storage, Screen(), exclusive=True)
    print(f"results  {prepared.folder}")
    print("mlflow   not logged")
    print(f"next     {launch_command()} train with the same settings {storage_flag(str(storage))}".rstrip())
    return DONE


def prepare_data(
    config: Config,
    storage: Folder,
    screen: Screen,
    kept: KeptPreparations = NO_KEPT_PREPARATIONS,
    *,
    exclusive: bool = False,
) -> PreparedData:
    """Prepares the data if it is not prepared yet; `kept` as in `prepare`; `exclusive`: waits for other preparing processes.

    Raises SettingError, DataError.
    """
    on_ray = config.launch.mode != "inline"
    if exclusive:
        prepared = prepare_exclusively(config, storage, screen.log, kept)
    else:
        prepared = prepare(config, storage, build_task(config), kept=kept, on_ray=on_ray, log=screen.log)
    _check_samples(config, prepared)
    return prepared


@contextmanager
def open_prepared_data(
    config: Config, storage: Folder, screen: Screen, plugin_bundle: PluginBundle, kept: KeptPreparations, cpus: float
) -> Iterator[PreparedData]:
    """Yields the prepared data of a training; with `data.start_after_mib` its first part, while another process continues.

    That process uses at most `cpus` of the cluster's CPUs at a time, and at least one. Raises SettingError, DataError.
    """
    if not config.data.start_after_mib or is_prepared(config, storage, kept):
        yield prepare_data(config, storage, screen, kept)
        return
    with prepare_in_background(config, storage, screen, plugin_bundle, kept, cpus) as preparation:
        prepared = preparation.wait_for_first()
        _check_samples(config, prepared)
        screen.log(f"data: {prepared.manifest.tokens('train'):,} tokens are prepared to begin with, the rest follows")
        yield prepared


class PreparationProcess:
    """A preparation that runs in another process."""

    def __init__(self, folder: Folder, process: BaseProcess) -> None:
        self.folder, self._process = folder, process

    def wait_for_first(self) -> PreparedData:
        """Waits for and returns the data on which training can begin. Raises DataError if the preparation fails."""
        while True:
            ended = self._process.exitcode
            if (manifest := read_generation(self.folder, 0)) or (manifest := load_finished_manifest(self.folder)):
                return PreparedData(self.folder, manifest, reused=False)
            if error := read_failure(self.folder):
                raise DataError(error)
            if ended is not None:
                raise DataError(f"the preparation in process {self._process.pid} ended with code {ended}: start it again")
            time.sleep(POLL_S)


def _check_samples(config: Config, prepared: PreparedData) -> None:
    """Raises SettingError if the data does not fill one window."""
    task = build_task(config)
    for name, (_, manifest) in prepared.manifest.by_source(prepared.folder).items():
        label = f"of data.sources.{name} " if name else ""
        for split in ("train", "validation") if task.window else ():
            tokens = manifest.tokens(split)
            if not count_windows(task, tokens):
                raise SettingError(
                    f"model.context is {config.model.context}: the {split} data {label}has {tokens} tokens, which is not "
                    f"one sample of {config.model.context + 1}. Lower model.context, give more data, or set "
                    "data.validation_fraction",
                    setting="model.context",
                    value=config.model.context,
                )


@contextmanager
def prepare_in_background(
    config: Config, storage: Folder, screen: Screen, plugin_bundle: PluginBundle, kept: KeptPreparations, cpus: float
) -> Iterator[PreparationProcess]:
    """Prepares in another process until the block ends. With Ray, this process has joined the cluster.

    At most `cpus` tasks run at a time; otherwise the workers would wait for their slots until all is prepared.
    """
    from ray import cloudpickle  # another process cannot import plug-ins that the user's script has registered

    if not config.data.sources:  # fixed here, as the other process could see another version of the script
        kept = KeptPreparations(fingerprints={"": identity(config, build_task(config), kept, storage).data})
    folder, address = prepared_folder(config, storage, kept), None
    if config.launch.mode != "inline":
        import ray

        address = ray.get_runtime_context().gcs_address
    context = fresh_context()
    receiver, sender = context.Pipe(duplex=False)
    clear_failure(folder)
    process = context.Process(
        target=_preparation_main,
        args=(cloudpickle.dumps((config, storage, plugin_bundle, kept)), address, cpus, sender),
        daemon=True,
    )
    process.start()
    sender.close()
    ended = Event()
    watch = partial(_relay_messages, process, receiver, ended, folder, screen.log)
    ServiceThread("preparation", watch, every_s=0.0, log=screen.log).start()
    try:
        yield PreparationProcess(folder, process)
    finally:
        ended.set()
        process.kill()
        process.join()


def prepare_exclusively(
    config: Config, storage: Folder, log: Callable[[str], None], kept: KeptPreparations = NO_KEPT_PREPARATIONS
) -> PreparedData:
    """Prepares the data as the only process, and waits if another one is at it. Raises DataError, SettingError."""
    task, folder, is_announced = build_task(config), prepared_folder(config, storage, kept), False
    while load_finished_manifest(folder) is None:
        try:
            with RunLease.acquire(folder, new_attempt()):
                return prepare(config, storage, task, kept=kept, on_ray=config.launch.mode != "inline", log=log)
        except RunLocked:
            if not is_announced:
                log(f"data: another process prepares {folder}, and this one waits for it")
            is_announced = True
            time.sleep(OTHER_PROCESS_POLL_S)
    return prepare(config, storage, task, kept=kept, on_ray=False, log=log)


def _preparation_main(pickled: bytes, address: str | None, cpus: float, sender: Connection) -> None:
    """Main function of the preparing process.

    A terminal's Ctrl-C and job schedulers signal this process, too, so it blocks those signals: the training handles them,
    and still reads data until it has saved. When the training ends, this process is ended by a signal that is not blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    end_with_parent()
    from ray import cloudpickle

    config, storage, plugin_bundle, kept = cloudpickle.loads(pickled)
    plugin_bundle.register()
    own = address and not (config.launch.address or os.environ.get("RAY_ADDRESS"))
    if address:
        os.environ["RAY_ADDRESS"] = address
        limit_ray_data_cpus(cpus)
    try:
        with listen_on_loopback() if own else nullcontext(), cluster(config.launch):
            prepare_exclusively(config, storage, sender.send, kept)
    except (DataError, SettingError) as error:
        publish_failure(prepared_folder(config, storage, kept), str(error))


def limit_ray_data_cpus(cpus: float) -> None:
    """Limits Ray Data in this process to `cpus` CPUs at a time, at least one."""
    from ray.data import DataContext, ExecutionResources

    DataContext.get_current().execution_options.resource_limits = ExecutionResources.for_limits(cpu=max(1.0, cpus))


def _relay_messages(
    process: BaseProcess, receiver: Connection, ended: Event, folder: Folder, log: Callable[[str], None]
) -> bool:
    """Logs the messages of the process; publishes a failure if it dies before `ended` is set. Returns True at its end."""
    with suppress(EOFError):
        while True:
            try:
                text = receiver.recv()
            except OSError:
                break
            log(text)
    process.join()
    if process.exitcode and not ended.is_set() and load_finished_manifest(folder) is None:
        publish_failure(folder, f"its process ended with code {process.exitcode}: start this run again")
    return True
