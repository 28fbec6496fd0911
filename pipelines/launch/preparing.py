"""Prepares a training's data before it, or in another process during it (`data.start_after_mib`).

    with open_prepared_data(context, plugin_bundle, 2.0) as prepared:
        ...                                               # trains, while the rest may still be prepared

One process at a time prepares a folder: another one, of another training or `raystride prepare`, waits for its end, and
continues its work if it dies.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.data.feed.samples import count_windows
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.prepare.data_lines import list_data_lines
from raystride.pipelines.data.prepare.fingerprint import KeptPreparations
from raystride.pipelines.data.prepare.generations import clear_failure, publish_failure, read_failure, read_generation
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import check_data, needs_ray, prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import cluster, uses_running_cluster
from raystride.pipelines.launch.cluster.internals import listen_on_loopback
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.preflight.check import resolve_resources
from raystride.pipelines.launch.run_store.lease import RunLease, RunLocked, new_attempt
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.system.commands import launch_command, storage_flag
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.storage.folder import Folder
from raystride.triton_kernels.processes import end_with_parent, fresh_context

POLL_S = 0.5
"""Seconds between two checks whether there is enough data to begin."""
OTHER_PROCESS_POLL_S = 5.0
"""Seconds between two checks whether another process has finished the preparation, or has died."""


def run_preparation(parsed: Parsed[Config]) -> int:
    """Prepares the data of a configuration; returns the exit code."""
    context = RunContext(*locate_run(parsed), log=Screen().log)
    check_data(context)
    launch = context.config.launch
    on_ray = not context.is_inline and (uses_running_cluster(launch) or needs_ray(context))
    with cluster(launch) if on_ray else nullcontext():
        if on_ray and context.config.data.start_after_mib:
            with suppress(SettingError):  # a training that does not fit here runs elsewhere
                resolved = resolve_resources(context)
                limit_ray_data_cpus(resolved.resources.cpus - resolved.allocation.cpus)
        prepared = prepare_data(context, exclusive=True)
    print(f"results  {prepared.folder}")
    print("mlflow   not logged")
    print(f"next     {launch_command()} train with the same settings {storage_flag(str(context.storage))}".rstrip())
    return DONE


def prepare_data(context: RunContext, *, exclusive: bool = False) -> PreparedData:
    """Prepares the data if it is not prepared yet; `exclusive`: waits for other preparing processes.

    Raises SettingError, DataError.
    """
    prepared = prepare_exclusively(context) if exclusive else prepare(context, context.task, on_ray=context.on_ray)
    _check_samples(context, prepared)
    return prepared


@contextmanager
def open_prepared_data(context: RunContext, plugin_bundle: PluginBundle, cpus: float) -> Iterator[PreparedData]:
    """Yields the prepared data of a training; with `data.start_after_mib` its first part, while another process continues.

    That process uses at most `cpus` of the cluster's CPUs at a time, and at least one. Raises SettingError, DataError.
    """
    if not context.config.data.start_after_mib or context.is_prepared:
        yield prepare_data(context)
        return
    with prepare_in_background(context, plugin_bundle, cpus) as preparation:
        prepared = preparation.wait_for_first()
        _check_samples(context, prepared)
        context.log(f"data: {prepared.manifest.tokens('train'):,} tokens are prepared to begin with, the rest follows")
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
                return PreparedData(self.folder, manifest, reused=False, lines=tuple(list_data_lines(manifest, self.folder)))
            if error := read_failure(self.folder):
                raise DataError(error)
            if ended is not None:
                raise DataError(f"the preparation in process {self._process.pid} ended with code {ended}: start it again")
            time.sleep(POLL_S)


def _check_samples(context: RunContext, prepared: PreparedData) -> None:
    """Raises SettingError if the data does not fill one window."""
    task, length = context.task, context.config.model.context
    for name, (_, manifest) in prepared.manifest.by_source(prepared.folder).items():
        label = f"of data.sources.{name} " if name else ""
        for split in ("train", "validation") if task.window else ():
            tokens = manifest.tokens(split)
            if not count_windows(task, tokens):
                raise SettingError(
                    f"model.context is {length}: the {split} data {label}has {tokens} tokens, which is not "
                    f"one sample of {length + 1}. Lower model.context, give more data, or set "
                    "data.validation_fraction",
                    setting="model.context",
                    value=length,
                )


@contextmanager
def prepare_in_background(context: RunContext, plugin_bundle: PluginBundle, cpus: float) -> Iterator[PreparationProcess]:
    """Prepares in another process until the block ends. With Ray, this process has joined the cluster.

    At most `cpus` tasks run at a time; otherwise the workers would wait for their slots until all is prepared.
    """
    from ray import cloudpickle  # another process cannot import plug-ins that the user's script has registered

    if not context.config.data.sources:  # fixed here, as the other process could see another version of the script
        context = replace(context, kept=KeptPreparations(fingerprints={"": context.identity().data}))
    folder, address = context.prepared_folder, None
    if not context.is_inline:
        import ray

        address = ray.get_runtime_context().gcs_address
    processes = fresh_context()
    receiver, sender = processes.Pipe(duplex=False)
    clear_failure(folder)
    process = processes.Process(
        target=_preparation_main,
        # The log stays here: the lines of the other process come through the pipe.
        args=(cloudpickle.dumps((replace(context, log=print), plugin_bundle)), address, cpus, sender),
        daemon=True,
    )
    process.start()
    sender.close()
    ended = Event()
    watch = partial(_relay_messages, process, receiver, ended, folder, context.log)
    ServiceThread("preparation", watch, every_s=0.0, log=context.log).start()
    try:
        yield PreparationProcess(folder, process)
    finally:
        ended.set()
        process.kill()
        process.join()


def prepare_exclusively(context: RunContext) -> PreparedData:
    """Prepares the data as the only process, and waits if another one is at it. Raises DataError, SettingError."""
    task, folder, is_announced = context.task, context.prepared_folder, False
    while load_finished_manifest(folder) is None:
        try:
            with RunLease.acquire(folder, new_attempt(), None if is_announced else context.log):
                return prepare(context, task, on_ray=context.on_ray)
        except RunLocked:
            if not is_announced:
                context.log(f"data: another process prepares {folder}, and this one waits for it")
            is_announced = True
            time.sleep(OTHER_PROCESS_POLL_S)
    return prepare(context, task, on_ray=False)


def _preparation_main(pickled: bytes, address: str | None, cpus: float, sender: Connection) -> None:
    """Main function of the preparing process.

    A terminal's Ctrl-C and job schedulers signal this process, too, so it blocks those signals: the training handles them,
    and still reads data until it has saved. When the training ends, this process is ended by a signal that is not blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    end_with_parent()
    from ray import cloudpickle

    context, plugin_bundle = cloudpickle.loads(pickled)
    context = replace(context, log=sender.send)
    plugin_bundle.register()
    launch = context.config.launch
    own = address and not uses_running_cluster(launch)
    if address:
        os.environ["RAY_ADDRESS"] = address
        limit_ray_data_cpus(cpus)
    try:
        with listen_on_loopback() if own else nullcontext(), cluster(replace(launch, address=None) if own else launch):
            prepare_exclusively(context)
    except (DataError, SettingError) as error:
        publish_failure(context.prepared_folder, str(error))


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
