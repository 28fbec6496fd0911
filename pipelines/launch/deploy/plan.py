"""Plans a deployment: checks that a run fits a place, and decides its share of the place, before anything is written.

place = load_place("slurm_two_nodes_of_eight")
deployment = plan_deployment("slurm", DeployConfig(nodes=2, gpus_per_node=8), place, parsed)
deployment.workers, deployment.grace_s                     # 16, 180
"""

import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from raystride.locations import PACKAGE
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.deploy import DeployConfig, TargetConfig
from raystride.pipelines.config.parse import Parsed, load_settings
from raystride.pipelines.data.prepare.choose_task import choose_task, choose_validation
from raystride.pipelines.data.sources.selection import is_local
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.preflight.checks import GIB, Check, check_settings, estimate_memory, raise_for_failures
from raystride.pipelines.launch.preflight.choose_mesh import choose_mesh
from raystride.pipelines.launch.run_store.location import is_path, with_absolute_paths, with_data
from raystride.pipelines.system.credentials import redact_all_uris
from raystride.pipelines.system.storage.folder import absolute_uri

Kind = Literal["compose", "slurm", "kuberay", "launcher", "sky"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TEMPLATES = PACKAGE / "deploy"
DEFAULT_PLACES = {
    "compose": "this_machine",
    "slurm": "slurm",
    "kuberay": "kubernetes",
    "launcher": "machines_by_ssh",
    "sky": "aws",
}
"""The default place of each kind."""

BUNDLED_MLFLOW_URIS = {"kuberay": "http://mlflow:5000"}
"""Address of the MLflow server that a kind's files also deploy, if the place names none."""
MIN_SAVE_MIB_PER_S = 100
"""The lowest rate planned for, at which one node writes a checkpoint to a busy network drive."""
DATA_FIELDS = ("source", "validation_source", "test_source", "target_source")
MIN_GRACE_S = 120
"""Minimum time to save and to close the record, even for a small model."""
MIN_RUN_S = 480
"""Minimum time of one start on Slurm besides saving; with less the run makes few steps."""
NODES_TIMEOUT_S = 1800.0
"""Time that a start waits for machines that a cloud or hosts bring up one by one."""
MAX_SHARED_MEMORY_GIB = 64
"""Ray's object store is used for data preparation alone, which needs no more than this."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A run in a place. Its fields and properties are the variables of the templates."""

    kind: Kind
    job: str
    """`train` or `sweep`."""
    run: str
    name: str
    """The run's name in the form that host names, Kubernetes and Slurm allow."""
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    """CPUs of each node: all, or those that belong to the GPUs in use."""
    memory_gib: int
    """Memory of each node, likewise."""
    min_nodes: int
    """Minimum number of nodes with which the run goes on if others are lost."""
    workers: int
    """Training processes; on CPUs, 0 if the run itself decides how many."""
    grace_s: int
    """Seconds for saving after a stop request."""
    shared_memory_gib: int
    """Size of /dev/shm in each container."""
    settings: str
    """YAML of the settings that differ from their defaults, with the run's name and storage."""
    array: int
    """Jobs of a Slurm array that share a sweep; 0: one job."""
    place: TargetConfig

    @property
    def price_per_hour(self) -> float:
        """Hourly price of all nodes, in the place's currency; 0 if unknown."""
        return self.place.price_per_hour * self.nodes

    @property
    def has_whole_nodes(self) -> bool:
        """Whether the run has all CPUs of its nodes, so that no other job can use them."""
        return self.cpus_per_node == self.place.cpus_per_node

    @property
    def storage_is_uri(self) -> bool:
        """Whether runs are stored in an object store and not in a folder."""
        return "://" in self.place.storage


def known_places() -> dict[str, Path]:
    """Returns the files of the places that come with Raystride, by name."""
    return {path.stem: path for path in sorted((TEMPLATES / "places").glob("*.yaml"))}


def load_place(name: str) -> TargetConfig:
    """Loads a place by its name or file. Raises SettingError, which lists the places or names the fault in the file."""
    path = known_places().get(name, Path(name))
    if not path.is_file():
        raise SettingError(
            f"place is {name!r}: there is no such file; places are {', '.join(known_places())}", setting="place", value=name
        )
    return load_settings(TargetConfig, str(path)).settings


def plan_deployment(kind: Kind, request: DeployConfig, place: TargetConfig, parsed: Parsed[Any]) -> Deployment:
    """Plans the run's share of the place.

    `parsed` holds a Config, or for the job `sweep` a SweepJobConfig. Raises CannotRun, with a line for each reason, if the
    place cannot run it, and SettingError if settings contradict each other.
    """
    chosen: Config = choose_task(with_data(parsed))
    chosen = replace(chosen, data=choose_validation(chosen.data, chosen.task))
    run = chosen.run or chosen.default_run(parsed.preset)
    config = _resolve_local_paths(chosen)
    cpus, memory = _node_share(request, place)
    resources = _expected_resources(request, place, cpus, memory)
    config = replace(config, scaling=replace(config.scaling, device="cuda" if request.gpus_per_node else "cpu"))
    config, allocation = choose_mesh(config, resources, None, print)
    grace_s = _estimate_grace_s(config, allocation, request.nodes)
    checks = list(_check_place(kind, request, place, config, grace_s))
    checks += check_settings(config, allocation, resources)
    raise_for_failures(checks, "place")
    workers_known = request.gpus_per_node or isinstance(config.scaling.workers, int)
    # A sweep varies the workers itself.
    if workers_known and request.job == "train":
        config = replace(config, scaling=replace(config.scaling, workers=allocation.workers))
    if kind in ("launcher", "sky"):
        config = _with_wait_for_nodes(config, request.nodes)
    config = replace(config, run=run, storage=place.storage or config.storage)
    if server := place.mlflow_uri or BUNDLED_MLFLOW_URIS.get(kind):
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
        min_nodes=math.ceil(allocation.min_workers * request.nodes / allocation.workers)
        if allocation.min_workers
        else request.nodes,
        workers=allocation.workers if workers_known else 0,
        grace_s=grace_s,
        shared_memory_gib=max(1, min(MAX_SHARED_MEMORY_GIB, int(0.3 * place.memory_gib))),
        settings=_dump_settings(config),
        array=request.array,
        place=replace(place, storage=config.storage),
    )


