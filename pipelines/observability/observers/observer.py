"""The observer interface: hooks that the training loop calls.

The loop calls every observer in order; each overrides the hooks that it needs. `measured` and `summary` are dicts passed
through the observers: each may add figures, and the tracker, which comes last, sends them to the recorder. An observer with
a thread of its own inherits from `BackgroundObserver`, which ends it with the loop.

    class Loud(Observer):
        def on_log(self, step, measured):
            print(step, measured["train_loss"])
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raystride.pipelines.system.service_thread import ServiceThread

if TYPE_CHECKING:
    from torch import nn

    from raystride.pipelines.observability.record.summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Constants of one attempt, from one worker's point of view."""

    run: str
    """The run's name."""
    attempt: str
    """The attempt's name."""
    rank: int = 0
    """This worker's number."""
    world: int = 1
    """Workers in the run."""
    local_rank: int = 0
    """This worker's number on its node."""
    node: str = "localhost"
    """The node's name."""
    nodes: int = 1
    """Number of nodes with workers; with several, each node's figures carry its name."""
    device: str = "cpu"
    """The device's name as PyTorch gives it (`NVIDIA H100 80GB HBM3`), or `cpu`."""
    precision: str = "fp32"
    """Precision of the matrix products, a key of `peaks.PEAKS`: `fp32`, `tf32` or `bf16`."""
    tokens_per_step: float = 0
    """Tokens (or whatever the task counts) in one step of all workers together."""
    flops_per_token: float | None = None
    """Floating-point operations of forward and backward for one token, if the model knows them."""
    parameters: int = 0
    """Trainable parameters."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Owner and tags of the run, as labels of its metrics."""

    @property
    def system_prefix(self) -> str:
        """Returns the prefix of this node's metric names."""
        return f"system/{self.node}/" if self.nodes > 1 else "system/"

    step: int = 0
    """Steps of the run before this attempt."""


class Observer:
    """An observer of a training run. Every hook is empty until a subclass overrides it."""

    def on_start(self, run: RunFacts) -> None:
        """Called before the first step, after the model is built and the state is loaded."""

    def on_step(self, step: int) -> None:
        """Called after each step, before anything waits for the device: do only microseconds of work here."""

    def on_gradients(self, step: int, model: "nn.Module") -> None:
        """Called between backward and update, with the network: each `grad` is the mean over the batch of all workers, after
        `train.clip_norm`. May change gradients in place. With `fsdp` they are shards, with `deepspeed` none are there; those
        of a step that the guard drops afterwards are seen, too."""

    def on_pause(self, seconds: float) -> None:
        """Called with the seconds that the loop spent outside training: in a validation, waiting for a checkpoint."""

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        """Called with the figures of an interval or a validation, already equal on every worker; may add to them."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """Called when the checkpoint of `step` is complete at `path`, some steps later; never if its save failed."""

    def on_save_wait(self, step: int, seconds: float) -> None:
        """Called while training waits for the save of `step`, from 10 s on; with 0 `seconds` when that save has ended."""

    def on_error(self, error: BaseException) -> None:
        """Called when the loop ends with an exception, which then propagates."""

    def on_end(self, summary: "RunSummary") -> None:
        """Called after the last step with the figures of the whole attempt; may add to them."""


class BackgroundObserver(Observer):
    """An observer with a thread that is stopped when the training ends or fails, waiting at most `join_timeout_s`."""

    def __init__(self, join_timeout_s: float = 5.0) -> None:
        self._join_timeout_s = join_timeout_s
        self._thread: ServiceThread | None = None

    def _start_thread(
        self, name: str, work: Callable[[], object], every_s: float, log: Callable[[str], None]
    ) -> ServiceThread:
        """Starts and returns a thread that calls `work` every `every_s` seconds until the end, or until it returns True."""
        self._thread = ServiceThread(name, work, every_s=every_s, log=log).start()
        return self._thread

    def on_error(self, error: BaseException) -> None:
        self._stop_thread()

    def on_end(self, summary: "RunSummary") -> None:
        self._stop_thread()

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(self._join_timeout_s)
