"""The sender: nothing lost, nothing twice, nothing out of order, and nobody waits."""

import random
import threading
import time
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Recorder, Sender, read_entries
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.system.storage.folder import Folder
from tests.receipts import accept, taken
from tests.waiting import wait_until


class Unreliable:
    """A connection to the recorder that fails before delivery, loses the receipt, or understates it, in a share of calls."""

    def __init__(self, recorder: Recorder, seed: int, share: float) -> None:
        self._recorder, self._random, self._share = recorder, random.Random(seed), share

    def __call__(self, name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        if self._random.random() < self._share:
            raise ConnectionError("lost before delivery")
        receipt = self._recorder.receive(name, entries, recorder, urgent)
        if self._random.random() < self._share:
            raise TimeoutError("the receipt was lost")
        return receipt._replace(durable=receipt.durable // 2) if self._random.random() < self._share else receipt


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 0.6]), senders=st.integers(1, 3), count=st.integers(1, 60)
)
def test_every_entry_is_in_the_journal_once_and_in_order(
    storage: Folder, seed: int, share: float, senders: int, count: int
) -> None:
    folder = storage / f"sent-{uuid4().hex[:8]}"
    recorder = Recorder(folder, "r", "a1", RecordConfig(mlflow=False), storage, {}, {})
    wires = [Sender(Unreliable(recorder, seed + i, share), f"rank{i}", interval_s=0.002) for i in range(senders)]
    for i in range(count):
        for wire in wires:
            wire.put(new_entry("metrics", {"train_loss": i}, step=i))
    for wire in wires:
        wire.put(new_entry("error", {"text": "urgent, so that it is written at once"}))
    assert all(wire.close(20.0) for wire in wires)
    recorder.finish("finished")
    entries = read_entries(folder)
    for wire in wires:
        own = [entry for entry in entries if entry["sender"] == wire.name]
        assert [entry["sequence"] for entry in own] == list(range(1, count + 2))
        assert [entry["step"] for entry in own] == [*range(count), None]


def test_the_recorder_of_the_tests_own_workers_keeps_none_of_them_waiting() -> None:
    sender = Sender(accept, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1))
    assert sender.close(60.0)


def test_put_does_not_wait_for_a_post_that_hangs() -> None:
    inside, release = threading.Event(), threading.Event()

    def hang(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        inside.set()
        release.wait()
        return taken(entries)

    sender = Sender(hang, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1))
    inside.wait()
    for step in range(1000):  # one that waits waits for ever
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
    assert not sender.flush(0.05)
    release.set()
    assert sender.flush(60.0)
    sender.close()


def test_a_flush_waits_for_no_later_entries() -> None:
    """The readings of a machine go on: a checkpoint would wait until they pause."""
    ended = threading.Event()
    sender = Sender(accept, "rank0", interval_s=0.01)

    def measure() -> None:
        while not ended.wait(0.001):
            sender.put(new_entry("system", {"cpu": 1.0}, step=1))

    readings = threading.Thread(target=measure)
    readings.start()
    try:
        assert all(sender.flush(60.0) for _ in range(5))
    finally:
        ended.set()
        readings.join()
        sender.close()