def _with_wait_for_nodes(config: Config, nodes: int) -> Config:
    """Returns the settings with the wait for all nodes, whose machines join one by one; what is given stays."""
    scaling, launch = config.scaling, config.launch
    timeout_s = max(launch.cluster_timeout_s, NODES_TIMEOUT_S)
    return replace(
        config,
        scaling=replace(scaling, min_nodes=scaling.min_nodes or nodes),
        launch=replace(launch, cluster_timeout_s=timeout_s),
    )


def _estimate_grace_s(config: Config, allocation: Allocation, nodes: int) -> int:
    """Returns the seconds, in whole minutes, to save and to close the record; every node writes its part of a checkpoint."""
    memory_estimate = estimate_memory(config, allocation)
    copies = allocation.workers if config.scaling.kind.is_sharded else 1
    checkpoint_bytes = (memory_estimate.parameters + memory_estimate.optimizer) * copies if memory_estimate else GIB
    return max(MIN_GRACE_S, 60 + math.ceil(checkpoint_bytes / nodes / (MIN_SAVE_MIB_PER_S << 20) / 60) * 60)


def _node_share(request: DeployConfig, place: TargetConfig) -> tuple[int, int]:
    """Returns the CPUs and the GiB of memory that the run has of a node: all, or those that belong to its GPUs."""
    fraction = (
        min(1.0, request.gpus_per_node / place.gpus_per_node) if request.gpus_per_node and place.gpus_per_node else 1.0
    )
    return max(1, int(place.cpus_per_node * fraction)), max(1, int(place.memory_gib * fraction))


