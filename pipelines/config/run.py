"""Settings of where and on what a run happens: scaling, launch, record, sample."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.credentials import MLFLOW_LOGIN

LEAST_HANG_S = 5
"""A shorter `launch.hang_s` would end trainings that merely wait for a busy machine."""

LEAST_SLOWER = 1.5
"""A lower `scaling.drop_slower_than` would drop nodes for what any of them does at times."""


@dataclass(frozen=True, kw_only=True)
class Scaling(Section):
    """How many workers, and how the model is spread over them."""

    name: ClassVar[str] = "scaling"

    workers: Literal["auto"] | int = setting("auto", at_least=1)
    """Training processes, never more than slots; `auto`: one a GPU if there are any. On CPUs of one machine one that has all
    threads, or several, whichever a few steps show to be faster, of several machines and with train.exact one a core."""
    least_workers: int = setting(0, at_least=0)
    """With how few workers a run goes on when a node is lost, within `launch.restarts`, from its newest checkpoint; when
    there is room again, it saves and grows back to `workers`. 0: their number is fixed."""
    resize_every_s: float = setting(60.0, above=0)
    """With `least_workers`, seconds between two looks for room for more workers."""
    drop_slower_than: float = setting(0.0, at_least=0, since="0.3")
    """With `least_workers`, go on without a node on which a worker takes more than so many times the other nodes' own time
    for a step, over half a minute, for the rest of the job. 0: never; else at least 1.5."""
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = setting("auto")
    """`single` for one worker; `ddp`: every worker holds the whole model; `fsdp` (FSDP2) and `deepspeed` (ZeRO): parameters,
    gradients and optimiser state are spread over the workers. `auto`: `single` for one worker, `ddp` for several."""
    shard_workers: int = setting(0, at_least=0)
    """With `fsdp`, neighbouring workers that hold one copy of the model between them, such as those of a node (hybrid
    sharding); must divide the workers. 0: all."""
    reshard: bool = setting(True)
    """With `fsdp`, drop a block's whole parameters after its forward and gather them again for its backward, which saves
    memory; without, they stay, which saves a third of the traffic."""
    mesh: Literal["given", "auto"] = setting("given", since="0.3")
    """`auto`: tensor, pipeline and context, where they are 1, and an open strategy are chosen when the run starts: what a
    sweep has recommended for the same steps, or the smallest that memory allows. `given`: they are as they stand."""
    tensor: int = setting(1, at_least=1, since="0.3")
    """Workers that share a model's heads, hidden units and words, and between them its tokens (tensor and sequence
    parallelism); must divide model.heads and model.kv_heads."""
    pipeline: int = setting(1, at_least=1, since="0.3")
    """Workers that have a model's blocks one after another (pipeline parallelism); its slots are micro-batches."""
    schedule: Literal["1f1b", "interleaved", "zbv"] = setting("1f1b", since="0.3")
    """With `pipeline`, the order of forwards and backwards: one stage a worker, or two that are `interleaved`, or two there
    and back (`zbv`), which wait least and hold most."""
    context: int = setting(1, at_least=1, since="0.3")
    """Workers that share each sample's tokens (context parallelism), for long contexts; twice as many must divide
    model.context."""
    context_exchange: Literal["ring", "heads", "keys"] = setting("ring", since="0.3")
    """With `context`, what travels: keys and values round a `ring` while attention computes; tokens for `heads`, so that
    each worker has all tokens of some; or all `keys` at once."""
    zero: int = setting(1, at_least=1, at_most=3)
    """With `deepspeed`, the ZeRO stage (Rajbhandari et al., 2020): spread the optimiser's state (1), gradients too (2), and
    parameters too (3)."""
    offload: bool = setting(False)
    """Keep optimiser state, with `fsdp` parameters and gradients too, in main memory while GPUs compute."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """What a worker computes on; `auto`: a GPU if the cluster has any."""
    threads: int = setting(0, at_least=0)
    """Threads of a worker on CPUs; 0: the node's cores shared out among its workers, with train.exact 1."""
    bucket_mib: float = setting(25.0, above=0)
    """Gradients that are reduced in one go, in MiB, overlapped with the rest of the backward."""

    @property
    def group(self) -> int:
        """Workers that compute a slot together."""
        return self.pipeline * self.context * self.tensor

    @property
    def stages(self) -> int:
        """Parts into which `pipeline` cuts a model's blocks."""
        return self.pipeline * (2 if self.pipeline > 1 and self.schedule != "1f1b" else 1)

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, or contradicts another about how few workers may train."""
        super().__post_init__()
        if isinstance(self.workers, int) and self.least_workers > self.workers:
            raise self.error("least_workers", f"must be at most scaling.workers, {self.workers}")
        if 0 < self.drop_slower_than < LEAST_SLOWER:
            raise self.error(
                "drop_slower_than", f"must be 0, for never, or at least {LEAST_SLOWER}: no two nodes are as fast"
            )
        if self.drop_slower_than and not self.least_workers:
            raise self.error("drop_slower_than", "must be 0 unless scaling.least_workers says with how few workers to go on")


@dataclass(frozen=True, kw_only=True)
class Launch(Section):
    """How the processes are started."""

    name: ClassVar[str] = "launch"

    mode: Literal["ray", "inline"] = setting("ray")
    """`ray`: workers by Ray Train. `inline`: one worker in this very process, without Ray (also `--launch inline`)."""
    address: str | None = setting(None)
    """A running Ray cluster to join (`auto` or an address); when not given, a local one is started and stopped."""
    lean: bool = setting(True)
    """Leave out the parts of Ray Train that this run has no use for, which halves the start; else the stock TorchTrainer."""
    restarts: int = setting(0, at_least=0)
    """Times that a run whose worker died is started again from its newest checkpoint, within the same job."""
    preemptions: int = setting(-1, at_least=-1, since="0.3")
    """Times besides that it is started again since a node was taken away as had been announced. -1: always."""
    resubmit: int = setting(0, at_least=0, since="0.3")
    """Times that a job of `ray job submit` is submitted again since its driver was lost, with its host or by SIGKILL."""
    hang_s: Literal["auto"] | int = setting("auto", at_least=0)
    """Seconds in which no worker moves within a step, or half of them in which one is not even heard of, after which the
    workers are killed, as if they had died; where each stood is kept. The first steps of a start have half an hour at least.
    `auto`: 600, or three times the longest pause that ended by itself; with `launch.mode` inline, where a debugger may have
    stopped it, never. 0: never."""
    timeout_s: float = setting(60.0, above=0)
    """Seconds that the preflight waits for the cluster to answer."""
    wait_s: float = setting(0.0, at_least=0, since="0.2")
    """Seconds that the workers wait for places on a cluster that is in use, after which the job ends. 0: for ever."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, or `hang_s` is shorter than pauses that any machine has."""
        super().__post_init__()
        if isinstance(self.hang_s, int) and 0 < self.hang_s < LEAST_HANG_S:
            raise self.error("hang_s", f"must be 0, for never, or at least {LEAST_HANG_S}: any machine pauses for seconds")


