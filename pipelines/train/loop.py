"""The training loop. Everything else than the gradient is observed from outside (`observers`) and is optional.

Every rank runs it and decides alike, because its decisions depend on values that are equal on every rank (step, metrics,
stop requests): summed with the gradients, or over all workers.

    training = Training(config, strategy, model, optimizer, loader, state, rules, validate, checkpoints, header)
    ending, metrics = training.run()                          # Ending.DONE, {"val_loss": 1.88, ...}
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from raystride.pipelines.config import CheckpointConfig, Config, ValidationConfig
from raystride.pipelines.config.schedules import learning_rate
from raystride.pipelines.config.train import cost_of
from raystride.pipelines.data.feed.loader import Loader, Requests, Step
from raystride.pipelines.observability.phases import phase
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.train.checkpoint.layout import BRANCHED_FROM
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.train_state import SkippedSlot, TrainState, Updater, evaluated_weights
from raystride.pipelines.train.guard import Diagnosis, Diverged, Rewind, StepGuard
from raystride.pipelines.train.network_at_start import NetworkAtStart
from raystride.pipelines.train.part_norms import PartNorms
from raystride.pipelines.train.step import (
    VERDICT,
    DelayedHostRead,
    StepResult,
    StepRules,
    build_step_rules,
    clip_coefficient,
    train_step,
)
from raystride.pipelines.train.strategies import OUT_OF_TIME, SAVE_REQUEST, STOP, TARGETS
from raystride.pipelines.train.strategies.parameter_layout import replicated_state
from raystride.pipelines.train.strategies.strategy import Strategy, average_buffers
from raystride.pipelines.train.validation import Validation


class Ending(StrEnum):
    """Reason of a loop's end."""

    DONE = "done"
    STOPPED = "stopped"
    OUT_OF_TIME = "out_of_time"
    EARLY = "stopped_early"


def _requested_ending(stop: float, late: float) -> Ending | None:
    """Returns the ending that these requests ask for, if any."""
    return Ending.STOPPED if stop else Ending.OUT_OF_TIME if late >= 1 else None


