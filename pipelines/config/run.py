"""Settings of a run's workers, start, record and profile, and of the jobs that use a finished run.

ScalingConfig(workers=8, tensor=2).group                  # 2: workers that compute a slot together
ProfileConfig(steps=(100, 110), ranks=(0,))               # a profiler watches these steps of the first worker
"""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.config.strategies import STRATEGIES, StrategyKind, StrategyName
from raystride.pipelines.system.credentials import MLFLOW_LOGIN


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Profiling of selected steps. Files are in `profiles/` of the run's folder and with the run in MLflow."""

    name: ClassVar[str] = "profile"

    tool: Literal["none", "torch", "memory", "nsys", "ncu"] = setting("none", also="profiler enable_profiling")
    """Profiler. `torch`: a trace and the most expensive operations. `memory`: memory allocations over time. `nsys`: timeline
    of Nsight Systems. `ncu`: metrics of each GPU kernel by Nsight Compute, with `launch.mode` inline. Nsight must be
    installed."""
    steps: tuple[int, int] = setting((20, 25), at_least=1)
    """First and last step to profile, as counted by the run. The first steps of an attempt are slower than the rest."""
    ranks: tuple[int, ...] = setting((0,), at_least=0)
    """Ranks of the workers to profile."""
    kernel: str = setting("")
    """Regular expression of the kernels that `ncu` measures. Each is run several times. Empty: all kernels."""
    stall_factor: float = setting(20.0, at_least=0)
    """Factor over the usual duration from which a step counts as a stall. A stall lasts at least 30 s; the stack of each
    thread of the worker is saved, and training continues. 0: no detection of stalls."""

    def __post_init__(self) -> None:
        """Raises SettingError if `steps` is no first and last step, or `ranks` names no worker."""
        super().__post_init__()
        if len(self.steps) != 2 or self.steps[0] > self.steps[1]:
            raise self.error("steps", "must be a first and a last step, such as [20, 25]")
        if not self.ranks:
            raise self.error("ranks", "must name at least one worker, such as [0]; for no profile set profile.tool none")


MIN_HANG_S = 5
"""A shorter `launch.hang_s` would end trainings that merely wait for a busy machine."""

