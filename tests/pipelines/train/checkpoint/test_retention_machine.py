"""Checkpoints of several attempts, best or not, with rewinds between them, beside a plain account of what must be there."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import manifest_names, step_name
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.checkpoint.train_state import TrainState
from tests.pipelines.train.checkpoints import train_model

MODELS = [train_model(seed) for seed in range(3)]


class Retention(RuleBasedStateMachine):
    """The model knows of each step the parameters saved last, and whether their data must be there."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.place, self.keep = Path(tempfile.mkdtemp()), keep
        self.saved, self.data, self.loaded = dict[int, str](), set[int](), set[int]()
        self.best_step = self.term = 0
        self.state = TrainState()
        self.start_attempt()

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    @rule()
    def start_attempt(self) -> None:
        """A driver that goes on where the newest checkpoint is, with what that says of the best one."""
        self.term += 1
        self.log: list[str] = []
        self.group = Checkpoints(
            Folder(str(self.place)), f"a{self.term}", keep=self.keep, log=self.log.append, term=self.term
        )
        self.group.fence_older_groups()
        if self.saved:
            found = self.group.find_newest()
            assert found
            self.state = found.state

    @precondition(lambda self: len(self.data) > 1)
    @rule()
    def rewind(self) -> None:
        """The newest checkpoint goes bad, so that the guard goes back to the one before, and comes to its step again."""
        newest = max(self.data)
        (manifest, *_) = manifest_names(Folder(str(self.place)) / step_name(newest))
        (self.place / step_name(newest) / manifest).write_text("{torn")
        for other in (self.place / step_name(newest)).glob("MANIFEST*.json"):
            other.write_text("{torn")
        found = self.group.find_newest()
        assert found
        self.data.discard(newest)
        del self.saved[newest]
        assert found.step == max(self.data)
        self.state = found.state
        self.best_step = self.state.best_step

    @rule(model=st.integers(0, 2), steps=st.integers(1, 2), best=st.booleans())
    def save(self, model: int, steps: int, best: bool) -> None:
        network, optimizer = MODELS[model]
        self.state.step += steps
        if best:
            self.state.best, self.state.best_step = float(model), self.state.step
            self.best_step = self.state.step
        self.group.save(network, optimizer, self.state, {}, best=best)
        self.group.wait_for_save()
        step = self.state.step
        self.saved[step] = parameters_sha256(network)
        self.loaded.discard(step)
        self.data.add(step)
        kept = {*sorted(other for other in self.saved if other <= step)[-self.keep :], self.best_step}
        self.data = {other for other in self.data if other in kept or other > step}

    @invariant()
    def what_must_be_there_is_there_and_nothing_else(self) -> None:
        steps = {int(path.name[5:]): path for path in self.place.glob("step-*")}
        with_data = {step for step, path in steps.items() if any(inside.is_dir() for inside in path.iterdir())}
        assert with_data & self.saved.keys() == self.data
        assert self.saved.keys() <= steps.keys(), "manifests stay"
        newest, best = self.group.find_newest(), self.group.find_best()
        assert (newest.step if newest else None) == max(self.data, default=None)
        assert (best.step if best else 0) == self.best_step
        for found in (newest, best):
            if found and found.step not in self.loaded:
                self.loaded.add(found.step)
                network, _ = train_model(9, steps=0)
                self.group.load(found, network)
                assert parameters_sha256(network) == self.saved[found.step]


TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=10, stateful_step_count=10, deadline=None)