class LoopWatcher(Protocol):
    """Hooks that the loop calls; `raystride.pipelines.observability.observers.Observer` documents them."""

    def on_step(self, step: int) -> None: ...
    def on_gradients(self, step: int, model: nn.Module) -> None: ...
    def on_pause(self, seconds: float) -> None: ...
    def on_log(self, step: int, measured: dict[str, float]) -> None: ...
    def on_checkpoint(self, step: int, path: str) -> None: ...
    def on_save_wait(self, step: int, seconds: float) -> None: ...


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
    validate: Validation
    """Computes metrics over the validation samples; all ranks call it together."""
    checkpoints: Checkpoints | None
    """None: checkpoints are disabled."""
    header: dict[str, Any]
    """The run's entries in every checkpoint's manifest."""
    watchers: Sequence[LoopWatcher] = ()
    stopping: Callable[[], bool] = lambda: False
    """Whether this worker was asked to stop."""
    permit: Permit = field(default_factory=Permit)
    """The right to write the run's files; the loop ends in the step in which it is known to be lost."""
    log: Callable[[str], None] = print
    """Receives messages for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest validation."""

    def __post_init__(self) -> None:
        train = self.config.train
        self.total_steps = min(train.steps or math.inf, self.loader.plan.steps)
        self._began = time.perf_counter()
        self.loader.requests = self._stop_requests
        self._validated_at = self._saved_at = -1
        if self.checkpoints:
            self.checkpoints.on_wait = partial(self._call_watchers, "on_save_wait")
        self._norms = PartNorms(self.model, self.optimizer) if self.config.train.log_norms else None
        is_own = getattr(self.model, "saves_buffers", False)
        self._at_start = NetworkAtStart(self.model, exact=self.config.train.exact) if is_own else None
        self._users_module = getattr(self.model, "users_module", self.model)
        self._reset_counters()

    def _reset_counters(self) -> None:
        """Resets the counters at the state's position: at the start of an attempt, or after a rewind."""
        self._save_began, self._has_asked_to_save = time.perf_counter(), False
        self._delayed_read = DelayedHostRead(self.strategy.device)
        # In fp64: a long interval has more targets than fp32 can count one by one.
        self._sums = torch.tensor(self.state.interval, dtype=torch.float64, device=self.strategy.device)
        self._clipped = torch.tensor(self.state.clipped, dtype=torch.float64, device=self.strategy.device)
        self._began_counting = self._interval_began = time.perf_counter()
        self._newest: StepResult | None = None
        self._waited_before = self.loader.wait_s
        self._seconds_before = self.state.seconds
        self._tokens_before = self.state.tokens_seen - round(self.state.interval[TARGETS])
        self._guard = StepGuard(self.config.guard, self.state, self._diagnose_step, self.log)

    def run(self) -> tuple[Ending, dict[str, float]]:
        """Trains to the end, saves, and returns the reason of the end. Raises Diverged, and any error of a step or a
        save."""
        try:
            ending = self._train_with_rewinds()
            self._finish_run(ending)
        except BaseException:
            if self.checkpoints:
                self.checkpoints.wait_after_error()
                self._notify_commits()
            raise
        return ending, self.metrics

    def close(self) -> None:
        """Ends the threads and processes that read data."""
        self.loader.close()
        for samples in self.validate.held_out.values():
            samples.close()

    def _train_with_rewinds(self) -> Ending:
        """Trains, and rewinds as often as the guard requests it."""
        begins_at = self.header.get(BRANCHED_FROM, {}).get("step", 0)
        if self.checkpoints and self.config.guard.policy == "rewind" and self.state.step == begins_at:
            self._save_checkpoint(best=False)  # a rewind needs a checkpoint
        while True:
            try:
                return self._train_steps()
            except Rewind as rewind:
                self._rewind_to_checkpoint(rewind.slots)

    def _train_steps(self) -> Ending:
        """Runs steps until there is a reason to end. Raises Rewind if the guard requests it."""
        exhausted = self._out_of_patience()
        until = self.state.step if exhausted else self.total_steps
        step, result = None, None
        for step in self.loader.steps(self.state.step, until):
            self.permit.raise_if_revoked()
            self._learning_rate = self._learning_rate_at(step.number)
            with phase("step"):
                result = train_step(
                    self.strategy,
                    self.model,
                    self.optimizer,
                    step,
                    self.rules,
                    self._learning_rate,
                    self._step_requests(),
                    partial(self._see_gradients, step.number + 1),
                )
            self._after_step(step, result)
            if reason := self._reason_to_end(step, result):
                return reason
        # Verdicts arrive a step late, so the last step has not been checked yet.
        if step and result:
            self._check_verdict_now(step, result)
        return _requested_ending(*self.loader.agreed_requests) or (Ending.EARLY if exhausted else Ending.DONE)

    def _see_gradients(self, step: int) -> None:
        """Does what observers and a log do with the gradients of a step, before its update."""
        self._call_watchers("on_gradients", step, self._users_module)
        if self._norms and step % self.config.train.log_every == 0:
            self._norms.begin_step()

    def _after_step(self, step: Step, result: StepResult) -> None:
        """Does everything that may follow an update: counting, logging, validation, a checkpoint."""
        self.state.advance(step)
        self._sums += result.measured[: TARGETS + 1]
        if self.rules.clip_norm:
            self._clipped += result.gradient_norm > self.rules.clip_norm
        self._call_watchers("on_step", self.state.step)
        self._notify_commits()
        self._newest = result
        if self._is_due(self.config.train.log_every):
            self._log_metrics(result)
        validation, checkpoint = (
            self._is_scheduled(step, each) for each in (self.config.validation, self.config.checkpoint)
        )
        if validation or checkpoint:
            self._check_verdict_now(step, result)
        is_best = self._run_validation() if validation else False
        if self.checkpoints and (is_best or checkpoint):
            self._save_checkpoint(best=is_best)

    def _check_verdict_now(self, step: Step, result: StepResult) -> None:
        """Handles the verdict on this very step, before its parameters are validated or saved."""
        self._guard.handle_verdict(step.number, float(result.measured[VERDICT]))

    def _diagnose_step(self, step: int, spike: bool) -> Diagnosis:
        from raystride.pipelines.train.guard import diagnose_step

        return diagnose_step(self.strategy, self.model, self.loader, self.rules, step, spike)

    def _rewind_to_checkpoint(self, slots: list[SkippedSlot]) -> None:
        """Loads the newest checkpoint; the loop continues there without these slots. Raises Diverged without one."""
        assert self.checkpoints is not None
        # A save in progress may become the newest checkpoint.
        self.checkpoints.wait_for_save()
        self._notify_commits()
        if (found := self.checkpoints.find_newest()) is None:
            raise Diverged("there is no whole checkpoint to go back to; set guard.policy skip")
        found = self.checkpoints.load_newest(found, self.model, self.optimizer)
        previous_state, self.state = self.state, found.state
        self.state.left_out = previous_state.left_out + slots
        self.state.rewinds, self.state.spikes = previous_state.rewinds + 1, previous_state.spikes
        self.loader.left_out = frozenset((skipped.step, skipped.slot) for skipped in self.state.left_out)
        # The loss scale and the running loss return to those of the checkpoint.
        rules = self.rules
        self.rules = build_step_rules(
            self.config, self.loader.samples, self.state, self.strategy.device, rules.rows, rules.draws, rules.routing
        )
        self._saved_at = self.state.step
        self._reset_counters()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _is_scheduled(self, step: Step, settings: ValidationConfig | CheckpointConfig) -> bool:
        """Returns whether this step is one of `every` steps, or the first to reach a multiple of `every_epochs`."""
        if not settings.every_epochs:
            return self._is_due(settings.every)
        progress = self.loader.plan.order.epoch_progress
        reached = [progress(position)["epoch"] / settings.every_epochs for position in (step.position, self.state.position)]
        before, now = (math.floor(number + 1e-9) for number in reached)
        return now > before

    def _learning_rate_at(self, step: int) -> float:
        total = self.total_steps if math.isfinite(self.total_steps) else 0
        factor = self.loader.samples.task.learning_rate_factor(step, int(total))
        if factor is not None:
            return self.config.optimizer.learning_rate * factor
        return learning_rate(self.config.optimizer, step, int(total), self.config.model.hidden_size)

    def _stop_requests(self) -> Requests:
        """Returns this worker's requests to end."""
        hours = self.config.train.hours
        late = hours > 0 and time.perf_counter() - self._began > 3600 * hours
        return float(self.stopping()), float(late)

    def _step_requests(self) -> Requests:
        """Returns this worker's requests to end, and rank 0's to save when its clock says so; each is asked for once."""
        stop, late = self._stop_requests()
        minutes = self.config.checkpoint.minutes
        if (
            minutes
            and self.checkpoints
            and self.checkpoints.rank == 0
            and not self._has_asked_to_save
            and time.perf_counter() - self._save_began > 60 * minutes
            and not self.checkpoints.is_saving()
        ):
            self._has_asked_to_save = True
            late += SAVE_REQUEST
        return stop, late

    def _reason_to_end(self, step: Step, result: StepResult) -> Ending | None:
        """Returns why to end, equal on every rank: stop requests summed in the previous step, or too many bad
        validations. Saves if that was requested in the previous step, and no checkpoint has begun since."""
        agreed = self._delayed_read.read_previous(result.measured)
        self._guard.handle_verdict(step.number - 1, agreed[VERDICT])
        reason = _requested_ending(agreed[STOP], agreed[OUT_OF_TIME]) or (Ending.EARLY if self._out_of_patience() else None)
        is_due = bool(agreed[OUT_OF_TIME] % 1) and self._saved_at < self.state.step - 1
        if reason or is_due:
            self._check_verdict_now(step, result)
        if is_due and not reason:
            self._save_checkpoint(best=False, timed=True)
        return reason

    def _out_of_patience(self) -> bool:
        patience = self.config.validation.patience
        return patience > 0 and self.state.worse_validations >= patience

    def _update_counters(self) -> None:
        """Updates the state's counters to this step; waits for the device."""
        self.state.interval, self.state.clipped = self._sums.tolist(), float(self._clipped)
        self.state.tokens_seen = self._tokens_before + round(self.state.interval[TARGETS])
        self.state.seconds = self._seconds_before + time.perf_counter() - self._began_counting

    def _interval_loss(self) -> float | None:
        """Returns the mean loss of the steps since the last one whose log was due; None if no target counted."""
        self._update_counters()
        loss, targets = self.state.interval
        if targets:
            self.state.train_loss = loss / targets
        if self._is_due(self.config.train.log_every):
            self._tokens_before, self.state.interval, self.state.clipped = self.state.tokens_seen, [0.0, 0.0], 0.0
            self._sums.zero_()
            self._clipped.zero_()
        return self.state.train_loss if targets else None

    def _log_metrics(self, result: StepResult) -> None:
        num_clipped, log_every = float(self._clipped), self.config.train.log_every
        loss = self._interval_loss()
        now = time.perf_counter()
        measured = {
            "learning_rate": self._learning_rate,
            "gradient_norm": float(result.gradient_norm),
            "tokens_seen": float(self.state.tokens_seen),
            "data_wait_share": (self.loader.wait_s - self._waited_before) / max(1e-9, now - self._interval_began),
        }
        measured |= self.loader.plan.order.epoch_progress(self.state.position)
        measured |= self.loader.samples.tokens_by_source(self.state.position)
        if self.rules.clip_norm:
            measured["clipped_share"] = num_clipped / (self.state.step % log_every or log_every)
        if self.config.guard.spike:
            measured["loss_spikes"] = float(self.state.spikes)
        if loss is not None:
            measured["train_loss"] = loss
        task = self.loader.samples.task
        if (sums := task.take_sums(self.model)) is not None:
            measured |= task.train_scores(self.strategy.all_reduce_sum(sums).tolist())
        if self.rules.routing is not None:
            measured |= self.rules.routing.take_figures(self.strategy.all_reduce_sum)
        if self.rules.scale:
            measured["loss_scale"] = float(self.rules.scale.value)
        if self.state.dropped or self.state.left_out:
            measured |= {"dropped_steps": float(len(self.state.dropped)), "left_out_slots": float(len(self.state.left_out))}
        if self._norms:
            limit, norm = self.rules.clip_norm, torch.tensor(measured["gradient_norm"], dtype=torch.float64)
            clip = float(clip_coefficient(norm, limit)) if limit else 1.0
            measured |= self._norms.take_figures(clip, self.strategy.all_reduce_sum)
        self._interval_began, self._waited_before = now, self.loader.wait_s
        self._call_watchers("on_log", self.state.step, measured)

    def _run_validation(self) -> bool:
        """Measures the validation samples; returns whether these parameters are the best so far."""
        began = time.perf_counter()
        if self._at_start:
            self._at_start.refuse_changes(self.state.step)
        average_buffers(self.model, self.strategy)
        with phase("validation"), evaluated_weights(self.optimizer):
            self.metrics = self.validate()
        self._validated_at = self.state.step
        self.state.val_loss = self.metrics.get("val_loss")
        chosen = self.config.validation
        if chosen.metric not in self.metrics:
            raise chosen.error("metric", f"must be one of {', '.join(sorted(self.metrics))}")
        value = self.metrics[chosen.metric]
        if not math.isfinite(value):
            self.log(f"step {self.state.step}: {chosen.metric} is {value}, so this checkpoint cannot be the best")
        improved = chosen.cost(value) < chosen.cost(self.state.best)
        self.state.worse_validations = 0 if improved else self.state.worse_validations + 1
        is_best = improved or self._wins_tie(value)
        if is_best:
            self.state.best, self.state.best_loss, self.state.best_step = value, self.state.val_loss, self.state.step
        self._call_watchers("on_log", self.state.step, dict(self.metrics))
        self._notify_pause(began)
        return is_best

    def _wins_tie(self, value: float) -> bool:
        """Returns whether a value as good as the best goes before it: by a loss that is lower or the same, as it is later.

        The best of a run of an earlier version, which did not note its loss, stays.
        """
        loss, best_loss = (cost_of(found) for found in (self.state.val_loss, self.state.best_loss))
        cost = self.config.validation.cost(value)
        return math.isfinite(cost) and cost == self.config.validation.cost(self.state.best) and loss <= best_loss < math.inf

    def _save_checkpoint(self, *, best: bool, timed: bool = False) -> None:
        """Begins a save. One that is due by the clock leaves the model as it was: no result may depend on the clock."""
        assert self.checkpoints is not None
        began = time.perf_counter()
        if self._at_start:
            self._at_start.refuse_changes(self.state.step)
        own = [(value, value.clone()) for value in replicated_state(self.model) if timed and self.strategy.world > 1]
        average_buffers(self.model, self.strategy)
        self._update_counters()
        self.state.loss_scale = self.rules.scale.read_state() if self.rules.scale else None
        self.state.loss_seen = self.rules.check.read_state() if self.config.guard.spike else None
        with phase("checkpoint"):
            header = self.header | {"order": self.loader.plan.order.to_json()}
            self.checkpoints.save(self.model, self.optimizer, self.state, header, best=best, timed=timed)
        for buffer, value in own:
            buffer.copy_(value)
        self._saved_at = self.state.step
        self._save_began, self._has_asked_to_save = time.perf_counter(), False
        self._notify_commits()  # the previous save has ended, by itself or because this one waited for it
        self._notify_pause(began)

    def _notify_commits(self) -> None:
        """Notifies watchers of commits; ranks may notice them at different steps, since no decision depends on them."""
        if checkpoints := self.checkpoints:
            for step in checkpoints.take_committed_steps():
                self._call_watchers("on_checkpoint", step, str(checkpoints.step_folder(step)))

    def _finish_run(self, ending: Ending) -> None:
        """Logs, validates and saves the last step if this has not been done yet, and waits until it is written."""
        if self._newest and self.config.train.log_every and not self._is_due(self.config.train.log_every):
            self._log_metrics(self._newest)
        else:
            self._interval_loss()
        if not self.checkpoints:  # else a save does so in its own thread
            self.loader.beside.finish()
        is_best = False
        finished = ending is not Ending.STOPPED
        if finished and self._validated_at != self.state.step:
            is_best = self._run_validation()
        if checkpoints := self.checkpoints:
            if self._saved_at == self.state.step:
                checkpoints.wait_for_save()  # for its outcome
            if self._saved_at != self.state.step or is_best or checkpoints.has_refused_save:
                self._save_checkpoint(best=is_best)
            checkpoints.finish()
            self._notify_commits()

    def _notify_pause(self, began: float) -> None:
        self._call_watchers("on_pause", time.perf_counter() - began)

    def _call_watchers(self, hook: str, *arguments: Any) -> None:
        for watcher in self.watchers:
            if call := getattr(watcher, hook, None):  # an observer of one's own may be older than a hook
                call(*arguments)
