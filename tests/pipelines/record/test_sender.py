"""The sender: nothing lost, nothing twice, nothing out of order, and nobody waits."""

import random
import threading
import time
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raystride.pipelines.config.run import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.record import Recorder, Sender, read_entries
from raystride.pipelines.record.entry import new_entry
from raystride.pipelines.record.sender import Entry


class Unreliable:
    """A way to the recorder that fails before delivery, loses the receipt, or understates it, each in its share of calls."""

    def __init__(self, recorder: Recorder, seed: int, share: float) -> None:
        self._recorder, self._random, self._share = recorder, random.Random(seed), share

    def __call__(self, name: str, entries: list[Entry]) -> int:
        if self._random.random() < self._share:
            raise ConnectionError("lost before delivery")
        acknowledged = self._recorder.receive(name, entries)
        if self._random.random() < self._share:
            raise TimeoutError("the receipt was lost")
        return acknowledged // 2 if self._random.random() < self._share else acknowledged


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.3, 0.6]), senders=st.integers(1, 3), count=st.integers(1, 60)
)
def test_every_entry_is_in_the_journal_once_and_in_order(
    storage: Folder, seed: int, share: float, senders: int, count: int
) -> None:
    folder = storage / f"sent-{uuid4().hex[:8]}"
    recorder = Recorder(folder, "r", "a1", Record(mlflow=False), storage, {}, {})
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


def test_put_does_not_wait_for_a_post_that_hangs() -> None:
    release = threading.Event()

    def hang(name: str, entries: list[Entry]) -> int:
        release.wait(10)
        return int(entries[-1]["sequence"])

    sender = Sender(hang, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1))
    time.sleep(0.1)  # the thread is now inside the post
    start = time.perf_counter()
    for step in range(1000):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
    assert time.perf_counter() - start < 0.5
    assert not sender.flush(0.05)
    release.set()
    assert sender.flush(5.0)
    sender.close()


def test_the_oldest_metrics_are_thinned_and_that_is_said() -> None:
    posted: list[Entry] = []
    away = threading.Event()

    def post(name: str, entries: list[Entry]) -> int:
        if not away.is_set():
            raise ConnectionError("away")
        posted.extend(entries)
        return int(entries[-1]["sequence"])

    sender = Sender(post, "rank0", most_waiting=100, interval_s=0.01)
    sender.put(new_entry("checkpoint", {"path": "p"}, step=0))
    for step in range(500):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
    away.set()
    assert sender.close(5.0)
    assert len(posted) <= 101
    assert [entry["sequence"] for entry in posted] == sorted({entry["sequence"] for entry in posted})
    assert posted[0]["kind"] == "checkpoint"
    assert posted[-1]["step"] == 499
    assert any(entry["kind"] == "event" and "left out" in entry["values"]["text"] for entry in posted)


def test_entries_keep_the_time_they_were_given() -> None:
    posted: list[Any] = []
    sender = Sender(lambda name, entries: posted.extend(entries) or entries[-1]["sequence"], "rank0")  # type: ignore[func-returns-value]
    sender.put(new_entry("metrics", {}, step=1, time=12.5))
    before = time.time()
    sender.put(new_entry("metrics", {}, step=2))
    assert sender.close()
    assert posted[0]["time"] == 12.5
    assert before <= posted[1]["time"] <= time.time()


def test_a_restarted_process_does_not_take_the_name_of_the_one_before() -> None:
    names = {Sender(lambda name, entries: 0, "rank0").name for _ in range(3)}
    assert len(names) == 3