def _expected_resources(request: DeployConfig, place: TargetConfig, cpus: int, memory_gib: int) -> Resources:
    """Returns the cluster resources that the preflight will find in the place."""
    return Resources(
        cpus=float(cpus * request.nodes),
        gpus=float(request.gpus_per_node * request.nodes),
        memory_bytes=memory_gib * GIB,
        gpu_memory_bytes=place.gpu_memory_gib * GIB or None,
        nodes=request.nodes,
        node_cpus=(float(cpus),) * request.nodes,
        gpu_name=place.gpu or None,
    )


def _check_place(kind: Kind, request: DeployConfig, place: TargetConfig, config: Config, grace_s: int) -> Iterator[Check]:
    """Yields the checks that the place has enough of everything, and that the run will find its storage and data there."""
    nodes, gpus = request.nodes, request.gpus_per_node
    yield Check("nodes", nodes <= place.nodes, f"{nodes} asked, {place.nodes} there", f"lower --nodes to {place.nodes}")
    remedy = f"lower --gpus-per-node to {place.gpus_per_node}, or name another --place"
    yield Check("GPUs", gpus <= place.gpus_per_node, f"{gpus} a node asked, {place.gpus_per_node} there", remedy)
    slots, num_gpus, group = config.train.slots, nodes * gpus, config.scaling.group
    num_groups = num_gpus // group
    leaves_idle = isinstance(config.scaling.workers, str) and slots < num_groups
    slots_remedy = f"give --train.slots {num_groups} (and lower train.slot_size to keep the batch), or fewer GPUs"
    yield Check(
        "slots",
        not leaves_idle,
        f"{slots} slots a step leave {num_gpus - slots * group} of {num_gpus} GPUs without work",
        slots_remedy,
    )
    yield _check_storage(kind, request, place)
    yield _check_data(kind, place, config)
    if kind == "slurm":
        limit, min_limit_s = _parse_time_limit(place.slurm.time_limit), MIN_RUN_S + grace_s
        fault = f"{place.slurm.time_limit} is too short to start and, {grace_s} s before its end, to save"
        yield Check(
            "time limit",
            limit >= min_limit_s,
            fault,
            f"give slurm.time_limit at least {math.ceil(min_limit_s / 60)} minutes",
        )
        # The only text of a place that stands in a file as it is.
        bash = subprocess.run(["bash", "-n"], input=place.slurm.activate, capture_output=True, text=True, check=False)
        fault = f"{place.slurm.activate!r}: {bash.stderr.partition(chr(10))[0]}"
        yield Check("slurm.activate", not bash.returncode, fault, "give one complete line of bash")
    if kind == "sky":
        fault = "cloud.provider is local: SkyPilot starts machines of a cloud"
        yield Check("cloud", place.cloud.provider != "local", fault, "name one in the place's file")
    if kind == "launcher" and place.cloud.provider == "local":
        hosts = len(place.cloud.hosts)
        yield Check("hosts", nodes <= hosts, f"{nodes} nodes asked, {hosts} in cloud.hosts", "name them in the place's file")
    if kind == "launcher" and place.cloud.provider != "local":
        is_complete = bool(place.cloud.region and place.cloud.worker_type)
        settings = f"cloud.region {place.cloud.region!r}, cloud.worker_type {place.cloud.worker_type!r}"
        yield Check("machines", is_complete, settings, "name both in the place's file")


def _check_storage(kind: Kind, request: DeployConfig, place: TargetConfig) -> Check:
    """Checks that all nodes see the place's storage, and that it outlives them."""
    location, is_remote = place.storage, "://" in place.storage
    if not location:
        return Check("storage", False, "the place names none", "name a folder or a URI as `storage` in the place's file")
    remedy = "name a folder that all nodes see and say `shared: true`, or an object store such as s3://bucket/runs"
    if request.nodes > 1 and not is_remote and not place.shared:
        return Check("storage", False, f"{location} is a folder of each of {request.nodes} nodes", remedy)
    if kind == "kuberay" and not is_remote and not place.kubernetes.storage_class:
        return Check("storage", False, f"{location} is a folder, and kubernetes.storage_class is empty", "name either")
    if kind == "sky" and not is_remote:
        return Check("storage", False, f"{location} ends with the machines that SkyPilot starts", "name an object store")
    is_absolute = is_remote or location.startswith(("/", "~"))
    return Check("storage", is_absolute, f"{location} is no absolute path, so each node has its own", "write the whole path")


