"""Two senders, receipts that are lost, and recorders that die in any order, beside the plain list of what was sent."""

import shutil
import tempfile
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Recorder, Sender, read_entries
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.system.storage.folder import Folder
from tests.waiting import wait_until

KINDS = {
    "metrics": {"train_loss": 1.0},
    "system": {"cpu": 1.0},
    "event": {"name": "x", "text": "t"},
    "checkpoint": {"name": "step-00000001"},
}


class Record(RuleBasedStateMachine):
    """The wire of each sender may lose what is posted, or the receipt, a number of times."""

    @initialize()
    def begin(self) -> None:
        self.storage = Folder(tempfile.mkdtemp())
        self.folder = self.storage / "run"
        self.sent: list[list[int]] = [[], []]
        self.lost = [0, 0]
        self.steps = 0
        self.start_recorder()
        self.senders = [Sender(partial(self._post, number), f"rank{number}", interval_s=0.002) for number in (0, 1)]

    def start_recorder(self) -> None:
        settings = RecordConfig(mlflow=False, tensorboard=False)
        self.recorder = Recorder(self.folder, "run", "a1", settings, self.storage, {}, {}, 100)

    def _post(self, number: int, name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        if self.lost[number] > 0:
            self.lost[number] -= 1
            if self.lost[number] % 2:
                self.recorder.receive(name, entries, recorder, urgent)
            raise ConnectionError("the receipt, or the way there, was lost")
        return self.recorder.receive(name, entries, recorder, urgent)

    @rule(number=st.integers(0, 1), kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
    def put(self, number: int, kinds: list[str]) -> None:
        for kind in kinds:
            self.steps += 1
            self.senders[number].put(new_entry(kind, KINDS[kind], step=self.steps))
            self.sent[number].append(self.steps)

    @rule(number=st.integers(0, 1), times=st.integers(1, 3))
    def lose(self, number: int, times: int) -> None:
        self.lost[number] = times

    @rule(number=st.integers(0, 1))
    def flush(self, number: int) -> None:
        assert self.senders[number].flush(60.0)
        assert self._written(number) == self.sent[number]

    @rule(has_all=st.booleans())
    def kill_recorder(self, has_all: bool) -> None:
        """What it has not written is gone; the next one reads the journal, and gets the rest again."""
        for sender, sent in zip(self.senders, self.sent, strict=True):
            wait_until(lambda: not has_all or sender._posted == len(sent), "the recorder")  # noqa: B023
        self.recorder._writing.acquire()  # its thread writes nothing from now on
        self.start_recorder()

    def _written(self, number: int) -> list[int]:
        return [entry["step"] for entry in read_entries(self.folder) if entry["sender"] == self.senders[number].name]

    @invariant()
    def nothing_is_written_twice_or_before_an_earlier_one(self) -> None:
        for number in (0, 1):
            written = self._written(number)
            assert written == self.sent[number][: len(written)]

    def teardown(self) -> None:
        if hasattr(self, "senders"):
            assert all(sender.close(60.0) for sender in self.senders)
            self.recorder.finish("finished")
            for number in (0, 1):
                assert self._written(number) == self.sent[number]
            shutil.rmtree(self.storage.uri)


TestRecord = Record.TestCase
TestRecord.settings = settings(derandomize=True, max_examples=10, stateful_step_count=10, deadline=None)
