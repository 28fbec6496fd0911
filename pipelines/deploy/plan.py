"""What a run will take of a place, decided before anything is written.

deployment = plan("slurm", Deploy(nodes=2, gpus_per_node=8), find_place("slurm_two_nodes_of_eight"), parsed)
deployment.workers, deployment.grace_s                     # 16, 180
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from raystride.pipelines.cluster.resources import Resources, Share, resolve
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.combinations import SHARDED
from raystride.pipelines.config.deploy import Deploy, Place
from raystride.pipelines.config.parse import Parsed, configured
from raystride.pipelines.credentials import masked_all
from raystride.pipelines.files import absolute
from raystride.pipelines.launch.mesh_choice import choose_mesh
from raystride.pipelines.launch.place import is_path, settled
from raystride.pipelines.launch.preflight import GIB, Check, checks_of_settings, estimate_memory, refuse_failing

Kind = Literal["compose", "slurm", "kuberay", "launcher", "sky"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TEMPLATES = Path(__file__).parents[2] / "deploy"
FIRST_PLACE = {
    "compose": "this_machine",
    "slurm": "slurm",
    "kuberay": "kubernetes",
    "launcher": "machines_by_ssh",
    "sky": "aws",
}
"""The place that a kind begins with, where none is named."""

MLFLOW_BESIDE = {"kuberay": "http://mlflow:5000"}
"""The tracking server that a kind deploys along, where the place names none."""
SAVE_MIB_PER_S = 100
"""What a busy network drive takes of a checkpoint from one node, at the least that we would plan for."""
DATA_PLACES = ("source", "validation_source", "test_source", "target_source")
LEAST_GRACE_S = 120
"""Time to save and to close the record, however small the model is."""
LEAST_RUN_S = 480
"""Of one start on Slurm besides saving, below which it comes to few steps."""
MOST_SHARED_MEMORY_GIB = 64
"""Ray's object store serves preparation alone; more than this it has no use for."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A run in a place: all that the templates are told."""

    kind: Kind
    job: str
    """`train` or `sweep`."""
    run: str
    name: str
    """The run's name as hosts, Kubernetes and Slurm take it."""
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    """With some of a node's GPUs, its share of the processors."""
    memory_gib: int
    """Of each node, likewise."""
    least_nodes: int
    """With how many the run goes on when others are lost."""
    workers: int
    """Training processes; on CPUs 0 where the run itself finds out how many."""
    grace_s: int
    """Seconds that a stop request leaves for saving."""
    shared_memory_gib: int
    """Of /dev/shm in each container."""
    settings: str
    """YAML of what is not as it is by default, with the run's name and storage."""
    array: int
    place: Place

    @property
    def price_per_hour(self) -> float:
        """Of all nodes, in the place's currency; 0: not known."""
        return self.place.price_per_hour * self.nodes

    @property
    def whole_nodes(self) -> bool:
        """Whether nobody else can use what the run leaves of its nodes."""
        return self.cpus_per_node == self.place.cpus_per_node

    @property
    def storage_is_uri(self) -> bool:
        """Whether runs lie in an object store, and not in a folder."""
        return "://" in self.place.storage


def known_places() -> dict[str, Path]:
    """The descriptions that come along, by name."""
    return {path.stem: path for path in sorted((TEMPLATES / "places").glob("*.yaml"))}


def find_place(name: str) -> Place:
    """A place by its name or file. Raises SettingError, which names the places or what is wrong in the file."""
    path = known_places().get(name, Path(name))
    if not path.is_file():
        raise SettingError(
            f"place is {name!r}: there is no such file; places are {', '.join(known_places())}", setting="place", value=name
        )
    return configured(Place, str(path)).settings