MIN_SLOWER_FACTOR = 1.5
"""A lower `scaling.drop_slower_than` would drop nodes for usual variations."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Section):
    """Number of workers, and distribution of the model over them."""

    name: ClassVar[str] = "scaling"

    workers: Literal["auto"] | int = setting(
        "auto",
        at_least=1,
        also="num_workers nproc_per_node devices num_gpus n_gpus gpus num_processes world_size n_workers",
    )
    """Number of training processes, at most `train.slots`. `auto`: one per GPU if the cluster has any. On CPUs of one
    machine: one worker with all threads or several workers, as a few timed steps show to be faster. On CPUs of several
    machines, or with train.exact: one per core."""
    min_nodes: int = setting(0, at_least=0, since="0.4")
    """Minimum number of nodes with CPUs or GPUs that a start waits for, at most `launch.cluster_timeout_s`: machines join a
    cluster one by one, and a run uses those that are there. 0: does not wait."""
    min_workers: int = setting(0, at_least=0, was="scaling.least_workers", renamed="0.3")
    """Minimum number of workers with which a run continues after losing a node. It continues from the newest checkpoint,
    within `launch.max_restarts`; when there is room again, it saves and grows back to `workers`. 0: the number of workers is
    fixed."""
    resize_every_s: float = setting(60.0, above=0)
    """Seconds between two checks for room for more workers. Used with `min_workers`."""
    drop_slower_than: float = setting(0.0, at_least=0, since="0.3")
    """Drop a node that is slower than the others by more than this factor. A node's own time per step is compared with that
    of the other nodes, over half a minute; a dropped node stays excluded for the rest of the job. Needs `min_workers`. 0:
    never; otherwise at least 1.5."""
    strategy: StrategyName = setting(
        "auto",
        also="parallelism ddp_backend distributed_strategy fsdp sharding_strategy distributed_type",
        table=STRATEGIES,
    )
    """Data-parallel strategy."""
    shard_workers: int = setting(0, at_least=0, also="dp_shard data_parallel_shard_degree hybrid_shard")
    """Number of neighbouring workers that shard one copy of the model. For example, those of a node (hybrid sharding). Used
    with `fsdp`; must divide the number of workers. 0: all workers."""
    reshard: bool = setting(True)
    """Free full parameters after a block's forward; gather them for its backward. Used with `fsdp`; saves memory. false: the
    full parameters stay; saves a third of the traffic."""
    mesh: Literal["given", "auto"] = setting("given", since="0.3")
    """Choice of the parallelism degrees. `given`: as set. `auto`: tensor, pipeline and context degrees that are 1, and a
    strategy that is not set, are chosen when the run starts: those that a sweep recommended for the same steps, or the
    smallest that fit into memory."""
    tensor: int = setting(
        1,
        at_least=1,
        since="0.3",
        also="tp tensor_parallel tensor_parallel_size tensor_parallel_degree tp_size tensor_model_parallel_size",
    )
    """Tensor-parallel degree. Heads, hidden units and vocabulary are sharded over this many workers, and tokens between them
    (sequence parallelism). Must divide model.heads and model.kv_heads."""
    pipeline: int = setting(
        1,
        at_least=1,
        since="0.3",
        also="pp pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp_size pipeline_model_parallel_size",
    )
    """Pipeline-parallel degree. Each worker has a part of the model's blocks; the slots are its micro-batches."""
    schedule: Literal["1f1b", "interleaved", "zbv"] = setting("1f1b", since="0.3")
    """Pipeline schedule. `1f1b`: one stage per worker. `interleaved`: two stages per worker. `zbv`: two stages per worker in
    a V (zero bubble); least idle time, most memory. Used with `pipeline`."""
    context: int = setting(
        1,
        at_least=1,
        since="0.3",
        also="cp context_parallel context_parallel_size context_parallel_degree cp_size sequence_parallel_size",
    )
    """Context-parallel degree. Each sample's tokens are sharded over this many workers, for long contexts. Twice the degree
    must divide model.context."""
    expert: int = setting(
        1,
        at_least=1,
        since="0.4",
        also="ep expert_parallel expert_parallel_size expert_parallel_degree ep_size expert_model_parallel_size",
    )
    """Expert-parallel degree. Each block's experts are sharded over this many workers, which also share out the samples of a
    slot; tokens travel to their experts and back. Must divide model.experts."""
    context_exchange: Literal["ring", "heads", "keys"] = setting("ring", since="0.3")
    """Communication of context-parallel attention. `ring`: keys and values travel round a ring while attention computes.
    `heads`: tokens are exchanged for heads, so that each worker has all tokens of some heads. `keys`: the remote keys and
    values are fetched at once."""
    zero: int = setting(1, at_least=1, at_most=3, also="zero_stage zero_optimization")
    """ZeRO stage (Rajbhandari et al., 2020). 1 shards the optimiser state, 2 the gradients as well, 3 the parameters as
    well. Used with `deepspeed`."""
    offload: bool = setting(False, also="cpu_offload offload_optimizer fsdp_offload_params")
    """Keep the optimiser state in main memory. With `fsdp`, parameters and gradients as well. GPUs still do the
    computation."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", also="accelerator use_gpu use_cpu no_cuda")
    """Device of the workers. `auto`: GPUs if the cluster has any."""
    threads: int = setting(0, at_least=0, also="num_threads torch_num_threads cpus_per_worker")
    """CPU threads per worker. 0: the node's cores divided among its workers; 1 with train.exact."""
    bucket_mib: float = setting(25.0, above=0, also="ddp_bucket_cap_mb bucket_cap_mb")
    """Size of a gradient bucket in MiB. A bucket is reduced at once, overlapped with the rest of the backward."""

    @property
    def kind(self) -> StrategyKind:
        """The conditions of `strategy`."""
        return STRATEGIES[self.strategy]

    @property
    def group(self) -> int:
        """Workers that compute a slot together."""
        return self.pipeline * self.expert * self.context * self.tensor

    @property
    def keeps_parameters_whole(self) -> bool:
        """Whether a worker has, or gathers under `fsdp`, each parameter in full."""
        return not self.kind.runs_engine and self.group == 1 and self.mesh != "auto"

    @property
    def stages(self) -> int:
        """Number of stages of a model's blocks, over all workers of `pipeline`."""
        return self.pipeline * (2 if self.pipeline > 1 and self.schedule != "1f1b" else 1)

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or contradicts another about the minimum number of workers."""
        super().__post_init__()
        if isinstance(self.workers, int) and self.min_workers > self.workers:
            raise self.error("min_workers", f"must be at most scaling.workers, {self.workers}")
        if 0 < self.drop_slower_than < MIN_SLOWER_FACTOR:
            raise self.error(
                "drop_slower_than", f"must be 0, for never, or at least {MIN_SLOWER_FACTOR}: no two nodes are as fast"
            )
        if self.drop_slower_than and not self.min_workers:
            raise self.error("drop_slower_than", "must be 0 unless scaling.min_workers says with how few workers to go on")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """Start and supervision of the processes."""

    name: ClassVar[str] = "launch"

    mode: Literal["ray", "inline"] = setting("ray")
    """Backend that starts the workers. `ray`: Ray Train. `inline`: one worker in the current process, without Ray (also
    `--launch inline`)."""
    address: str | None = setting(None, also="ray_address master_addr cluster_address")
    """Address of a running Ray cluster to join, or `auto`. None: that of $RAY_ADDRESS; without one, and with
    `local`, a local cluster is started and stopped."""
    fast_start: bool = setting(True, was="launch.lean", renamed="0.3")
    """Skip the parts of Ray Train that this run does not need. Halves the start-up time. false: the stock TorchTrainer."""
    max_restarts: int = setting(
        0, at_least=0, was="launch.restarts", renamed="0.3", also="max_failures max_retries elastic_max_restarts"
    )
    """Maximum number of restarts after a worker died. Each restarts from the newest checkpoint, in the same job. An error
    of settings or data, which the next start would meet as well, ends the job at once; without `fast_start` it counts."""
    max_preemption_restarts: int = setting(-1, at_least=-1, since="0.3", was="launch.preemptions", renamed="0.3")
    """Maximum number of further restarts after announced preemptions. They do not count against `max_restarts`. -1: no
    limit."""
    max_resubmissions: int = setting(0, at_least=0, since="0.3", was="launch.resubmit", renamed="0.3")
    """Maximum number of resubmissions after the driver was lost. For jobs of `ray job submit`, if the driver died with its
    host or by SIGKILL."""
    start_over: bool = setting(False, since="0.4", also="overwrite_output_dir restart_from_scratch")
    """Begin at step 0 under the name of an earlier run. Its checkpoints are moved to `checkpoints-before-ATTEMPT` in its
    folder; nothing is deleted. Holds for one attempt: the next start goes on."""
    hang_s: Literal["auto"] | int = setting("auto", at_least=0, also="ddp_timeout nccl_timeout")
    """Kill and restart the workers if no step makes progress for this many seconds. A worker that sends no heartbeat for
    half as long counts as hung, too. Stack traces are saved, and the restart counts as after a worker's death. The first
    steps after a start have at least half an hour. `auto`: 600 s, or three times the longest pause that ended by itself;
    never with `launch.mode` inline, because a debugger may have stopped the process. 0: never."""
    cluster_timeout_s: float = setting(60.0, above=0, was="launch.timeout_s", renamed="0.4")
    """Seconds that a start waits for the cluster: its address, its nodes (`scaling.min_nodes`) and their answers. Then the
    job ends with exit code 3."""
    accept_other_code: bool = setting(False, since="0.4")
    """Accept nodes with other files of Raystride than the driver's. For developers who try changes on some nodes; the
    record names the driver's commit only. false: such a node is an error that names the first files."""
    placement_timeout_s: float = setting(0.0, at_least=0, since="0.2", was="launch.wait_s", renamed="0.3")
    """Seconds that the workers wait for placement on a busy cluster. The job ends after that. 0: no limit."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or `hang_s` is shorter than pauses of any machine."""
        super().__post_init__()
        if isinstance(self.hang_s, int) and 0 < self.hang_s < MIN_HANG_S:
            raise self.error("hang_s", f"must be 0, for never, or at least {MIN_HANG_S}: any machine pauses for seconds")


