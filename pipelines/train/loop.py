"""The one train loop. Whatever is not the gradient watches from outside (`observers`), and may be absent.

Every rank runs it and decides alike, because all that it decides by (step, metrics, the stop request) is the same on every
rank: summed with the gradients, or over all workers.

    training = Training(config, strategy, model, optimizer, loader, state, rules, validate, checkpoints, header)
    ending, metrics = training.run()                          # Ending.DONE, {"val_loss": 1.88, ...}
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import nn

from raystride.pipelines.config import Config
from raystride.pipelines.feed.loader import Loader, Requests, Step
from raystride.pipelines.phases import phase
from raystride.pipelines.strategies import OUT_OF_TIME, STOP, TARGETS
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.train.checkpoint import Checkpoints
from raystride.pipelines.train.guard import Diagnosis, Diverged, GoBack, StepGuard
from raystride.pipelines.train.optimizer import Updater, learning_rate
from raystride.pipelines.train.state import LeftOut, TrainState
from raystride.pipelines.train.step import (
    VERDICT,
    Agreement,
    StepResult,
    StepRules,
    build_rules,
    train_step,
)


class Ending(StrEnum):
    """Why a loop came to its end."""

    DONE = "done"
    STOPPED = "stopped"
    OUT_OF_TIME = "out_of_time"
    EARLY = "stopped_early"


def _asked(stop: float, late: float) -> Ending | None:
    """The ending that these requests make."""
    return Ending.STOPPED if stop else Ending.OUT_OF_TIME if late else None


class LoopWatcher(Protocol):
    """The hooks that the loop calls; `raystride.pipelines.observers.Observer` documents them."""

    def on_step(self, step: int) -> None: ...
    def on_pause(self, seconds: float) -> None: ...
    def on_log(self, step: int, measured: dict[str, float]) -> None: ...
    def on_checkpoint(self, step: int, path: str) -> None: ...


@dataclass
class Training:
    """A training that is ready to run: built, loaded, at its position."""

    config: Config
    strategy: Strategy
    model: nn.Module
    optimizer: Updater
    loader: Loader
    state: TrainState
    rules: StepRules
    validate: Callable[[], dict[str, float]]
    """Metrics over the validation samples; all ranks call it together."""
    checkpoints: Checkpoints | None
    """None: no checkpoints are wanted."""
    header: dict[str, Any]
    """What every checkpoint's manifest says of the run."""
    watchers: Sequence[LoopWatcher] = ()
    stopping: Callable[[], bool] = lambda: False
    """Whether someone asked this worker to end."""
    log: Callable[[str], None] = print
    """Takes what people should read."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest validation's."""

    def __post_init__(self) -> None:
        train = self.config.train
        self.total_steps = min(train.steps or math.inf, self.loader.plan.steps)
        self._began = time.perf_counter()
        self.loader.requests = self._requests
        self._validated_at = self._saved_at = -1
        self._begin()

    def _begin(self) -> None:
        """What is counted from the state's position on: of this attempt, or since the run went back."""
        self._agreement = Agreement(self.strategy.device)
        # In fp64, since a long run has more targets than fp32 can count one by one.
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.strategy.device)
        self._since = self._interval_began = time.perf_counter()
        self._totals = self._logged = [0.0, 0.0]
        self._newest: StepResult | None = None
        self._waited = self.loader.waited
        self._seconds_before, self._tokens_before = self.state.seconds, self.state.tokens_seen
        self._guard = StepGuard(self.config.guard, self.state, self._diagnose, self.log)

    def run(self) -> tuple[Ending, dict[str, float]]:
        """Trains to the end, saves, and says why it ended. Raises Diverged, and whatever a step or a save raises."""
        try:
            ending = self._train_through()
            self._finish(ending)
        except BaseException:
            if self.checkpoints:
                self.checkpoints.wait_after_error()
                self._tell_of_commits()
            raise
        return ending, self.metrics

    def _train_through(self) -> Ending:
        """Trains, and goes back as often as the guard asks for it."""
        if self.checkpoints and self.config.guard.policy == "rewind" and not self.state.step:
            self._save(best=False)  # something to go back to
        while True:
            try:
                return self._train()
            except GoBack as wanted:
                self._go_back(wanted.slots)

    def _train(self) -> Ending:
        """Steps until there is a reason to end. Raises GoBack where the guard asks for it."""
        exhausted = self._out_of_patience()
        until = self.state.step if exhausted else self.total_steps
        step, result = None, None
        for step in self.loader.steps(self.state.step, until):
            self._learning_rate = self._learning_rate_at(step.number)
            with phase("step"):
                result = train_step(
                    self.strategy, self.model, self.optimizer, step, self.rules, self._learning_rate, self._requests()
                )
            self._after(step, result)
            if reason := self._reason_to_end(step, result):
                return reason
        # What the workers agree on comes a step late, so nobody has looked at the last step yet.
        if step and result:
            self._heed_now(step, result)
        return _asked(*self.loader.heeded) or (Ending.EARLY if exhausted else Ending.DONE)

    def _after(self, step: Step, result: StepResult) -> None:
        """Everything that may follow an update: counting, logging, validation, a checkpoint."""
        self.state.advance(step)
        self._sums += result.measured[: TARGETS + 1]
        self._watch("on_step", self.state.step)
        self._tell_of_commits()
        self._newest = result
        if self._due(self.config.train.log_every):
            self._log(result)
        validation, checkpoint = self._due(self.config.validation.every), self._due(self.config.checkpoint.every)
        if validation or checkpoint:
            self._heed_now(step, result)
        improved = self._validate() if validation else False
        if self.checkpoints and (improved or checkpoint):
            self._save(best=improved)

    def _heed_now(self, step: Step, result: StepResult) -> None:
        """Acts on the verdict on this very step, before something is made of its parameters."""
        self._guard.handle(step.number, float(result.measured[VERDICT]))

    def _diagnose(self, step: int, spike: bool) -> Diagnosis:
        from raystride.pipelines.train.guard import diagnose

        return diagnose(self.strategy, self.model, self.loader, self.rules, step, spike)

    def _go_back(self, slots: list[LeftOut]) -> None:
        """Loads the newest checkpoint, from where the loop comes again without these slots. Raises Diverged without one."""
        assert self.checkpoints is not None
        # What is still being written may be the newest checkpoint.
        self.checkpoints.wait()
        self._tell_of_commits()
        if (found := self.checkpoints.newest()) is None:
            raise Diverged("there is no whole checkpoint to go back to; set guard.policy skip")
        self.checkpoints.load(found, self.model, self.optimizer)
        earlier, self.state = self.state, found.state
        self.state.left_out = earlier.left_out + slots
        self.state.rewinds = earlier.rewinds + 1
        self.loader.left_out = frozenset((each.step, each.slot) for each in self.state.left_out)
        # The loss scale and the running loss are those of the checkpoint again.
        self.rules = build_rules(self.config, self.loader.samples, self.state, self.strategy.device)
        self._saved_at = self.state.step
        self._begin()

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _learning_rate_at(self, step: int) -> float:
        total = self.total_steps if math.isfinite(self.total_steps) else 0
        return learning_rate(self.config.optimizer, step, int(total), self.config.model.width)

    def _requests(self) -> Requests:
        """What asks this worker to end."""
        hours = self.config.train.hours
        late = hours > 0 and time.perf_counter() - self._began > 3600 * hours
        return float(self.stopping()), float(late)

    def _reason_to_end(self, step: Step, result: StepResult) -> Ending | None:
        """Why to end, the same on every rank: stop requests summed in the step before, or too many bad validations."""
        agreed = self._agreement.previous(result.measured)
        self._guard.handle(step.number - 1, agreed[VERDICT])
        reason = _asked(agreed[STOP], agreed[OUT_OF_TIME]) or (Ending.EARLY if self._out_of_patience() else None)
        if reason:
            self._heed_now(step, result)
        return reason

    def _out_of_patience(self) -> bool:
        patience = self.config.validation.patience
        return patience > 0 and self.state.worse_validations >= patience

    def _collect(self) -> None:
        """Brings the state's counters up to this step, which waits for the device."""
        self._totals = self._sums.tolist()
        self.state.tokens_seen = self._tokens_before + round(self._totals[TARGETS])
        self.state.seconds = self._seconds_before + time.perf_counter() - self._since

    def _interval_loss(self) -> float | None:
        """Mean loss of the steps since the last call; None where no target counted."""
        self._collect()
        loss, targets = (now - then for now, then in zip(self._totals, self._logged, strict=True))
        self._logged = self._totals
        if targets:
            self.state.train_loss = loss / targets
        return self.state.train_loss if targets else None

    def _log(self, result: StepResult) -> None:
        loss = self._interval_loss()
        now = time.perf_counter()
        measured = {
            "learning_rate": self._learning_rate,
            "gradient_norm": float(result.gradient_norm),
            "tokens_seen": float(self.state.tokens_seen),
            "data_wait_share": (self.loader.waited - self._waited) / max(1e-9, now - self._interval_began),
        }
        measured |= self.loader.plan.order.progress(self.state.position)
        if loss is not None:
            measured["train_loss"] = loss
        task = self.loader.samples.task
        if (sums := task.take_sums(self.model)) is not None:
            measured |= task.train_scores(self.strategy.sum(sums).tolist())
        if self.rules.scale:
            measured["loss_scale"] = float(self.rules.scale.value)
        if self.state.dropped or self.state.left_out:
            measured |= {"dropped_steps": float(len(self.state.dropped)), "left_out_slots": float(len(self.state.left_out))}
        self._interval_began, self._waited = now, self.loader.waited
        self._watch("on_log", self.state.step, measured)

    def _validate(self) -> bool:
        """Measures the validation samples; returns whether the chosen metric is better than ever."""
        began = time.perf_counter()
        with phase("validation"):
            self.metrics = self.validate()
        self._validated_at = self.state.step
        self.state.val_loss = self.metrics.get("val_loss")
        chosen = self.config.validation
        value = self.metrics[chosen.metric]
        improved = chosen.cost(value) < chosen.cost(self.state.best)
        if improved:
            self.state.best, self.state.best_step, self.state.worse_validations = value, self.state.step, 0
        else:
            self.state.worse_validations += 1
        self._watch("on_log", self.state.step, dict(self.metrics))
        self._pause(began)
        return improved

    def _save(self, *, best: bool) -> None:
        assert self.checkpoints is not None
        began = time.perf_counter()
        self._collect()
        self.state.loss_scale = self.rules.scale.read() if self.rules.scale else None
        self.state.loss_seen = self.rules.check.read() if self.config.guard.spike else None
        with phase("checkpoint"):
            header = self.header | {"order": self.loader.plan.order.to_json()}
            self.checkpoints.save(self.model, self.optimizer, self.state, header, best=best)
        self._saved_at = self.state.step
        self._tell_of_commits()  # the save before has ended, by itself or because this one waited for it
        self._pause(began)

    def _tell_of_commits(self) -> None:
        """Saves end in the background, and ranks need not hear of it at the same step: nothing is decided by it."""
        if checkpoints := self.checkpoints:
            for step in checkpoints.committed():
                self._watch("on_checkpoint", step, str(checkpoints.path(step)))

    def _finish(self, ending: Ending) -> None:
        """Logs, validates and saves where the last step has not been yet, and waits until it is written."""
        if self._newest and self.config.train.log_every and not self._due(self.config.train.log_every):
            self._log(self._newest)
        else:
            self._interval_loss()
        improved = False
        finished = ending is not Ending.STOPPED
        if finished and self._validated_at != self.state.step:
            improved = self._validate()
        if checkpoints := self.checkpoints:
            if self._saved_at == self.state.step:
                checkpoints.wait()  # for what became of it
            if self._saved_at != self.state.step or improved or checkpoints.refused:
                self._save(best=improved)
            checkpoints.finish()
            self._tell_of_commits()

    def _pause(self, began: float) -> None:
        self._watch("on_pause", time.perf_counter() - began)

    def _watch(self, hook: str, *arguments: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, hook)(*arguments)
