"""Checks whether a configuration will run on the given resources; also the command `raystride check`.

resolved = resolve_resources(RunContext(config, storage))
resolved.context.config, resolved.allocation.workers      # the settings with their mesh, and the run's workers
run_preflight(resolved)                                   # a training's preflight
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from raystride.pipelines.config import Config, LaunchConfig, SettingError, TrainConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.data.feed.open_dataset import share_notes
from raystride.pipelines.data.feed.samples import count_windows
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.prepare import check_first_rows
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import CannotRun, cluster, uses_running_cluster
from raystride.pipelines.launch.cluster.network import measure_network
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.cluster.versions import describe_other_packages
from raystride.pipelines.launch.cluster.wait_for_nodes import wait_for_nodes
from raystride.pipelines.launch.console.exit_codes import CANNOT_RUN, DONE
from raystride.pipelines.launch.preflight.checks import Check, preflight, raise_for_failures
from raystride.pipelines.launch.preflight.choose_mesh import choose_mesh
from raystride.pipelines.launch.preflight.hosts import probe_hosts
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.system.commands import launch_command
from raystride.pipelines.system.storage.folder import Folder


def run_check(parsed: Parsed[Config], prove: Callable[["ResolvedRun"], list[str]] = lambda resolved: []) -> int:
    """Prints the checks and whether the configuration will run; returns the exit code. The lines of `prove` come last."""
    context = RunContext(*locate_run(parsed))
    data, lines = _check_first_rows(context)  # no cluster is started for data that cannot be read
    launch = context.config.launch
    if not data.passed:
        return _report([data], [], "", context.storage)
    with cluster(launch):
        resolved = resolve_resources(context)
        checks, table = [data, *_local_checks(resolved)], ""
        if _runs_on_hosts(launch) and all(check.passed for check in checks):
            hosts, links = probe_hosts(resolved.context), measure_network(launch.cluster_timeout_s)
            checks += [*hosts.checks(), *hosts.optional_checks(links)]
            table = hosts.table(links)
        notes = [*lines, *_mixture_notes(resolved.context), *prove(resolved)]
    return _report(checks, notes, table, context.storage)


def _check_first_rows(context: RunContext) -> tuple[Check, list[str]]:
    """Reads the first rows of data that is not prepared, as the preparation would; also returns lines about the data."""
    try:
        lines = check_first_rows(context)
    except DataError as error:
        return Check("data", False, str(error), "mend the data, or the settings of data that the line names"), []
    return Check("data", True, "its first rows can be read"), [f"data: {line}" for line in lines]


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


@dataclass(frozen=True)
class ResolvedRun:
    """A run, and the share of this machine or cluster that it gets."""

    context: RunContext
    """The run; its settings have their mesh."""
    resources: Resources
    """All resources of this machine or the cluster."""
    allocation: Allocation
    """Those of the run's workers."""


def resolve_resources(context: RunContext) -> ResolvedRun:
    """Returns the run with the resources of this machine or the cluster, its mesh and its allocation.

    Waits for the nodes of `scaling.min_nodes`. Raises SettingError if the settings contradict each other or the device, and
    CannotRun if nodes are missing.
    """
    config = context.config
    if not context.is_inline:
        wait_for_nodes(config.scaling.min_nodes, config.launch, context.log)
    uses_gpus = config.scaling.device != "cpu"
    resources = Resources.of_this_machine(gpus=uses_gpus) if context.is_inline else Resources.of_cluster(gpus=uses_gpus)
    # If the data is prepared already, no CPU is needed besides those of the workers.
    without_preparation = (
        replace(config, data=replace(config.data, start_after_mib=0.0, follow=False)) if context.is_prepared else config
    )
    chosen, allocation = choose_mesh(without_preparation, resources, context.storage, context.log)
    return ResolvedRun(context.with_config(replace(chosen, data=config.data)), resources, allocation)


def resolve_and_check(context: RunContext, warn: Callable[[str], None]) -> ResolvedRun:
    """Returns the result of `resolve_resources` after all checks of the preflight. Raises CannotRun if one fails."""
    resolved = resolve_resources(context)
    if resolved.resources.gpu_problem and context.config.scaling.device == "auto":
        warn(f"training on CPUs: {resolved.resources.gpu_problem}")
    raise_for_failures(run_preflight(resolved), "cluster")
    refuse_other_packages(resolved.context.config.train, warn)
    return resolved


def refuse_other_packages(train: TrainConfig, warn: Callable[[str], None]) -> None:
    """Warns of each node that has other versions of packages than this driver. Raises CannotRun if the run is exact."""
    lines = describe_other_packages()
    if lines and train.exact:
        found = "; ".join(lines)
        raise CannotRun(
            f"train.exact is true, and nodes have other versions of packages: {found}. Have the same on all nodes",
            problems=[("packages", found)],
            setting="train.exact",
            value=True,
        )
    for line in lines:
        warn(f"{line}: have the same on all nodes")


def run_preflight(resolved: ResolvedRun) -> list[Check]:
    """Runs all checks of a training's preflight, on every host if the run joins a cluster.

    Needs ray.init unless the run is inline. Raises SettingError and DataError if the data cannot be read here.
    """
    checks = _local_checks(resolved)
    if _runs_on_hosts(resolved.context.config.launch) and all(check.passed for check in checks):
        checks += probe_hosts(resolved.context).checks()
    return checks


def _local_checks(resolved: ResolvedRun) -> list[Check]:
    return preflight(resolved.context.config, resolved.allocation, resolved.resources, resolved.context.storage)


def _mixture_notes(context: RunContext) -> list[str]:
    """Returns notes if a mixture's actual shares differ from its weights, as far as known before its data is prepared."""
    config = context.config
    sizes = dict.fromkeys(config.data.sources, 1)
    requested_weights = [config.data.weights, *(item.get("weights") for item in config.data.curriculum)]
    if sizes and any(isinstance(weights, str) and weights != "given" for weights in requested_weights):
        task = context.task
        try:
            folder = context.prepared_folder
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
