"""Verdicts in any order, each as often as the loop reads it, beside a plain count of bad steps; and two of them in a run."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystride.pipelines.config import GuardConfig
from raystride.pipelines.train.checkpoint.train_state import SkippedSlot, TrainState
from raystride.pipelines.train.guard import Diagnosis, Diverged, Rewind, StepGuard
from raystride.pipelines.train.step import FINE, NOT_FINITE, OVERFLOW, SPIKE


class Verdicts(RuleBasedStateMachine):
    """A run whose steps come once, and again after a rewind; a verdict is read once or twice."""

    @initialize(policy=st.sampled_from(["stop", "skip", "rewind"]), allowed=st.integers(1, 3))
    def begin(self, policy: str, allowed: int) -> None:
        self.policy, self.allowed = policy, allowed
        self.state, self.log, self.diagnosed = TrainState(), list[str](), list[tuple[int, bool]]()
        self._make_guard()
        self.step, self.handled = 0, list[int]()
        self.bad: int | None = None
        """The step whose verdict may be read again."""
        self.ended = False

    def _make_guard(self) -> None:
        settings = GuardConfig(policy=self.policy, max_bad_steps=self.allowed)  # type: ignore[arg-type]
        self.guard = StepGuard(settings, self.state, self._diagnose, self.log.append)

    def _diagnose(self, step: int, spike: bool) -> Diagnosis:
        self.diagnosed.append((step, spike))
        return Diagnosis("blocks.1", [SkippedSlot(step, 2, 8 * step, 2)], [f"sample {step}"])

    @precondition(lambda self: not self.ended)
    @rule(verdict=st.sampled_from([FINE, OVERFLOW]))
    def good_step(self, verdict: float) -> None:
        before = len(self.diagnosed)
        self.guard.handle_verdict(self.step, verdict)
        self.step += 1
        assert len(self.diagnosed) == before

    @precondition(lambda self: not self.ended)
    @rule(verdict=st.sampled_from([NOT_FINITE, SPIKE]))
    def bad_step(self, verdict: float) -> None:
        before = len(self.handled)
        if self.policy == "stop" or before >= self.allowed:
            with pytest.raises(Diverged) as diverged:
                self.guard.handle_verdict(self.step, verdict)
            assert (diverged.value.step, diverged.value.bad_steps) == (self.step + 1, before)
            self.ended = True
            return
        self.handled.append(self.step)
        if self.policy == "rewind":
            with pytest.raises(Rewind) as rewind:
                self.guard.handle_verdict(self.step, verdict)
            assert [slot.step for slot in rewind.value.slots] == [self.step]
            self.state.rewinds += 1  # as the loop does, which goes back to a checkpoint
            self.step = max(0, self.step - 2, *(step + 1 for step in self.state.dropped))
        else:
            self.guard.handle_verdict(self.step, verdict)
            self.bad, self.step = self.step, self.step + 1
        assert self.diagnosed[-1] == (self.handled[-1], verdict == SPIKE)
        assert f"step {self.handled[-1] + 1}: " in self.log[-1]

    @precondition(lambda self: not self.ended and self.bad is not None)
    @rule()
    def read_again(self) -> None:
        """Read before a validation or a save, and a step later."""
        assert self.bad is not None
        self.guard.handle_verdict(self.bad, NOT_FINITE)

    @precondition(lambda self: self.ended)
    @rule(policy=st.sampled_from(["stop", "skip", "rewind"]))
    def start_again(self, policy: str) -> None:
        """By a user who allows one more, perhaps by another policy; the bad steps so far are in the checkpoint."""
        self.policy = policy
        self.state, self.bad = TrainState.from_json(json.loads(json.dumps(self.state.to_json()))), None
        self.allowed, self.ended, self.step = self.allowed + 1, False, self.step + 1
        self._make_guard()

    @invariant()
    def each_bad_step_counts_once(self) -> None:
        assert len(self.state.dropped) + self.state.rewinds == len(self.handled) == len(self.log)
        assert set(self.state.dropped) <= set(self.handled)


TestVerdicts = Verdicts.TestCase
TestVerdicts.settings = settings(derandomize=True, max_examples=20, stateful_step_count=12, deadline=None)