@dataclass(frozen=True, kw_only=True)
class ResumeConfig(Section):
    """Checks and choices of a training that resumes a run."""

    name: ClassVar[str] = "resume"

    edited: bool = setting(False, since="0.4")
    """Take a `config.yaml` that was edited by hand since the run wrote it. Its differences are shown either way; without
    this setting they are refused. Holds for one attempt, which writes the file anew."""
    accept: Literal["none", "data", "bits"] = setting("none", since="0.4")
    """Differences with which a run may go on. `data`: other samples of a model of your own (`raystride.fit`), of the same
    number and shapes, in the places of the former ones. `bits`: a `train.exact` run under another PyTorch or on another
    processor, with other bits; its checkpoints name the steps from which that holds. `none`: they are refused. Holds for one
    attempt."""


@dataclass(frozen=True, kw_only=True)
class PredictorLaunchConfig(LaunchConfig):
    """Start of the processes that run inference with a trained model."""

    mode: Literal["auto", "ray", "inline"] = setting("auto")  # type: ignore[assignment]
    """Backend that starts the workers. `auto`: the current process for up to 8 MiB of data, and Ray for the rest if that
    takes over half a minute; Ray for more data, or if `launch.address` or `workers` is set. `ray`, `inline`: always this
    one (also `--launch inline`)."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Section):
    """Logging of a run."""

    name: ClassVar[str] = "record"

    mlflow: bool = setting(True, also="report_to log_with logger")
    """Log the run to MLflow. false: only the run's folder holds the record."""
    mlflow_uri: str | None = setting(None, logins=MLFLOW_LOGIN, also="tracking_uri mlflow_tracking_uri")
    """URI of an MLflow tracking server or database. None: the SQLite file `mlflow.db` in the storage. A password in the URI
    is not stored; MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment work as well."""
    experiment: str = setting("raystride", also="experiment_name project project_name")
    """Name of the MLflow experiment."""
    owner: str | None = setting(None, since="0.4", also="user username")
    """Whom a run's time is charged to, in its folder, MLflow, Ray's list of jobs and the labels of metrics. None: `owner` of
    `ray job submit --metadata-json`, else $USER of who starts it."""
    tags: dict[str, Any] = field(default_factory=dict, metadata={"since": "0.4"})
    """Tags of a run, by name, at the same places. `{project: parser, cost_center: 42}`."""
    tensorboard: bool = setting(False, also="enable_tensorboard use_tensorboard")
    """Write TensorBoard event files as well. They are in `tensorboard/` in the run's folder; view them with `tensorboard
    --logdir`."""
    system_every_s: float = setting(5.0, above=0)
    """Seconds between two readings of each node's hardware metrics. CPU and memory, and GPUs or, on CPUs, the processors'
    energy."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or a tag or the owner is no short text of one line."""
        super().__post_init__()
        if self.owner is not None and not _is_label(self.owner):
            raise self.error("owner", f"must be a text of one line, at most {MAX_LABEL_LENGTH} characters")
        if len(self.tags) > MAX_TAGS:
            raise self.error("tags", f"must have at most {MAX_TAGS} names")
        for name, value in self.tags.items():
            if not re.fullmatch(r"(?!mlflow\.|raystride\.)[A-Za-z][A-Za-z0-9_.\-]{0,63}", str(name)):
                raise self.error(
                    "tags",
                    f"must have names of letters, digits, `_`, `-` and `.`, none that begins with mlflow. or raystride., "
                    f"and not {name!r}",
                )
            if not isinstance(value, str | int | float) or not _is_label(str(value)):
                raise self.error(
                    "tags", f"must have texts of one line, at most {MAX_LABEL_LENGTH} characters, without commas: see {name}"
                )


