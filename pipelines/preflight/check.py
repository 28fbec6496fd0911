"""Checks whether a configuration will run on the given resources; also the command `raystride check`.

config, resources, allocation = resolve_resources(config, storage, print)
run_preflight(config, storage, resources, allocation)     # a training's preflight
"""

from collections.abc import Callable
from dataclasses import replace

from raystride.pipelines.cluster.cluster import cluster, uses_running_cluster
from raystride.pipelines.cluster.nodes import measure_network
from raystride.pipelines.cluster.resources import Allocation, Resources, resolve_allocation
from raystride.pipelines.commands import launch_command
from raystride.pipelines.config import Config, LaunchConfig, SettingError
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.console.exit_codes import CANNOT_RUN, DONE, run_with_exit_code
from raystride.pipelines.feed.open_dataset import share_notes
from raystride.pipelines.feed.samples import count_windows
from raystride.pipelines.preflight.checks import Check, preflight, raise_for_failures
from raystride.pipelines.preflight.choose_mesh import choose_mesh
from raystride.pipelines.preflight.hosts import probe_hosts
from raystride.pipelines.prepare.fingerprint import NO_KEPT_PREPARATIONS, KeptPreparations, identity
from raystride.pipelines.prepare.one_source import load_finished_manifest
from raystride.pipelines.prepare.prepare import check_first_rows
from raystride.pipelines.prepare.prepared_folder import is_prepared
from raystride.pipelines.run_store.location import locate_run
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.storage.folder import Folder
from raystride.pipelines.tasks import build_task


def run_check(parsed: Parsed[Config]) -> int:
    """Prints the checks and whether the configuration will run; returns the exit code."""
    return run_with_exit_code(lambda: _run_check(*locate_run(parsed)))


def _run_check(config: Config, storage: Folder) -> int:
    data = _check_first_rows(config, storage)  # no cluster is started for data that cannot be read
    if not data.passed:
        return _report([data], [], "", storage)
    with cluster(config.launch):
        config, resources, allocation = resolve_resources(config, storage, print)
        checks, table = [data, *preflight(config, allocation, resources, storage)], ""
        if _runs_on_hosts(config.launch) and all(check.passed for check in checks):
            hosts, links = probe_hosts(config, storage), measure_network(config.launch.timeout_s)
            checks += [*hosts.checks(), *hosts.optional_checks(links)]
            table = hosts.table(links)
    return _report(checks, _mixture_notes(config, storage), table, storage)


def _check_first_rows(config: Config, storage: Folder) -> Check:
    """Reads the first rows of data that is not prepared, as the preparation would."""
    try:
        check_first_rows(config, storage, build_task(config))
    except DataError as error:
        return Check("data", False, str(error), "mend the data, or the settings of data that the line names")
    return Check("data", True, "its first rows can be read")


def _report(checks: list[Check], notes: list[str], table: str, storage: Folder) -> int:
    for check in checks:
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name:<15} {check.found}")
        if not check.passed:
            print(f"     {'':<15} {check.remedy}")
    for note in notes:
        print(f"note {note}")
    if table:
        print(f"\n{table}\n")
    passed = all(check.passed for check in checks)
    print(f"results  {storage}")
    print("mlflow   not logged")
    print(
        f"next     {launch_command()} train with the same settings"
        if passed
        else "next     mend what failed, and check again"
    )
    return DONE if passed else CANNOT_RUN


def resolve_resources(
    config: Config, storage: Folder, log: Callable[[str], None], kept: KeptPreparations = NO_KEPT_PREPARATIONS
) -> tuple[Config, Resources, Allocation]:
    """Returns the settings with their mesh, the resources of this machine or the cluster, and the run's allocation.

    `kept` as in `prepare`. Raises SettingError if the settings contradict each other or the device.
    """
    uses_gpus = config.scaling.device != "cpu"
    inline = config.launch.mode == "inline"
    resources = Resources.of_this_machine(gpus=uses_gpus) if inline else Resources.of_cluster(gpus=uses_gpus)
    # If the data is prepared already, no CPU is needed besides those of the workers.
    is_ready = is_prepared(config, storage, kept)
    without_preparation = (
        replace(config, data=replace(config.data, start_after_mib=0.0, follow=False)) if is_ready else config
    )
    chosen = choose_mesh(without_preparation, resources, storage, log)
    return replace(chosen, data=config.data), resources, resolve_allocation(chosen, resources)


def resolve_and_check(
    config: Config,
    storage: Folder,
    log: Callable[[str], None],
    warn: Callable[[str], None],
    kept: KeptPreparations = NO_KEPT_PREPARATIONS,
) -> tuple[Config, Resources, Allocation]:
    """Returns the result of `resolve_resources` after all checks of the preflight. Raises CannotRun if one fails."""
    config, resources, allocation = resolve_resources(config, storage, log, kept)
    if resources.gpu_problem and config.scaling.device == "auto":
        warn(f"training on CPUs: {resources.gpu_problem}")
    raise_for_failures(run_preflight(config, storage, resources, allocation, kept), "cluster")
    return config, resources, allocation


def run_preflight(
    config: Config,
    storage: Folder,
    resources: Resources,
    allocation: Allocation,
    kept: KeptPreparations = NO_KEPT_PREPARATIONS,
) -> list[Check]:
    """Runs all checks of a training's preflight, on every host if the run joins a cluster.

    Needs ray.init unless the run is inline. Raises SettingError and DataError if the data cannot be read here.
    """
    checks = preflight(config, allocation, resources, storage)
    if _runs_on_hosts(config.launch) and all(check.passed for check in checks):
        checks += probe_hosts(config, storage, kept).checks()
    return checks


def _mixture_notes(config: Config, storage: Folder) -> list[str]:
    """Returns notes if a mixture's actual shares differ from its weights, as far as known before its data is prepared."""
    sizes = dict.fromkeys(config.data.sources, 1)
    requested_weights = [config.data.weights, *(item.get("weights") for item in config.data.curriculum)]
    if sizes and any(isinstance(weights, str) and weights != "given" for weights in requested_weights):
        task = build_task(config)
        try:
            folder = storage / ".prepared" / identity(config, task, storage=storage).data
        except (DataError, SettingError):  # a check of resources does not need the data
            return []
        if (manifest := load_finished_manifest(folder)) is None:
            return []
        for name, (_, manifest_of_source) in manifest.by_source(folder).items():
            sizes[name] = (
                count_windows(task, manifest_of_source.tokens("train"))
                if task.window
                else manifest_of_source.documents("train")
            )
    return share_notes(config.data, sizes) if sizes else []


def _runs_on_hosts(launch: LaunchConfig) -> bool:
    return launch.mode == "ray" and uses_running_cluster(launch)
