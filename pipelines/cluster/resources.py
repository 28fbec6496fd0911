"""What there is to compute on, and what a run will take of it.

there = Resources.of_this_machine()                       # or Resources.of_cluster(), after ray.init
share = resolve(config, there)                            # Share(workers=2, device="cpu", threads=1)
"""

from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which

from raystride.pipelines.cluster.cluster import ask_a_node
from raystride.pipelines.config import Config
from raystride.pipelines.hardware.torch_gpus import LIMIT_S, asked, asked_apart, problem_with
from raystride.pipelines.limits import usable_cores, usable_memory


@dataclass(frozen=True)
class Resources:
    """Processors, GPUs and memory of a machine or a cluster; memory in bytes."""

    cpus: float
    gpus: float
    memory_bytes: float
    """Main memory of the smallest node."""
    gpu_memory_bytes: float | None
    """Memory of one GPU, where that is known."""
    nodes: int = 1
    node_cpus: tuple[float, ...] = ()
    """Processors of each node; none: all on one."""
    gpu_name: str | None = None
    """What one GPU is called, where that is known."""
    gpu_problem: str = ""
    """Why PyTorch can use none of the GPUs that a driver shows, which are not counted then, and what to install."""

    def fit(self, cpus: float) -> int:
        """How many workers with that many processors each find a place: none lies across two nodes."""
        return sum(int(node // cpus) for node in self.node_cpus or (self.cpus,))

    @classmethod
    def of_this_machine(cls, *, gpus: bool = True) -> "Resources":
        """The resources of this machine that this process may use (`limits`). Without `gpus` nobody asks for them."""
        memory = float(usable_memory())
        if not gpus:
            return cls(float(usable_cores()), 0.0, memory, None)
        answer = asked()
        problem = "" if answer["count"] else problem_with(answer, _driver_shows())
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
        """The resources that the cluster which this process joined has in all, taken or not.

        GPUs are those that PyTorch can use, which a node with some is asked; without `gpus` nobody asks.
        """
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        totals = [node["Resources"] for node in nodes]
        shown = sum(total.get("GPU", 0) for total in totals)
        # Ray counts what NVIDIA's driver shows, and this process may be on a node without any.
        answer = (
            ask_a_node(asked_apart, LIMIT_S, gpu=True) if gpus and shown else {"count": shown, "name": None, "memory": None}
        )
        problem = problem_with(answer, shown)
        return cls(
            cpus=sum(total.get("CPU", 0) for total in totals),
            gpus=0 if problem else shown,
            memory_bytes=min(total.get("memory", 0) + total.get("object_store_memory", 0) for total in totals),
            gpu_memory_bytes=answer["memory"],
            nodes=len(nodes),
            node_cpus=tuple(total.get("CPU", 0) for total in totals),
            gpu_name=answer["name"],
            gpu_problem=problem,
        )


@dataclass(frozen=True)
class Share:
    """What a run takes of the resources: how many workers, and what each of them has."""

    workers: int
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """Threads of a worker on CPUs."""
    least: int = 0
    """Workers with which an elastic run goes on; 0: `workers` and no other number."""

    @property
    def per_worker(self) -> dict[str, float]:
        """The resources of one worker, as Ray counts them."""
        return {"GPU": 1} if self.device == "cuda" else {"CPU": self.threads}

    @property
    def cpus(self) -> float:
        """Processors of all workers, as Ray counts them."""
        return self.workers * self.per_worker.get("CPU", 0.0)


def resolve(config: Config, there: Resources) -> Share:
    """Replaces every `auto` by what fits. Raises SettingError where the settings contradict each other."""
    scaling, slots = config.scaling, config.train.slots
    device = scaling.device if scaling.device != "auto" else "cuda" if there.gpus >= 1 else "cpu"
    _refuse_for_device(config, device)
    free = int(there.cpus) - (config.data.start_after_mib > 0)  # one is to prepare
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
        groups = int(there.gpus if device == "cuda" else free) // scaling.group
        # A stage for each slot at least, where there are stages.
        workers = scaling.group * max(1, min(slots // scaling.stages, groups))
    groups = workers // scaling.group
    if scaling.shard_workers and groups % scaling.shard_workers:
        raise scaling.error("shard_workers", f"must divide the workers, of which there are {groups}")
    # Products of matrices are cut up among threads, so a number that follows the workers would change bits with them.
    threads = scaling.threads or (1 if config.train.exact and device == "cpu" else _threads(there, workers, free))
    if config.data.start_after_mib and config.launch.mode != "inline" and workers * threads >= there.cpus:
        raise config.data.error(
            "start_after_mib",
            f"needs a processor besides those of {workers} worker(s) with {threads} thread(s); there are {there.cpus:g}: "
            "lower scaling.workers or scaling.threads, or prepare first (start_after_mib 0)",
        )
    return Share(workers, device, threads, min(scaling.least_workers, workers))


def _refuse_for_device(config: Config, device: str) -> None:
    """Raises SettingError for what this device, or this machine, cannot do."""
    train, scaling = config.train, config.scaling
    if device == "cpu" and train.precision == "tf32":
        raise train.error("precision", "must be another on CPUs, which have no TF32: use `fp32` or `bf16`")
    if device == "cpu" and scaling.offload:
        raise scaling.error("offload", "must be false on CPUs, whose memory is the main memory already")
    if device == "cpu" and train.compile != "none" and not any(map(which, ("g++", "clang++", "c++"))):
        raise train.error(
            "compile", "must be `none` where there is no C++ compiler (g++), which torch.compile needs on CPUs"
        )
    if scaling.strategy == "deepspeed" and find_spec("deepspeed") is None:
        raise scaling.error(
            "strategy", 'needs DeepSpeed, which is not installed: pip install "raystride[deepspeed]", or use `fsdp`'
        )


def _threads(there: Resources, workers: int, free: int) -> int:
    """The most threads a worker with which all of them find a place on so many processors, at least 1."""
    return next((threads for threads in range(free // workers, 1, -1) if there.fit(threads) >= workers), 1)


def _driver_shows() -> float:
    """GPUs of this machine as NVML counts them; 0 where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetCount())
    except Exception:  # ImportError, NVMLError: there are none for us
        return 0.0