def plan(kind: Kind, request: Deploy, place: Place, parsed: Parsed[Any]) -> Deployment:
    """What the run takes of the place.

    `parsed` holds a Config, or for the job `sweep` a SweepConfig. Raises CannotRun, with a line for each reason, where the
    place cannot satisfy it, and SettingError where settings contradict each other.
    """
    named: Config = parsed.settings
    run = named.run or named.default_run(parsed.preset)
    config = _with_whole_paths(named)
    cpus, memory = _of_a_node(request, place)
    there = _resources(request, place, cpus, memory)
    config = replace(config, scaling=replace(config.scaling, device="cuda" if request.gpus_per_node else "cpu"))
    config = choose_mesh(config, there, None, print)
    share = resolve(config, there)
    grace_s = _grace_s(config, share, request.nodes)
    checks = list(_checks_of_place(kind, request, place, config, grace_s))
    checks += checks_of_settings(config, share, there, config.tokenizer.vocabulary_size)
    refuse_failing(checks, "place")
    settled = request.gpus_per_node or isinstance(config.scaling.workers, int)
    # A sweep varies the workers itself.
    if settled and request.job == "train":
        config = replace(config, scaling=replace(config.scaling, workers=share.workers))
    config = replace(config, run=run, storage=place.storage or config.storage)
    if server := place.mlflow_uri or MLFLOW_BESIDE.get(kind):
        config = replace(config, record=replace(config.record, mlflow_uri=server))
    return Deployment(
        kind=kind,
        job=request.job,
        run=run,
        name=_host_name(run),
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        cpus_per_node=cpus,
        memory_gib=memory,
        least_nodes=math.ceil(share.least * request.nodes / share.workers) if share.least else request.nodes,
        workers=share.workers if settled else 0,
        grace_s=grace_s,
        shared_memory_gib=max(1, min(MOST_SHARED_MEMORY_GIB, int(0.3 * place.memory_gib))),
        settings=_settings(config),
        array=request.array,
        place=replace(place, storage=config.storage),
    )


def _grace_s(config: Config, share: Share, nodes: int) -> int:
    """Seconds, in whole minutes, to save and to close the record; every node writes its part of a checkpoint."""
    need = estimate_memory(config, share, config.tokenizer.vocabulary_size)
    copies = share.workers if config.scaling.strategy in SHARDED else 1
    saved = (need.parameters + need.optimizer) * copies if need else GIB
    return max(LEAST_GRACE_S, 60 + math.ceil(saved / nodes / (SAVE_MIB_PER_S << 20) / 60) * 60)


def _of_a_node(request: Deploy, place: Place) -> tuple[int, int]:
    """Processors, and GiB of memory, that the run has of a node: all, or those that belong to its GPUs."""
    part = min(1.0, request.gpus_per_node / place.gpus_per_node) if request.gpus_per_node and place.gpus_per_node else 1.0
    return max(1, int(place.cpus_per_node * part)), max(1, int(place.memory_gib * part))


def _resources(request: Deploy, place: Place, cpus: int, memory_gib: int) -> Resources:
    """What the preflight will find there."""
    return Resources(
        cpus=float(cpus * request.nodes),
        gpus=float(request.gpus_per_node * request.nodes),
        memory_bytes=memory_gib * GIB,
        gpu_memory_bytes=place.gpu_memory_gib * GIB or None,
        nodes=request.nodes,
        node_cpus=(float(cpus),) * request.nodes,
        gpu_name=place.gpu or None,
    )


def _checks_of_place(kind: Kind, request: Deploy, place: Place, config: Config, grace_s: int) -> Iterator[Check]:
    """What the place has too little of, and what the run would not find there."""
    nodes, gpus = request.nodes, request.gpus_per_node
    yield Check("nodes", nodes <= place.nodes, f"{nodes} asked, {place.nodes} there", f"lower --nodes to {place.nodes}")
    fewer = f"lower --gpus-per-node to {place.gpus_per_node}, or name another --place"
    yield Check("GPUs", gpus <= place.gpus_per_node, f"{gpus} a node asked, {place.gpus_per_node} there", fewer)
    slots, every, group = config.train.slots, nodes * gpus, config.scaling.group
    groups = every // group
    idle = isinstance(config.scaling.workers, str) and slots < groups
    more = f"give --train.slots {groups} (and lower train.slot_size to keep the batch), or fewer GPUs"
    yield Check("slots", not idle, f"{slots} slots a step leave {every - slots * group} of {every} GPUs without work", more)
    yield _check_storage(kind, request, place)
    yield _check_data(kind, place, config)
    if kind == "slurm":
        limit, least = _seconds(place.slurm.time_limit), LEAST_RUN_S + grace_s
        found = f"{place.slurm.time_limit} is too short to start and, {grace_s} s before its end, to save"
        yield Check("time limit", limit >= least, found, f"give slurm.time_limit at least {math.ceil(least / 60)} minutes")
    if kind == "launcher" and place.cloud.provider == "local":
        hosts = len(place.cloud.hosts)
        yield Check("hosts", nodes <= hosts, f"{nodes} nodes asked, {hosts} in cloud.hosts", "name them in the place's file")
    if kind == "launcher" and place.cloud.provider != "local":
        known = bool(place.cloud.region and place.cloud.worker_type)
        what = f"cloud.region {place.cloud.region!r}, cloud.worker_type {place.cloud.worker_type!r}"
        yield Check("machines", known, what, "name both in the place's file")