class RecorderAway:
    """A recorder that does not answer until it is back."""

    def __init__(self) -> None:
        self.posted: list[Entry] = []
        self.back = threading.Event()

    def post(self, name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        """Takes all entries, or raises."""
        if not self.back.is_set():
            raise ConnectionError("away")
        self.posted.extend(entries)
        return taken(entries)


def test_the_oldest_metrics_are_thinned_and_that_is_said() -> None:
    recorder = RecorderAway()
    sender = Sender(recorder.post, "rank0", max_waiting=100, interval_s=0.01)
    sender.put(new_entry("checkpoint", {"path": "p"}, step=0))
    for step in range(500):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
    recorder.back.set()
    assert sender.close(60.0)
    posted = recorder.posted
    assert len(posted) <= 101
    assert [entry["sequence"] for entry in posted] == sorted({entry["sequence"] for entry in posted})
    assert posted[0]["kind"] == "checkpoint"
    assert posted[-1]["step"] == 499
    assert any(entry["kind"] == "event" and "left out" in entry["values"]["text"] for entry in posted)


def test_each_outage_says_what_it_has_cost_itself() -> None:
    recorder = RecorderAway()
    sender = Sender(recorder.post, "rank0", max_waiting=100, interval_s=0.01)
    lost = []
    for count in (500, 2000, 300):
        recorder.back.clear()
        recorder.posted.clear()
        for step in range(count):
            sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
        recorder.back.set()
        assert sender.flush(60.0)
        lost.append(count - sum(entry["kind"] == "metrics" for entry in recorder.posted))
        (thinned,) = [entry for entry in recorder.posted if entry["kind"] == "event"]
        assert f"so {lost[-1]} older entries were left out" in thinned["values"]["text"]
    assert sender.close(60.0)
    assert lost[1] > lost[0] > lost[2] > 0


def test_notes_alone_do_not_grow_for_ever_and_errors_and_checkpoints_stay() -> None:
    recorder = RecorderAway()
    sender = Sender(recorder.post, "rank0", max_waiting=100, interval_s=0.01)
    for number in range(3000):
        sender.put(new_entry("event", {"name": "note", "text": f"note {number}"}, step=number))
        if number % 100 == 0:
            sender.put(new_entry("checkpoint", {"path": f"{number}"}, step=number))
    recorder.back.set()
    assert sender.close(60.0)
    posted = recorder.posted
    assert [entry["step"] for entry in posted if entry["kind"] == "checkpoint"] == list(range(0, 3000, 100))
    notes = [entry for entry in posted if entry["kind"] == "event" and entry["values"]["name"] == "note"]
    assert len(notes) <= 2 * 100 * 1.25
    assert notes[-1]["step"] == 2999
    (thinned,) = [entry for entry in posted if entry["kind"] == "event" and entry["values"]["name"] == "thinned"]
    assert f"so {3000 - len(notes)} older entries were left out" in thinned["values"]["text"]


def test_entries_that_were_never_taken_are_said_with_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    sender = Sender(RecorderAway().post, "rank0", interval_s=0.01)
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1))
    wait_until(lambda: sender._error, "an error")
    assert not sender.close(0.01)
    line = f"warning: 1 entries of {sender.name} may be missing in the record (ConnectionError: away)\n"
    assert capsys.readouterr().err == line


def test_entries_keep_the_time_they_were_given() -> None:
    posted: list[Any] = []
    sender = Sender(lambda name, entries, recorder, urgent: posted.extend(entries) or taken(entries), "rank0")  # type: ignore[func-returns-value]
    sender.put(new_entry("metrics", {}, step=1, time=12.5))
    before = time.time()
    sender.put(new_entry("metrics", {}, step=2))
    assert sender.close(60.0)
    assert posted[0]["time"] == 12.5
    assert before <= posted[1]["time"] <= time.time()


def test_a_restarted_process_does_not_take_the_name_of_the_one_before() -> None:
    names = {Sender(lambda *posted: taken([]), "rank0").name for _ in range(3)}
    assert len(names) == 3


def test_an_entry_travels_once_though_its_receipt_comes_late(storage: Folder) -> None:
    """The recorder writes every second or less often; entries that it holds until then are not posted again."""
    recorder = Recorder(storage / f"once-{uuid4().hex[:8]}", "r", "a1", RecordConfig(mlflow=False), storage, {}, {})
    posted: list[int] = []

    def post(name: str, entries: list[Entry], held_by: str, urgent: bool) -> Receipt:
        posted.extend(entry["sequence"] for entry in entries)
        return recorder.receive(name, entries, held_by, urgent)

    sender = Sender(post, "rank0", interval_s=0.01)
    for step in range(200):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
        time.sleep(0.005)
    assert sender.close(20.0)
    assert posted == list(range(1, 201))
    recorder.finish("finished")


def test_a_recorder_that_follows_gets_what_the_one_before_only_held(storage: Folder) -> None:
    folder = storage / f"followed-{uuid4().hex[:8]}"
    recorders = [Recorder(folder, "r", "a1", RecordConfig(mlflow=False), storage, {}, {})]
    sender = Sender(lambda *posted: recorders[-1].receive(*posted), "rank0", interval_s=0.01)
    sender.put(new_entry("error", {"text": "written at once", "rank": 0}))
    assert sender.flush(20.0)
    recorders[0]._write_segment = lambda: None  # type: ignore[method-assign]  # it dies before it writes the rest
    for step in range(1, 6):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
    wait_until(lambda: recorders[0].state()["step"] == 5, "the entries")
    recorders.append(Recorder(folder, "r", "a1", RecordConfig(mlflow=False), storage, {}, {}))
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=6))
    assert sender.close(20.0)
    recorders[-1].finish("finished")
    assert [entry["step"] for entry in read_entries(folder) if entry["sender"] == sender.name] == [None, 1, 2, 3, 4, 5, 6]