@dataclass(frozen=True, kw_only=True)
class AnswerLaunch(Launch):
    """How the processes are started that answer with a trained model."""

    mode: Literal["auto", "ray", "inline"] = setting("auto")  # type: ignore[assignment]
    """`auto`: up to 2 MiB of data are answered in this process, and more by Ray's workers, as also where `launch.address` or
    `workers` asks for them. `ray`, `inline`: always one of the two (also `--launch inline`)."""


@dataclass(frozen=True, kw_only=True)
class Record(Section):
    """What is written down, and where."""

    name: ClassVar[str] = "record"

    mlflow: bool = setting(True)
    """Log the run to MLflow; without, the run's folder alone holds the record."""
    mlflow_uri: str | None = setting(None, logins=MLFLOW_LOGIN)
    """A tracking server or database; when not given, SQLite file `mlflow.db` beside the runs. A password in it is not kept;
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment will do as well."""
    experiment: str = setting("raystride")
    """The MLflow experiment that runs are filed under."""
    tensorboard: bool = setting(False)
    """Write TensorBoard's event files, too, in `tensorboard/` in the run's folder; see them with `tensorboard --logdir`."""
    system_every_s: float = setting(5.0, above=0)
    """Seconds between two readings of each node: its CPU and memory, and its GPUs or, on CPUs, the processors' energy."""