MAX_TAGS, MAX_LABEL_LENGTH = 20, 100


def _is_label(text: str) -> bool:
    return 0 < len(text) <= MAX_LABEL_LENGTH and text.isprintable() and "," not in text


@dataclass(frozen=True, kw_only=True)
class FinishedRunConfig(Section):
    """The trained model that a job uses; each such job adds its own settings."""

    name: ClassVar[str] = ""

    run: str = setting("")
    """Name of the run."""
    storage: str = setting("runs")
    """Folder or filesystem URI that holds the runs."""
    checkpoint: Literal["best", "last"] | int = setting("best", at_least=0)
    """Checkpoint of the run: the best, the last, or that of a step (a number)."""
    average: int = setting(1, at_least=1, at_most=1000)
    """Average the last N checkpoints (needs `checkpoint.keep` ≥ N). Used instead of `checkpoint`. 1: no averaging."""
    plugins: tuple[str, ...] = setting((), since="0.4")
    """Plug-ins, as modules or files, in place of those that the run's stored settings name. Needed if their code has changed
    since the run began, or lies elsewhere. Empty: those of the run."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or no run is named."""
        super().__post_init__()
        if not self.run:
            raise self.error("run", "must name a run; `raystride runs list` shows them")


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(FinishedRunConfig):
    """Batched inference with a trained model; each such job adds its inputs."""

    batch: int = setting(64, at_least=1, at_most=1_000_000)
    """Batch size of inference, in samples."""
    precision: Literal["fp32", "bf16"] = setting("fp32")
    """Precision of matrix products. `bf16` is faster on hardware with bfloat16 instructions."""
    workers: Literal["auto"] | int = setting("auto", at_least=1)
    """Number of processes that hold the model. `auto`: one per GPU if there are any, otherwise one per core; never more than
    the amount of work needs."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """Device of the workers. `auto`: GPUs if the cluster has any."""
    threads: int = setting(0, at_least=0)
    """CPU threads per worker. 0: the cores divided among the workers."""
    beams: int = setting(0, at_least=0, at_most=1024)
    """Beam size of translations. 0: the run's `decoding.beams`."""
    on_error: Literal["raise", "skip"] = setting("raise")
    """Handling of inputs that cannot be read or answered. `raise`: end with an error. `skip`: skip and count them."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Section):
    """Decoding of translations."""

    name: ClassVar[str] = "decoding"

    beams: int = setting(1, at_least=1, at_most=1024, also="num_beams beam_size beam")
    """Beam size of translations. 1: greedy decoding. Validation during training always uses 1."""
    length_penalty: float = setting(0.6, at_least=0)
    """Exponent of the length penalty, which favours longer translations. Formula: Wu et al., 2016, equation 14. 0: none."""
    max_length: int = setting(
        0, at_least=0, was="decoding.longest", renamed="0.3", also="max_target_length max_decode_length"
    )
    """Maximum length of a translation in tokens. 0: fifty more than its source has (Vaswani et al., 2017, section 6.1)."""


ARGUMENTS = ("fit.model_args", "fit.data_args")
"""Settings with mappings from the arguments of users' functions; each key is a setting."""


