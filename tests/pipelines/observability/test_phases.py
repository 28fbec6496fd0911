"""Ranges around the phases of a step: their times, their listener, and their cost."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import Any

import pytest

from raystride.pipelines.config import TrainConfig, ValidationConfig
from raystride.pipelines.observability.observers.throughput import PhaseShares
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES, PHASES, phase, set_listener
from tests.processes import make_job
from tests.receipts import accept
from tests.tiny import tiny, write_text


def test_a_range_counts_the_hosts_time_even_when_it_raises() -> None:
    def body() -> None:
        with phase("reduce"):
            assert phase("reduce").began > 0
            sleep(0.01)
            raise ArithmeticError

    before, began = phase("reduce").seconds, perf_counter()
    with pytest.raises(ArithmeticError):
        body()
    assert 0.01 <= phase("reduce").seconds - before <= perf_counter() - began
    assert phase("reduce").began == 0


def test_a_listener_hears_ranges_nested_as_they_are() -> None:
    heard: list[str] = []

    @contextmanager
    def tell(name: str) -> Iterator[None]:
        heard.append(f"<{name}")
        yield
        heard.append(f"{name}>")

    set_listener(tell)
    with phase("slot"), phase("forward"):
        set_listener(None)  # in the middle: what is open still ends properly
    with phase("update"):
        pass
    assert heard == ["<slot", "<forward", "forward>", "slot>"]


def test_an_unknown_phase_is_no_phase() -> None:
    with pytest.raises(KeyError):
        phase("lunch")


def test_a_range_is_two_calls_and_two_readings_of_the_clock() -> None:
    """Measured: 0.5 to 0.7 µs. A step passes 4 and 3 more for each micro-batch: 7 µs of 10 ms are 0.07 %."""
    called: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else function.__name__)

    forward = phase("forward")
    sys.setprofile(note)
    with forward:
        pass
    sys.setprofile(None)
    assert called[:4] == ["__enter__", "perf_counter", "__exit__", "perf_counter"]
    assert called[4:] == ["setprofile"]


def test_shares_are_those_of_the_interval() -> None:
    now = [100.0]
    observer = PhaseShares(lambda: now[0])
    phase("data").seconds += 7.0  # before the start: does not count
    observer.on_start(None)  # type: ignore[arg-type]
    phase("forward").seconds += 3.0
    now[0] += 4.0
    observer.on_step(1)
    measured: dict[str, float] = {}
    observer.on_log(1, measured)
    assert measured["phase_forward_share"] == pytest.approx(0.75)
    assert measured["phase_data_share"] == 0
    nothing: dict[str, float] = {}
    observer.on_log(1, nothing)  # of a validation, without steps of its own
    assert not nothing


def test_a_training_passes_every_phase(tmp_path: Path) -> None:
    before = {name: phase(name).seconds for name in PHASES}
    config = tiny(
        write_text(tmp_path),
        train=TrainConfig(steps=2, slots=2, slot_size=1),
        validation=ValidationConfig(every=1, samples=2),
    )
    began = perf_counter()
    _train_here(config, tmp_path)
    elapsed = perf_counter() - began
    spent = {name: phase(name).seconds - before[name] for name in PHASES}
    assert all(seconds > 0 for seconds in spent.values()), spent
    assert spent["forward"] + spent["backward"] < spent["slot"] < spent["step"]
    assert sum(spent[name] for name in EXCLUSIVE_PHASES) < elapsed


def _train_here(config: object, storage: Path) -> None:
    from raystride.pipelines.train.worker.job import WorkerInfo
    from raystride.pipelines.train.worker.run import run_worker

    job = make_job(config, storage, "mine")  # type: ignore[arg-type]
    run_worker(job, WorkerInfo(), accept, lambda: False)
