"""Checkpoints of several attempts, best or not, with rewinds between them, beside a plain account of what must be there."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import step_name
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.checkpoint.train_state import TrainState
from tests.errors import refused
from tests.pipelines.train.checkpoints import train_model

MODELS = [train_model(seed) for seed in range(3)]


class Retention(RuleBasedStateMachine):
    """The model knows of each step the parameters saved last, the best step then, and whether their data must be there."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.place, self.keep = Path(tempfile.mkdtemp()), keep
        self.saved, self.best = dict[int, str](), dict[int, int]()
        self.data, self.torn, self.loaded = set[int](), set[int](), set[int]()
        self.hint = self.term = 0
        """The step that the file `best` names, and the driver's term."""
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
        for manifest in (self.place / step_name(newest)).glob("MANIFEST*.json"):
            manifest.write_text("{torn")
        found = self.group.find_newest()
        assert found
        self.data.discard(newest)
        self.torn.add(newest)
        del self.saved[newest], self.best[newest]
        assert found.step == max(self.data)
        self.state = found.state

    @rule(model=st.integers(0, 2), steps=st.integers(1, 2), best=st.booleans())
    def save(self, model: int, steps: int, best: bool) -> None:
        network, optimizer = MODELS[model]
        self.state.step += steps
        if best:
            self.state.best, self.state.best_step = float(model), self.state.step
            self.hint = self.state.step
        self.group.save(network, optimizer, self.state, {}, best=best)
        self.group.wait_for_save()
        step = self.state.step
        self.saved[step], self.best[step] = parameters_sha256(network), self.state.best_step
        self.loaded.discard(step)
        self.torn.discard(step)
        self.data.add(step)
        self.data &= {*sorted(self.data)[-self.keep :], self.state.best_step, self.hint}

    def _best_step(self) -> int:
        """Returns the best step by the newest manifest, also of one whose data is gone; 0 if there is none."""
        newest = max(self.saved, default=0)
        best = self.best.get(newest, 0)
        if best in self.saved.keys() | self.torn:
            return best
        return 0 if newest and not best and self.hint <= newest else self.hint

    @invariant()
    def what_must_be_there_is_there_and_nothing_else(self) -> None:
        steps = {int(path.name[5:]): path for path in self.place.glob("step-*")}
        with_data = {step for step, path in steps.items() if any(inside.is_dir() for inside in path.iterdir())}
        assert with_data & self.saved.keys() == self.data
        assert self.saved.keys() <= steps.keys(), "manifests stay"
        newest, best, best_step = self.group.find_newest(), None, self._best_step()
        assert (newest.step if newest else None) == max(self.data, default=None)
        if best_step and best_step not in self.data:
            with refused("checkpoint", "best", names=[step_name(best_step)]):
                self.group.find_best()
        else:
            best = self.group.find_best()
            assert (best.step if best else 0) == best_step
        for found in (newest, best):
            if found and found.step not in self.loaded:
                self.loaded.add(found.step)
                network, _ = train_model(9, steps=0)
                self.group.load(found, network)
                assert parameters_sha256(network) == self.saved[found.step]


TestRetention = Retention.TestCase
TestRetention.settings = settings(derandomize=True, max_examples=20, stateful_step_count=10, deadline=None)