@dataclass(frozen=True, kw_only=True)
class Finished(Section):
    """Which trained model a job works with; each such job adds what it does with it."""

    name: ClassVar[str] = ""

    run: str = setting("")
    """The run whose model it is."""
    storage: str = setting("runs")
    """Folder or filesystem URI under which runs lie."""
    checkpoint: Literal["best", "last"] | int = setting("best", at_least=0)
    """Which of the run's checkpoints; a number: that of this step."""
    average: int = setting(1, at_least=1, at_most=1000)
    """Above 1: the mean of so many newest checkpoints instead, which `checkpoint.keep` must have kept."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, or no run is named."""
        super().__post_init__()
        if not self.run:
            raise self.error("run", "must name a run; `raystride runs list` shows them")


@dataclass(frozen=True, kw_only=True)
class Answering(Finished):
    """How a trained model answers many samples; jobs that do add which."""

    batch: int = setting(64, at_least=1, at_most=1_000_000)
    """Samples that are answered side by side."""
    precision: Literal["fp32", "bf16"] = setting("fp32")
    """What products are computed in; `bf16` is faster where the hardware multiplies it."""
    workers: Literal["auto"] | int = setting("auto", at_least=1)
    """Processes that hold the model; `auto`: one a GPU if there are any, else one a core, never more than there is work."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """What they compute on; `auto`: a GPU if the cluster has any."""
    threads: int = setting(0, at_least=0)
    """Threads of a worker on CPUs; 0: the cores shared out among the workers."""
    beams: int = setting(0, at_least=0, at_most=1024)
    """Translations that are followed side by side; 0: as `decoding.beams` of the run."""
    on_error: Literal["raise", "skip"] = setting("raise")
    """At what cannot be read or answered: end with an error, or skip and count it."""


@dataclass(frozen=True, kw_only=True)
class Decoding(Section):
    """How a translator chooses its words."""

    name: ClassVar[str] = "decoding"

    beams: int = setting(1, at_least=1, at_most=1024)
    """Translations that are followed side by side (beam search); 1: the likeliest next token each time. Validation during
    training takes 1, whatever stands here."""
    length_penalty: float = setting(0.6, at_least=0)
    """Exponent by which longer translations are favoured (Wu et al., 2016, equation 14); 0: not at all."""
    longest: int = setting(0, at_least=0)
    """Most tokens of a translation; 0: fifty more than its source has (Vaswani et al., 2017, section 6.1)."""


@dataclass(frozen=True, kw_only=True)
class Sample(Section):
    """Text that the trained model writes at the end of a training, and that `raystride generate` writes."""

    name: ClassVar[str] = "sample"

    prompt: str = setting("")
    """What the text starts with; empty: as a new document does."""
    tokens: int = setting(200, at_least=0)
    """Tokens to write at most; 0: no sample. Tasks that train no decoder write none."""
    temperature: float = setting(0.8, at_least=0)
    """Sharpness of the choice; 0 takes the likeliest token."""
    top_k: int = setting(0, at_least=0)
    """Choose among that many likeliest tokens; 0: among all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Choose among the likeliest tokens that together have this probability (nucleus sampling, Holtzman et al., 2020)."""
    stop: tuple[str, ...] = setting(())
    """Strings at which the text ends."""
    seed: int = setting(0, at_least=0)
    """Seed of the choice."""