def _check_storage(kind: Kind, request: Deploy, place: Place) -> Check:
    found, remote = place.storage, "://" in place.storage
    if not found:
        return Check("storage", False, "the place names none", "name a folder or a URI as `storage` in the place's file")
    remedy = "name a folder that all nodes see and say `shared: true`, or an object store such as s3://bucket/runs"
    if request.nodes > 1 and not remote and not place.shared:
        return Check("storage", False, f"{found} is a folder of each of {request.nodes} nodes", remedy)
    if kind == "kuberay" and not remote and not place.kubernetes.storage_class:
        return Check("storage", False, f"{found} is a folder, and kubernetes.storage_class is empty", "name either")
    if kind == "sky" and not remote:
        return Check("storage", False, f"{found} ends with the machines that SkyPilot starts", "name an object store")
    absolute = remote or found.startswith(("/", "~"))
    return Check("storage", absolute, f"{found} is no absolute path, so each node has its own", "write the whole path")


def _check_data(kind: Kind, place: Place, config: Config) -> Check:
    """Files of this machine are found by jobs that run on it, or that share its disks, and below the storage by all."""
    found = {f"data.{name}": getattr(config.data, name) for name in DATA_PLACES}
    found |= {"tokenizer.file": config.tokenizer.file, "model.init_from": config.model.init_from}
    found["lora.init_from"] = config.lora.init_from
    found |= {f"plugins[{number}]": file for number, file in enumerate(config.plugins)}
    below = f"{place.storage.rstrip('/')}/"
    local = [f"{name} {path!r}" for name, path in found.items() if path and _is_here(path) and not path.startswith(below)]
    elsewhere = kind != "slurm" and bool(local)
    remedy = "put it below the place's storage, or into an object store, and give that path"
    return Check("data", not elsewhere, f"{', '.join(local)} is a file of this machine", remedy)


def _seconds(limit: str) -> float:
    """A time as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    Raises SettingError.
    """
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if form is None:
        if limit.lower() in ("infinite", "unlimited"):
            return math.inf
        raise SettingError(
            f"slurm.time_limit is {limit!r}: it must be written as Slurm does, such as 24:00:00 or 2-00:00:00",
            setting="slurm.time_limit",
            value=limit,
        )
    days, *rest = form.groups()
    first, second, third = (int(part or 0) for part in rest)
    if days is not None:
        return int(days) * 86400 + first * 3600 + second * 60 + third
    if rest[2] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _with_whole_paths(config: Config) -> Config:
    """The settings with whole paths of files that are here: jobs work in folders of their own."""
    config, start = settled(config), config.model.init_from
    plugins = tuple(absolute(file) if file.endswith(".py") and _is_here(file) else file for file in config.plugins)
    model = replace(config.model, init_from=absolute(start)) if start and _is_here(start) else config.model
    return replace(config, model=model, plugins=plugins)


def _is_here(place: str) -> bool:
    """Whether it is a path of this machine, and not of the place."""
    return is_path(place) and os.path.exists(os.path.expanduser(place))


def _host_name(run: str) -> str:
    """At most 40 of `a-z0-9-`, as a name of a host ends, and as one of Kubernetes' services begins: with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-") or "run"
    return (name if name[0].isalpha() else f"run-{name}")[:40].rstrip("-")


def _settings(config: Config) -> str:
    """YAML of the settings that are not as they are by default, in sections."""
    tree = _changed(asdict(config), asdict(type(config)()))
    return yaml.safe_dump(masked_all(tree), sort_keys=False, allow_unicode=True, width=120)


def _changed(value: Any, default: Any) -> Any:
    """What of a section differs; another value as it is, tuples as lists."""
    if isinstance(value, dict) and isinstance(default, dict) and default:
        return {key: _changed(each, default.get(key)) for key, each in value.items() if each != default.get(key)}
    return list(value) if isinstance(value, tuple) else value