def is_argument(key: str) -> bool:
    """Whether a setting's full name is that of an argument of a user's function, `fit.model_args.width`."""
    return key.startswith(tuple(f"{mapping}." for mapping in ARGUMENTS))


@dataclass(frozen=True, kw_only=True)
class FitConfig(Section):
    """Arguments of a model and dataset of your own (`raystride.fit`)."""

    name: ClassVar[str] = "fit"

    model_args: dict[str, Any] = field(default_factory=dict, metadata={"fixed": True, "since": "0.3"})
    """Keyword arguments of the callable that makes the model. `{width: 256}`; a sweep may vary them."""
    data_args: dict[str, Any] = field(default_factory=dict, metadata={"fixed": True, "since": "0.3"})
    """Keyword arguments of the callable that returns the dataset, and of that of the validation, if it takes them."""
    rehearse: Literal["auto", "full", "keys", "off"] = setting("auto", since="0.4")
    """Two steps on a few samples before the start, with a save and a load between them, after which all bits must be the
    same. `full`: at any size. `keys`: names, shapes and types alone, as `auto` does above 256 MiB of parameters, or if a
    step takes more than 20 s."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section):
    """Text that the trained model generates at the end of a training, and with `raystride generate`."""

    name: ClassVar[str] = "sample"

    prompt: str = setting("")
    """Prompt of the generated text. Empty: the start of a new document."""
    tokens: int = setting(200, at_least=0, also="max_new_tokens max_tokens num_tokens")
    """Maximum number of tokens to generate. 0: no sample. Tasks without a decoder generate none."""
    temperature: float = setting(0.8, at_least=0, also="temp")
    """Sampling temperature. 0: greedy, the most likely token."""
    top_k: int = setting(0, at_least=0)
    """Sample among the k most likely tokens. 0: among all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Probability mass of nucleus sampling (Holtzman et al., 2020). Tokens are sampled among the most likely ones that
    together have this probability. 1: among all."""
    stop: tuple[str, ...] = setting((), also="stop_sequences stop_strings")
    """Strings at which generation stops."""
    seed: int = setting(0, at_least=0)
    """Seed of sampling."""