def _check_data(kind: Kind, place: TargetConfig, config: Config) -> Check:
    """Checks that the job will find its local files: on Slurm, which shares this machine's disks, or below the storage."""
    paths = {f"data.{name}": getattr(config.data, name) for name in DATA_FIELDS}
    paths |= {"tokenizer.file": config.tokenizer.file, "model.init_from": config.model.init_from}
    paths |= {"lora.init_from": config.lora.init_from, "objective.teacher": config.objective.teacher}
    paths |= {f"plugins[{number}]": file for number, file in enumerate(config.plugins)}
    prefix = f"{place.storage.rstrip('/')}/"
    local = [
        f"{name} {path!r}" for name, path in paths.items() if path and _is_local_path(path) and not path.startswith(prefix)
    ]
    is_missing = kind != "slurm" and bool(local)
    remedy = "put it below the place's storage, or into an object store, and give that path"
    return Check("data", not is_missing, f"{', '.join(local)} is a file of this machine", remedy)


def _parse_time_limit(limit: str) -> float:
    """Returns the seconds of a time limit in Slurm's form; infinity if it is unlimited. Raises SettingError.

    The forms are minutes, minutes:seconds, hours:minutes:seconds and days-hours[:minutes[:seconds]].
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        if limit.lower() in ("infinite", "unlimited"):
            return math.inf
        raise SettingError(
            f"slurm.time_limit is {limit!r}: it must be written as Slurm does, such as 24:00:00 or 2-00:00:00",
            setting="slurm.time_limit",
            value=limit,
        )
    days, *rest = match.groups()
    first, second, third = (int(part or 0) for part in rest)
    if days is not None:
        return int(days) * 86400 + first * 3600 + second * 60 + third
    if rest[2] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _resolve_local_paths(config: Config) -> Config:
    """Returns the settings with absolute paths of local files: jobs run in other working folders."""
    config, base = with_absolute_paths(config), config.model.init_from
    plugins = tuple(absolute_uri(file) if file.endswith(".py") and _is_local_path(file) else file for file in config.plugins)
    model = replace(config.model, init_from=absolute_uri(base)) if base and _is_local_path(base) else config.model
    return replace(config, model=model, plugins=plugins)


def _is_local_path(text: str) -> bool:
    """Returns whether it is an existing path of this machine, and not of the place."""
    return is_path(text) and is_local(text)


def _host_name(run: str) -> str:
    """Returns the run's name as a host name: at most 40 of `a-z0-9-`, not ending in `-`.

    It begins with a letter, as names of Kubernetes services must.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-") or "run"
    return (name if name[0].isalpha() else f"run-{name}")[:40].rstrip("-")


def _dump_settings(config: Config) -> str:
    """Returns the YAML of the settings that differ from their defaults, in sections, and of the data's source in any case.

    With `model.init_from`, `model` and `tokenizer` are written in full: missing fields would be read from that folder.
    """
    values = asdict(config)
    changed_values = _non_default_values(values, asdict(type(config)()))
    if config.model.init_from:
        changed_values |= {name: _non_default_values(values[name], None) for name in ("model", "tokenizer")}
    if not config.data.sources:  # a job whose settings name no data is refused
        changed_values["data"] = {"source": config.data.source} | changed_values.get("data", {})
    return yaml.safe_dump(redact_all_uris(changed_values), sort_keys=False, allow_unicode=True, width=120)


def _non_default_values(value: Any, default: Any) -> Any:
    """Returns the fields of a section that differ from `default`, or all if it is None.

    Other values are returned as they are, tuples as lists.
    """
    if isinstance(value, dict) and default is None:
        return {key: _non_default_values(field_value, None) for key, field_value in value.items()}
    if isinstance(value, dict) and isinstance(default, dict) and default:
        return {
            key: _non_default_values(field_value, default.get(key))
            for key, field_value in value.items()
            if field_value != default.get(key)
        }
    return list(value) if isinstance(value, tuple) else value
