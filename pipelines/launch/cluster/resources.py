"""Resources of a machine or cluster, and the allocation of a run: workers, device and threads.

resources = Resources.of_this_machine()                   # or Resources.of_cluster(), after ray.init
allocation = resolve_allocation(config, resources)        # Allocation(workers=2, device="cpu", threads=1)
"""

from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which

from raystride.pipelines.config import Config, ScalingConfig, TrainConfig
from raystride.pipelines.launch.cluster.cluster import run_on_node
from raystride.pipelines.observability.hardware.torch_gpus import (
    TIMEOUT_S,
    diagnose_torch_gpus,
    query_torch,
    query_torch_in_subprocess,
)
from raystride.pipelines.system.limits import usable_cores, usable_memory


@dataclass(frozen=True)
class Resources:
    """CPUs, GPUs and memory of a machine or a cluster; memory in bytes."""

    cpus: float
    gpus: float
    memory_bytes: float
    """Main memory of the smallest node."""
    gpu_memory_bytes: float | None
    """Memory of one GPU, if known."""
    nodes: int = 1
    node_cpus: tuple[float, ...] = ()
    """CPUs of each node; empty if all are on one."""
    gpu_name: str | None = None
    """Name of one GPU, if known."""
    gpu_problem: str = ""
    """Why PyTorch cannot use the GPUs that the driver shows, and what to install; those GPUs are not counted."""

    def choose_device(self, wanted: str) -> str:
        """Returns `wanted`, a setting `scaling.device`, or for `auto` what there is: `cuda` or `cpu`."""
        return wanted if wanted != "auto" else "cuda" if self.gpus >= 1 else "cpu"

    def num_fitting_workers(self, cpus: float) -> int:
        """Returns how many workers with `cpus` CPUs each fit; a worker needs its CPUs on one node."""
        return sum(int(node // cpus) for node in self.node_cpus or (self.cpus,))

    @classmethod
    def of_this_machine(cls, *, gpus: bool = True) -> "Resources":
        """Returns the resources that this process may use (`system.limits`). Without `gpus`, GPUs are not queried."""
        memory = float(usable_memory())
        if not gpus:
            return cls(float(usable_cores()), 0.0, memory, None)
        answer = query_torch()
        problem = "" if answer["count"] else diagnose_torch_gpus(answer, _count_driver_gpus())
        return cls(
            cpus=float(usable_cores()),
            gpus=float(answer["count"]),
            memory_bytes=memory,
            gpu_memory_bytes=answer["memory"],
            gpu_name=answer["name"],
            gpu_problem=problem,
        )

    @classmethod
    def of_cluster(cls, *, gpus: bool = True) -> "Resources":
        """Returns the total resources of the cluster that this process has joined, free or not.

        GPUs are those that PyTorch can use, as queried on a node with GPUs; without `gpus` they are not queried.
        """
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        totals = [node["Resources"] for node in nodes]
        num_gpus_shown = sum(total.get("GPU", 0) for total in totals)
        # Ray counts the GPUs that NVIDIA's driver shows, and this process may be on a node without any.
        answer = (
            run_on_node(query_torch_in_subprocess, TIMEOUT_S, gpu=True)
            if gpus and num_gpus_shown
            else {"count": num_gpus_shown, "name": None, "memory": None}
        )
        problem = diagnose_torch_gpus(answer, num_gpus_shown)
        return cls(
            cpus=sum(total.get("CPU", 0) for total in totals),
            gpus=0 if problem else num_gpus_shown,
            memory_bytes=min(total.get("memory", 0) + total.get("object_store_memory", 0) for total in totals),
            gpu_memory_bytes=answer["memory"],
            nodes=len(nodes),
            node_cpus=tuple(total.get("CPU", 0) for total in totals),
            gpu_name=answer["name"],
            gpu_problem=problem,
        )


@dataclass(frozen=True)
class Allocation:
    """Number of workers of a run, and the device and threads of each."""

    workers: int
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """Threads of a worker on CPUs."""
    min_workers: int = 0
    """Smallest number of workers of an elastic run; 0: the number is fixed to `workers`."""

    @property
    def per_worker(self) -> dict[str, float]:
        """Resources of one worker, in Ray's units."""
        return {"GPU": 1} if self.device == "cuda" else {"CPU": self.threads}

    @property
    def cpus(self) -> float:
        """CPUs of all workers, in Ray's units."""
        return self.workers * self.per_worker.get("CPU", 0.0)


def resolve_allocation(config: Config, resources: Resources) -> Allocation:
    """Returns the allocation, with a fitting value for every `auto`. Raises SettingError if settings are contradictory."""
    scaling, slots = config.scaling, config.train.slots
    device = resources.choose_device(scaling.device)
    _check_device(config.train, config.scaling, device)
    free = int(resources.cpus) - (config.data.start_after_mib > 0)  # one CPU for preparation
    if config.launch.mode == "inline":
        if isinstance(scaling.workers, int) and scaling.workers > 1:
            raise scaling.error("workers", "must be 1 (or auto) with --launch inline, which is this one process")
        if scaling.group > 1:
            raise scaling.error("tensor", "must be 1, and so pipeline and context, with --launch inline, one process")
        workers = 1
    elif isinstance(scaling.workers, int):
        workers = scaling.workers
    elif scaling.strategy == "single":
        workers = 1
    else:
        groups = int(resources.gpus if device == "cuda" else free) // scaling.group
        # With pipeline stages, each stage needs at least one slot.
        workers = scaling.group * max(1, min(slots // scaling.stages, groups))
    groups = workers // scaling.group
    if scaling.shard_workers and groups % scaling.shard_workers:
        raise scaling.error("shard_workers", f"must divide the workers, of which there are {groups}")
    # Matrix products are split among threads, so a thread count that depends on the workers would change the bits.
    threads = scaling.threads or (1 if config.train.exact and device == "cpu" else _max_threads(resources, workers, free))
    if config.data.start_after_mib and config.launch.mode != "inline" and workers * threads >= resources.cpus:
        raise config.data.error(
            "start_after_mib",
            f"needs a processor besides those of {workers} worker(s) with {threads} thread(s); there are "
            f"{resources.cpus:g}: lower scaling.workers or scaling.threads, or prepare first (start_after_mib 0)",
        )
    return Allocation(workers, device, threads, min(scaling.min_workers, workers))


def _check_device(train: TrainConfig, scaling: ScalingConfig, device: str) -> None:
    """Raises SettingError for settings that this device or machine does not support."""
    if device == "cpu" and train.precision == "tf32":
        raise train.error("precision", "must be another on CPUs, which have no TF32: use `fp32` or `bf16`")
    if device == "cpu" and scaling.offload:
        raise scaling.error("offload", "must be false on CPUs, whose memory is the main memory already")
    if device == "cpu" and train.compile != "none" and not any(map(which, ("g++", "clang++", "c++"))):
        raise train.error(
            "compile", "must be `none` where there is no C++ compiler (g++), which torch.compile needs on CPUs"
        )
    if (package := scaling.kind.package) and find_spec(package) is None:
        raise scaling.error(
            "strategy", f'needs {package}, which is not installed: pip install "raystride[{package}]", or use `fsdp`'
        )


def _max_threads(resources: Resources, workers: int, free: int) -> int:
    """Returns the largest number of threads a worker with which all workers fit into `free` CPUs, at least 1."""
    return next(
        (threads for threads in range(free // workers, 1, -1) if resources.num_fitting_workers(threads) >= workers), 1
    )


def _count_driver_gpus() -> float:
    """Returns the number of this machine's GPUs by NVML, 0 without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetCount())
    except Exception:  # ImportError, NVMLError: no usable GPUs
        return 0.0
