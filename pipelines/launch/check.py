"""Whether a configuration will run here: what there is, what is asked of it, and `raystride check`, which prints both.

config, there, share = resources_for(config, storage, print)
checks_for(config, storage, there, share)                 # a training's preflight
"""

from collections.abc import Callable
from dataclasses import replace

from raystride.pipelines.cluster.cluster import cluster, joined
from raystride.pipelines.cluster.nodes import measure_network
from raystride.pipelines.cluster.resources import Resources, Share, resolve
from raystride.pipelines.commands import program
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.feed.opening import share_notes
from raystride.pipelines.feed.samples import windows_in
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import CANNOT_RUN, DONE, guarded
from raystride.pipelines.launch.hosts import look_at_hosts
from raystride.pipelines.launch.mesh_choice import choose_mesh
from raystride.pipelines.launch.place import locate
from raystride.pipelines.launch.preflight import Check, preflight
from raystride.pipelines.launch.preparing import prepared_before
from raystride.pipelines.prepare.fingerprint import NOTHING_KEPT, Kept, identity
from raystride.pipelines.prepare.one_source import finished
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks import build_task


def run_check(parsed: Parsed[Config]) -> int:
    """Prints what there is and whether the configuration will run on it; returns the exit code."""
    return guarded(lambda: _check(*locate(parsed)))


def _check(config: Config, storage: Folder) -> int:
    with cluster(config.launch):
        config, there, share = resources_for(config, storage, print)
        checks, table = preflight(config, share, there, storage, config.tokenizer.vocabulary_size), ""
        if _on_hosts(config) and all(check.passed for check in checks):
            hosts, links = look_at_hosts(config, storage), measure_network(config.launch.timeout_s)
            checks += [*hosts.checks(), *hosts.more_checks(links)]
            table = hosts.table(links)
    for check in checks:
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name:<15} {check.found}")
        if not check.passed:
            print(f"     {'':<15} {check.remedy}")
    for note in _notes_of_shares(config, storage):
        print(f"note {note}")
    if table:
        print(f"\n{table}\n")
    passed = all(check.passed for check in checks)
    print(f"results  {storage}")
    print("mlflow   not logged there")
    print(f"next     {program()} train with the same settings" if passed else "next     mend what failed, and check again")
    return DONE if passed else CANNOT_RUN


def resources_for(
    config: Config, storage: Folder, said: Callable[[str], None], kept: Kept = NOTHING_KEPT
) -> tuple[Config, Resources, Share]:
    """The settings with their mesh, the resources of this machine or the cluster, and the share that the run takes of them.

    `kept` as in `prepare`. Raises SettingError where the settings contradict each other or the device.
    """
    asked = config.scaling.device != "cpu"
    inline = config.launch.mode == "inline"
    there = Resources.of_this_machine(gpus=asked) if inline else Resources.of_cluster(gpus=asked)
    # What is prepared already needs no processor beside those of the workers.
    alone = prepared_before(config, storage, kept)
    asked_for = replace(config, data=replace(config.data, start_after_mib=0.0, follow=False)) if alone else config
    chosen = choose_mesh(asked_for, there, storage, said)
    return replace(chosen, data=config.data), there, resolve(chosen, there)


def checks_for(config: Config, storage: Folder, there: Resources, share: Share, kept: Kept = NOTHING_KEPT) -> list[Check]:
    """All that a training's preflight looks at, on every host of a cluster that is joined.

    Needs ray.init unless the run is inline. Raises SettingError and DataError where the data cannot be read here.
    """
    checks = preflight(config, share, there, storage, config.tokenizer.vocabulary_size)
    if _on_hosts(config) and all(check.passed for check in checks):
        checks += look_at_hosts(config, storage, kept).checks()
    return checks


def _notes_of_shares(config: Config, storage: Folder) -> list[str]:
    """Where a mixture's shares are not those of its weights, as far as that is known before its data is prepared."""
    sizes = dict.fromkeys(config.data.sources, 1)
    asked = [config.data.weights, *(item.get("weights") for item in config.data.curriculum)]
    if sizes and any(isinstance(weights, str) and weights != "given" for weights in asked):
        task = build_task(config)
        try:
            folder = storage / ".prepared" / identity(config, task, storage=storage).data
        except (DataError, SettingError):  # a check of resources does not need the data
            return []
        if (manifest := finished(folder)) is None:
            return []
        for name, (_, own) in manifest.by_source(folder).items():
            sizes[name] = windows_in(task, own.tokens("train")) if task.window else own.documents("train")
    return share_notes(config, sizes) if sizes else []


def _on_hosts(config: Config) -> bool:
    return config.launch.mode == "ray" and joined(config.launch)
